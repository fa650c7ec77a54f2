"""The child of a launch: signals are passed on to it, and its exit code alone tells little.

    this process ── accelerate launch, or a command (its own session) ── rank 0, rank 1, …

A launcher's code is 1 for every failing rank, and also after a SIGTERM for which all ranks saved a
complete checkpoint. So rank 0 writes its code and last message to a file, the exit report, which
LLMTRAIN_LAUNCHED names. Without a report, `status.json` tells how the run ended, and without that
the marks of failed ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import FrameType
from typing import IO, TYPE_CHECKING

from llmtrain import system
from llmtrain.errors import RESTARTABLE, UserError
from llmtrain.rundir import failures
from llmtrain.rundir.contents import STATUS
from llmtrain.rundir.failures import Mark, new_since
from llmtrain.rundir.status import read_status
from llmtrain.training.stop import LAUNCHED, SUPERVISOR
from llmtrain.types import JsonMapping

if TYPE_CHECKING:
    import psutil

_LOOK_SECONDS = 0.1


def write_exit_report(env: Mapping[str, str], exit_code: int, message: str) -> bool:
    """Write the report if this is rank 0 and LLMTRAIN_LAUNCHED is set. Return whether it worked."""
    path = Path(env.get(LAUNCHED, ""))
    if not path.is_absolute() or env.get("RANK", "0") != "0":
        return False
    try:
        system.write_durably(path, json.dumps([exit_code, message]).encode())
    except OSError:
        return False  # the caller prints the message, and the launcher reads status.json
    return True


def read_exit_report(path: Path) -> tuple[int, str] | None:
    """Return the code and message of rank 0; None if it ended without a report."""
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
    began = system.start_time(os.getppid())
    if "TORCHELASTIC_RUN_ID" not in env or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if began is not None:
        words = [sys.executable, "-c", _AFTER, str(os.getppid()), began, message]
        Popen(words, stdin=DEVNULL, start_new_session=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a start ended: the code of the run itself, not of its launcher.

    exit_code: of the run
    message: of rank 0's exit report, to be printed; without a report, how the run ended, in words
    asked_to_stop: whether a signal was passed on to the run
    began: whether the start has written `status.json`
    lost_launcher: whether the ranks saved and stopped because their launcher was gone
    """

    exit_code: int
    message: str
    asked_to_stop: bool = False
    began: bool = False
    lost_launcher: bool = False


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    run_dir: Path,
    forward: Forward,
    wait_for_ranks: Callable[[set[int]], None],
    report: Path | None = None,
    output: IO[bytes] | None = None,
) -> Ended:
    """Run a launcher or another command, wait for it and its ranks, and return how the run ended.

    forward: of `passing_signals_on`
    wait_for_ranks: waits for ranks that outlive the command, and are children of this process then;
        is called with the ids of the children from before
    report: where rank 0 writes its exit report, if it writes one
    output: a file for all that is printed; None = the streams of this process

    Raises OSError if the command cannot be started.
    """
    import psutil

    status, before, marks = _identity(run_dir), read_status(run_dir), failures.versions(run_dir)
    others = {one.pid for one in psutil.Process().children()}
    # In a session of its own, so that Ctrl-C reaches the child only once, through this process, and
    # not from the terminal as well. It receives SIGTERM if this process is killed.
    follow = partial(system.signal_on_death_of_parent, signal.SIGTERM)
    forward.child = Popen(
        command, env=env, stdout=output, stderr=output, start_new_session=True, preexec_fn=follow
    )
    forward.tell()
    code = forward.child.wait()
    wait_for_ranks(others)
    stopped, now, new = forward.asked is not None, read_status(run_dir), new_since(run_dir, marks)
    put_back = now == before and any(mark.is_cause for mark in new)  # by a start that was refused
    began = _identity(run_dir) != status and not put_back
    if report and (reported := read_exit_report(report)):
        return Ended(*reported, stopped, began)
    end = judge(now, new, code, changed=began, stopped=stopped)
    return replace(end, asked_to_stop=stopped, began=began)


