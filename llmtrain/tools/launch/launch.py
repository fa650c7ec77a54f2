"""Start `accelerate launch` around a config, pass signals on, and find out how the run ended.

The launcher's own exit code tells little: it is 1 for every failing rank, and also after a SIGTERM
for which all ranks saved a complete checkpoint. So rank 0 writes its code to a file, here called
the mark (`last_words.py`). If rank 0 died without one, `status.json` is read.

    this process ── accelerate launch (its own session) ── rank 0, rank 1, …

Report the end of a run to the process that launched it, by a file with a code and a message.

The launcher between them has exit code 1 for every failure, and would print its own tracebacks
after our message. So rank 0 writes code and message to the file named by LLMTRAIN_LAUNCHED.

Find the addresses by which the machines of a run meet, which torch's launcher would guess.

Torch's launcher asks the name service whether this machine is the one where all meet, and by which
address others reach it. On a machine with two networks, or whose name means 127.0.1.1, both answers
are wrong: no machine opens the rendezvous, or each connects to itself. The routing table gives the
right answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO

from llmtrain import system
from llmtrain.config.checks import Rule, apply
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, DistributedConfig
from llmtrain.config.yaml12 import write
from llmtrain.distributed.launch.environment import INSTALL_DEEPSPEED, family, launcher_problems
from llmtrain.distributed.launch.named import example, named_family
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.errors import DISK_FAILED, RESTARTABLE, Problem, UserError, raise_any
from llmtrain.rundir.contents import LOGS, STATUS
from llmtrain.rundir.status import read_status
from llmtrain.system import start_time
from llmtrain.tools.launch.file import LaunchFile, launch_values, read_launch_file
from llmtrain.training.start.claim import rules_of_a_launch
from llmtrain.training.stop import LAUNCHED


def leave_words(env: Mapping[str, str], exit_code: int, message: str) -> bool:
    """Write the file, if this is rank 0 and LLMTRAIN_LAUNCHED is set; return whether it worked."""
    path = Path(env.get(LAUNCHED, ""))
    if not path.is_absolute() or env.get("RANK", "0") != "0":
        return False
    try:
        system.write_durably(path, json.dumps([exit_code, message]).encode())
    except OSError:
        return False  # the caller prints the message, and the launcher reads status.json
    return True


def words_left(path: Path) -> tuple[int, str] | None:
    """Return the code and message of rank 0; None if it ended without writing them."""
    if not path.exists():
        return None
    exit_code, message = json.loads(path.read_text(encoding="utf-8"))
    return int(exit_code), str(message)


_AFTER = """
import os, sys, time
launcher, began, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from llmtrain.system import is_alive, start_time
end = time.monotonic() + 60
while is_alive(launcher) and start_time(launcher) == began and time.monotonic() < end:
    time.sleep(0.05)
os.write(2, os.fsencode(text) + b"\\n")
"""


def repeat_after_launcher(env: Mapping[str, str], message: str) -> None:
    """Print a message again below what torch's launcher prints when its ranks have failed.

    A launcher that a person has started himself cannot be asked to be silent. So a process of its
    own waits for its end, for at most a minute. env: that of rank 0
    """
    began = start_time(os.getppid())
    if "TORCHELASTIC_RUN_ID" not in env or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if began is not None:
        words = [sys.executable, "-c", _AFTER, str(os.getppid()), began, message]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def meeting(backend: str, first: str) -> tuple[list[str], dict[str, str]]:
    """Return the settings for machines to meet at the machine whose address is `first`.

    The settings are options for `accelerate launch`, and variables for it and its ranks.

    backend: c10d or static

    Raises UserError if this machine has no route to that address.
    """
    # accelerate 1.15 ignores `rdzv_backend` in its file and uses its default, static.
    options = ["--rdzv_backend", backend]
    if backend != "c10d":
        return options, {}
    own, theirs = _addresses(first)
    here = own == theirs
    return [*options, "--rdzv_conf", f"is_host={int(here)}"], {
        "PET_LOCAL_ADDR": first if here else own,
        # torch 2.13 keeps the addresses of ranks for the next attempt of --max_restarts, and
        # some ranks then connect to dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _addresses(first: str) -> tuple[str, str]:
    """Return this machine's address on the route to `first`, and the address of `first`."""
    try:
        found = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        expected = f"an address that this machine can reach ({error.strerror or error})"
        raise UserError(Problem("main_process_ip", first, expected)) from error


