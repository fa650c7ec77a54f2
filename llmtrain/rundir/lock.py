"""The lock that lets one process at a time use a run directory: `flock`, and JSON of the holder.

The process keeps the `flock` until it ends, and never removes the file. At a clean end it empties
the file. A kill releases the `flock` but leaves the JSON, from which the next process decides
whether the holder is still alive. Clocks are never compared. The trap: a forked child would inherit
the `flock` and keep the directory locked, so nothing may fork (without exec) while it is held.

The `flock` is on an inode. If somebody removes the file, the next process locks a new one, and both
use the directory. So each beat compares the file at the path with the open one:

    the same file              the beat is written
    no file, or a free one     it is locked instead (`made_again`)
    a file that is locked      the directory is lost (`lost`): the run must end, and write nothing
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from llmtrain import faults, system
from llmtrain.errors import DISK_FAILED, RESTARTABLE, Problem, RunError, UserError
from llmtrain.rundir.contents import LOCK
from llmtrain.system import is_alive, start_time

BEAT_SECONDS = 5.0
WATCHED_BEATS = 3
# Longer than a server of NFS keeps the locks of a client that has died: 90 s by default on Linux.
_HAND_OVER_LOOKS, _HAND_OVER_SECONDS = 750, 0.2
# Options of NFS and Lustre with which a lock is not seen by other machines.
_LOCKS_HERE = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
_FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.ENODEV)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run directory.

    boot_id, started: None where the system does not report them
    beat: a counter that the process increments as long as it lives
    since: ISO 8601, UTC; only shown to people, since clocks are never compared
    """

    host: str
    boot_id: str | None
    pid: int
    started: str | None
    run_id: str
    beat: int = 0
    since: str = ""


