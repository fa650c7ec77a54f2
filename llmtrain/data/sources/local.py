"""Finds the files of a source on this machine, and those of one split as the Hub would.

A local path comes first. The suffix of a file decides how it is read, so one directory may mix
formats. Any other path in the form of an id is a data set on the Hub (`hub.py`). What the splits
of a directory are is found out from the first of these that it has:

    dataset_dict.json    what `DatasetDict.save_to_disk` writes, a folder for each split
    state.json           what `Dataset.save_to_disk` writes: the files that it lists
    README.md            its `configs`, as in a copy of a data set of the Hub
    names and folders    train, validation, test and their other names: test.jsonl, dev/a.parquet

A directory without any of these has no splits, and all its files are read. Patterns and names are
those of `datasets`, which is imported only where a name or a README may mean a split.
"""

import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from llmtrain.config.schema import DocumentsConfig, SourceConfig
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_few, first_line, harmless
from llmtrain.types import JsonMapping, JsonObject

_log = logging.getLogger(__name__)

CARD = "README.md"
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
# A name that may mean a split: `datasets` decides. The last is data/SPLIT-00000-of-00001.
_LIKELY = re.compile(
    r"(^|[-._ 0-9/])(train(ing)?|val(id(ation)?)?|dev|test(ing)?|eval(uation)?)[-._ 0-9/]"
    r"|^data/.*-\d{5}-of-\d{5}"
)
WITHOUT_SPLITS = "%s has no splits: split %s is not looked at, and all its files are read"


def files_of_split(
    source: DocumentsConfig, root: Path, there: Sequence[Path], key: str
) -> list[Path]:
    """Return the files of a directory that `split`, and `name` where it has configs, ask for.

    root: the directory
    there: its data files
    key: of the source's path, for messages
    Raises UserError for a split or config that it does not have.
    """
    if (root / SAVED_SPLITS).is_file():
        names = _read(root / SAVED_SPLITS, key).get("splits") or []
        _refuse_name(source, root, key)
        _require(source.split, names, key, "split")
        return _saved(root / source.split, key)
    if (root / SAVED_STATE).is_file():
        _refuse_name(source, root, key)
        saved = _read(root / SAVED_STATE, key).get("_split")
        if source.split != "train" and saved:  # by default, it is the one that was saved
            _require(source.split, [saved], key, "split")
        elif source.split != "train":
            _log.warning(WITHOUT_SPLITS, harmless(source.path), harmless(source.split))
        return _saved(root, key)
    patterns = _of_card(source, root, key)
    if patterns is None:
        names = (path.relative_to(root).as_posix() for path in there)
        patterns = _of_names(root, key) if any(map(_LIKELY.search, names)) else {}
    if not patterns:
        if source.split != "train":
            _log.warning(WITHOUT_SPLITS, harmless(source.path), harmless(source.split))
        return list(there)
    _require(source.split, patterns, key, "split")
    chosen = {split: _matching(root, of, key) for split, of in patterns.items()}
    left = sorted({*map(str, there)} - {name for names in chosen.values() for name in names})
    if left:
        few = first_few([harmless(Path(path).relative_to(root).as_posix()) for path in left])
        _log.warning("%s: no split has these files: %s", harmless(source.path), few)
    return [path for path in there if str(path) in chosen[source.split]]


def _of_card(source: DocumentsConfig, root: Path, key: str) -> Mapping[str, Sequence[str]] | None:
    """Return split → patterns, as the README has them for a config; None if it has none."""
    configs = _configs(root, key)
    if not configs:
        _refuse_name(source, root, key)
        return None
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    try:
        name = source.name or MetadataConfigs(configs).get_default_config_name()
        if name is None:
            expected = f"one of: {', '.join(configs)}"
            raise UserError(Problem(sibling(key, "name"), None, expected))
        _require(name, configs, key, "name")
        asked = configs[name]
        if "data_files" in asked:
            return _local(sanitize_patterns(asked["data_files"]), root, key)
        below = asked.get("data_dir")
        if below is None:
            return None
        _local({"data_dir": [str(below)]}, root, key)
        return {
            split: [f"{below}/{pattern}" for pattern in patterns]
            for split, patterns in _of_names(root / below, key).items()
        } or {"train": [f"{below}/**"]}
    except (ValueError, TypeError) as error:
        raise UserError(_bad_card(root, key, error)) from error


