"""Run a training command, and start it again where that may help.

    this process ── COMMAND, a launcher (its own session) ── rank 0, rank 1, …

A launcher's exit code does not tell how the run ended: `status.json` decides, and without it the
files that failed ranks leave, here called marks. The trap: ranks outlive their launcher while they
save. A start at that moment would be refused, and the old ranks' status would be mistaken for that
of the new start. So the lock of the run directory must be free first.

A command with `--nodes` is one machine's part of a run that others may go on with. So its own exit
code counts, and the lock of the run is none of its business.

The config and the run directory are found in the command, and its secrets are hidden:

    accelerate launch --config_file a.yaml scripts/train.py my.yaml run.dir=runs/x
                                                            └ config └ override
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint import format as form
from llmtrain.config.secrets import HIDDEN, hider, is_secret, is_secret_name
from llmtrain.errors import DISK_FAILED, RESTARTABLE, Problem, UserError
from llmtrain.rundir import contents
from llmtrain.rundir.lock import RunLock, is_held, lives_here, read
from llmtrain.tools.launch.child import (
    Ended,
    Forward,
    living_children,
    passing_signals_on,
    run_child,
    wait_until,
)
from llmtrain.training.stop import GRACE, RESTARTS, SUPERVISOR

if TYPE_CHECKING:
    import psutil


_CONFIGS_OF_LAUNCHERS = ("--config_file", "--config-file", "--accelerate")
_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)
_SECTION = re.compile(r"^(\w+)[ \t]*:", re.MULTILINE)
# NAME=value or NAME='a value' inside a word, which may be a line of shell.
_ASSIGNMENT = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s;&|"']*)""")


