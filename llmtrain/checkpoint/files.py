"""Files of a checkpoint that is being written: how they are made, opened and made durable.

The trap: file systems report failures late, at fsync or even at close. Neither may be left out, and
every error of theirs counts.
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

_SYNCS = 8  # at a time
_OPEN = 64  # files that wait to be durable
_APPEARS_SECONDS = 30  # that another client of a network file system may need to see a new file

logger = logging.getLogger(__name__)


def new(path: Path, body: bytes, size: int) -> int:
    """Make a file that begins with `body`, allocate its `size` bytes, and return it open."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with close_on_error(descriptor):
        if size > len(body):
            _allocate(descriptor, size)
        write_at(descriptor, memoryview(body), 0)
    return descriptor


@contextmanager
def sync_together() -> Iterator[Callable[[int], None]]:
    """Give a function that takes open files; by the end of the block they are durable and closed.

    Several threads do it: file systems answer waiting fsyncs together (a dozen small files on ext4:
    3 ms, one after the other 25).
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
    """Make a file durable and close it. NFS may report a full disk at the close."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; the system may take less at a time."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def open_when_visible(path: Path) -> int:
    """Open a file that rank 0 made, which this machine may not see at once."""
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
    """List a directory: NFS remembers that a name is absent until then."""
    try:
        list(root.iterdir())
    except OSError as error:
        logger.debug("%s cannot be listed: %s", root, error)


def alive(doing: str) -> None:
    """Beat. In a thread beside the training the phase stays the training's."""
    beside = threading.current_thread() is not threading.main_thread()
    heartbeat.beat(heartbeat.read()[1] if beside else doing)


def _allocate(descriptor: int, size: int) -> None:
    """Allocate a file's bytes, so that a full disk shows before anything is written."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            # This file system cannot reserve space.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    return os.ftruncate(descriptor, size)