def _refuse_name(source: DocumentsConfig, root: Path, key: str) -> None:
    if source.name is not None:
        expected = f"left out: {root} has no configs"
        raise UserError(Problem(sibling(key, "name"), source.name, expected))


def _configs(root: Path, key: str) -> JsonObject:
    if not (root / CARD).is_file():
        return {}
    text = (root / CARD).read_text("utf-8-sig", errors="replace")
    if not text.startswith("---") or "configs:" not in text:
        return {}
    import yaml
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        card = DatasetCard(text, ignore_metadata_errors=True).data
        return dict(MetadataConfigs.from_dataset_card_data(card))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(_bad_card(root, key, error)) from error


def _bad_card(root: Path, key: str, error: Exception) -> Problem:
    expected = f"a README.md whose `configs` name the files of its splits ({first_line(error)})"
    remedy = "repair it, or name the files with a glob"
    return Problem(key, str(root / CARD), expected, remedy)


def _local(
    patterns: Mapping[Any, Sequence[str]], root: Path, key: str
) -> Mapping[str, Sequence[str]]:
    """Return the patterns, with split names as strings. Refuses what is not below the directory."""
    for pattern in (one for globs in patterns.values() for one in globs):
        if "://" in pattern or pattern.startswith("/") or ".." in Path(pattern).parts:
            raise UserError(Problem(key, pattern, f"files below {root}, as {CARD} is to name them"))
    return {str(split): list(globs) for split, globs in patterns.items()}


def _of_names(root: Path, key: str) -> Mapping[str, Sequence[str]]:
    """Return split → patterns, as names of files and folders have them; {} if all are one split."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, EmptyDatasetError, get_data_patterns

    try:
        by_split = get_data_patterns(glob.escape(str(root)))
    except (EmptyDatasetError, ValueError) as error:
        expected = f"names of files from which the splits can be told ({first_line(error)})"
        remedy = "name the files of one split with a glob"
        raise UserError(Problem(key, str(root), expected, remedy)) from error
    if by_split == DEFAULT_PATTERNS_ALL:
        return {}
    return {str(split): list(patterns) for split, patterns in by_split.items()}


def _matching(root: Path, patterns: Sequence[str], key: str) -> set[str]:
    from datasets.data_files import DataFilesList

    try:
        return set(DataFilesList.from_patterns(list(patterns), glob.escape(str(root))))
    except FileNotFoundError as error:
        expected = f"files that are there, as {CARD} names them ({first_line(error)})"
        raise UserError(Problem(key, ", ".join(patterns), expected)) from error


def _saved(directory: Path, key: str) -> list[Path]:
    """Return the files of a directory that `Dataset.save_to_disk` has written."""
    state = _read(directory / SAVED_STATE, key)
    if state.get("_indices_data_files"):
        expected = "a data set without an index of rows"
        remedy = "save it again: flatten_indices().save_to_disk(…)"
        raise UserError(Problem(key, str(directory), expected, remedy))
    try:
        files = [directory / one["filename"] for one in state["_data_files"]]
    except (KeyError, TypeError) as error:
        expected = "what `save_to_disk` of datasets writes"
        raise UserError(Problem(key, str(directory / SAVED_STATE), expected)) from error
    outside = [file for file in files if file.parent != directory]
    if outside:
        raise UserError(Problem(key, str(outside[0]), f"a file of {directory} itself"))
    return files


def _read(path: Path, key: str) -> JsonMapping:
    try:
        saved = json.loads(path.read_text("utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        expected = f"a file that `save_to_disk` of datasets has written ({first_line(error)})"
        raise UserError(Problem(key, str(path), expected)) from error
    return saved


def _require(asked: str, names: Iterable[str], key: str, what: str) -> None:
    existing = list(names)
    if asked not in existing:
        remedy = "or name the files with a glob, which has no splits" if what == "split" else ""
        expected = f"one of: {', '.join(map(str, existing[:SHOWN])) or 'none'}"
        raise UserError(Problem(sibling(key, what), asked, expected, remedy))


SAMPLE = "sample"
EDGE_BYTES = 64 * 1024
ANY_SOURCE = "a file, a directory, a glob, a data set id of the Hub (OWNER/NAME), or sample"
SHOWN = 8  # how many problems of one kind a message lists
FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
TABLES = ("parquet", "arrow")  # kinds with columns, and groups of rows
INDEX = ".idx"  # of a token cache, with a .bin beside it
PROSE = ".md"  # read as a whole or not at all: a line of it is no document
# Files that are found beside data in many directories.
NOT_DATA = {"readme.md", "readme", "license", "license.md", "license.txt", "dataset_infos.json"}
SUFFIXES = (
    ".parquet, .arrow, .jsonl, .json, .csv, .tsv, .txt, .gz or .zst after all but the first two; "
    ".idx with .bin"
)
# What `save_to_disk` of datasets writes beside the rows.
OF_DATASETS = {"dataset_info.json", "state.json", "dataset_dict.json"}
ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class File(NamedTuple):
    """One file of a source.

    name: relative to the source, with `/`
    size: in bytes
    etag: the Hub's, or the digest of a local file's first and last bytes
    """

    name: str
    size: int
    etag: str


class Format(NamedTuple):
    """How a file is read.

    kind: parquet, jsonl, text …
    compression: None, gzip or zstd
    """

    kind: str
    compression: str | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source's files, sorted by the bytes of their paths.

    root: root + `/` + a file's name is a path or hf:// address
    remote: whether they are on the Hub
    revision: the commit on the Hub
    """

    root: str
    remote: bool
    revision: str | None
    files: tuple[File, ...]


