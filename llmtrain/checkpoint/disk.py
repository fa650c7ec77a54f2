"""The files of a checkpoint on a real disk: created, opened, synced, read again, and room for them.

The trap: file systems report failures late, at fsync or even at close. Neither may be left out, and
no error of either may be ignored.

A checkpoint becomes valid when its directory is renamed, so a store without rename is refused. On
NFS a machine reads and writes through its own cache, so two machines must not write parts of one
file. With several nodes on NFS, rank 0 therefore writes everything.

What follows a full disk is decided in `training/saving.py`.

Room is needed for the checkpoints that the policy of a run keeps, one that is being written and one
that is being deleted. Those that the run has already are subtracted.

If the disk does not answer, reading is tried three times within half a minute, unless a stop is
asked for: the second time soon, since many failures of a network file system are short, and the
third time much later. Damage is not a failure of the disk and is not retried.
"""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from llmtrain import system
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.candidates import is_of_run
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.system import close_on_error
from llmtrain.text import size

_SYNCS = 8  # fsyncs at the same time
_OPEN = 64  # files that may wait for their fsync
_APPEARS_SECONDS = 30  # in which another client of a network file system must see a new file

_log = logging.getLogger(__name__)


def new(path: Path, body: bytes, size: int) -> int:
    """Create a file of `size` allocated bytes, write `body` at its start, and return it open."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with close_on_error(descriptor):
        if size > len(body):
            _allocate(descriptor, size)
        write_at(descriptor, memoryview(body), 0)
    return descriptor


@contextmanager
def sync_together() -> Iterator[Callable[[int], None]]:
    """Yield a function that syncs and closes an open file; the block ends when all are done.

    Several threads do the work, since file systems answer waiting fsyncs together (a dozen small
    files on ext4: 3 ms, one after the other 25).
    """
    with ThreadPoolExecutor(_SYNCS) as pool:
        jobs: list[Future[None]] = []

        def sync(descriptor: int) -> None:
            if len(jobs) >= _OPEN:
                jobs[-_OPEN].result()
            jobs.append(pool.submit(durable, descriptor))

        yield sync
        for job in jobs:
            job.result()


def durable(descriptor: int) -> None:
    """Sync a file to the disk and close it. NFS may report a full disk only at the close."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a single system call may write less."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def open_when_visible(path: Path) -> int:
    """Open a file that rank 0 created. Wait for it, since this machine may not see it at once."""
    until = time.monotonic() + _APPEARS_SECONDS
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > until:
                raise
        still_writing(f"waiting for {path.parent.name} to appear")
        time.sleep(0.2)
        try:  # until the directory is listed, a client of NFS remembers that a name is not there
            list(path.parent.parent.iterdir())
        except OSError as error:
            _log.debug("%s cannot be listed: %s", path.parent.parent, error)


def still_writing(doing: str) -> None:
    """Beat with the phase `doing`. A background thread does not change the phase."""
    if threading.current_thread() is threading.main_thread():
        system.beat(doing)
    else:
        system.beat_again()


