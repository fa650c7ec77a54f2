"""What is written stays: a file that is there as a whole or not at all, names that outlive a crash.

A rename is on the disk only once its directory is.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from pathlib import Path

# ENOTDIR: the directory is a file now · ESTALE: removed by another client of NFS.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
log = logging.getLogger(__name__)


def write(path: Path, data: bytes) -> None:
    """Replace a file. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the file at a path is the open one: neither removed nor replaced.

    Where the disk cannot tell, it counts as there: whatever is written next will show.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        return error.errno not in _GONE


def is_gone(path: Path) -> bool:
    """Whether nothing is at a path. Where the disk cannot tell, it counts as there."""
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
            # Some network file systems cannot; they make entries durable themselves or not at all.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            _warn_unsynced()
        finally:
            os.close(descriptor)


@functools.cache
def _warn_unsynced() -> None:
    """Say it once in a process."""
    log.warning("this file system cannot fsync directories: a power cut may lose what was written")
