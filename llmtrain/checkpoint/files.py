"""Creates, opens and syncs the files of a checkpoint that is being written.

The trap: file systems report failures late, at fsync or even at close. Neither may be left out, and
no error of either may be ignored.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from llmtrain import heartbeat
from llmtrain.durable import close_on_error

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
        alive(f"waiting for {path.parent.name} to appear")
        time.sleep(0.2)
        _look_again(path.parent.parent)


def _look_again(root: Path) -> None:
    """List a directory: until then, a client of NFS remembers that a name does not exist."""
    try:
        list(root.iterdir())
    except OSError as error:
        _log.debug("%s cannot be listed: %s", root, error)


def alive(doing: str) -> None:
    """Beat with the phase `doing`. A background thread does not change the phase."""
    if threading.current_thread() is threading.main_thread():
        heartbeat.beat(doing)
    else:
        heartbeat.again()


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