class RunLock:
    """The lock of a run directory, for rank 0: `with RunLock(run_dir, run_id) as lock:`.

    Makes the directory if it does not exist. Entering raises UserError if another process holds the
    lock or the directory cannot be written, RunError if the disk fails.

    takeover: why the process whose lock was taken over counts as ended; None if there was none
    lost: a description of the process that has the directory now; None while this process has it
    made_again: how often the file was removed and a new one was locked
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        beat_seconds: float = BEAT_SECONDS,
        wait: Callable[[float], object] = time.sleep,
        *,
        handed_over: bool = False,
    ) -> None:
        """handed_over: whether a launcher passes the run from machine to machine.

        It has found that file locks work, so a free one proves that its holder has ended, wherever
        that was. A holder that still saves is waited for, and one whose machine has died until the
        file server notices: entering raises RunError (75) if that takes more than 150 s.
        """
        self.takeover: str | None = None
        self.lost: str | None = None
        self.made_again = 0
        self._path = run_dir / LOCK
        pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        self._holder = Holder(
            socket.gethostname(), boot_id(), pid, start_time(pid), run_id, since=now
        )
        self._handed_over = handed_over
        self._beat_seconds = beat_seconds
        self._wait = wait
        self._end = threading.Event()
        self._one_at_a_time = threading.Lock()

    def check(self) -> None:
        """Raise what entering would raise, but do not change the file."""
        with writable(self._path.parent), os.fdopen(_open(self._path)) as file:
            self._judge(file.fileno())

    def __enter__(self) -> Self:
        with (
            writable(self._path.parent),
            system.close_on_error(_open(self._path)) as self._descriptor,
        ):
            for _ in range(_HAND_OVER_LOOKS if self._handed_over else 0):
                if self._take(self._descriptor):
                    break
                self._wait(_HAND_OVER_SECONDS)
            self.takeover = self._judge(self._descriptor)
            self._write()
            faults.hit("lock.taken", path=self._path)
        self._thread = threading.Thread(target=self._keep_beating, name="lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join()
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as failed:
            _log.warning("could not empty %s: %s", self._path, failed)
        finally:
            os.close(self._descriptor)

    def _judge(self, descriptor: int) -> str | None:
        """Take the flock; return why the process that the file names counts as ended, or None.

        None: the file names none. Raises UserError if that process may be alive, RunError (75) if a
        launcher passes the run on.
        """
        free = self._take(descriptor)
        other = read(self._path)
        if free and other is None:
            return None
        reason = self._why_left(other) if free and other else None
        if reason is None and self._handed_over:  # it may have died, which is noticed only later
            remedy = "the launcher tries again; if it gives up, end that process, or wait"
            message = f"{self._path} stays locked: it is {_describe(other)}"
            raise RunError(message, RESTARTABLE, remedy)
        if reason is None:
            remedy = (
                "wait for that run or stop it (touch STOP in its directory), or set another run.dir"
            )
            expected = f"a run directory that no other process uses; this one is {_describe(other)}"
            raise UserError(Problem("run.dir", self._path.parent, expected, remedy))
        return reason

    def _take(self, descriptor: int) -> bool:
        try:
            return try_lock(descriptor, fcntl.LOCK_EX)
        except NoLocksError:
            _log.warning("this file system has no flock: the JSON of the lock alone decides")
            return True

    def _why_left(self, other: Holder) -> str | None:
        """Return why `other` counts as ended; None if it may be alive."""
        if self._handed_over:
            return f"its lock on host {other.host} is free"
        if other.host != self._holder.host:
            # Watch the beat of a process on another host; return as `_why_left` does.
            for _ in range(WATCHED_BEATS):
                self._wait(self._beat_seconds)
                # Opened again each time, as NFS caches attributes of open files.
                now = read(self._path)
                if now is None:
                    return "it has ended since"
                if now != other:
                    return None
            return f"its beat stood still for {WATCHED_BEATS * self._beat_seconds:g} s"
        if other.boot_id != self._holder.boot_id:
            return "the machine was started again since"
        if other.pid == self._holder.pid:
            return "this process or an earlier one with the same number left it"
        started = start_time(other.pid)
        if not is_alive(other.pid):
            return "that process has ended"
        return None if started == other.started else "another process has that number now"

    def keep(self) -> None:
        """Check that the file at the path is still the locked one; if it is not, lock it.

        Sets `lost` if another process has locked it. Makes a run directory that is gone. Raises
        OSError.
        """
        with self._one_at_a_time:
            if self.lost is not None or system.is_at(self._path, self._descriptor):
                return
            try:
                with system.close_on_error(_open(self._path)) as descriptor:
                    self._judge(descriptor)
            except (UserError, RunError):
                self.lost = _describe(read(self._path))
                _log.error("%s was removed, and the directory is %s", self._path, self.lost)
                return
            before, self._descriptor = self._descriptor, descriptor
            os.close(before)
            self._write()
            self.made_again += 1
            _log.warning("%s was removed while this run holds it; it was made again", self._path)

    def _keep_beating(self) -> None:
        while not self._end.wait(self._beat_seconds) and self.lost is None:
            if not self._path.parent.is_dir():
                continue  # the next save makes the directory again, with all that belongs in it
            try:
                self.keep()
                with self._one_at_a_time:
                    if self.lost is None:
                        self._holder = replace(self._holder, beat=self._holder.beat + 1)
                        self._write()
            except OSError as error:
                _log.warning("could not write the beat to %s: %s", self._path, error)

    def _write(self) -> None:
        """Write the JSON in place, since the lock is on the inode.

        Padding before the last brace keeps the length constant, so that a reader that sees half of
        a write still reads valid JSON.
        """
        body = json.dumps(asdict(self._holder))[:-1].encode().ljust(510) + b"}\n"
        os.pwrite(self._descriptor, body, 0)
        os.fsync(self._descriptor)


class NoLocksError(OSError):
    """The file system has no file locks."""


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file unless a lock of another process hinders it; return whether it is locked.

    kind: LOCK_SH or LOCK_EX of `fcntl`

    Raises NoLocksError where there are no locks, any other OSError if the disk does not answer.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise NoLocksError(error.errno, error.strerror) from error
        raise
    return True


def only_here(place: Path) -> str:
    """Return the options of a mount by which locks hold on this machine alone, "" if none."""
    return ", ".join(sorted(_LOCKS_HERE & system.mounted(place).options))


def check_file_locks(run_dir: Path) -> None:
    """Raise UserError if the file system of a run directory has no locks for several machines.

    Machines that come and go find each other by them. Makes the directory.
    """
    remedy = "mount it with them (NFS: not nolock; Lustre: flock), or set another run.dir"
    with writable(run_dir), os.fdopen(_open(run_dir / LOCK)) as file:
        try:
            try_lock(file.fileno(), fcntl.LOCK_SH)  # a lock that a run holds is one, too
        except NoLocksError as error:
            expected = f"a directory with file locks, by which machines meet ({error.strerror})"
            raise UserError(Problem("run.dir", run_dir, expected, remedy)) from error
    if option := only_here(run_dir):
        expected = f"file locks that other machines see, by which they meet (mounted with {option})"
        raise UserError(Problem("run.dir", run_dir, expected, remedy))


def is_held(run_dir: Path) -> bool:
    """Whether a process has the lock now, as far as this machine can tell. Changes nothing."""
    try:
        with (run_dir / LOCK).open("rb") as file:
            return not try_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except NoLocksError:
        holder = read(run_dir / LOCK)
        return holder is not None and lives_here(holder)


def read(path: Path) -> Holder | None:
    """Return the holder named in a lock file; None if the file is missing or names no holder."""
    try:
        holder = Holder(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return holder if isinstance(holder.pid, int) else None


def boot_id() -> str | None:
    """Return an id that changes when this machine boots; None on macOS, which has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def lives_here(holder: Holder) -> bool:
    """Whether the holder is a process of this machine that has not ended."""
    here = (holder.host, holder.boot_id) == (socket.gethostname(), boot_id())
    return here and is_alive(holder.pid) and start_time(holder.pid) == holder.started


