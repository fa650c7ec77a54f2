"""Ranges of files on the Hub, read exactly or not at all.

An answer counts only with status 206, the `Content-Range` that was asked for and as many bytes.
What a network does for a while (timeouts, resets, short bodies, 408, 429, 5xx) is tried again after
a random wait that grows; what a person must change (401, 403, 404, 410, 416) is said at once.
"""

from __future__ import annotations

import email.utils
import io
import os
import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import quote, urljoin, urlsplit

from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError

PIECE_BYTES = 16 << 20
MAX_WAIT_SECONDS = 60.0
RETRY_SHARE = 0.75  # of the timeout after which peers give up on this process
REDIRECTS = 5
REFUSED = {
    401: "log in: the data set needs a token (HF_TOKEN)",
    403: "ask for access on the data set's page, and set HF_TOKEN",
    404: "see that the data set and its revision still exist",
    410: "see that the data set and its revision still exist",
    416: "see that the file was not replaced",
}


class Stopping(Protocol):
    """The part of an Event, of threads or of processes, that waiting code needs."""

    def wait(self, timeout: float | None = None) -> bool:
        """True as soon as the process shall end."""
        ...


class AttemptError(Exception):
    """One attempt failed in a way that may pass. wait_seconds: what the server asks for."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class RangeFile(io.RawIOBase):
    """A file on the Hub as a file object: every read is one range, unless it is already held."""

    def __init__(
        self, url: str, size: int, etag: str, *, timeout: float, stop: Stopping | None = None
    ) -> None:
        self._url = url
        self._size = size
        self._etag = etag
        self._timeout = timeout
        self._stop = stop
        self._position = 0
        self._held: tuple[int, bytes] = (0, b"")

    def hold(self, start: int, end: int) -> None:
        """Read [start, end) at once and keep it for the reads that follow."""
        self._held = (start, self._fetch(start, end))

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; nothing is asked for."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only at the end of the file."""
        end = self._size if size is None or size < 0 else min(self._position + size, self._size)
        start, self._position = self._position, max(self._position, end)
        first, held = self._held
        if first <= start and end <= first + len(held):
            return held[start - first : end - first]
        return self._fetch(start, end)

    def _fetch(self, start: int, end: int) -> bytes:
        return fetch(
            self._url,
            start,
            end,
            etag=self._etag,
            size=self._size,
            timeout=self._timeout,
            stop=self._stop,
        )

    def readall(self) -> bytes:
        """All that is left."""
        return self.read()


def fetch(
    url: str,
    start: int,
    end: int,
    *,
    etag: str,
    size: int,
    timeout: float,
    stop: Stopping | None = None,
) -> bytes:
    """Bytes [start, end) of a file of `size` bytes; in pieces of 16 MiB.

    timeout: seconds after which a peer gives up on us; we give up after 0.75 of them. Raises
    UserError if the Hub refuses or the file changed, RunError (75) if the network stays away.
    """
    deadline = time.monotonic() + RETRY_SHARE * timeout
    pieces = [
        _piece(url, first, min(first + PIECE_BYTES, end), etag, size, deadline, stop)
        for first in range(start, end, PIECE_BYTES)
    ]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def back_off(attempt: int, asked: float, deadline: float, what: str, reason: str) -> float:
    """Seconds to wait before attempt + 1: full jitter, at least what the server asks for.

    Raises RunError (75) if that is later than the deadline.
    """
    jitter = secrets.randbelow(1 << 20) / (1 << 20)
    wait = max(asked, jitter * min(MAX_WAIT_SECONDS, 2.0**attempt))
    if time.monotonic() + wait > deadline:
        asks = f"; the server asks to wait {asked:.0f} s" if asked else ""
        raise RunError(
            f"{what} could not be read in {attempt + 1} attempts: {reason}{asks}",
            RESTARTABLE,
            "the same command continues once the network is back",
        )
    return wait


def pause(seconds: float, stop: Stopping | None) -> None:
    """Wait, unless the process is asked to end meanwhile (RunError)."""
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise RunError("stopped while waiting for data", RESTARTABLE, "start again")