_KEY = "distributed.strategy"
_CODES = (0, 1, 2, DISK_FAILED, RESTARTABLE)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launched run ended: the code of the run itself, not of its launcher.

    exit_code: of the run
    message: to be printed; "" if the run has printed everything
    asked_to_stop: whether a signal was passed on to the run
    """

    exit_code: int
    message: str
    asked_to_stop: bool = False


def launch(
    config_file: str,
    overrides: Sequence[str] = (),
    accelerate_file: Path | None = None,
    processes: int | None = None,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> Ended:
    """Train in several processes, and wait for them.

    accelerate_file: a config of accelerate; None = this machine, with its GPUs if it has any
    processes: in place of the file's number
    env: the environment of the ranks; None = that of this process
    output: a file for everything that they print; None = the streams of this process

    Raises UserError before anything is started.
    """
    env = dict(os.environ if env is None else env)
    _refuse_nested(env)
    raise_any(launcher_problems(env), "the launch")
    file = (
        read_launch_file(accelerate_file, processes)
        if accelerate_file
        else _of_this_machine(processes or 1, env)
    )
    config = load_config(config_file, overrides, _rules(config_file, file, env))
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if file.path is None:
            written = Path(folder) / "accelerate.yaml"
            asked = config.training.precision
            fp32 = asked == "fp32" or (file.on_cpu and asked == "auto")
            values = {**file.values, "mixed_precision": "no" if fp32 else "bf16"}
            written.write_text(write(values), encoding="utf-8")
            file = replace(file, path=written)
        mark = Path(folder) / "ended"
        env[LAUNCHED] = str(mark)
        if file.on_cpu:
            # torch's launcher does not set these, and sharding looks for devices.
            env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        options: list[str] = []
        if file.machines > 1:
            options, met = meeting(file.rendezvous, str(file.values["main_process_ip"]))
            env = {**met, **env}
        elif file.values.get("main_process_port") is None:
            options = ["--main_process_port", "0"]  # any free one, so two runs do not share one
        launcher = [sys.executable, "-m", "llmtrain.tools.launch.quiet", str(config.run_dir)]
        launcher += ["--config_file", str(file.path), "--num_processes", str(file.processes)]
        command = [*launcher, *options, "-m", "llmtrain", "train", config_file, *overrides]
        return run_launcher(command, env, mark, config.run_dir, output)


def _refuse_nested(env: Mapping[str, str]) -> None:
    """Raise UserError inside a launcher: each of its ranks would start all processes again."""
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", LAUNCHED):
        if name in env:
            expected = "no launcher around this process: it starts one itself"
            remedy = "leave --accelerate and --processes out"
            raise UserError(Problem(name, env[name], expected, remedy), where="the launch")


def _rules(config_file: str, file: LaunchFile, env: Mapping[str, str]) -> list[Rule]:
    """Return the rules for the config of a launch. env: in which the launcher is started."""
    told = file.environment
    exported = {} if file.path else {name: env[name] for name in env.keys() - told.keys()}
    ranks = {**exported, **told}
    deepspeed = partial(_deepspeed_problems, ranks)
    return [*rules_of_a_launch(config_file, ranks, exported), deepspeed]


def _deepspeed_problems(
    env: Mapping[str, str], distributed: DistributedConfig
) -> Iterator[Problem]:
    """Check that DeepSpeed is installed if it is needed: the launcher would import it first."""
    by_file, strategy = named_family(env) == "zero", distributed.strategy
    if (by_file or family(strategy) == "zero") and find_spec("deepspeed") is None:
        key, found = ("distributed_type", "DEEPSPEED") if by_file else (_KEY, strategy)
        expected = "fsdp2 or ddp: the package deepspeed is not installed"
        yield Problem(key, found, expected, f"{INSTALL_DEEPSPEED}, or {example('fsdp2')}")


def plain_launch_problems(config: Config, processes: int, env: Mapping[str, str]) -> list[Problem]:
    """Return why a start of this many processes here would be refused; nothing is started."""
    rules = _rules("", _of_this_machine(processes, env), env)
    return launcher_problems(env) or list(apply(rules, dict(config)))


def _of_this_machine(processes: int, env: Mapping[str, str]) -> LaunchFile:
    """Return the settings of a start without a file of accelerate, but for the precision."""
    here = Hardware(0, None, processes, 1, cpu=not has_gpu(env))
    values = launch_values("ddp", here, "fp32")
    # MULTI_CPU would start only one process. MULTI_GPU also works with one process; it uses
    # torch's launcher, which passes signals on, as accelerate's own does not.
    return LaunchFile(None, processes, values | {"distributed_type": "MULTI_GPU"})


def has_gpu(env: Mapping[str, str]) -> bool:
    """Whether this machine has a visible GPU. Does not import torch."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    asked_cpu = env.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return there and not hidden and not asked_cpu