def judge(
    status: JsonMapping,
    new_marks: Sequence[Mark],
    code: int,
    *,
    changed: bool,
    stopped: bool = False,
) -> Ended:
    """Return how a start ended without an exit report.

    status: the content of `status.json`
    new_marks: files that the failed ranks of this start have left
    code: exit code of the command, negative for a signal
    changed: whether this start has written `status.json`
    stopped: whether a signal was passed on

    If no rank has reported anything, the command's exit code 2 counts: no launcher ends with 2
    because a rank failed.
    """
    refused = code == UserError.exit_code and not new_marks
    if stopped and not changed and not refused and not any(one.is_cause for one in new_marks):
        return Ended(0, "stopped before there was a run")
    state, reason, exit_code = status.get("state"), status.get("reason"), status.get("exit_code")
    if changed and state in ("finished", "stopped", "failed") and isinstance(exit_code, int):
        text = f"{state} at step {status.get('step')}" + (f" ({_line(reason)})" if reason else "")
        return Ended(exit_code, text, lost_launcher=(state, reason) == ("stopped", "launcher_lost"))
    left = failures.worst(new_marks)
    if left is not None and left.is_cause:
        return Ended(left.code, f"failed on rank {left.rank} ({_line(left.reason)})")
    if changed and state == "running":
        return Ended(RESTARTABLE, "ended as rank 0 died without a word")
    if code < 0:
        return Ended(RESTARTABLE, f"ended by signal {-code}")
    if changed:
        return Ended(1, "ended with a status.json that is no record of a run")
    return Ended(code if refused else 1, "ended before a rank has written status.json")


def _line(text: object) -> str:
    return " ".join(str(text).split())


class Forward:
    """A signal handler that passes stop signals on to a child and the process group that it leads.

    A shell, or accelerate's launcher of one process, passes nothing on itself. Ranks of torch's
    launcher have sessions of their own, and receive the signal from that launcher.

    child: None until it is started
    asked: the signal to pass on, None until one was received
    """

    child: Popen[bytes] | None = None
    asked: signal.Signals | None = None

    def __init__(self, *, may_leave: bool = False) -> None:
        """may_leave: whether SIGUSR1 is passed on as it is, to a launcher that knows it."""
        self._may_leave = may_leave
        self._supervisor = os.environ.get(SUPERVISOR) if may_leave else None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        # USR1 would kill torch's launcher and orphan its ranks; TERM asks for the same stop.
        as_it_is = (signal.SIGINT, *([signal.SIGUSR1] if self._may_leave else []))
        self.asked = signal.Signals(number) if number in as_it_is else signal.SIGTERM
        if self._supervisor and not system.is_alive(int(self._supervisor)):
            self.asked = signal.SIGUSR1  # it was killed: that is no stop for the other machines
        self.tell()

    def tell(self) -> None:
        """Pass the signal on, if one was received and there is a child."""
        if self.child is not None and self.asked is not None:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(self.child.pid, self.asked)


@contextmanager
def passing_signals_on(*, may_leave: bool = False) -> Iterator[Forward]:
    """Pass stop signals of this process on to the `child` of the `Forward` that is yielded.

    The signals are SIGTERM, SIGINT, SIGHUP and SIGUSR1. Orphaned descendants become children of
    this process meanwhile. Python passes signals to the main thread alone, so that in another one
    none is passed on.
    """
    forward = Forward(may_leave=may_leave)
    main = threading.current_thread() is threading.main_thread()
    old = {one: signal.signal(one, forward) for one in (system.stop_signals() if main else ())}
    system.adopt_orphans(True)  # ranks of a launcher that was killed become our children
    try:
        yield forward
    finally:
        system.adopt_orphans(False)
        for number, handler in old.items():
            signal.signal(number, handler)


def living_children(others: Container[int]) -> list[psutil.Process]:
    """Return the children of this process that live, but for `others`; wait for those that ended.

    Orphans that this process has adopted are among them.
    """
    import psutil

    children = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):  # it has ended since
            if child.pid not in others and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
            elif child.pid not in others:
                os.waitpid(child.pid, os.WNOHANG)
    return children


def wait_until(condition: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Wait for a condition, at most this long; return whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _identity(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever `status.json` is written; None if it does not exist."""
    with contextlib.suppress(OSError):
        stat = (run_dir / STATUS).stat()
        return stat.st_ino, stat.st_mtime_ns
    return None
