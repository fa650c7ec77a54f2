"""Requests a range of a file on the Hub once: returns its bytes, or raises the reason.

    Hub  ──206──►  bytes                        with the token
    Hub  ──302──►  storage  ──206──►  bytes     a signed address, never the token

An answer counts only with status 206, the `Content-Range` that was asked for and that many bytes; a
whole file may also come with 200. A failure that may pass is an `AttemptError`; what a person must
change (401, 403, 404, 410, 416 from the Hub, a file that was replaced) is a `UserError`. The trap:
no time-out of a client notices a server that sends a few bytes now and then, so a request runs in a
thread that can be abandoned (`wait_for`).
"""

from __future__ import annotations

import email.utils
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.processes import begin

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


def attempt(
    file: HubFile, start: int, end: int, until: float, signed: MutableMapping[str, str]
) -> bytes:
    """Fetch bytes [start, end) with one request. Redirects are followed here.

    until: time on `time.monotonic` after which nobody waits for the bytes
    signed: file's URL → signed address to which the Hub redirected; one that fails is removed
    """
    target = signed.get(file.url, file.url)
    try:
        for _ in range(REDIRECTS + 1):
            found = _ask(file, target, start, end, until)
            if isinstance(found, bytes):
                if not _same_origin(target, file.url):
                    signed[file.url] = target
                return found
            target = found
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
            _accept(answer.status_code, answer.headers, start, end, file.size)
            return _body(answer, end - start, until)
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
    own = headers.get("etag") if status < 300 else None  # a redirect has an etag of its own
    etag = (headers.get("x-linked-etag") or own or "").removeprefix("W/").strip('"')
    size = headers.get("x-linked-size", str(file.size))
    if etag and file.etag and etag != file.etag:
        expected = f"the file with etag {file.etag}, as when the run began"
        raise UserError(Problem(file.url, f"etag {etag}", expected, "begin a new run"))
    if size != str(file.size):
        expected = f"a file of {file.size} bytes, as when the run began"
        raise UserError(Problem(file.url, f"{size} bytes", expected, "begin a new run"))


def _accept(status: int, headers: Mapping[str, str], start: int, end: int, size: int) -> None:
    """Raise unless this is the range that was asked for. The body of another answer is not read."""
    if status == 200 and (start, end) == (0, size):
        return
    if status != 206:
        raise AttemptError(f"HTTP {status}", asked_wait(headers))
    if headers.get("content-range") != f"bytes {start}-{end - 1}/{size}":
        raise AttemptError("an answer with another range")


def _body(answer: Any, length: int, until: float) -> bytes:
    """Read the body as it arrives: chunks of a fixed size would hide that it is too slow."""
    body = bytearray()
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > length or time.monotonic() > until:
            break
    if len(body) != length:
        raise AttemptError(f"{len(body)} bytes instead of {length}")
    return bytes(body)


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
    answer = begin(work, "hub")
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
