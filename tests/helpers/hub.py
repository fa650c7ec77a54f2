"""A small Hub on loopback: what `datasets` and huggingface_hub ask for, with faults on order.

with serving(files) as server:              server.url(name) → the bytes, by ranges
    server.faults.extend(["503", "short"])  the next two requests for ranges get these
    server.mixture = mixture(seed)          each request for a range: a fault, or ""
with serving(files) as store, serving(files, store=store): …     302 to signed addresses
"""

import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from llmtrain.data.sources.fetch import quiet_hub
from llmtrain.hashing import mix

SHA = "0123456789abcdef0123456789abcdef01234567"
ID = "someone/encyclopedia"
DRIP_SECONDS = 0.02
NINE = ("503", "429 0", "500", "reset", "short", "long", "shifted", "whole", "408")


class Hub(ThreadingHTTPServer):
    """files: path → content · store: another server, where the bytes are.

    faults, listing_faults: what the next requests for ranges, and the other ones, get · mixture: a
    fault or "" for each request for a range · down: nothing is answered · uses: of a signed address
    before it expires · requests: how many of each kind were met · ranges: (name, start, end) ·
    tokens: Authorization of each request for a file · lfs: files named by sha256 · page: entries
    of a listing in one answer.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, files: dict[str, bytes], store: "Hub | None" = None, handler: type | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.files = files
        self.store = store
        self.faults: deque[str] = deque()
        self.listing_faults: deque[str] = deque()
        self.mixture: Callable[[], str] = str
        self.down = False
        self.uses = 1_000_000
        self.signed: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.tokens: list[str | None] = []
        self.lfs: set[str] = set()
        self.page = 1000
        self.lock = threading.Lock()
        self.ending = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def url(self, name: str) -> str:
        return f"{self.endpoint}/datasets/{ID}/resolve/{SHA}/{name}"

    def sign(self, name: str) -> str:
        """An address of a file that may be asked for `uses` times."""
        with self.lock:
            signature = f"{len(self.signed)}"
            self.signed[signature] = self.uses
        return f"{self.endpoint}/elsewhere/{name}?signature={signature}"

    def fault(self) -> str:
        """What the next request for a range gets."""
        with self.lock:
            return self.faults.popleft() if self.faults else self.mixture()

    def listing_fault(self) -> str:
        """What the next request for anything else gets."""
        with self.lock:
            return self.listing_faults.popleft() if self.listing_faults else ""

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may leave at any time."""


def mixture(seed: int, share: float = 0.3) -> Callable[[], str]:
    """Faults of nine kinds for a share of the requests."""
    numbers = count()

    def draw() -> str:
        number = next(numbers)
        hit = mix(seed, number, 0) < share * 2**64
        return NINE[mix(seed, number, 1) % len(NINE)] if hit else ""

    return draw


@contextmanager
def serving(files: dict[str, bytes], store: Hub | None = None):
    with running(Hub(files, store)) as hub:
        yield hub


