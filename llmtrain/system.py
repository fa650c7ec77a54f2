"""What a process asks of the operating system: durable files, processes, and its own heartbeat.

A file is written completely or not at all. The trap: a rename is on the disk only after its
directory has been synced. File names from elsewhere must lead to regular files inside their
directory: anybody can write an index or a manifest, and opening the files that it names would
silently follow `../x` and symbolic links.

Linux can send a signal to a child whose parent dies (`prctl`, PR_SET_PDEATHSIG). Elsewhere these
calls do nothing. The trap: the parent may have died before the child asked, so afterwards the child
has to compare `os.getppid()` with the parent's process id.

The heartbeat is a count of finished work, and what the process is doing. The watchdog reads it, and
a person is shown it while nothing else is. A call costs a few assignments, since `beat` is called
in the innermost loops: at each micro-batch, block of an evaluation, wait for data, 64 MiB of a
file, vote and stage of the start. This module uses only the standard library.
"""

import ctypes
import errno
import functools
import logging
import os
import re
import secrets
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import BinaryIO, Final, NamedTuple, TypeVar

# ENOTDIR: the directory is a file now. ESTALE: another client of NFS removed the file.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_log = logging.getLogger(__name__)


def write_durably(path: Path, data: bytes, *, sync: bool = True, shared: bool = False) -> None:
    """Replace a file with these bytes. sync, shared: as in `replacing`. Raises OSError."""
    with replacing(path, sync=sync, shared=shared) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, sync: bool = True, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that is renamed to `path` after the block, or removed if the block raises.

    sync: wait until the file is on the disk; otherwise a power cut may lose it, but a kill cannot
        damage it
    shared: several processes or threads may write the same path at the same time

    Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    if shared:
        partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w+b") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
        if sync:
            sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def close_on_error(descriptor: int) -> Iterator[int]:
    """Close a file if the block raises; otherwise it stays open."""
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        yield descriptor
        stack.pop_all()


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the file at a path is still the open one, neither removed nor replaced.

    True if the disk does not answer: the next write will fail anyway.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        return error.errno not in _GONE


def is_gone(path: Path) -> bool:
    """Whether a path does not exist. False if the disk does not answer."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in _GONE
    return False


def sync_directory(*directories: Path) -> None:
    """Make the entries of directories durable. Raises OSError."""
    for directory in directories:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync a directory. They make its entries durable
            # themselves, or never.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            _warn_unsynced()
        finally:
            os.close(descriptor)


@functools.cache
def _warn_unsynced() -> None:
    """Warn, once in a process, that directories cannot be synced."""
    _log.warning("this file system cannot fsync directories: a power cut may lose what was written")


T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_THREADS = "OMP_NUM_THREADS"
_LAUNCHED = {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"}  # which launchers set, and no person
_ASKED = "__num_cpu_threads_per_process"  # an option of `accelerate launch`, - written as _


@dataclass(frozen=True, slots=True)
class CpuCount:
    """How many processors a process may use, or threads it computes with, and what decides it."""

    count: int
    why: str


def cores(root: Path = Path("/")) -> CpuCount:
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
    # The processors that control groups (cgroup v1 or v2) allow; None = no limit. Each group above
    # this process's own may have a limit, too.
    limits: list[float] = []
    for kind, mounted, inside in _cpu_groups(root):
        for group in (inside, *inside.parents):
            limits += _limit_of(kind, mounted / group)
    quota = min(limits, default=None)
    if quota is not None and quota < count:
        count = max(1, int(quota))
        why = f"{count} of {all_of_them}, as their control group may use {quota:g}"
    return CpuCount(count, why)


def _cpu_groups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the control groups of this process that may limit its processors.

    That is for each the kind of its file system, where this is mounted, and the path in it. In a
    container the path may be that of the host, while only the container's own part is mounted.
    """
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, more = line.partition(" - ")
        part, point = mount.split()[3:5]
        kind, _, options = more.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        path = paths[kind].removeprefix(part if part != "/" else "").lstrip("/")
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


