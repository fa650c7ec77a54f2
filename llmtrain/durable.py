"""Writes that survive a crash: a file is written completely or not at all.

A rename is on the disk only after its directory has been synced.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

# ENOTDIR: the directory is a file now. ESTALE: another client of NFS removed the file.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_log = logging.getLogger(__name__)


def write(path: Path, data: bytes, *, sync: bool = True, shared: bool = False) -> None:
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
