"""Reads ranges of files on the Hub exactly or not at all, for as long as peers wait.

Failures of the network that may pass (timeouts, resets, hangs, wrong bodies, 408, 429, 5xx) are
tried again after a random wait that grows. Nothing is ever skipped: when the time is over, the run
ends, and a restart continues it.
"""

from __future__ import annotations

import io
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llmtrain.data.remote.request import (
    AttemptError,
    HubFile,
    Stopping,
    attempt,
    stop_error,
    wait_for,
)
from llmtrain.errors import RESTARTABLE, RunError

_log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
MAX_WAIT_SECONDS = 60.0
ATTEMPT_SECONDS = 300.0
RETRY_SHARE = 0.75  # of the timeout after which peers give up on this process
TELL_SECONDS = 10.0  # between two lines of the log about failed attempts


class Remote:
    """Reads ranges for one process. Its threads share the signed addresses.

    timeout: seconds after which peers give up on this process; reading gives up after 0.75 of them
    stop: set when the process must end
    """

    def __init__(self, timeout: float, stop: Stopping | None = None) -> None:
        self._limit = RETRY_SHARE * timeout
        self._stop = stop
        self._signed: dict[str, str] = {}
        self._told_at = float("-inf")
        self._untold = 0

    def deadline(self) -> float:
        """Return the deadline, on `time.monotonic`, of a unit that is asked for now."""
        return time.monotonic() + self._limit

    def fetch(self, file: HubFile, start: int, end: int, deadline: float) -> bytes:
        """Fetch bytes [start, end) in pieces of 16 MiB.

        Raises UserError if the Hub refuses or the file changed, RunError (75) if the network still
        fails at the deadline.
        """
        pieces = [
            self._piece(file, first, min(first + PIECE_BYTES, end), deadline)
            for first in range(start, end, PIECE_BYTES)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, file: HubFile, start: int, end: int, deadline: float) -> bytes:
        failures = 0
        while True:
            seconds = min(ATTEMPT_SECONDS, max(1.0, deadline - time.monotonic()))
            until = time.monotonic() + seconds
            work = partial(attempt, file, start, end, until, self._signed)
            try:
                return wait_for(work, seconds, self._stop)
            except AttemptError as failed:
                what = f"bytes {start} to {end} of {file.url}"
                wait = back_off(failures, failed.wait_seconds, deadline, what, str(failed))
                self._tell(what, str(failed), wait)
            pause(wait, self._stop)
            failures += 1

    def _tell(self, what: str, reason: str, wait: float) -> None:
        """Log a failed attempt. While many fail, one of them is logged every few seconds."""
        self._untold += 1
        if time.monotonic() - self._told_at < TELL_SECONDS:
            return
        more = f" ({self._untold} attempts failed since the last line)"
        _log.warning("%s: %s, trying again in %.1f s%s", what, reason, wait, more)
        self._told_at, self._untold = time.monotonic(), 0


class RangeFile(io.RawIOBase):
    """A file on the Hub as a file object. Every read requests one range, unless that is held.

    ask(start, end): returns the bytes of a range
    """

    def __init__(self, size: int, ask: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._ask = ask
        self._position = 0
        self._held: list[tuple[int, bytes]] = []

    def hold(self, spans: Sequence[tuple[int, int]]) -> None:
        """Read these ranges at once and keep them for the reads that follow."""
        self._held = [(start, self._ask(start, end)) for start, end in spans]

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position. Nothing is requested."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the file. Ranges stay held."""
        end = self._size if size is None or size < 0 else min(self._position + size, self._size)
        start, self._position = self._position, max(self._position, end)
        for index, (first, held) in enumerate(self._held):
            stop = first + len(held)
            if first <= start < stop:
                if stop < end:  # a line that is longer than the margin that was read for it
                    held += self._ask(stop, end)
                    self._held[index] = (first, held)
                return held[start - first : end - first]
        return self._ask(start, end) if start < end else b""

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as fit; return how many. A buffered reader asks for them so."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def readall(self) -> bytes:
        """Return all that is left."""
        return self.read()


def back_off(failures: int, asked: float, deadline: float, what: str, reason: str) -> float:
    """Return how many seconds to wait after this many failures: random, but at least `asked`.

    Raises RunError (75) if that is later than the deadline.
    """
    jitter = secrets.randbelow(1 << 20) / (1 << 20)
    wait = max(asked, jitter * min(MAX_WAIT_SECONDS, 2.0**failures))
    if time.monotonic() + wait > deadline:
        asks = f"; the server asks to wait {asked:.0f} s" if asked else ""
        raise RunError(
            f"{what} could not be read in {failures + 1} attempts: {reason}{asks}",
            RESTARTABLE,
            "the same command continues once the network is back",
        )
    return wait


def pause(seconds: float, stop: Stopping | None) -> None:
    """Wait. Raises RunError if the process is asked to end meanwhile."""
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise stop_error()
