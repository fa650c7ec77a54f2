"""A small Hub on loopback: what `datasets` and huggingface_hub ask for, with faults on order."""

import hashlib
import json
import threading
from collections import Counter, deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
ID = "someone/encyclopedia"


class Hub(ThreadingHTTPServer):
    """files: path → content · faults: what the next requests for ranges get · requests: met."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.faults: deque[str] = deque()
        self.listing_faults: deque[str] = deque()
        self.requests: Counter[str] = Counter()
        self.tokens: list[str | None] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def url(self, name: str) -> str:
        return f"{self.endpoint}/datasets/{ID}/resolve/{SHA}/{name}"


@contextmanager
def serving(files: dict[str, bytes]):
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


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
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/elsewhere/"):
            self.server.requests["elsewhere"] += 1
            return self.file(path.removeprefix("/elsewhere/"), body)
        if f"/datasets/{ID}/resolve/" in path and "Range" in self.headers:
            self.server.requests["range"] += 1
            fault = self.server.faults.popleft() if self.server.faults else ""
            if fault:
                return self.fail(fault, path.split("/", 6)[-1])
        if f"/datasets/{ID}/resolve/" in path:
            return self.file(path.split("/", 6)[-1], body)
        self.server.requests["api"] += 1
        if self.server.listing_faults:
            return self.fail(self.server.listing_faults.popleft(), "")
        if path.startswith(f"/api/datasets/{ID}/tree/"):
            under = "/".join(path.split("/")[7:])
            return self.json(self.tree(under), body)
        if path.startswith(f"/api/datasets/{ID}/paths-info/"):
            return self.json(self.tree(""), body)
        if path in (f"/api/datasets/{ID}", f"/api/datasets/{ID}/revision/{SHA}") or path.endswith(
            "/revision/main"
        ):
            return self.json(self.info(), body)
        return self.send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

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

    def tree(self, under: str) -> list[dict]:
        entries = []
        for name, content in self.server.files.items():
            if name.startswith(under):
                oid = etag(content)
                entries.append({"type": "file", "oid": oid, "size": len(content), "path": name})
        folders = {name.rsplit("/", 1)[0] for name in self.server.files if "/" in name}
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f} for f in folders]
        return entries

    def json(self, value: object, body: bool) -> None:
        self.send(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def file(self, name: str, body: bool) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        content = self.server.files.get(name)
        if content is None:
            return self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": SHA}
        asked = self.headers.get("Range")
        if not asked:
            return self.send(200, content, body, headers)
        first, last = asked.removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.send(206, content[start:stop], body, headers)

    def fail(self, fault: str, name: str) -> None:
        """fault: a status, `429 SECONDS`, short, shifted, whole, reset, other, redirect HOST."""
        content = self.server.files.get(name, b"")
        first = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]
        if fault == "short":
            self.send_response(206)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(content[:1])
            self.close_connection = True
        elif fault == "shifted":
            headers = {"Content-Range": f"bytes 1-{len(content) - 1}/{len(content)}"}
            self.send(206, content[1:], True, headers)
        elif fault == "whole":
            self.send(200, content, True, {})
        elif fault == "reset":
            self.close_connection = True
            self.connection.close()
        elif fault == "changed":
            self.send(206, content, True, {"ETag": '"f00"'})
        elif fault.startswith("redirect"):
            target = f"{fault.split()[1]}/elsewhere/{name}"
            self.send(302, b"", True, {"Location": target})
        else:
            status, *seconds = fault.split()
            self.send(int(status), b"", True, {"Retry-After": seconds[0]} if seconds else {})

    def send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def read_files(root: Path) -> dict[str, bytes]:
    """The files under a directory, as the Hub serves them."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