def decide_threads(
    asked: int | str, begun: int | None, env: Mapping[str, str], *, same_bits: bool = False
) -> CpuCount:
    """Return the threads of a process of a run.

    asked: as `training.threads`
    begun: the threads that earlier launches of this kind had; None = there was none
    env: the process's environment
    same_bits: as `training.same_bits`, of a run on CPUs. There the number of threads decides bits:
        torch's LayerNorm adds up the gradient of its weights in as many parts.
    """
    if isinstance(asked, int):
        return CpuCount(asked, "training.threads")
    if same_bits:
        return CpuCount(1, "training.same_bits")
    setting = env.get(_THREADS, "").split(",")[0].strip()  # "4,2" is for nested regions
    if setting.isdecimal() and int(setting) > 0 and set_by_user(env):
        return CpuCount(int(setting), _THREADS)
    if begun is not None:
        return CpuCount(begun, "as launches of this kind began")
    here, usable = int(env.get("LOCAL_WORLD_SIZE", "1")), cores()
    why = usable.why if here == 1 else f"1/{here} of {usable.why}"
    return CpuCount(max(1, usable.count // here), why)


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

    with suppress(psutil.Error, OSError):
        process: psutil.Process | None = psutil.Process()
        while process and (process := process.parent()):
            yield process.environ(), process.cmdline()


def set_variables_of_torch(env: MutableMapping[str, str]) -> None:
    """Set what torch reads when it is imported, where the user has not set it."""
    # By default, OpenMP threads that wait for work spin. On a shared machine they then take the
    # cores from the threads that they wait for. Threads that go to sleep at once are slow where
    # nobody else computes, so GNU's OpenMP (torch's wheels for Linux) spins some 0.1 ms first:
    # benchmarks/threads.py.
    if "OMP_WAIT_POLICY" not in env and "GOMP_SPINCOUNT" not in env:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env["GOMP_SPINCOUNT"] = "5000"
    # Segments of a GPU's memory that can grow leave no gaps between blocks of other sizes. The
    # older name of the variable still counts, but not beside the new one.
    if "PYTORCH_CUDA_ALLOC_CONF" not in env:
        env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


_MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """The file system of a directory: its type ("" if that is not known), and its options."""

    kind: str = ""
    options: frozenset[str] = frozenset()


def mounted(path: Path) -> Mount:
    """Return the file system that a directory is on; an empty Mount if this is not Linux."""
    if not _MOUNTS.is_file():
        return Mount()
    place = path.resolve()
    mounts: dict[Path, Mount] = {}
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        # proc(5) writes a space as \040. A later mount hides earlier ones.
        mount = re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), before.split()[4])
        kind, *_, options = after.split()
        mounts[Path(mount)] = Mount(kind, frozenset(options.split(",")))
    return next((mounts[one] for one in (place, *place.parents) if one in mounts), Mount())


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


def begin_in_thread(work: Callable[[], T], name: str) -> Future[T]:
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


_count = 0
_phase = "the start"
_done = 0
_of = 0


def beat(phase: str, done: int = 0, of: int = 0) -> None:
    """Count a piece of work as finished.

    phase: what comes next, in words for people
    done, of: number of pieces of this phase, the next one included, and of all; 0 = not known
    """
    global _count, _phase, _done, _of
    _count += 1
    _phase, _done, _of = phase, done, of


def beat_again() -> None:
    """Count a piece of work as finished, within the phase of the last `beat`."""
    global _count
    _count += 1


def last_beat() -> tuple[int, str]:
    """Return how often `beat` was called in this process, and its last phase."""
    return _count, _phase


def beat_in_words() -> str:
    """Return the last phase with its count, if there is one: `looking into files (3 of 20)`."""
    phase, done, of = _phase, _done, _of
    if not done:
        return phase
    return f"{phase} ({done:,} of {of:,})" if of else f"{phase} ({done:,})"


def unsafe_name(name: str) -> str | None:
    """Return what is wrong with a file's name; None for a plain relative path."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and path.as_posix() == name
    if not plain or path.is_absolute() or not path.parts or ".." in path.parts:
        return f"{name!r} is not a plain path inside the directory"
    return None


def unsafe_file(directory: Path, name: str, root: Path | None = None) -> str | None:
    """Return what is wrong with a file whose name is safe; None for a regular file inside.

    root: the directory in which the real path must be; None = `directory`

    Raises OSError for a file that does not exist.
    """
    real = Path(os.path.realpath(directory / name))
    allowed = Path(os.path.realpath(root or directory))
    if not real.is_relative_to(allowed):
        return f"{name} leads out of the directory, to {real}"
    if not stat.S_ISREG(real.stat().st_mode):
        return f"{name} is not a regular file"
    return None
