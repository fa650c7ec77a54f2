"""From a data set id of the Hub to its files at a pinned commit. Rank 0 asks, at the first start.

`datasets` knows ids, configs, splits and the patterns in a data set's README; the bytes are read by
us (`remote.py`). Sizes and etags come from the same listing, without further requests.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llmtrain.config.schema import SourceConfig
from llmtrain.data.remote import REFUSED, back_off, pause, quiet_hub
from llmtrain.data.sources import File, Resolved, bounded, file_format
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

log = logging.getLogger(__name__)
T = TypeVar("T")
ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PREFIX = re.compile(r"hf://datasets/(?P<id>[^@]+)@(?P<sha>[0-9a-f]{40})/(?P<path>.+)")
READABLE = ("parquet", "json", "text")
ASK_SECONDS = 900.0  # how long the first start waits for the Hub to answer


def looks_like_id(path: str) -> bool:
    """OWNER/NAME or NAME, as the Hub spells them."""
    return ID.fullmatch(path) is not None


def resolve_hub(source: SourceConfig, key: str) -> Resolved:
    """Files, sizes and etags of a data set's split at the commit that `revision` names now.

    Raises UserError for what does not exist, is not open to this user or is in a format that is not
    read; RunError (75) if the Hub does not answer.
    """
    quiet_hub()
    from huggingface_hub import HfFileSystem, constants

    if constants.HF_HUB_OFFLINE:
        expected = "a path on this machine, since HF_HUB_OFFLINE forbids to ask the Hub"
        raise UserError(Problem(key, source.path, expected))
    urls = _retried(lambda: _file_urls(source, key), source.path)
    found = [PREFIX.fullmatch(url) for url in urls]
    inside = [match for match in found if match is not None]
    if len(inside) != len(urls):
        outside = next(url for url, match in zip(urls, found, strict=True) if match is None)
        expected = "files of the data set itself"
        raise UserError(Problem(key, outside, expected, "name them as a source of their own"))
    unknown = [match["path"] for match in inside if file_format(match["path"]) is None]
    if unknown:
        expected = "parquet, JSON lines or text; convert it with `llmtrain data repack`"
        raise UserError(*bounded([Problem(key, name, expected) for name in unknown], key))
    system = HfFileSystem()
    files = sorted((_file(system, match) for match in inside), key=lambda file: file.name.encode())
    name, sha = inside[0]["id"], inside[0]["sha"]
    return Resolved(f"hf://datasets/{name}@{sha}", True, sha, tuple(files))


def _file_urls(source: SourceConfig, key: str) -> list[str]:
    """What `datasets` finds: hf://datasets/ID@COMMIT/PATH of every file of the split.

    Raises OSError for what may pass: a reset can even look like a data set without files.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(source.path, source.name, revision=source.revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        remedy = "check the spelling; a private or gated data set needs HF_TOKEN and access"
        expected = f"a file here, or a data set of the Hub ({_first_line(error)})"
        raise UserError(Problem(key, source.path, expected, remedy)) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        expected = f"a data set that can be read ({_first_line(error)})"
        raise UserError(Problem(key, f"{source.path}, name {source.name}", expected)) from error
    if builder.name not in READABLE:
        expected = "parquet, JSON lines or text; convert it with `llmtrain data repack`"
        raise UserError(Problem(key, f"{source.path} ({builder.name})", expected))
    splits = builder.config.data_files or {}
    if source.split not in splits:
        there = ", ".join(map(str, splits)) or "none"
        raise UserError(Problem(key.replace(".path", ".split"), source.split, f"one of: {there}"))
    return [str(url) for url in splits[source.split]]


def _file(system: HfFileSystem, match: re.Match[str]) -> File:
    """Name, size and etag: of a large file its sha256, else its blob id."""
    info = _retried(lambda: system.info(match[0]), match[0])
    large = info.get("lfs")
    etag = large["sha256"] if large else info["blob_id"]
    return File(match["path"], int(info["size"]), str(etag))


def _retried(ask: Callable[[], T], what: str) -> T:
    """The answer of the Hub, asked again while it fails in a way that may pass."""
    import httpx2

    deadline = time.monotonic() + ASK_SECONDS
    attempt = 0
    while True:
        try:
            return ask()
        except (OSError, httpx2.HTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in REFUSED:
                expected = f"an answer of the Hub ({_first_line(error)})"
                raise UserError(
                    Problem(what, f"HTTP {status}", expected, REFUSED[status])
                ) from error
            wait = back_off(attempt, 0.0, deadline, what, _first_line(error))
        log.warning("%s: no answer yet, trying again in %.1f s", what, wait)
        pause(wait, None)
        attempt += 1


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