def resolve(source: SourceConfig, key: str) -> Resolved:
    """Find the files of a source on this machine. `key` names it in messages.

    Raises UserError for a path that does not exist, an empty directory, a glob without a match, a
    file with an unknown suffix or a name that is not UTF-8, and for anything that is not a file,
    such as a broken link.
    """
    if source.path != SAMPLE and not is_local(source.path):
        raise UserError(_nothing_there(source.path, key))
    root = Path(locate(source, key))
    data_files = list_files(source.path, root, key, prose=source.document == "file")
    if source.path != SAMPLE and Path(source.path).is_dir():
        data_files = files_of_split(source, root, data_files, key)
    elif source.split != "train" or source.name is not None:
        both = (("name", source.name), ("split", source.split))
        given = [(name, value) for name, value in both if value not in (None, "train")]
        asked = " and ".join(f"{name}: {harmless(value)}" for name, value in given)
        _log.warning("%s has no splits and no configs: %s is not looked at", source.path, asked)
    paths = sorted(data_files, key=lambda path: os.fsencode(path))
    if any(is_index(path.name) for path in paths):
        paths = _pairs(paths, key)
    elif unknown := [path for path in paths if not _is_read(path, source)]:
        prose = [path for path in unknown if _is_prose(path)]
        unknown = [path for path in unknown if path not in prose[1:]]  # one message for all
        raise UserError(*bounded([_unknown_suffix(path, source, key) for path in unknown], key))
    files: list[File] = []
    unreadable: list[Problem] = []
    for path in paths:
        try:
            size, digest = path.stat().st_size, edges_digest(path)
        except OSError as error:
            expected = f"a file that can be read ({error.strerror})"
            unreadable.append(Problem(key, str(path), expected))
        else:
            files.append(File(path.relative_to(root).as_posix(), size, digest))
    raise_any(bounded(unreadable, key))
    return Resolved(str(root), False, None, tuple(files))


def locate(source: DocumentsConfig, key: str) -> str:
    """Return the directory that the names of a local source's files are relative to."""
    path = source.path
    if path == SAMPLE:
        return str(Path(__file__).parents[1] / "sample")
    if is_glob(path):
        fixed = Path(path)
        while is_glob(str(fixed)):
            fixed = fixed.parent
        return str(fixed.absolute())
    if not Path(path).exists():
        linked = Path(path).is_symlink()
        raise UserError(_no_file(Path(path), key) if linked else _nothing_there(path, key))
    return str(Path(path).absolute() if Path(path).is_dir() else Path(path).absolute().parent)