def _piece(
    url: str, start: int, end: int, etag: str, size: int, deadline: float, stop: Stopping | None
) -> bytes:
    attempt = 0
    while True:
        try:
            return _attempt(url, start, end, etag, size, deadline)
        except AttemptError as failed:
            wait = back_off(attempt, failed.wait_seconds, deadline, url, str(failed))
        pause(wait, stop)
        attempt += 1


def _attempt(url: str, start: int, end: int, etag: str, size: int, deadline: float) -> bytes:
    """One request, its redirects followed by hand: another origin never sees the token."""
    import httpx2
    from huggingface_hub import get_session
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # untyped export

    target = url
    for _ in range(REDIRECTS + 1):
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if _origin(target) == _origin(url):
            headers |= build_hf_headers()
        limits = httpx2.Timeout(30, connect=10, pool=30)
        try:
            with get_session().stream(
                "GET", target, headers=headers, follow_redirects=False, timeout=limits
            ) as answer:
                if _origin(target) == _origin(url):
                    _same_file(url, answer.headers, etag, answer.status_code)
                if answer.status_code in (301, 302, 303, 307, 308):
                    target = urljoin(target, answer.headers["location"])
                    continue
                _accept(url, target, answer.status_code, answer.headers, start, end, size)
                return _body(answer, end - start, deadline)
        except OfflineModeIsEnabled as error:
            expected = f"unset, or 0: {url} is read from the Hub"
            raise UserError(Problem("HF_HUB_OFFLINE", "1", expected)) from error
        except httpx2.HTTPError as error:
            raise AttemptError(type(error).__name__) from error
    raise AttemptError(f"more than {REDIRECTS} redirects")


def _accept(
    url: str, target: str, status: int, headers: Mapping[str, str], start: int, end: int, size: int
) -> None:
    """Raise unless this is the range that was asked for."""
    if status in REFUSED and _origin(target) == _origin(url):
        expected = "an answer with the bytes of the file"
        raise UserError(Problem(url, f"HTTP {status}", expected, REFUSED[status]))
    if status == 200 and (start, end) == (0, size):
        return
    if status != 206:
        raise AttemptError(f"HTTP {status}", asked_wait(headers))
    if headers.get("content-range") != f"bytes {start}-{end - 1}/{size}":
        raise AttemptError("an answer with another range")


def _body(answer: object, length: int, deadline: float) -> bytes:
    body = bytearray()
    for chunk in answer.iter_raw():  # type: ignore[attr-defined]  # httpx2 is imported late
        body += chunk
        if len(body) > length or time.monotonic() > deadline:
            break
    if len(body) != length:
        raise AttemptError(f"{len(body)} bytes instead of {length}")
    return bytes(body)


def _same_file(url: str, headers: Mapping[str, str], etag: str, status: int) -> None:
    """The Hub's answers name the content; a difference is a file that was replaced."""
    if status >= 400:
        return
    own = headers.get("etag") if status < 300 else None  # a redirect has an etag of its own
    found = headers.get("x-linked-etag") or own or ""
    found = found.removeprefix("W/").strip('"')
    if found and etag and found != etag:
        expected = f"the file with etag {etag}, as when the run began"
        raise UserError(Problem(url, f"etag {found}", expected, "begin a new run"))


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that `Retry-After` (seconds or a date) or `ratelimit` asks for; else 0."""
    after = headers.get("retry-after", "")
    if re.fullmatch(r"\d+", after.strip()):
        return float(after)
    if after:
        when = email.utils.parsedate_tz(after)
        if when is not None:
            then = email.utils.mktime_tz(when)
            return max(0.0, then - datetime.now(UTC).timestamp())
    limit = re.search(r"r=0;\s*t=(\d+)", headers.get("ratelimit", ""))
    return float(limit.group(1)) if limit else 0.0


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def web_url(address: str) -> str:
    """Where the bytes of hf://datasets/ID@COMMIT/PATH are, on the endpoint of this process."""
    quiet_hub()
    from huggingface_hub import constants

    name, rest = address.removeprefix("hf://datasets/").split("@", 1)
    commit, path = rest.split("/", 1)
    return f"{constants.ENDPOINT}/datasets/{name}/resolve/{commit}/{quote(path)}"


def quiet_hub() -> None:
    """Before the first import of huggingface_hub: no telemetry request, no signed URLs in logs."""
    import logging

    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
