"""From a source of the config to its files at a pinned revision.

A local path wins; the suffix of a file chooses its reader, so one directory may mix formats. Any
other path is a data set id on the Hub: `datasets` knows ids, configs, splits and the patterns in a
data set's README; sizes and etags come from the same listing, and the bytes are read by us
(`remote.py`). Rank 0 asks once, at the first start.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from llmtrain.config.schema import SourceConfig
from llmtrain.data.remote import back_off, pause
from llmtrain.data.request import REFUSED, quiet_hub
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

log = logging.getLogger(__name__)
T = TypeVar("T")

SAMPLE = "sample"
EDGE_BYTES = 64 * 1024
SHOWN = 8  # problems of one kind that a message lists
FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
}
COMPRESSED = (".gz", ".zst")
# What lies beside data in many directories.
NOT_DATA = {"readme.md", "readme", "license", "license.md", "license.txt", "dataset_infos.json"}
SUFFIXES = ".parquet, .jsonl, .json, .txt; .gz or .zst after all but the first"
ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PREFIX = re.compile(r"hf://datasets/(?P<id>[^@]+)@(?P<sha>[0-9a-f]{40})/(?P<path>.+)")
READABLE = ("parquet", "json", "text")
ASK_SECONDS = 120.0  # how long a first start, which has nothing to lose, waits for the Hub


class File(NamedTuple):
    """One file of a source.

    name: relative to the source, with `/` · etag: the Hub's, or the digest of a local file's ends.
    """

    name: str
    size: int
    etag: str


class Format(NamedTuple):
    """How a file is read: parquet, jsonl or text; compression None, gz or zst."""

    kind: str
    compression: str | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source's files, sorted by path bytes; root + `/` + name is a path or hf:// address."""

    root: str
    remote: bool
    revision: str | None
    files: tuple[File, ...]


def resolve(source: SourceConfig, key: str) -> Resolved:
    """Find the files of a source. `key` names it in messages.

    Raises UserError for a path where nothing is, an empty directory, a glob without a match, a file
    of unknown suffix, and whatever the Hub refuses.
    """
    if source.path != SAMPLE and not is_local(source.path):
        if looks_like_id(source.path):
            return resolve_hub(source, key)
        raise UserError(_nothing_there(source.path, key))
    root = Path(locate(source, key))
    paths = sorted(_list(source.path, root, key), key=lambda path: os.fsencode(path))
    unknown = [path for path in paths if file_format(path.name) is None]
    if unknown:
        raise UserError(*bounded([_unknown_suffix(path, key) for path in unknown], key))
    files: list[File] = []
    unreadable: list[Problem] = []
    for path in paths:
        try:
            size, digest = path.stat().st_size, edges_digest(path)
        except OSError as error:
            unreadable.append(
                Problem(key, str(path), f"a file that can be read ({error.strerror})")
            )
        else:
            files.append(File(path.relative_to(root).as_posix(), size, digest))
    if unreadable:
        raise UserError(*bounded(unreadable, key))
    return Resolved(str(root), False, None, tuple(files))


def locate(source: SourceConfig, key: str) -> str:
    """The directory that the names of a local source's files are relative to."""
    path = source.path
    if path == SAMPLE:
        return str(Path(__file__).parent / "sample")
    if is_glob(path):
        fixed = Path(path)
        while is_glob(str(fixed)):
            fixed = fixed.parent
        return str(fixed.absolute())
    if not Path(path).exists():
        raise UserError(_nothing_there(path, key))
    return str(Path(path).absolute() if Path(path).is_dir() else Path(path).absolute().parent)


def is_local(path: str) -> bool:
    """Is this path meant for this machine's files? (What exists here always is.)"""
    explicit = path.startswith((".", "/", "~")) or Path(path).suffix in {*FORMATS, *COMPRESSED}
    beside = "/" in path and Path(path).parent.is_dir()  # a misspelt name in a directory of ours
    return Path(path).exists() or is_glob(path) or explicit or beside


def is_glob(path: str) -> bool:
    """Has it wildcards? A file that really is called so is no glob."""
    return glob.has_magic(path) and not Path(path).exists()


def file_format(name: str) -> Format | None:
    """How a file of this name is read; None: unknown."""
    stem, compression = name.lower(), None
    for suffix in COMPRESSED:
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), suffix[1:]
    kind = FORMATS.get(Path(stem).suffix)
    if kind is None or (kind == "parquet" and compression):
        return None
    return Format(kind, compression)


def labels(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Names for metrics: the last part of the path, `/name` if it has one, `-2` … if repeated."""
    names: list[str] = []
    for source in sources:
        base = source.path.rstrip("/").rsplit("/", 1)[-1]
        named = source.name and not is_local(source.path)
        base = f"{base}/{source.name}" if named else base
        label, count = base, 2
        while label in names:
            label, count = f"{base}-{count}", count + 1
        names.append(label)
    return tuple(names)


def edges_digest(path: Path) -> str:
    """Digest of the first and last 64 KiB: tells changed files without reading them whole."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        digest.update(file.read(EDGE_BYTES))
        file.seek(max(0, path.stat().st_size - EDGE_BYTES))
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def bounded(problems: Sequence[Problem], key: str) -> list[Problem]:
    """The first few problems, and how many more there are."""
    shown = list(problems[:SHOWN])
    if len(problems) > SHOWN:
        more = f"{len(problems) - SHOWN} more files with problems of this kind"
        shown.append(Problem(key, more, "none", "put right the files above first"))
    return shown


def _list(path: str, root: Path, key: str) -> list[Path]:
    if path == SAMPLE:
        return list(root.glob("*.parquet"))
    if is_glob(path):
        pattern = str(Path(path).absolute().relative_to(root))
        found = [file for file in root.glob(pattern) if file.is_file()]
        if not found:
            raise UserError(_no_match(path, root, key))
        return found
    if Path(path).is_file():
        return [Path(path).absolute()]
    found = [file for file in root.rglob("*") if file.is_file() and _is_data(file, root)]
    if not found:
        expected = f"a directory with data files ({SUFFIXES})"
        raise UserError(Problem(key, path, f"{expected}; it holds {_listing(root)}"))
    return found


def _is_data(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    return not hidden and path.name.lower() not in NOT_DATA


def _listing(directory: Path) -> str:
    """What lies in a directory, for a message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "nothing"


def _no_match(path: str, root: Path, key: str) -> Problem:
    while not root.is_dir():
        root = root.parent
    return Problem(
        key, path, "a glob that matches files", f"see what is there: {root} holds {_listing(root)}"
    )


def _nothing_there(path: str, key: str) -> Problem:
    parent = Path(path).absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    return Problem(
        key,
        path,
        "a file, a directory, a glob, a data set id of the Hub (OWNER/NAME), or sample",
        f"see what is there: {parent} holds {_listing(parent)}",
    )


def _unknown_suffix(path: Path, key: str) -> Problem:
    return Problem(
        key, str(path), f"a data file ({SUFFIXES})", "move it away, or name the files with a glob"
    )


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
    urls = _retried(
        lambda: _file_urls(source, key),
        f"{source.path} (no path of this machine; data set of the Hub)",
    )
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
