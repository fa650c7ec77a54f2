"""Keeps bytes of the Hub on disk, so that a second epoch or an outage needs no network.

    $HF_HOME/llmtrain/<etag>/<start>-<end>      the bytes, then their xxh3 (8 bytes)
    $HF_HOME/llmtrain/sources/<xxh3>.json       the files of a data set, as the Hub listed them

Processes share it without a lock: a range is written under another name and renamed, one that is
damaged or deleted counts as never read, and an etag names content that does not change.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from llmtrain import durable
from llmtrain.data.remote.request import quiet_hub

_log = logging.getLogger(__name__)

DIGEST_BYTES = 8
KEPT_SHARE = 0.9  # of the limit, after the oldest were deleted
SOURCES = "sources"
SAFE_NAME = re.compile(r"[0-9A-Za-z_-]{1,80}")


class Cache:
    """Ranges of files, stored by the files' etags; about `limit` bytes at most."""

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._left = 0  # bytes that may be written before the directory is scanned again
        self._usable = True

    def get(self, etag: str, start: int, end: int) -> bytes | None:
        """Return the bytes of a range that was stored whole, else None."""
        path = self._path(etag, start, end)
        if not self._usable:
            return None
        try:
            stored = path.read_bytes()
            content, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
            if len(content) == end - start and digest == xxhash.xxh3_64_digest(content):
                os.utime(path)  # the time of last use: the oldest are deleted first
                return content
            _log.warning("%s is damaged: deleted, to be read again", path)
            path.unlink()
        except FileNotFoundError:  # never read, or another process deleted it just now
            return None
        except OSError as error:
            self._give_up(error)
        return None

    def put(self, etag: str, start: int, end: int, content: bytes) -> None:
        """Store a range. If that fails, the run continues without the cache, and logs it once."""
        path = self._path(etag, start, end)
        if not etag or not self._usable or len(content) > self._limit:
            return
        try:
            write(path, content, xxhash.xxh3_64_digest(content))
            self._left -= len(content)
            if self._left <= 0:
                self._make_room()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._usable:
            _log.warning("nothing more is kept in %s: %s", self._root, error)
        self._usable = False

    def _path(self, etag: str, start: int, end: int) -> Path:
        return self._root / file_name(etag) / f"{start}-{end}"

    def _make_room(self) -> None:
        """If the ranges exceed the limit, delete the oldest until 90 % of it are left."""
        found = sorted(_ranges(self._root))
        total = sum(size for _, size, _ in found)
        if total > self._limit:
            for _, size, path in found:
                if total <= KEPT_SHARE * self._limit:
                    break
                path.unlink(missing_ok=True)
                total -= size
        self._left = self._limit - total


def cache_root() -> Path:
    """Return the directory in which bytes and answers of the Hub are kept."""
    quiet_hub()
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "llmtrain"


def file_name(etag: str) -> str:
    """Return the etag if it is a plain name, else a digest of it."""
    return etag if SAFE_NAME.fullmatch(etag) else xxhash.xxh3_128_hexdigest(etag.encode())


def write(path: Path, *parts: bytes) -> None:
    """Write a file whole or not at all. There is no fsync, since the Hub has the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable.replacing(path, sync=False, shared=True) as file:
        file.writelines(parts)


def _ranges(root: Path) -> list[tuple[float, int, Path]]:
    """Return (time of last use, size, path) of all ranges, even those that a kill cut off."""
    found = []
    for path in root.glob("*/*"):
        if path.parent.name != SOURCES:
            with suppress(FileNotFoundError):  # another process made room
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
    return found


def answer_path(root: Path, question: Sequence[str | None]) -> Path:
    """Return the path at which the Hub's answer to a source's question is kept.

    question: endpoint, path, name, split, revision
    """
    digest = xxhash.xxh3_64_hexdigest(json.dumps(list(question)).encode())
    return root / SOURCES / f"{digest}.json"


def load_answer(path: Path) -> dict[str, Any] | None:
    """Return the stored answer, or None without a readable one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found


def store_answer(path: Path, answer: dict[str, Any]) -> None:
    """Store the answer for a first start without a network. A failure is only logged."""
    try:
        write(path, json.dumps(answer).encode())
    except OSError as error:
        _log.warning("the answer of the Hub is not kept in %s: %s", path, error)
