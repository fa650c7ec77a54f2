"""Run a training command, and start it again where that may help.

    this process ── COMMAND, a launcher (its own session) ── rank 0, rank 1, …

A launcher's exit code does not tell how the run ended: `status.json` decides, and without it the
files that failed ranks leave, here called marks. The trap: ranks outlive their launcher while they
save. A start at that moment would be refused, and the old ranks' status would be mistaken for that
of the new start. So the lock of the run directory must be free first.

Find the config and run directory in a command that starts a run, and hide its secrets.

accelerate launch --config_file a.yaml scripts/train.py my.yaml run.dir=runs/x
                                                        └ config └ override
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.checkpoint import format as form
from llmtrain.config.secrets import HIDDEN, hider, is_secret, is_secret_name
from llmtrain.errors import DISK_FAILED, RESTARTABLE, Problem, UserError
from llmtrain.rundir import contents, failures
from llmtrain.rundir.failures import Mark
from llmtrain.rundir.lock import RunLock, is_held, lives_here, read
from llmtrain.rundir.status import read_status
from llmtrain.training.stop import GRACE

if TYPE_CHECKING:
    import psutil

    from llmtrain.tools.launch.launch import Forward


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


def checked_run_dir(command: Sequence[str], run_dir: Path | None) -> Path:
    """Return the run directory of a command, after checking that its config may use it.

    run_dir: the one that the user named, if any

    Raises UserError if the config is wrong or names another directory than `run_dir`, and if there
    is neither a config nor a `run_dir`.
    """
    from llmtrain.config.load import load_config
    from llmtrain.training.start import claim

    found = config_in(command)
    if run_dir is not None and (found is None or not _is_config(Path(found[0]))):
        return run_dir
    if found is None:
        expected = "a command with the config (*.yaml) of the run, or --run DIR"
        raise UserError(Problem("COMMAND", shown(command), expected))
    config = load_config(*found)
    named = config.run_dir
    if run_dir is not None and run_dir.resolve() != named.resolve():
        expected = f"{named}, the run.dir of {found[0]} in the command"
        remedy = f"leave --run out, or put run.dir={run_dir} behind {found[0]}"
        raise UserError(Problem("--run", run_dir, expected, remedy))
    claim.check(config)
    return named


def shown(command: Sequence[str]) -> str:
    """Return the command as a line of shell, without the secrets in it.

    These are hidden: values of secrets in the environment, text that looks like a secret, and the
    value after the name of a secret (`HF_TOKEN=…`, `--hub-token …`), also inside a line of shell.
    """
    hide = hider(os.environ)  # used before quoting, which may put quotes inside a secret
    words = [
        HIDDEN if _asks_for_secret(before) else _mask(hide(word))
        for before, word in zip(["", *command], command, strict=False)
    ]
    return shlex.join(words)


def _asks_for_secret(word: str) -> bool:
    return word.startswith("--") and "=" not in word and is_secret_name(word)


def _mask(text: str) -> str:
    name, equals, value = text.partition("=")
    if equals and _is_secret(name, value) and not re.search(r"\s", name):
        return f"{name}={HIDDEN}"
    return _ASSIGNMENT.sub(lambda found: f"{found[1]}={_mask_value(found[1], found[2])}", text)


def _mask_value(name: str, value: str) -> str:
    return HIDDEN if _is_secret(name, value.strip("\"'")) else _mask(value)


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


RESTARTS = "LLMTRAIN_RESTARTS"  # tells the command how often it was started before
MOST_STARTS = 3  # without a new checkpoint
MOST_DEFECTS = 1  # restarts after code 1, without a new checkpoint
_FINAL = {
    0: "the end",
    UserError.exit_code: "the end, since the input must change first",
    DISK_FAILED: "the end, since the disk has failed",
}
_LOOK_SECONDS = 0.2
_KILLED_SECONDS = 10.0

Say = Callable[[str], None]


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
class Outcome:
    """How one start ended.

    code: exit code of the run
    reason: in words
    lost_launcher: whether the ranks saved and stopped because their launcher was gone
    """

    code: int
    reason: str
    lost_launcher: bool = False


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
class Patience:
    """Waiting times in seconds.

    first: before the first restart; doubled for each further one
    most: before any restart
    leave: after the end of the launcher, before remaining ranks are killed
    """

    first: float = 5.0
    most: float = 300.0
    leave: float = 60.0


def supervise(
    command: Sequence[str], run_dir: Path | None, say: Say, patience: Patience | None = None
) -> Supervised:
    """Run a command until it has finished, was stopped, or a restart would not help.

    run_dir: None = that of the config in the command
    say: called with each line of output, which contains no secret

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the command's process group, and then the
    command is not started again. Raises UserError before the first start if the config is wrong or
    names another run directory, or if that is in use.
    """
    from llmtrain.tools.launch.launch import passing_signals_on

    grace = os.environ.get(GRACE, "")  # before torch's launcher kills its ranks
    patience = patience or Patience(leave=30.0 + (float(grace) if grace.isdigit() else 30.0))
    run_dir = checked_run_dir(command, run_dir)
    RunLock(run_dir, "").check()
    known, tries, hide = _complete_checkpoints(run_dir), Tries(), hider(os.environ)
    with passing_signals_on(to_group=True) as forward:
        for number in count(1):
            say(f"start {number}: {shown(command)}")
            outcome = _start(command, run_dir, forward, patience.leave, say, restarts=number - 1)
            now = _complete_checkpoints(run_dir)
            progress, known = bool(now - known), known | now
            stopped = forward.asked is not None
            decision = decide(outcome, tries, patience, progress=progress, stopped=stopped)
            ended = f"start {number} {outcome.reason} with code {decision.code}: {decision.why}"
            say(hide(ended))
            if decision.restart:
                # Varied by ±20 %, so that runs ended by one fault do not restart together.
                spread = 0.8 + 0.4 * int.from_bytes(os.urandom(4)) / 2**32
                _until(lambda: forward.asked is not None, decision.seconds * spread)
            if not decision.restart or forward.asked is not None:
                return Supervised(decision.code, number, outcome.reason)
            tries = decision.tries
    raise AssertionError("count never ends")


def decide(
    outcome: Outcome, tries: Tries, patience: Patience, *, progress: bool, stopped: bool
) -> Decision:
    """Decide what to do after a start.

    outcome: how the start ended
    tries: counts from before this start
    progress: whether the start committed a new checkpoint
    stopped: whether a person or a batch system has asked this process to stop
    """
    code = outcome.code
    if stopped:
        return Decision(False, code, "asked to stop")
    if code in _FINAL and not outcome.lost_launcher:
        return Decision(False, code, _FINAL[code])
    code = code or RESTARTABLE  # stopped, but not because somebody asked it to
    tries = Tries() if progress else replace(tries, starts=tries.starts + 1)
    if tries.starts >= MOST_STARTS:
        return Decision(False, code, f"{MOST_STARTS} starts without a new checkpoint")
    if code != RESTARTABLE:
        if tries.defects >= MOST_DEFECTS:
            return Decision(False, code, "again, without a new checkpoint: a defect stays one")
        tries = replace(tries, defects=tries.defects + 1)
    seconds = min(patience.most, patience.first * 2**tries.restarts)
    why = f"restart in about {seconds:g} s ({tries.starts} of {MOST_STARTS} without a checkpoint)"
    return Decision(True, code, why, seconds, replace(tries, restarts=tries.restarts + 1))


def judge(
    status: Mapping[str, Any], new_marks: Sequence[Mark], launcher: int, *, changed: bool
) -> Outcome:
    """Return how a start ended.

    status: the content of `status.json`
    new_marks: files that the failed ranks of this start have left
    launcher: exit code of the command, negative for a signal
    changed: whether this start has written `status.json`

    If no rank has reported anything, the command's exit code 2 counts: no launcher ends with 2
    because a rank failed.
    """
    state, reason = status.get("state"), status.get("reason")
    code = status.get("exit_code")
    if changed and state in ("finished", "stopped", "failed") and isinstance(code, int):
        said = f"{state} at step {status.get('step')}" + (f" ({_line(reason)})" if reason else "")
        lost = (state, reason) == ("stopped", "launcher_lost")
        return Outcome(code, said, lost)
    left = failures.worst(new_marks)
    if left is not None and left.is_cause:
        return Outcome(left.code, f"failed on rank {left.rank} ({_line(left.reason)})")
    if changed and state == "running":
        return Outcome(RESTARTABLE, "ended as rank 0 died without a word")
    if launcher < 0:
        return Outcome(RESTARTABLE, f"ended by signal {-launcher}")
    if changed:
        return Outcome(1, "ended with a status.json that is no record of a run")
    refused = launcher == UserError.exit_code and not new_marks
    code = UserError.exit_code if refused else 1
    return Outcome(code, "ended before a rank has written status.json")


def _start(
    command: Sequence[str],
    run_dir: Path,
    forward: Forward,
    leave: float,
    say: Say,
    *,
    restarts: int,
) -> Outcome:
    """Run the command once, wait until none of its ranks is left, and return how it ended."""
    from llmtrain.tools.launch.launch import children, follow_parent, identity

    status, left, others = identity(run_dir), failures.versions(run_dir), children()
    said = read_status(run_dir)
    env = {**os.environ, RESTARTS: str(restarts)}
    try:
        forward.child = subprocess.Popen(
            command, env=env, start_new_session=True, preexec_fn=follow_parent
        )
    except OSError as error:
        expected = f"a program that can be started ({error.strerror})"
        raise UserError(Problem("COMMAND", shown(command[:1]), expected)) from error
    forward.tell()
    launcher = forward.child.wait()
    _wait_for_ranks(run_dir, others, leave, say)
    forward.child = None
    RunLock(run_dir, "").check()
    now, new = read_status(run_dir), failures.new_since(run_dir, left)
    put_back = now == said and any(mark.is_cause for mark in new)  # by a start that was refused
    changed = identity(run_dir) != status and not put_back
    outcome = judge(now, new, launcher, changed=changed)
    if outcome.code and not changed and forward.asked is not None:
        return Outcome(0, "stopped before there was a run")
    return outcome


def _wait_for_ranks(run_dir: Path, others: set[int], leave: float, say: Say) -> None:
    """Wait until the lock is free and no rank is left; after `leave` seconds, kill the ranks.

    Ranks whose launcher is gone are children of this process. others: children from before.
    """
    import psutil

    def gone() -> bool:
        return not _ranks(run_dir, others) and not is_held(run_dir)

    if _until(gone, leave):
        return
    for rank in _ranks(run_dir, others):
        say(f"killed process {rank.pid}: a rank {leave:.0f} s behind its launcher")
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    _until(gone, _KILLED_SECONDS)


def _ranks(run_dir: Path, others: set[int]) -> list[psutil.Process]:
    """Return the ranks among this process's descendants, what they started, and the lock's holder.

    The holder counts because a run of one process has no RANK in its environment. Children that
    have ended are waited for.
    """
    import psutil

    holder = read(run_dir / contents.LOCK)
    locker = holder.pid if holder is not None and lives_here(holder) else None
    found = []
    for child in psutil.Process().children():
        if child.pid in others:
            continue
        with contextlib.suppress(psutil.Error):  # it has ended since
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
                continue
            family = [child, *child.children(recursive=True)]
            found += [one for one in family if one.pid == locker or _has_rank(one)]
    return found


def _has_rank(process: psutil.Process) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):  # it has ended since, or is somebody else's
        return "RANK" in process.environ()
    return False


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _complete_checkpoints(run_dir: Path) -> frozenset[str]:
    """Return the names of all complete checkpoints."""
    return frozenset(form.complete_names(run_dir / contents.CHECKPOINTS))


def _line(text: object) -> str:
    return " ".join(str(text).split())