def is_local(path: str) -> bool:
    """Return whether a path is meant for files of this machine. What exists here always is."""
    suffixes = {*FORMATS, *COMPRESSED, INDEX}
    explicit = path.startswith((".", "/", "~")) or Path(path).suffix.lower() in suffixes
    explicit = explicit or path.count("/") > 1
    beside = "/" in path and Path(path).parent.is_dir()  # perhaps a misspelt name in a directory
    # Unlike `Path.exists`, this is false for a name that is too long or has a NUL.
    exists = os.path.exists(path)  # noqa: PTH110
    return exists or is_glob(path) or explicit or beside


def is_glob(path: str) -> bool:
    """Return whether a path has wildcards. If a file has exactly this name, it is not a glob."""
    return glob.has_magic(path) and not Path(path).exists()


def is_index(name: str) -> bool:
    """Return whether it is the `.idx` of a token cache."""
    return name.endswith(INDEX)


def file_format(name: str, kinds: Mapping[str, str] = FORMATS) -> Format | None:
    """Return how a file of this name is read; None if that is unknown. kinds: suffix → kind."""
    stem, compression = name.lower(), None
    for suffix, codec in COMPRESSED.items():
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), codec
    kind = kinds.get(Path(stem).suffix)
    if kind is None or (compression and kind in TABLES):
        return None
    return Format(kind, compression)


