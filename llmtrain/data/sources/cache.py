"""Ranges of files on the Hub in one process: from memory, disk, a read ahead or the network.

    read   ─►  kept in memory?  ─►  being read ahead? wait for it  ─►  disk cache  ─►  network
    expect ─►  a daemon thread reads it, within AHEAD_RANGES and AHEAD_BYTES

The bytes are the same wherever they come from, and the reader decides in which order it asks for
them, so nothing here changes what is trained on. On disk, a second epoch or an outage needs no
network, and footers of parquet files are requested once per run:

    $HF_HOME/llmtrain/<etag>/<start>-<end>      the bytes, then their xxh3 (8 bytes)
    $HF_HOME/llmtrain/sources/<xxh3>.json       the files of a data set, as the Hub listed them
    run.dir/footers/<etag>                      a parquet file of nothing but the footer

Processes share the cache without a lock: a range is written under another name and renamed, one
that is damaged or deleted counts as never read, and an etag names content that does not change.
Rank 0 reads the footers when it looks for units; every other process and every later start finds
them in the run directory.
"""

import io
import json
import logging
import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from llmtrain import system
from llmtrain.data.sources import fetch
from llmtrain.errors import RunError, UserError
from llmtrain.types import JsonObject

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
            if self._left <= 0:  # where the ranges exceed the limit, delete the oldest
                ranges = sorted(_ranges(self._root))
                total = sum(size for _, size, _ in ranges)
                most = self._limit if total <= self._limit else KEPT_SHARE * self._limit
                for _, size, path in ranges:
                    if total <= most:
                        break
                    path.unlink(missing_ok=True)
                    total -= size
                self._left = self._limit - total
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._usable:
            _log.warning("nothing more is kept in %s: %s", self._root, error)
        self._usable = False

    def _path(self, etag: str, start: int, end: int) -> Path:
        return self._root / file_name(etag) / f"{start}-{end}"


def cache_root() -> Path:
    """Return the directory in which bytes and answers of the Hub are kept."""
    fetch.quiet_hub()
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "llmtrain"


def file_name(etag: str) -> str:
    """Return the etag if it is a plain name, else a digest of it."""
    return etag if SAFE_NAME.fullmatch(etag) else xxhash.xxh3_128_hexdigest(etag.encode())


