"""Reads ranges of files on the Hub in one process: from memory, disk, a read ahead or the network.

    read   ─►  kept in memory?  ─►  being read ahead? wait for it  ─►  disk cache  ─►  network
    expect ─►  a daemon thread reads it, within AHEAD_RANGES and AHEAD_BYTES

The bytes are the same wherever they come from, and the reader decides in which order it asks for
them, so nothing here changes what is trained on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from functools import partial
from threading import Lock
from typing import NamedTuple

from llmtrain.data.remote.cache import Cache
from llmtrain.data.remote.request import POLL_SECONDS, HubFile, Stopping, offline, stop_error
from llmtrain.data.remote.retry import RangeFile, Remote
from llmtrain.errors import RunError, UserError
from llmtrain.processes import begin

AHEAD_RANGES = 2
AHEAD_BYTES = 64 << 20
KEPT_BYTES = 256 << 20


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    file: HubFile
    start: int
    end: int


class Ranges:
    """Ranges of files on the Hub.

    cache: keeps them on disk. Without it, ranges that are needed again (slices of one row group)
        are kept in memory, at most KEPT_BYTES of them
    """

    def __init__(self, remote: Remote, cache: Cache | None, stop: Stopping | None = None) -> None:
        self._remote = remote
        self._cache = cache
        self._stop = stop
        self._lock = Lock()
        self._kept: OrderedDict[Range, bytes] = OrderedDict()
        self._ahead: dict[Range, Future[bytes]] = {}
        self._expected: deque[Range] = deque()

    def open(self, file: HubFile, *, again: bool = False) -> RangeFile:
        """Open a file to read one unit from. The unit's deadline counts from now.

        again: whether its ranges are likely to be read again

        Reading raises as `Remote.fetch` does.
        """
        deadline = self._remote.deadline()
        return RangeFile(
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
            self._keep(key, content)
        return content

    def _admit(self) -> None:
        """Begin to read expected ranges in order, while there is room for them."""
        with self._lock:
            while self._expected and len(self._ahead) < AHEAD_RANGES:
                size = sum(key.end - key.start for key in (*self._ahead, self._expected[0]))
                if size > AHEAD_BYTES:
                    return
                key = self._expected.popleft()
                self._ahead[key] = begin(partial(self._read_ahead, key), "ahead")

    def _read_ahead(self, key: Range) -> bytes:
        return self._read(key, self._remote.deadline())

    def _from_ahead(self, key: Range, future: Future[bytes]) -> bytes | None:
        """Return what was read ahead, or None if that failed: then the caller reads it again.

        The caller's deadline is later than that of the failed read, which began before it.
        """
        while not wait([future], POLL_SECONDS).done:
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
            raise stop_error()

    def _read(self, key: Range, deadline: float) -> bytes:
        from huggingface_hub import constants

        file, start, end = key
        content = self._cache.get(file.etag, start, end) if self._cache else None
        if content is not None:
            return content
        if start < end and constants.HF_HUB_OFFLINE:
            raise UserError(offline(file.url, start, end))
        content = self._remote.fetch(file, start, end, deadline)
        if self._cache:
            self._cache.put(file.etag, start, end, content)
        return content

    def _keep(self, key: Range, content: bytes) -> None:
        with self._lock:
            self._kept[key] = content
            while sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
