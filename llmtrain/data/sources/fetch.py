"""Reads ranges of files on the Hub exactly or not at all, for as long as peers wait.

    Hub  ──206──►  bytes                        with the token
    Hub  ──302──►  storage  ──206──►  bytes     a signed address, never the token

An answer counts only with status 206, the `Content-Range` that was asked for and that many bytes; a
whole file may also come with 200. A failure that may pass (timeouts, resets, hangs, wrong bodies,
408, 429, 5xx) is an `AttemptError`, and is tried again after a random wait that grows. What a
person must change (401, 403, 404, 410, 416 from the Hub, a file that was replaced) is a
`UserError`. Nothing is ever skipped: when the time is over, the run ends; a restart continues it.

The trap: no time-out of a client notices a server that sends a few bytes now and then, so a request
runs in a thread that can be abandoned (`wait_for`).
"""

import email.utils
import importlib
import io
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.system import begin_in_thread

T = TypeVar("T")

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
POLL_SECONDS = 0.2  # how soon a waiting thread notices that the process must end
REDIRECTS = 5
MOVED = (301, 302, 303, 307, 308)
REFUSED = {
    401: "log in: the data set needs a token (HF_TOKEN)",
    403: "ask for access on the data set's page, and set HF_TOKEN",
    404: "see that the data set and its revision still exist",
    410: "see that the data set and its revision still exist",
    416: "see that the file was not replaced",
}


class Stopping(Protocol):
    """The part of an Event, of `threading` or `multiprocessing`, that waiting code needs."""

    def wait(self, timeout: float | None = None) -> bool:
        """Return True as soon as the process must end; False after `timeout` seconds."""
        ...


class AttemptError(Exception):
    """One attempt failed in a way that may pass. wait_seconds: asked for by the server."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at its commit.

    url: on the Hub
    size: in bytes
    etag: the Hub's name of its content; "" = unknown
    """

    url: str
    size: int
    etag: str


def request_once(
    file: HubFile, start: int, end: int, until: float, signed: MutableMapping[str, str]
) -> bytes:
    """Fetch bytes [start, end) with one request. Redirects are followed here.

    until: time on `time.monotonic` after which nobody waits for the bytes
    signed: file's URL → signed address to which the Hub redirected; one that fails is removed
    """
    target = signed.get(file.url, file.url)
    try:
        for _ in range(REDIRECTS + 1):
            answer = _ask(file, target, start, end, until)
            if isinstance(answer, bytes):
                if not _same_origin(target, file.url):
                    signed[file.url] = target
                return answer
            target = answer
    except AttemptError:
        signed.pop(file.url, None)
        raise
    raise AttemptError(f"more than {REDIRECTS} redirects")


def _ask(file: HubFile, target: str, start: int, end: int, until: float) -> bytes | str:
    """Return the bytes, or the address to which the Hub redirects."""
    from huggingface_hub import get_session
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of its client
        HTTPError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # untyped export

    # httpx2; before release 2 of huggingface_hub it is httpx.
    client = importlib.import_module(HTTPError.__module__.partition(".")[0])
    of_hub = _same_origin(target, file.url)
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    headers |= build_hf_headers() if of_hub else {}
    limits = client.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=READ_SECONDS)
    try:
        with get_session().stream(
            "GET", target, headers=headers, follow_redirects=False, timeout=limits
        ) as answer:
            if of_hub:
                _refuse(file, answer.status_code, answer.headers)
            if answer.status_code in MOVED and "location" in answer.headers:
                return urljoin(target, answer.headers["location"])
            # This must be the range that was asked for; the body of another answer is not read.
            if answer.status_code != 200 or (start, end) != (0, file.size):
                if answer.status_code != 206:
                    wait = asked_wait(answer.headers)
                    raise AttemptError(f"HTTP {answer.status_code}", wait)
                if answer.headers.get("content-range") != f"bytes {start}-{end - 1}/{file.size}":
                    raise AttemptError("an answer with another range")
            # Read the body as it arrives: chunks of a fixed size would hide that it is too slow.
            length = end - start
            body = bytearray()
            for chunk in answer.iter_raw():
                body += chunk
                if len(body) > length or time.monotonic() > until:
                    break
            if len(body) != length:
                raise AttemptError(f"{len(body)} bytes instead of {length}")
            return bytes(body)
    except OfflineModeIsEnabled as error:
        raise UserError(offline(file.url, start, end)) from error
    except (client.HTTPError, client.InvalidURL) as error:
        raise AttemptError(type(error).__name__) from error  # its text may hold a signed address


