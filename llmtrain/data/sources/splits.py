"""Finds the files of one split in a directory on this machine, as the Hub would.

    README.md            its `configs`, as in a copy of a data set of the Hub
    names and folders    train, validation, test and their other names: test.jsonl, dev/a.parquet
    dataset_dict.json    what `DatasetDict.save_to_disk` writes, a folder for each split
    state.json           what `Dataset.save_to_disk` writes: the files that it lists

A directory without any of these has no splits, and all its files are read. Patterns and names are
those of `datasets`, which is imported only where a name or a README may mean a split.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.schema import DocumentsConfig
from llmtrain.errors import Problem, UserError, first_line, harmless

_log = logging.getLogger(__name__)

CARD = "README.md"
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
# A name that may mean a split: `datasets` decides. The last is data/SPLIT-00000-of-00001.
_LIKELY = re.compile(
    r"(^|[-._ 0-9/])(train(ing)?|val(id(ation)?)?|dev|test(ing)?|eval(uation)?)[-._ 0-9/]"
    r"|^data/.*-\d{5}-of-\d{5}"
)
_SHOWN = 8
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
        own = _read(root / SAVED_STATE, key).get("_split")
        if source.split != "train" and own:  # by default, it is the one that was saved
            _require(source.split, [own], key, "split")
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
        _log.warning("%s: no split has these files: %s", harmless(source.path), _few(left, root))
    return [path for path in there if str(path) in chosen[source.split]]


def _of_card(source: DocumentsConfig, root: Path, key: str) -> Mapping[str, Sequence[str]] | None:
    """Return split → patterns, as the README has them for a config; None if it has none."""
    configs = _configs(root, key)
    beside = key.rpartition(".")[0]
    if not configs:
        _refuse_name(source, root, key)
        return None
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    try:
        name = source.name or MetadataConfigs(configs).get_default_config_name()
        if name is None:
            expected = f"one of: {', '.join(configs)}"
            raise UserError(Problem(f"{beside}.name", None, expected))
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
        raise UserError(Problem(f"{key.rpartition('.')[0]}.name", source.name, expected))


def _configs(root: Path, key: str) -> dict[str, Any]:
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
    for pattern in (one for found in patterns.values() for one in found):
        if "://" in pattern or pattern.startswith("/") or ".." in Path(pattern).parts:
            raise UserError(Problem(key, pattern, f"files below {root}, as {CARD} is to name them"))
    return {str(split): list(found) for split, found in patterns.items()}


def _of_names(root: Path, key: str) -> Mapping[str, Sequence[str]]:
    """Return split → patterns, as names of files and folders have them; {} if all are one split."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, EmptyDatasetError, get_data_patterns

    try:
        found = get_data_patterns(glob.escape(str(root)))
    except (EmptyDatasetError, ValueError) as error:
        expected = f"names of files from which the splits can be told ({first_line(error)})"
        remedy = "name the files of one split with a glob"
        raise UserError(Problem(key, str(root), expected, remedy)) from error
    if found == DEFAULT_PATTERNS_ALL:
        return {}
    return {str(split): list(patterns) for split, patterns in found.items()}


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


def _read(path: Path, key: str) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        expected = f"a file that `save_to_disk` of datasets has written ({first_line(error)})"
        raise UserError(Problem(key, str(path), expected)) from error
    if not isinstance(found, dict):
        expected = "a file that `save_to_disk` of datasets has written"
        raise UserError(Problem(key, str(path), expected))
    return found


def _require(asked: str, names: Iterable[str], key: str, what: str) -> None:
    there = list(names)
    if asked not in there:
        remedy = "or name the files with a glob, which has no splits" if what == "split" else ""
        expected = f"one of: {', '.join(map(str, there[:_SHOWN])) or 'none'}"
        raise UserError(Problem(f"{key.rpartition('.')[0]}.{what}", asked, expected, remedy))


def _few(paths: Sequence[str], root: Path) -> str:
    names = [harmless(Path(path).relative_to(root).as_posix()) for path in paths[:_SHOWN]]
    return ", ".join(names) + (f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN))