def run_launcher(
    command: Sequence[str],
    env: Mapping[str, str],
    mark: Path,
    run_dir: Path,
    output: IO[bytes] | None = None,
) -> Ended:
    """Start a launcher, wait for it and for ranks that outlive it; return how the run ended.

    Meanwhile SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the launcher.
    """
    before, others = identity(run_dir), children()
    with passing_signals_on() as forward:
        # In a session of its own, so that Ctrl-C reaches the launcher only once, through this
        # process, and not from the terminal as well.
        forward.child = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            preexec_fn=follow_parent,
            stdout=output,
            stderr=output,
        )
        forward.tell()
        launcher = forward.child.wait()
        _wait_for_ranks(mark, others)
    left, asked_to_stop = words_left(mark), forward.asked is not None
    if left is not None:
        return Ended(*left, asked_to_stop)
    changed = identity(run_dir) != before
    code = _exit_code(run_dir if changed else None, launcher, asked_to_stop)
    message = (
        "error: rank 0 ended without a word\n"
        f"    next:     look into {run_dir / LOGS}, where launcher.log says how each rank ended; "
        "the same command resumes"
    )
    return Ended(code, message if code else "", asked_to_stop)


class Forward:
    """A signal handler that passes stop signals on to a child.

    child: None until it is started
    asked: the signal to pass on, None until one was received
    to_group: signal the whole process group that the child leads: a shell, or accelerate's launcher
        of one process, passes nothing on. Ranks of torch's launcher have sessions of their own, and
        receive the signal from that launcher
    """

    def __init__(self, *, to_group: bool = False) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.asked: signal.Signals | None = None
        self._to_group = to_group

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        # USR1 would kill torch's launcher and orphan its ranks; TERM asks for the same stop.
        self.asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.tell()

    def tell(self) -> None:
        """Pass the signal on, if one was received and there is a child."""
        if self.child is None or self.asked is None:
            return
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            if self._to_group:
                os.killpg(self.child.pid, self.asked)
            else:
                self.child.send_signal(self.asked)


@contextmanager
def passing_signals_on(*, to_group: bool = False) -> Iterator[Forward]:
    """Pass stop signals of this process on to the `child` of the `Forward` that is yielded.

    to_group: pass them on to the child's whole process group

    The signals are SIGTERM, SIGINT, SIGHUP and SIGUSR1. Orphaned descendants become children of
    this process meanwhile. Python passes signals to the main thread alone, so that in another one
    none is passed on.
    """
    forward = Forward(to_group=to_group)
    main = threading.current_thread() is threading.main_thread()
    numbers = system.stop_signals() if main else ()
    old = {number: signal.signal(number, forward) for number in numbers}
    system.adopt_orphans(True)  # ranks of a launcher that was killed become our children
    try:
        yield forward
    finally:
        system.adopt_orphans(False)
        for number, handler in old.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """Make this new process receive SIGTERM if its parent is killed; runs before the launcher."""
    system.signal_on_death_of_parent(signal.SIGTERM)


def _wait_for_ranks(mark: Path, others: set[int]) -> None:
    """Wait for ranks whose launcher died by a signal: they stop and save by themselves.

    They are children of this process by then; `others` are children from before.
    """
    while not mark.exists() and (ranks := children() - others):
        for pid in ranks:
            with contextlib.suppress(ChildProcessError):  # waited for already
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)


def children() -> set[int]:
    """Return the ids of processes that this one has started or adopted."""
    import psutil

    return {child.pid for child in psutil.Process().children()}


def identity(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever `status.json` is written; None if it does not exist."""
    with contextlib.suppress(OSError):
        found = (run_dir / STATUS).stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _exit_code(run_dir: Path | None, launcher: int, stopped: bool) -> int:
    """Return the code of a run without a mark.

    run_dir: None if this start has not written `status.json`
    """
    if run_dir is not None:
        status = read_status(run_dir)
        ended = status.get("state") != "running"
        return int(status.get("exit_code") or 0) if ended else RESTARTABLE
    if stopped and launcher < 0:
        return 0  # asked to stop before there was a rank
    return launcher if launcher in _CODES else 1