def _refuse(file: HubFile, status: int, headers: Mapping[str, str]) -> None:
    """Raise UserError if the Hub refuses the file, or the file is not what it was."""
    if status in REFUSED:
        page = file.url.split("/resolve/")[0]
        expected = f"an answer with the bytes of the file; the data set's page is {page}"
        raise UserError(Problem(file.url, f"HTTP {status}", expected, REFUSED[status]))
    if status >= 400:
        return
    direct_etag = headers.get("etag") if status < 300 else None  # a redirect has an etag of its own
    etag = (headers.get("x-linked-etag") or direct_etag or "").removeprefix("W/").strip('"')
    size = headers.get("x-linked-size", str(file.size))
    if etag and file.etag and etag != file.etag:
        expected = f"the file with etag {file.etag}, as when the run began"
        raise UserError(Problem(file.url, f"etag {etag}", expected, "begin a new run"))
    if size != str(file.size):
        expected = f"a file of {file.size} bytes, as when the run began"
        raise UserError(Problem(file.url, f"{size} bytes", expected, "begin a new run"))


def offline(url: str, start: int, end: int) -> Problem:
    """Return the problem of bytes that are not cached while the Hub may not be asked."""
    expected = f"unset, or 0: bytes {start} to {end} of {url} are not in the cache"
    return Problem("HF_HUB_OFFLINE", "1", expected, "read them once online, with data.cache_gb set")


def asked_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait by `Retry-After` (seconds or a date) or `ratelimit`; else 0."""
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


def wait_for(work: Callable[[], T], seconds: float, stop: Stopping | None) -> T:
    """Run `work` in a daemon thread and return its result. After `seconds` the thread is abandoned.

    Raises AttemptError when the time is over, RunError (75) when the process must end. An executor
    would wait for a hanging thread when the process exits.
    """
    answer = begin_in_thread(work, "hub")
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if wait([answer], min(POLL_SECONDS, left)).done:
            return answer.result()
        if stop is not None and stop.wait(0):
            raise stop_error()
    raise AttemptError(f"no complete answer in {seconds:.0f} s")


def stop_error() -> RunError:
    """Return the error of a process that ends while it waits for data."""
    return RunError("stopped while waiting for data", RESTARTABLE, "start again")


def _same_origin(one: str, other: str) -> bool:
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.netloc) == (second.scheme, second.netloc)


def web_url(address: str) -> str:
    """Return the URL of hf://datasets/ID@COMMIT/PATH on the endpoint of this process."""
    quiet_hub()
    from huggingface_hub import constants

    name, rest = address.removeprefix("hf://datasets/").split("@", 1)
    commit, path = rest.split("/", 1)
    return f"{constants.ENDPOINT}/datasets/{name}/resolve/{commit}/{quote(path)}"


def quiet_hub() -> None:
    """Set up huggingface_hub before use: no request of its own at a start, no signed URLs in logs.

    It reads its environment when it is imported, and another package may already have imported it.
    """
    chosen = os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    if chosen == "1":
        constants.HF_HUB_DISABLE_TELEMETRY = True
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)


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
        firsts = range(start, end, PIECE_BYTES)
        pieces = [self._piece(file, n, min(n + PIECE_BYTES, end), deadline) for n in firsts]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, file: HubFile, start: int, end: int, deadline: float) -> bytes:
        failures = 0
        while True:
            seconds = min(ATTEMPT_SECONDS, max(1.0, deadline - time.monotonic()))
            until = time.monotonic() + seconds
            work = partial(request_once, file, start, end, until, self._signed)
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
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

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
        message = f"{what} could not be read in {failures + 1} attempts: {reason}{asks}"
        remedy = "the same command continues once the network is back"
        raise RunError(message, RESTARTABLE, remedy)
    return wait


def pause(seconds: float, stop: Stopping | None) -> None:
    """Wait. Raises RunError if the process is asked to end meanwhile."""
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise stop_error()