def labels(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Return names for metrics: end of the path, then `/name` if set, then `-2` … if repeated."""
    ends = ((source, source.path.rstrip("/").rsplit("/", 1)[-1]) for source in sources)
    return distinct(
        f"{end}/{source.name}" if source.name and not is_local(source.path) else end
        for source, end in ends
    )


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, with `-2`, `-3` … after those that occurred before."""
    unique: list[str] = []
    for base in names:
        every = chain([base], (f"{base}-{number}" for number in count(2)))
        unique.append(next(name for name in every if name not in unique))
    return tuple(unique)


def edges_digest(path: Path) -> str:
    """Return a hash of the first and last 64 KiB, so that no large file has to be read whole."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        digest.update(file.read(EDGE_BYTES))
        file.seek(max(0, path.stat().st_size - EDGE_BYTES))
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def bounded(problems: Sequence[Problem], key: str) -> list[Problem]:
    """Return the first few problems, and how many more there are."""
    shown = list(problems[:SHOWN])
    if len(problems) > SHOWN:
        more = f"{len(problems) - SHOWN} more files with problems of this kind"
        shown.append(Problem(key, more, "none", "put right the files above first"))
    return shown


def list_files(path: str, root: Path, key: str, *, prose: bool = False) -> list[Path]:
    """Return the data files of a local path, unsorted. Raises UserError if there are none.

    prose: whether files such as README.md are documents, too
    """
    if path == SAMPLE:
        return list(root.glob("*.parquet"))
    if is_glob(path):
        pattern = str(Path(path).absolute().relative_to(root))
        files = _only_files(root.glob(pattern), key)
        if not files:
            raise UserError(_nothing_there(path, key, "a glob that matches files"))
        return files
    if not Path(path).is_dir():
        return _only_files([Path(path).absolute()], key)
    entries = [file for file in root.rglob("*") if _is_data(file, root, prose)]
    # A link to a directory might lead back to itself.
    expected = "a directory itself: links to directories are not followed"
    remedy = "name it as a source of its own, or link its files"
    links = [_printable(file) for file in entries if file.is_symlink() and file.is_dir()]
    raise_any(bounded([Problem(key, link, expected, remedy) for link in links], key))
    files = _only_files(entries, key)
    if not files:
        expected = f"a directory with data files ({SUFFIXES})"
        raise UserError(Problem(key, path, f"{expected}; it holds {_listing(root)}"))
    return files


def _only_files(paths: Iterable[Path], key: str) -> list[Path]:
    """Drop the directories.

    Raises UserError for what is not a file either, and for names that are not UTF-8.
    """
    files: list[Path] = []
    problems: list[Problem] = []
    for path in paths:
        if path.is_dir():
            continue
        if _printable(path) != str(path):
            expected, remedy = "a file whose path is UTF-8", "rename the file, or its directory"
            problems.append(Problem(key, _printable(path), expected, remedy))
        elif not path.is_file():
            problems.append(_no_file(path, key))
        else:
            files.append(path)
    raise_any(bounded(problems, key))
    return files


def _printable(path: Path) -> str:
    r"""Return a path as text that can be written anywhere; bytes that are not UTF-8 as `\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _no_file(path: Path, key: str) -> Problem:
    """Return the problem of a broken link, a FIFO, a socket or a device."""
    what = "it is a FIFO, a socket or a device"
    if not path.exists():
        what = f"it is a link to {harmless(_printable(path.readlink()))}, which is not there"
    expected = f"a file that can be read; {what}"
    return Problem(key, str(path), expected, "repair it, move it away, or remove it")


def _pairs(paths: Sequence[Path], key: str) -> list[Path]:
    """Return the `.idx` and `.bin` files of token caches, not their descriptions and tokenizers.

    Raises UserError for an `.idx` without its `.bin`, and for any other data beside them.
    """
    indices = [path for path in paths if is_index(path.name)]
    tokens = [path.with_suffix(".bin") for path in indices]
    tokenizers = {path.parent / "tokenizer" for path in indices}
    known = {*indices, *tokens, *(path.with_suffix(".json") for path in indices)}
    others = [path for path in paths if path not in known and not tokenizers & {*path.parents}]
    expected = "nothing but token caches (.idx, .bin) where there is one"
    remedy = "make it a source of its own"
    problems = [Problem(key, str(path), expected, remedy) for path in others]
    for index, path in zip(indices, tokens, strict=True):
        if not path.is_file():
            problems.append(Problem(key, str(index), f"{path.name} beside it"))
    raise_any(bounded(problems, key))
    return sorted([*indices, *tokens], key=lambda path: os.fsencode(path))


def _is_data(path: Path, root: Path, prose: bool) -> bool:
    parts = path.relative_to(root).parts
    if any(part.startswith((".", "_")) for part in parts) or path.name in OF_DATASETS:
        return False
    return path.name.lower() not in NOT_DATA or (prose and path.suffix.lower() in (".md", ".txt"))


def _listing(directory: Path) -> str:
    """List the entries of a directory for a message."""
    entries = directory.iterdir()
    names = sorted(harmless(_printable(Path(one.name))) + "/" * one.is_dir() for one in entries)
    return first_few(names) or "nothing"


def _nothing_there(path: str, key: str, expected: str = ANY_SOURCE) -> Problem:
    """Return the problem of a path without files, with what is in the nearest directory."""
    near = Path(path).absolute().parent
    while not near.is_dir():
        near = near.parent
    remedy = f"see what is there: {near} holds {_listing(near)}"
    if path.startswith("~"):
        remedy = "write the path out: ~ is not expanded here"
    return Problem(key, path, expected, remedy)


def _is_read(path: Path, source: DocumentsConfig) -> bool:
    known_format = file_format(path.name)
    if source.document == "file":
        return known_format is not None and known_format.kind == "text"
    return known_format is not None and not _is_prose(path)


def _is_prose(path: Path) -> bool:
    return PROSE in (suffix.lower() for suffix in path.suffixes[-2:])


def _unknown_suffix(path: Path, source: DocumentsConfig, key: str) -> Problem:
    document = sibling(key, "document")
    if source.document == "file":
        expected = "a text file (.txt, .md, .gz or .zst after it), as each file is one document"
        return Problem(key, str(path), expected, f"{document}=line, or name the files with a glob")
    remedy = "move it away, or name the files with a glob"
    if _is_prose(path):
        remedy = f"{document}=file makes each text file one document"
    return Problem(key, str(path), f"a data file ({SUFFIXES})", remedy)


def sibling(key: str, name: str) -> str:
    """Replace the last part of a key, as in data.sources.0.path → data.sources.0.name."""
    return f"{key.rpartition('.')[0]}.{name}"


def on_hub(path: str) -> bool:
    """Return whether a path is the id of a data set (OWNER/NAME or NAME), not a local path."""
    return path != SAMPLE and not is_local(path) and ID.fullmatch(path) is not None
