"""Files of a checkpoint that is being written: made with their room, found again, made durable.

The trap: file systems tell of failures late, at fsync or even at close, so neither may be left out
and each of their errors counts.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from llmtrain import heartbeat
from llmtrain.durable import closed_on_error

_SYNCS = 8  # at a time
_OPEN = 64  # files that wait to be durable
_APPEARS_SECONDS = 30  # that another client of a network file system may need to see a new file

logger = logging.getLogger(__name__)


def new(path: Path, body: bytes, size: int) -> int:
    """A new file of `size` bytes that begins with `body`, its room taken; it is still open."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with closed_on_error(descriptor):
        if size > len(body):
            _allocate(descriptor, size)
        write_at(descriptor, memoryview(body), 0)
    return descriptor


@contextmanager
def syncing() -> Iterator[Callable[[int], None]]:
    """What is called with open files makes them durable and closes them, by the end of the block.

    Beside each other: file systems answer waiting fsyncs together (a dozen small files on ext4: 3
    ms, one after the other 25).
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
    """Errors of closing count: NFS may tell of a full disk there."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`; the system may take less at a time."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def opened(path: Path) -> int:
    """A descriptor of a file that rank 0 made, which this machine may not see at once."""
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
    """NFS remembers that a name is absent until its directory is read anew."""
    try:
        list(root.iterdir())
    except OSError as error:
        logger.debug("%s cannot be listed: %s", root, error)


def alive(doing: str) -> None:
    """A sign of life. Beside the training the phase stays the training's."""
    beside = threading.current_thread() is not threading.main_thread()
    heartbeat.beat(heartbeat.read()[1] if beside else doing)


def _allocate(descriptor: int, size: int) -> None:
    """Take the room for a file, so that a full disk shows before the writing."""
    if sys.platform == "linux":
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            # This file system cannot promise room.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    return os.ftruncate(descriptor, size)