def write(path: Path, *parts: bytes) -> None:
    """Write a file whole or not at all. There is no fsync, since the Hub has the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with system.replacing(path, sync=False, shared=True) as file:
        file.writelines(parts)


def _ranges(root: Path) -> list[tuple[float, int, Path]]:
    """Return (time of last use, size, path) of all ranges, even those that a kill cut off."""
    ranges = []
    for path in root.glob("*/*"):
        if path.parent.name != SOURCES:
            with suppress(FileNotFoundError):  # another process made room
                facts = path.stat()
                ranges.append((facts.st_mtime, facts.st_size, path))
    return ranges


def answer_path(root: Path, question: Sequence[str | None]) -> Path:
    """Return the path at which the Hub's answer to a source's question is kept.

    question: endpoint, path, name, split, revision
    """
    digest = xxhash.xxh3_64_hexdigest(json.dumps(list(question)).encode())
    return root / SOURCES / f"{digest}.json"


def load_answer(path: Path) -> JsonObject | None:
    """Return the stored answer; None if there is none. A damaged one is logged, and is none."""
    if not path.is_file():
        return None
    try:
        answer = json.loads(path.read_text("utf-8"))
        if not isinstance(answer, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        _log.warning("%s is no answer of the Hub that can be used: %s", path, error)
        return None
    return answer


def store_answer(path: Path, answer: JsonObject) -> None:
    """Store the answer for a first start without a network. A failure is only logged."""
    try:
        write(path, json.dumps(answer).encode())
    except OSError as error:
        _log.warning("the answer of the Hub is not kept in %s: %s", path, error)


def load_footer(
    run_dir: Path | None, etag: str, ask: Callable[[], pq.FileMetaData]
) -> pq.FileMetaData:
    """Return the footer kept in the run directory, or ask for it and keep it there."""
    if run_dir is None or not etag:
        return ask()
    path = run_dir / "footers" / file_name(etag)
    try:
        return pq.read_metadata(io.BytesIO(path.read_bytes()))
    except OSError:  # not there yet, or not readable
        footer = ask()
    except pa.ArrowException as error:
        _log.warning("%s is damaged, and read again: %s", path, error)
        footer = ask()
    content = io.BytesIO()
    footer.write_metadata_file(content)
    try:
        write(path, content.getvalue())
    except OSError as error:  # such as a run directory that may only be read
        _log.warning("%s is not kept: %s", path, error)
    return footer


AHEAD_RANGES = 2
AHEAD_BYTES = 64 << 20
KEPT_BYTES = 256 << 20


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    file: fetch.HubFile
    start: int
    end: int


class Ranges:
    """Ranges of files on the Hub.

    cache: keeps them on disk. Without it, ranges that are needed again (slices of one row group)
        are kept in memory, at most KEPT_BYTES of them
    """

    def __init__(
        self, remote: fetch.Remote, cache: Cache | None, stop: fetch.Stopping | None = None
    ) -> None:
        self._remote = remote
        self._cache = cache
        self._stop = stop
        self._lock = Lock()
        self._kept: OrderedDict[Range, bytes] = OrderedDict()
        self._ahead: dict[Range, Future[bytes]] = {}
        self._expected: deque[Range] = deque()

    def open(self, file: fetch.HubFile, *, again: bool = False) -> fetch.RangeFile:
        """Open a file to read one unit from. The unit's deadline counts from now.

        again: whether its ranges are likely to be read again

        Reading raises as `Remote.fetch` does.
        """
        deadline = self._remote.deadline()
        return fetch.RangeFile(
            file.size, lambda start, end: self._get(Range(file, start, end), deadline, again)
        )

    def expect(self, key: Range) -> None:
        """Read a range that will be asked for soon, once there is room."""
        with self._lock:
            known = key in self._kept or key in self._ahead or key in self._expected
            if known or key.end - key.start > AHEAD_BYTES:
                return
            self._expected.append(key)
        self._admit()

    def forget(self, key: Range) -> None:
        """Drop a range that is not asked for after all, to make room for another."""
        with self._lock:
            self._ahead.pop(key, None)
            if key in self._expected:
                self._expected.remove(key)
        self._admit()

    def _get(self, key: Range, deadline: float, again: bool) -> bytes:
        with self._lock:
            content = self._kept.get(key)
            if content is not None:
                self._kept.move_to_end(key)
                return content
            future = self._ahead.get(key)
            if future is None and key in self._expected:
                self._expected.remove(key)
        content = self._from_ahead(key, future) if future else None
        if content is None:
            content = self._read(key, deadline)
        if again and self._cache is None:
            with self._lock:
                self._kept[key] = content
                while sum(map(len, self._kept.values())) > KEPT_BYTES:
                    self._kept.popitem(last=False)
        return content

    def _admit(self) -> None:
        """Begin to read expected ranges in order, while there is room for them."""
        with self._lock:
            while self._expected and len(self._ahead) < AHEAD_RANGES:
                size = sum(key.end - key.start for key in (*self._ahead, self._expected[0]))
                if size > AHEAD_BYTES:
                    return
                key = self._expected.popleft()
                read = partial(self._read, key, self._remote.deadline())
                self._ahead[key] = system.begin_in_thread(read, "ahead")

    def _from_ahead(self, key: Range, future: Future[bytes]) -> bytes | None:
        """Return what was read ahead, or None if that failed: then the caller reads it again.

        The caller's deadline is later than that of the failed read, which began before it.
        """
        while not wait([future], fetch.POLL_SECONDS).done:
            self._check_stop()
        with self._lock:
            self._ahead.pop(key, None)
        self._admit()
        if not isinstance(future.exception(), UserError | RunError):
            return future.result()
        self._check_stop()
        return None

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.wait(0):
            raise fetch.stop_error()

    def _read(self, key: Range, deadline: float) -> bytes:
        from huggingface_hub import constants

        file, start, end = key
        content = self._cache.get(file.etag, start, end) if self._cache else None
        if content is not None:
            return content
        if start < end and constants.HF_HUB_OFFLINE:
            raise UserError(fetch.offline(file.url, start, end))
        content = self._remote.fetch(file, start, end, deadline)
        if self._cache:
            self._cache.put(file.etag, start, end, content)
        return content
