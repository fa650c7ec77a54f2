"""Finds the files of a data set on the Hub, by its id, at a commit.

`datasets` knows ids, configs, splits and the patterns in a data set's README. Sizes and etags come
from the same listing; llmtrain reads the bytes itself (`remote/`). Rank 0 asks once, at the first
start. The trap: a network that fails for a while can look like a data set without files, so only
what the Hub states explicitly is reported as a mistake of the user; everything else is asked again.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from llmtrain.config.schema import SourceConfig
from llmtrain.data.sources import fetch, local
from llmtrain.data.sources.cache import answer_path, cache_root, load_answer, store_answer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_few, first_line, harmless

if TYPE_CHECKING:
    from datasets import DatasetBuilder
    from huggingface_hub import HfFileSystem

_log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = re.compile(r"hf://datasets/(?P<id>[^@]+)@(?P<sha>[0-9a-f]{40})/(?P<path>.+)")
SHORT_COMMIT = re.compile(r"[0-9a-f]{4,39}")
READABLE = ("parquet", "json", "csv", "text")
FORMATS = "files of parquet, JSON, CSV or text (builders of `datasets` of these names)"
# Options of a builder that change what is in a row → the value with which it is read as here.
USUAL = {
    "field": None,
    "sample_by": "line",
    "names": None,
    "header": "infer",
    "skiprows": None,
    "quotechar": '"',
}
CONVERT = "convert it with `llmtrain data repack`, and name the new files"
# What `repack` does not read either, or would read without the options of the builder.
WRITE = "write it as parquet with datasets, load_dataset(…).to_parquet(FILE), and name that file"
NOT_READ = {".arrow", ".tar", ".zip", ".xml"}
ASK_SECONDS = 120.0  # how long a first start waits for the Hub: it has no work to lose


def resolve(
    source: SourceConfig, key: str, keep: bool = False, stop: fetch.Stopping | None = None
) -> local.Resolved:
    """Find the files of a source: on this machine, or those of a data set on the Hub.

    key: the source's key in the config, for messages
    keep: whether the Hub's answer is kept for a first start offline
    stop: ends the waiting

    Raises UserError for files that do not exist, are not open to this user or are in a format that
    is not read; RunError (75) if the Hub does not answer, or at a stop.
    """
    if not local.on_hub(source.path):
        return local.resolve(source, key)
    fetch.quiet_hub()
    from huggingface_hub import constants

    asked = (constants.ENDPOINT, source.path, source.name, source.split, source.revision)
    path = answer_path(cache_root(), asked)
    if constants.HF_HUB_OFFLINE:
        stored = load_answer(path) if keep else None
        if stored is None:
            expected = "a path on this machine, since HF_HUB_OFFLINE forbids to ask the Hub"
            remedy = (
                "begin the run once online with data.cache_gb set: then it can begin offline, too"
            )
            raise UserError(Problem(key, source.path, expected, remedy))
        files = tuple(local.File(*file) for file in stored["files"])
        return local.Resolved(stored["root"], True, stored["revision"], files)
    resolved = _ask(source, key, stop)
    if keep:
        answer = {"root": resolved.root, "revision": resolved.revision, "files": resolved.files}
        store_answer(path, answer)
    return resolved


def _ask(source: SourceConfig, key: str, stop: fetch.Stopping | None) -> local.Resolved:
    from huggingface_hub import HfFileSystem

    what = f"{source.path} (no path of this machine; data set of the Hub)"
    urls = _retry(lambda: _file_urls(source, key), what, stop)
    inside = [match for url in urls if (match := PREFIX.fullmatch(url))]
    if len(inside) != len(urls):
        outside = next(url for url in urls if not PREFIX.fullmatch(url))
        expected = "files of the data set itself"
        raise UserError(Problem(key, outside, expected, "name them as a source of their own"))
    formats = {match["path"]: local.file_format(match["path"]) for match in inside}
    unknown = [name for name, known in formats.items() if known is None]
    remedies = {name: CONVERT if name.endswith(".arrow") else WRITE for name in unknown}
    wrong = [Problem(key, name, FORMATS, remedy) for name, remedy in remedies.items()]
    raise_any(local.bounded(wrong, key))
    rows = [name for name, known in formats.items() if known and known.kind != "text"]
    if rows and source.document == "file":
        expected = f"line: {rows[0]} is no text file, of which each could be one document"
        raise UserError(Problem(local.sibling(key, "document"), "file", expected))
    root = f"hf://datasets/{inside[0]['id']}@{inside[0]['sha']}"
    names = sorted((match["path"] for match in inside), key=str.encode)
    system = HfFileSystem()
    _warn_of_left_out(system, root, names, stop)
    files = tuple(_file(system, root, name, stop) for name in names)
    return local.Resolved(root, True, inside[0]["sha"], files)


def _file_urls(source: SourceConfig, key: str) -> list[str]:
    """Return hf://datasets/ID@COMMIT/PATH of each file that `datasets` finds for the split.

    Raises UserError for what the Hub reports as missing, OSError for a failure that may pass.
    """
    builder = _builder(source, key)
    if builder.name == "cache":  # the fallback of `datasets`, which has no list of files
        raise OSError("the Hub gave no list of the data set's files")
    options = builder.config
    given = {name: getattr(options, name, usual) for name, usual in USUAL.items()}
    unusual = [f"{name}: {value}" for name, value in given.items() if value != USUAL[name]]
    if builder.name not in READABLE or unusual:
        value = f"{source.path} ({', '.join([builder.name, *unusual])})"
        remedy = CONVERT if builder.name == "arrow" and not unusual else WRITE
        raise UserError(Problem(key, value, FORMATS, remedy))
    splits = options.data_files or {}
    if source.split not in splits:
        expected = f"one of: {_nearest(source.split, splits)}"
        raise UserError(Problem(local.sibling(key, "split"), source.split, expected))
    urls = [str(url) for url in splits[source.split]]
    for url in urls:
        if builder.name == "csv" and options.sep != ("\t" if ".tsv" in url else ","):
            raise UserError(Problem(key, f"{url} (sep: {options.sep!r})", FORMATS, WRITE))
    return urls


def _builder(source: SourceConfig, key: str) -> DatasetBuilder:
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError, DatasetsError

    try:
        return datasets.load_dataset_builder(source.path, source.name, revision=source.revision)
    except DatasetNotFoundError as error:
        raise UserError(_not_found(source, key, str(error))) from error
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        value = f"{source.path} ({first_line(error)})"
        raise UserError(Problem(key, value, f"a data set with {FORMATS}", WRITE)) from error
    except json.JSONDecodeError as error:
        raise OSError(f"an answer that is no JSON: {error}") from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise OSError(first_line(error)) from error
        remedy = "the Hub may have it as parquet: try the revision refs/convert/parquet"
        value = f"{source.path} ({first_line(error)})"
        raise UserError(Problem(key, value, FORMATS, remedy)) from error
    except ValueError as error:
        raise UserError(_wrong_config(source, key, error)) from error
    except DatasetsError as error:
        expected = f"a data set that can be read ({first_line(error)})"
        raise UserError(Problem(key, f"{source.path}, name {source.name}", expected)) from error


def _not_found(source: SourceConfig, key: str, message: str) -> Problem:
    """Return what is wrong: id, revision or access. `datasets` has one exception for all three."""
    from huggingface_hub import constants

    page = f"{constants.ENDPOINT}/datasets/{source.path}"
    if "gated" in message:
        expected = "a data set that is open to you; this one is gated"
        remedy = f"ask for access on {page}, then set HF_TOKEN"
        return Problem(key, source.path, expected, remedy)
    if source.revision is not None and message.startswith("Revision"):
        short = SHORT_COMMIT.fullmatch(source.revision) is not None
        expected = "all 40 digits of a commit" if short else "a branch, tag or commit that exists"
        key = local.sibling(key, "revision")
        return Problem(key, source.revision, expected, f"see {page}/commits")
    expected = "a path on this machine, or a data set of the Hub; none of this name can be seen"
    remedy = "check the spelling; it does not exist, or it is private and needs HF_TOKEN"
    return Problem(key, source.path, expected, remedy)


def _wrong_config(source: SourceConfig, key: str, error: ValueError) -> Problem:
    """Return the problem of a config that does not exist or was not chosen, else of `error`."""
    import datasets

    names = datasets.get_dataset_config_names(source.path, revision=source.revision)
    if source.name in names or len(names) < (2 if source.name is None else 1):
        expected = f"a data set that can be read ({first_line(error)})"
        return Problem(key, source.path, expected)
    expected = f"one of: {_nearest(source.name, names)}"
    return Problem(local.sibling(key, "name"), source.name, expected)


def _nearest(asked: str | None, names: Iterable[object]) -> str:
    """Return the first few names that exist, those most similar to `asked` first."""
    likeness = {str(n): difflib.SequenceMatcher(None, asked or "", str(n)).ratio() for n in names}
    return first_few(sorted(likeness, key=likeness.__getitem__, reverse=True)) or "none"


def _warn_of_left_out(
    system: HfFileSystem, root: str, names: Sequence[str], stop: fetch.Stopping | None
) -> None:
    """Warn of data files of other types beside the chosen ones, since they are not read."""
    chosen, folders = set(names), {str(PurePosixPath(name).parent) for name in names}
    kinds = {file_format.kind for name in names if (file_format := local.file_format(name))}
    left: list[str] = []
    for folder in sorted(folders):
        place = root if folder == "." else f"{root}/{folder}"
        entries: list[Any] = _retry(partial(system.ls, place, detail=True), place, stop)
        start = len(root.removeprefix("hf://")) + 1
        files = sorted(str(one["name"])[start:] for one in entries if one["type"] == "file")
        left += [harmless(name) for name in files if _is_other_data(name, chosen, kinds)]
    if left:
        _log.warning("%s: files of other types are not read: %s", root, first_few(left))


def _is_other_data(name: str, chosen: set[str], kinds: set[str]) -> bool:
    base = PurePosixPath(name.lower())
    hidden = base.name.startswith((".", "_")) or base.name in local.NOT_DATA
    if name in chosen or hidden or base.name.endswith(local.PROSE):
        return False
    file_format = local.file_format(base.name)
    return file_format.kind not in kinds if file_format else base.suffix in NOT_READ


def _file(system: HfFileSystem, root: str, name: str, stop: fetch.Stopping | None) -> local.File:
    """Return name, size and etag. The etag of a large file is its sha256, else its blob id."""
    info = _retry(lambda: system.info(f"{root}/{name}"), f"{root}/{name}", stop)
    large = info.get("lfs")
    etag = large["sha256"] if large else info["blob_id"]
    return local.File(name, int(info["size"]), str(etag))


def _retry(ask: Callable[[], T], what: str, stop: fetch.Stopping | None) -> T:
    """Return the answer of the Hub. It is asked again after a failure that may pass."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its client

    deadline = time.monotonic() + ASK_SECONDS
    failures = 0
    while True:
        try:
            return fetch.wait_for(ask, fetch.ATTEMPT_SECONDS, stop)
        except (OSError, HTTPError, fetch.AttemptError) as error:
            status, asked = _status(error)
            if status in fetch.REFUSED:
                expected = f"an answer of the Hub ({first_line(error)})"
                problem = Problem(what, f"HTTP {status}", expected, fetch.REFUSED[status])
                raise UserError(problem) from error
            reason = first_line(error)
            wait = fetch.back_off(failures, asked, deadline, what, reason)
        _log.warning("%s: %s; trying again in %.1f s", what, reason, wait)
        fetch.pause(wait, stop)
        failures += 1


def _status(error: BaseException) -> tuple[int, float]:
    """Return the HTTP status behind an error (0: no answer), and the seconds it asks to wait.

    `datasets` wraps errors in others. Of a wrapped error only 401 and 403 count: a file that need
    not exist gives 404, long before the network fails.
    """
    answer = getattr(error, "response", None)
    if answer is not None:
        return int(answer.status_code), fetch.asked_wait(answer.headers)
    below = error.__cause__ or error.__context__
    status, asked = _status(below) if below is not None else (0, 0.0)
    return status if status in (401, 403) else 0, asked
