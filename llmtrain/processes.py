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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_THREADS = "OMP_NUM_THREADS"
_LAUNCHED = {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"}  # which launchers set, and no person
_ASKED = "__num_cpu_threads_per_process"  # an option of `accelerate launch`, - written as _


@dataclass(frozen=True, slots=True)
class Cores:
    """How many processors this process may use, and what limits them."""

    count: int
    why: str


def cores(root: Path = Path("/")) -> Cores:
    """Return how many processors this process may use.

    A container's CPU quota counts: threads beyond it would be stopped in turns, and those that wait
    for each other stop together.

    root: where /proc and /sys are
    """
    installed = os.cpu_count() or 1
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else installed
    plural = "s" if installed > 1 else ""
    all_of_them = f"{installed} CPU core{plural}"
    why = all_of_them
    if count < installed:
        why = f"{count} of {all_of_them}, to which this process is bound"
    quota = _cpu_quota(root)
    if quota is not None and quota < count:
        count = max(1, int(quota))
        why = f"{count} of {all_of_them}, as their control group may use {quota:g}"
    return Cores(count, why)


def _cpu_quota(root: Path) -> float | None:
    """Return the processors that control groups (cgroup v1 or v2) allow; None = no limit.

    Each group above this process's own may have a limit, too.
    """
    limits: list[float] = []
    for kind, mounted, inside in _cpu_groups(root):
        for group in (inside, *inside.parents):
            limits += _limit_of(kind, mounted / group)
    return min(limits, default=None)


def _cpu_groups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the control groups of this process that may limit its processors.

    That is for each the kind of its file system, where this is mounted, and the path in it. In a
    container the path may be that of the host, while only the container's own part is mounted.
    """
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, more = line.partition(" - ")
        part, point = mount.split()[3:5]
        kind, _, options = more.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        path = own[kind].removeprefix(part if part != "/" else "").lstrip("/")
        place = root / point.lstrip("/")
        yield kind, place, Path(path) if (place / path).is_dir() else Path()


def _limit_of(kind: str, group: Path) -> list[float]:
    """Return the limit that a group has of its own, if it has one."""
    if kind == "cgroup2":
        quota, period = (_lines(group / "cpu.max") or ["max 1"])[0].split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = ((_lines(group / name) or ["-1"])[0] for name in names)
    unlimited = quota == "max" or int(quota) < 0 or int(period) <= 0
    return [] if unlimited else [int(quota) / int(period)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:  # not Linux, or no such control group
        return []


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads a process computes with, and why."""

    count: int
    why: str


def decide_threads(asked: int | str, begun: int | None, env: Mapping[str, str]) -> Threads:
    """Return the threads of a process of a run.

    asked: as `training.threads`
    begun: the threads that earlier launches of this kind had; None = there was none
    env: the process's environment
    """
    if isinstance(asked, int):
        return Threads(asked, "training.threads")
    own = env.get(_THREADS, "").split(",")[0].strip()  # "4,2" is for nested regions
    if own.isdecimal() and int(own) > 0 and set_by_user(env):
        return Threads(int(own), _THREADS)
    if begun is not None:
        return Threads(begun, "as launches of this kind began")
    here, usable = int(env.get("LOCAL_WORLD_SIZE", "1")), cores()
    why = usable.why if here == 1 else f"1/{here} of {usable.why}"
    return Threads(max(1, usable.count // here), why)


def set_by_user(env: Mapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS in an environment is the user's, not a launcher's default.

    torchrun and accelerate set it for their processes if it is not set. So the first ancestor that
    began without it tells: where it is a launcher, it has chosen the number.
    """
    child = env
    for older, command in ancestors():
        if _THREADS not in older:
            asked = any(word.replace("-", "_").startswith(_ASKED) for word in command)
            return asked or not _LAUNCHED & (child.keys() - older.keys())
        child = older
    return not _LAUNCHED & child.keys() or env[_THREADS] != "1"


def ancestors() -> Iterator[tuple[Mapping[str, str], Sequence[str]]]:
    """Yield the environment in which each ancestor began, and its command, the parent first.

    It ends at the first one that may not be read.
    """
    import psutil

    try:
        process = psutil.Process().parent()
        while process is not None:
            yield process.environ(), process.cmdline()
            process = process.parent()
    except (psutil.Error, OSError):
        return


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
