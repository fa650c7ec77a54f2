"""What a process asks of the operating system about itself, its parent and its children.

Linux can send a signal to a child whose parent dies (`prctl`, PR_SET_PDEATHSIG). Elsewhere these
calls do nothing. The trap: the parent may have died before the child asked, so afterwards the child
has to compare `os.getppid()` with the parent's process id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Final, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def cores() -> int:
    """Return how many processors this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop; SIGHUP is left out where `nohup` ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot.

    None if the process has ended, or if there is no /proc.
    """
    fields = _stat(pid)
    return fields[19] if fields else None


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    fields = _stat(pid)
    return not fields or fields[0] not in ("Z", "X")


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a daemon thread and return a future of its result or exception.

    An executor is not used: at exit, Python would wait for its threads, even for one that hangs.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


def signal_on_death_of_parent(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans(adopt: bool) -> None:
    """Become the parent of descendants whose own parent dies, or stop doing so."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, which may contain any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
