"""A Hub with one model: several commits, a branch that moves, an end of access.

with serving_model({OLD: files, NEW: others}) as server:    main is the first commit
    server.main = NEW                                       somebody has pushed
    server.gated = True                                     files are refused, what is known is not
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers.hub import Handler, Hub, etag, running

MODEL = "someone/tiny"
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
Commits = dict[str, dict[str, bytes]]


class ModelHub(Hub):
    """commits: commit → name → content. main: the commit of that branch."""

    def __init__(self, commits: Commits) -> None:
        super().__init__({}, handler=ModelHandler)
        self.commits = commits
        self.main = next(iter(commits))
        self.gated = False
        self.read: list[tuple[str, str]] = []  # commit and name of each file that was sent


class ModelHandler(Handler):
    """One request for a model."""

    server: ModelHub

    def answer(self, *, body: bool) -> None:
        server, path = self.server, unquote(urlsplit(self.path).path)
        files, about = f"/{MODEL}/resolve/", f"/api/models/{MODEL}"
        server.requests["down" if server.down else "all"] += 1
        if server.down:
            self.close_connection = True
        elif path.startswith(files):
            revision, name = path.removeprefix(files).split("/", 1)
            self.model_file(self.commit(revision), name, body)
        elif path == about or path.startswith(f"{about}/revision/"):
            self.about(self.commit(path.removeprefix(about).removeprefix("/revision/")), body)
        else:
            missing = "Entry" if path.startswith(about) else "Repo"
            self.send(404, b"", body, {"X-Error-Code": f"{missing}NotFound"})

    def commit(self, revision: str) -> str:
        return self.server.main if revision in ("", "main") else revision

    def about(self, commit: str, body: bool) -> None:
        if commit not in self.server.commits:
            return self.send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        listed = [
            {"rfilename": name} | ({"size": len(content)} if "blobs=" in self.path else {})
            for name, content in self.server.commits[commit].items()
        ]
        return self.json({**self.info(), "id": MODEL, "sha": commit, "siblings": listed}, body)

    def model_file(self, commit: str, name: str, body: bool) -> None:
        if self.server.gated:
            return self.send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        content = self.server.commits.get(commit, {}).get(name)
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self.send(404, b"", body, headers)
        if body:
            self.server.read.append((commit, name))
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit}
        return self.send(200, content, body, headers)


@contextmanager
def serving_model(commits: Commits) -> Iterator[ModelHub]:
    with running(ModelHub(commits)) as server:
        yield server


def take_for_hub(patch: pytest.MonkeyPatch, server: ModelHub, home: Path) -> None:
    """This process takes the server for the Hub, with an empty cache in `home`."""
    from huggingface_hub import constants
    from transformers.utils import hub

    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", server.endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HOME", str(home))
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(hub, "_hf_api", None)  # it keeps the address of the Hub