def _open(path: Path) -> int:
    """Open the lock file, or make it. Raises OSError if the run directory cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # An old lock file may be writable in a directory where no file can be made.
    probe = path.with_name(f".probe-{os.getpid()}")
    probe.touch()
    probe.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


@contextmanager
def writable(run_dir: Path) -> Iterator[None]:
    """Turn an OSError in the block into UserError, or into RunError (74) if the disk fails."""
    if "\0" in str(run_dir):
        raise UserError(Problem("run.dir", run_dir, "a path without NUL"))
    try:
        yield
    except OSError as error:
        if error.errno in _FAILING:
            where = f"{error.strerror}: {error.filename or run_dir}"
            text = f"could not lock the run directory ({where})"
            raise RunError(text, DISK_FAILED, "check the disk") from error
        raise UserError(_unwritable(run_dir, error)) from error


def _unwritable(run_dir: Path, error: OSError) -> Problem:
    cause = error.strerror or str(error)
    parents = reversed(run_dir.absolute().parents)
    above = [path for path in parents if not os.path.isdir(path)]  # noqa: PTH112  # never raises
    expected = f"a directory that can be written ({cause})"
    remedy = "change its permissions, or set run.dir to another directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        expected = f"a disk with room on it ({cause})"
        remedy = "free some, or put run.dir on another disk"
    elif above:  # the first of them is the cause
        path = above[0]
        expected = f"a directory that can be made; {path} is not one and cannot be made ({cause})"
        remedy = "make it, or set run.dir to another place"
    elif os.path.isfile(run_dir):  # noqa: PTH113  # never raises
        expected, remedy = "a directory; there is a file of that name", "move it, or use another"
    return Problem("run.dir", run_dir, expected, remedy)


def _describe(holder: Holder | None) -> str:
    """Return who uses a run directory, as the end of a sentence."""
    if holder is None:
        return "in use"
    since = f" since {holder.since}" if holder.since else ""
    return f"in use by pid {holder.pid} on host {holder.host}{since}"