@contextmanager
def running(hub: Hub):
    """Answer requests in a thread of its own."""
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.ending.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def etag256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(body=True)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        if self.server.down:
            self.server.requests["down"] += 1
            self.close_connection = True
            return
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/elsewhere/"):
            self.elsewhere(path.removeprefix("/elsewhere/"), body)
        elif path.startswith(f"/datasets/{ID}/resolve/"):
            revision, name = path.removeprefix(f"/datasets/{ID}/resolve/").split("/", 1)
            self.resolve(revision, name, body)
        else:
            self.api(path, body)

    def resolve(self, revision: str, name: str, body: bool) -> None:
        if "Range" in self.headers:
            self.met(name)
            fault = self.server.fault()
            if fault:
                return self.fail(fault, name)
            if self.server.store is not None:
                return self.send_on(name)
        else:
            self.server.requests["whole"] += 1
            fault = self.server.listing_fault()
            if fault:
                return self.fail(fault, name)
        if revision not in (SHA, "main"):
            return self.send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        return self.file(name, body)

    def elsewhere(self, name: str, body: bool) -> None:
        """As a store behind the Hub: what the signature says is all it knows."""
        self.server.requests["elsewhere"] += 1
        signature = parse_qs(urlsplit(self.path).query).get("signature", [""])[0]
        if signature:
            with self.server.lock:
                self.server.signed[signature] -= 1
                expired = self.server.signed[signature] < 0
            if expired:
                return self.send(403, b"expired", body, {})
        fault = self.server.fault()
        return self.fail(fault, name) if fault else self.file(name, body)

    def send_on(self, name: str) -> None:
        assert self.server.store is not None
        content = self.server.files[name]
        headers = {
            "Location": self.server.store.sign(name),
            "X-Linked-ETag": f'"{etag(content)}"',
            "X-Linked-Size": str(len(content)),
            "ETag": '"of-the-redirect"',
            "X-Repo-Commit": SHA,
        }
        self.send(302, b"", True, headers)

    def met(self, name: str) -> None:
        self.server.requests["range"] += 1
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        with self.server.lock:
            self.server.ranges.append((name, int(first), int(last) + 1))

    def api(self, path: str, body: bool) -> None:
        self.server.requests["api"] += 1
        fault = self.server.listing_fault()
        if fault:
            return self.fail(fault, "")
        if path.startswith((f"/api/datasets/{ID}/tree/", f"/api/datasets/{ID}/paths-info/")):
            return self.listing("/".join(path.split("/")[7:]), body)
        known = (f"/api/datasets/{ID}", f"/api/datasets/{ID}/revision/{SHA}")
        if path in known or path == f"/api/datasets/{ID}/revision/main":
            return self.json(self.info(), body)
        missing = "Revision" if path.startswith(f"/api/datasets/{ID}/revision/") else "Repo"
        return self.send(404, b"", body, {"X-Error-Code": f"{missing}NotFound"})

    def info(self) -> dict:
        return {
            "id": ID,
            "sha": SHA,
            "siblings": [{"rfilename": name} for name in self.server.files],
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "createdAt": "2024-01-01T00:00:00.000Z",
            "lastModified": "2024-01-01T00:00:00.000Z",
        }

    def listing(self, under: str, body: bool) -> None:
        """Entries below a folder, or directly in it; in pages, each with a link to the next."""
        query = parse_qs(urlsplit(self.path).query)
        deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = [entry for entry in self.entries() if is_below(entry["path"], under, deep)]
        first = int(query.get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if first + self.server.page < len(entries):
            base = f"{self.server.endpoint}{urlsplit(self.path).path}"
            following = f"recursive={deep}&cursor={first + self.server.page}"
            headers["Link"] = f'<{base}?{following}>; rel="next"'
        page = entries[first : first + self.server.page]
        self.send(200, json.dumps(page).encode(), body, headers)

    def entries(self) -> list[dict]:
        entries, folders = [], set()
        for name, content in self.server.files.items():
            entry = {"type": "file", "oid": etag(content), "size": len(content), "path": name}
            if name in self.server.lfs:
                sha256 = etag256(content)
                entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 100}
            entries.append(entry)
            folders |= {str(parent) for parent in Path(name).parents} - {"."}
        return entries + [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
            for folder in sorted(folders)
        ]

    def json(self, value: object, body: bool) -> None:
        self.send(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def name_of(self, name: str) -> str:
        """The etag of a file."""
        content = self.server.files[name]
        return etag256(content) if name in self.server.lfs else etag(content)

    def file(self, name: str, body: bool) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        content = self.server.files.get(name)
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
            return self.send(404, b"", body, headers)
        headers = {"ETag": f'"{self.name_of(name)}"', "X-Repo-Commit": SHA}
        if "Range" not in self.headers:
            return self.send(200, content, body, headers)
        start, stop = self.asked(content)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.send(206, content[start:stop], body, headers)

    def asked(self, content: bytes) -> tuple[int, int]:
        first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1 if last else len(content), len(content))

    def fail(self, fault: str, name: str) -> None:
        """fault: see the cases; else a status and headers, as in `429 Retry-After=7`."""
        content = self.server.files.get(name, b"")
        start, stop = self.asked(content)
        good = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        match fault.split():
            case ["short"]:
                self.head(206, good, stop - start)
                self.wfile.write(content[start : start + 1])
                self.close_connection = True
            case ["long"]:  # more than was asked for, and the header says so
                self.send(206, content[start:stop] + b"more", True, good)
            case ["shifted"]:
                wrong = {"Content-Range": f"bytes {start + 1}-{stop}/{len(content)}"}
                self.send(206, content[start + 1 : stop + 1], True, wrong)
            case ["whole"]:
                self.send(200, content, True, {})
            case ["reset"]:
                self.close_connection = True
                self.connection.close()
            case ["hang"]:
                self.close_connection = True
                self.server.ending.wait(60)
            case ["drip"]:
                self.head(206, good, stop - start)
                self.drip(content[start:stop])
            case ["drip-headers"]:
                self.close_connection = True
                self.drip(b"HTTP/1.1 206 Partial Content\r\nX-Slow: " + b"x" * 10_000)
            case ["changed"]:
                self.send(206, content[start:stop], True, good | {"ETag": '"f00"'})
            case ["redirect", host]:
                self.send(302, b"", True, {"Location": f"{host}/elsewhere/{name}"})
            case ["late", seconds]:
                self.server.ending.wait(float(seconds))
                self.file(name, True) if name else self.send(503, b"", True, {})
            case ["429", "date", seconds]:
                then = datetime.now(UTC).timestamp() + float(seconds) + 1
                self.send(429, b"", True, {"Retry-After": formatdate(then)})
            case ["429", "ratelimit", seconds]:
                self.send(429, b"", True, {"ratelimit": f'"api";r=0;t={seconds}'})
            case [status, "code", code]:
                self.send(int(status), b"", True, {"X-Error-Code": code})
            case [status, *seconds]:
                self.send(int(status), b"", True, {"Retry-After": seconds[0]} if seconds else {})

    def drip(self, content: bytes) -> None:
        """A byte now and then, so that no time-out between two reads ever passes."""
        for index in range(len(content)):
            if self.server.ending.wait(DRIP_SECONDS):
                break
            self.wfile.write(content[index : index + 1])
            self.wfile.flush()
        self.close_connection = True

    def send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.head(status, headers, len(content))
        if body:
            self.wfile.write(content)

    def head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def is_below(path: str, folder: str, deep: bool) -> bool:
    rest = path.removeprefix(f"{folder}/") if folder else path
    return (not folder or path.startswith(f"{folder}/")) and (deep or "/" not in rest)


def read_files(root: Path) -> dict[str, bytes]:
    """The files under a directory, as the Hub serves them."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def stand_in(monkeypatch, server: Hub, home: Path) -> None:
    """This process takes the server for the Hub, with caches of its own."""
    quiet_hub()
    import datasets
    from huggingface_hub import HfFileSystem, constants

    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.endpoint)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(home / "modules"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