def config_in(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the config in a training command and the overrides after it; None without a config.

    The config is the first `*.yaml` or `*.yml` that is not the launcher's own config.
    """
    for index, word in enumerate(command):
        of_launcher = index > 0 and command[index - 1] in _CONFIGS_OF_LAUNCHERS
        if word.endswith((".yaml", ".yml")) and not word.startswith("-") and not of_launcher:
            return word, [one for one in command[index + 1 :] if _OVERRIDE.fullmatch(one)]
    return None


def is_of_machines(command: Sequence[str]) -> bool:
    """Whether a command is one machine's part of a run on several that come and go.

    A launcher of a batch system may have an option `--nodes` too.
    """
    options = {word.partition("=")[0] for word in command}
    return options >= {"--nodes", "--processes-per-node"}


def checked_run_dir(command: Sequence[str], run_dir: Path | None) -> Path:
    """Return the run directory of a command, after checking that its config may use it.

    run_dir: the one that the user named, if any

    Raises UserError if the config is wrong or names another directory than `run_dir`, and if there
    is neither a config nor a `run_dir`.
    """
    from llmtrain.config.load import load_config
    from llmtrain.training.start import claim

    arguments = config_in(command)
    if run_dir is not None and (arguments is None or not _is_config(Path(arguments[0]))):
        return run_dir
    if arguments is None:
        expected = "a command with the config (*.yaml) of the run, or --run DIR"
        raise UserError(Problem("COMMAND", shown(command), expected))
    config = load_config(*arguments)
    named = config.run_dir
    if run_dir is not None and run_dir.resolve() != named.resolve():
        expected = f"{named}, the run.dir of {arguments[0]} in the command"
        remedy = f"leave --run out, or put run.dir={run_dir} behind {arguments[0]}"
        raise UserError(Problem("--run", run_dir, expected, remedy))
    claim.check(config)
    return named


def shown(command: Sequence[str]) -> str:
    """Return the command as a line of shell, without the secrets in it.

    These are hidden: values of secrets in the environment, text that looks like a secret, and the
    value after the name of a secret (`HF_TOKEN=…`, `--hub-token …`), also inside a line of shell.
    """
    hide = hider(os.environ)  # used before quoting, which may put quotes inside a secret
    words = []
    for before, word in zip(["", *command], command, strict=False):
        asks = before.startswith("--") and "=" not in before and is_secret_name(before)
        words.append(HIDDEN if asks else _mask(hide(word)))
    return shlex.join(words)


def _mask(text: str) -> str:
    name, equals, value = text.partition("=")
    if equals and _is_secret(name, value) and not re.search(r"\s", name):
        return f"{name}={HIDDEN}"

    def masked(one: re.Match[str]) -> str:
        hidden = _is_secret(one[1], one[2].strip("\"'"))
        return f"{one[1]}={HIDDEN if hidden else _mask(one[2])}"

    return _ASSIGNMENT.sub(masked, text)


def _is_secret(name: str, value: str) -> bool:
    """Whether the value is a secret. Only a dotted key may be a field of a model instead."""
    return is_secret(name, value) if "." in name else is_secret_name(name)


def _is_config(path: Path) -> bool:
    """Whether it is a config of llmtrain, valid or not: launchers have other YAML files."""
    from llmtrain.config.schema import Config

    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # the command may run elsewhere and see another file, as in a container
    return len(set(_SECTION.findall(text)) & set(Config.model_fields)) >= 2


MOST_STARTS = 3  # without a new checkpoint
MOST_DEFECTS = 1  # restarts after code 1, without a new checkpoint
_FINAL = {
    0: "the end",
    UserError.exit_code: "the end, since the input must change first",
    DISK_FAILED: "the end, since the disk has failed",
}
_KILLED_SECONDS = 10.0
_OF_MACHINES_SECONDS = 1.0  # before the first restart: the others wait for this machine

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Supervised:
    """How a supervised command ended.

    exit_code: of the last start
    starts: how often the command was run
    reason: how the last start ended, in words
    """

    exit_code: int
    starts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tries:
    """Counts since the last new checkpoint.

    starts: starts that ended without one
    restarts: all restarts
    defects: restarts after code 1
    """

    starts: int = 0
    restarts: int = 0
    defects: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do after a start.

    restart: whether to start again
    code: exit code of the last start
    why: in words
    seconds: to wait before the restart, which is varied at random by ±20 %
    tries: the counts for the next decision
    """

    restart: bool
    code: int
    why: str
    seconds: float = 0.0
    tries: Tries = Tries()


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting times in seconds.

    first: before the first restart; doubled for each further one
    most: before any restart
    leave: after the end of the launcher, before remaining ranks are killed
    """

    first: float = 5.0
    most: float = 300.0
    leave: float = 60.0


def supervise(
    command: Sequence[str], run_dir: Path | None, log: Log, waits: Waits | None = None
) -> Supervised:
    """Run a command until it has finished, was stopped, or a restart would not help.

    run_dir: None = that of the config in the command
    log: called with each line of output, which contains no secret

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the command's process group, and then the
    command is not started again. Raises UserError before the first start if the config is wrong or
    names another run directory, or if that is in use.
    """
    grace = os.environ.get(GRACE, "")  # before torch's launcher kills its ranks
    of_machines = is_of_machines(command)
    first = Waits().first if not of_machines else _OF_MACHINES_SECONDS
    waits = waits or Waits(first, leave=30.0 + (float(grace) if grace.isdigit() else 30.0))
    run_dir = checked_run_dir(command, run_dir)
    if not of_machines:
        RunLock(run_dir, "").check()
    known, tries, hide = _complete_checkpoints(run_dir), Tries(), hider(os.environ)
    with passing_signals_on(may_leave=of_machines) as forward:
        for number in count(1):
            log(f"start {number}: {shown(command)}")
            start = _start_machine if of_machines else _start
            end = start(command, run_dir, forward, waits.leave, log, number - 1)
            now = _complete_checkpoints(run_dir)
            progress, known = bool(now - known), known | now
            stopped = forward.asked is not None
            decision = decide(end, tries, waits, progress=progress, stopped=stopped)
            ended = f"start {number} {end.message} with code {decision.code}: {decision.why}"
            log(hide(ended))
            if decision.restart:
                # Varied by ±20 %, so that runs ended by one fault do not restart together.
                spread = 0.8 + 0.4 * int.from_bytes(os.urandom(4)) / 2**32
                wait_until(lambda: forward.asked is not None, decision.seconds * spread)
            if not decision.restart or forward.asked is not None:
                return Supervised(decision.code, number, end.message)
            tries = decision.tries
    raise AssertionError("count never ends")


def decide(end: Ended, tries: Tries, waits: Waits, *, progress: bool, stopped: bool) -> Decision:
    """Decide what to do after a start.

    end: how the start ended
    tries: counts from before this start
    progress: whether the start committed a new checkpoint
    stopped: whether a person or a batch system has asked this process to stop
    """
    code = end.exit_code
    if stopped:
        return Decision(False, code, "asked to stop")
    if code in _FINAL and not end.lost_launcher:
        return Decision(False, code, _FINAL[code])
    code = code or RESTARTABLE  # stopped, but not because somebody asked it to
    tries = Tries() if progress else replace(tries, starts=tries.starts + 1)
    if tries.starts >= MOST_STARTS:
        return Decision(False, code, f"{MOST_STARTS} starts without a new checkpoint")
    if code != RESTARTABLE:
        if tries.defects >= MOST_DEFECTS:
            return Decision(False, code, "again, without a new checkpoint: a defect stays one")
        tries = replace(tries, defects=tries.defects + 1)
    seconds = min(waits.most, waits.first * 2**tries.restarts)
    why = f"restart in about {seconds:g} s ({tries.starts} of {MOST_STARTS} without a checkpoint)"
    return Decision(True, code, why, seconds, replace(tries, restarts=tries.restarts + 1))


def _start(
    command: Sequence[str], run_dir: Path, forward: Forward, leave: float, log: Log, restarts: int
) -> Ended:
    """Run the command once, wait until none of its ranks is left, and return how it ended."""
    wait_for_ranks = partial(_wait_for_ranks, run_dir, leave, log)
    with _starting(command, forward):
        return run_child(command, _told(restarts), run_dir, forward, wait_for_ranks)


def _told(restarts: int) -> dict[str, str]:
    return {**os.environ, RESTARTS: str(restarts), SUPERVISOR: str(os.getpid())}


@contextlib.contextmanager
def _starting(command: Sequence[str], forward: Forward) -> Iterator[None]:
    """Raise UserError if the block cannot start the command; afterwards there is no child."""
    try:
        yield
    except OSError as error:
        if forward.child is not None:  # it was started
            raise
        expected = f"a program that can be started ({error.strerror})"
        raise UserError(Problem("COMMAND", shown(command[:1]), expected)) from error
    finally:
        forward.child = None


def _start_machine(
    command: Sequence[str], run_dir: Path, forward: Forward, leave: float, log: Log, restarts: int
) -> Ended:
    """Run a command with `--nodes` once; return how this machine's part of the run ended."""

    def wait_for_ranks(others: set[int]) -> None:
        if not wait_until(lambda: not living_children(others), leave):
            for child in living_children(others):
                log(f"killed process {child.pid}: left {leave:.0f} s behind its launcher")
                child.kill()

    with _starting(command, forward):
        end = run_child(command, _told(restarts), run_dir, forward, wait_for_ranks)
        code = forward.child.returncode if forward.child is not None else RESTARTABLE
    message = f"ended by signal {-code}" if code < 0 else "ended"
    return replace(
        end, exit_code=code if code >= 0 else RESTARTABLE, message=message, lost_launcher=False
    )


def _wait_for_ranks(run_dir: Path, leave: float, log: Log, others: set[int]) -> None:
    """Wait until the lock is free and no rank is left; after `leave` seconds, kill the ranks.

    Ranks whose launcher is gone are children of this process. others: children from before.
    """
    import psutil

    def gone() -> bool:
        return not _ranks(run_dir, others) and not is_held(run_dir)

    if not wait_until(gone, leave):
        for rank in _ranks(run_dir, others):
            log(f"killed process {rank.pid}: a rank {leave:.0f} s behind its launcher")
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        wait_until(gone, _KILLED_SECONDS)
    RunLock(run_dir, "").check()


def _ranks(run_dir: Path, others: set[int]) -> list[psutil.Process]:
    """Return the ranks among this process's descendants, what they started, and the lock's holder.

    The holder counts because a run of one process has no RANK in its environment.
    """
    import psutil

    holder = read(run_dir / contents.LOCK)
    locker = holder.pid if holder is not None and lives_here(holder) else None
    ranks = []
    for child in living_children(others):
        with contextlib.suppress(psutil.Error):  # it has ended since
            family = [child, *child.children(recursive=True)]
            ranks += [one for one in family if one.pid == locker or _has_rank(one)]
    return ranks


def _has_rank(process: psutil.Process) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):  # it has ended since, or is somebody else's
        return "RANK" in process.environ()
    return False


def _complete_checkpoints(run_dir: Path) -> frozenset[str]:
    """Return the names of all complete checkpoints."""
    return frozenset(form.complete_names(run_dir / contents.CHECKPOINTS))