def _allocate(descriptor: int, size: int) -> None:
    """Allocate a file's bytes, so that a full disk is noticed before anything is written."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            # This file system cannot reserve space.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    return os.ftruncate(descriptor, size)


_PROBE = ".probe"  # one name is enough while the run's lock is held; a kill leaves one directory
# Here a client sees what another one wrote only after a close and a new open, if at all. Lustre,
# GPFS and CephFS are coherent and so are not in this list.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})


def probe_directory(root: Path) -> None:
    """Try what a commit does: create, write and rename a file and a directory.

    Only rank 0, which holds the run's lock, may call it. `root` must exist. Leaves nothing behind.
    Raises UserError with the error of the file system.
    """
    place = root / _PROBE
    try:
        shutil.rmtree(place, ignore_errors=True)
        partial, final = place / "a.partial", place / "a"
        partial.mkdir(parents=True)
        system.write_durably(partial / "file", b"x")
        partial.rename(final)
        system.sync_directory(place)
        if not (final / "file").is_file() or partial.exists():
            raise OSError("a directory was renamed, and still has its old name or no content")
    except OSError as error:
        why = error.strerror or str(error)
        expected = f"a store where files and directories can be written and renamed ({why})"
        remedy = "a file system with room; object stores mounted as one often cannot rename"
        raise UserError(Problem("run.dir", root, expected, remedy)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def is_network(path: Path) -> bool:
    """Whether a directory is on NFS or a similar network file system."""
    return system.mounted(path).kind in _NETWORK


def choose_writers(writers: str, nodes: int, network: bool, *, whole: bool) -> str:
    """Return which ranks write, `rank0` or `all`: `writers` itself, or what `auto` means.

    network: whether the checkpoints are on a network file system
    whole: whether rank 0 has all tensors
    """
    if writers != "auto":
        return writers
    return "rank0" if whole or (network and nodes > 1) else "all"


def most_at_once(policy: CheckpointConfig, steps: int) -> int:
    """Return how many checkpoints a run of `steps` can have at one time."""
    spaced = steps // policy.keep_every if policy.keep_every else 0
    return policy.keep_last + policy.keep_best + spaced + 2


def check_room(
    root: Path,
    policy: CheckpointConfig,
    steps: int,
    checkpoint_bytes: int,
    checkpoint_files: int,
    run_id: str | None = None,
) -> int:
    """Return how many bytes must be free; UserError, with both numbers, if the disk has fewer.

    Counts bytes and, if the file system has a limit, files, of at least one checkpoint. `root` need
    not exist yet.

    run_id: only checkpoints of this run are subtracted, as no others will be deleted for it; None =
        those of any run
    """
    names = form.complete_names(root)
    existing = sum(run_id is None or is_of_run(root / name, run_id) for name in names)
    missing = max(1, most_at_once(policy, steps) - existing)
    disk = os.statvfs(next(path for path in (root, *root.absolute().parents) if path.exists()))
    free, files = disk.f_bavail * disk.f_frsize, missing * (checkpoint_files + 2)
    needed = missing * checkpoint_bytes
    remedy = "free some, put run.dir on another disk, or lower checkpoint.keep_last or keep_every"
    problems = []
    if free < needed:
        expected = f"{size(needed)} free for the checkpoints that the run keeps, not {size(free)}"
        problems.append(Problem("run.dir", root, f"{expected} ({needed} and {free} bytes)", remedy))
    if disk.f_files and disk.f_favail < files:
        expected = f"room for {files} files (inodes), not {disk.f_favail}"
        problems.append(Problem("run.dir", root, expected, remedy))
    raise_any(problems)
    return needed


P = ParamSpec("P")
T = TypeVar("T")

PAUSES = (1, 29)  # seconds before the second and the third try


class StoppedError(Exception):
    """A stop was asked for while a checkpoint was being read; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How reading is retried.

    stopping: returns the reason of a stop, or None
    wait: sleeps for a number of seconds
    """

    stopping: Callable[[], str | None] = lambda: None
    wait: Callable[[float], object] = time.sleep

    def retry(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, which is tried up to three times if it raises OSError.

        Raises OSError after the third try, StoppedError before a try if a stop was asked for.
        """
        for pause in PAUSES:
            self.check_stop()
            try:
                return work(*args, **kwargs)
            except OSError as error:
                _log.warning("reading failed, next try in %d s: %s", pause, error)
                for _ in range(pause):
                    self.check_stop()
                    system.beat("waiting for the disk of the checkpoints")
                    self.wait(1.0)
        self.check_stop()
        return work(*args, **kwargs)

    def check_stop(self) -> None:
        """Raise StoppedError if a stop was asked for."""
        if reason := self.stopping():
            raise StoppedError(reason)
