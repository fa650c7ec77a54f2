"""Load a YAML file and `section.key=value` overrides as a `Config`, or report every mistake.

Nothing is read twice and nothing heavy is imported, so a mistake is reported within a third of a
second. Everything without a mistake is checked too, so that one start reports all mistakes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from llmtrain.config import checks, secrets, yaml12
from llmtrain.config.checks import Rule
from llmtrain.config.keys import ITEM, Key, all_keys, sections
from llmtrain.config.schema import Config, Section
from llmtrain.config.suggestions import guess, near_section
from llmtrain.errors import UNKNOWN_KEY, Problem, UserError

Tree = dict[str, Any]

_INDEX = re.compile(r"[0-9]+")
_HALF = {"fp16", "float16", "half", "16", "16-mixed", "fp16-mixed"}
_OTHER_NAMES = {"bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32", "32": "fp32"}


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply `section.key=value` overrides to it.

    An override's value is read as YAML. A number in its key is an index in a list
    (`data.sources.0.weight=0.7`). If `run.dir` is null, it becomes `runs/<file stem>`. If nothing
    is evaluated, no best checkpoints are kept. Raises UserError with every problem of the file and
    the overrides.
    """
    return load_checked(path, overrides, ())


def load_checked(
    path: str | os.PathLike[str], overrides: Sequence[str], rules: Sequence[Rule]
) -> Config:
    """Do what `load_config` does, and also check further rules between sections."""
    document = yaml12.parse(_text(Path(path)))
    tree = _tree(document, str(path))
    for override in overrides:
        _override(tree, override, document)
    config, found = _validate(tree, document.source, rules)
    problems = secrets.clear([*document.problems, *found], secrets.in_config(tree))
    if problems or config is None:
        raise UserError(*problems, where=str(path))
    return _complete(config, Path(path).stem)


def _complete(config: Config, name: str) -> Config:
    """Return the config with defaults that depend on the file's name and on other sections."""
    run, checkpoint = config.run, config.checkpoint
    if run.dir is None:
        run = run.model_copy(update={"dir": f"runs/{name}"})
    if not checks.evaluates(config.data, config.evaluation):
        checkpoint = checkpoint.model_copy(update={"keep_best": 0})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem(str(path), None, f"UTF-8; byte {error.start} is not")
    except FileNotFoundError:
        problem = Problem(str(path), None, "a config file that exists", _config_beside(path))
    except IsADirectoryError:
        inside = str(path / "config.yaml") if (path / "config.yaml").is_file() else ""
        problem = Problem(str(path), None, "a YAML file, not a directory", inside)
    except OSError as error:
        problem = Problem(str(path), None, f"a readable file ({error.strerror})")
    raise UserError(problem)


def _config_beside(path: Path) -> str:
    """Return a remedy that names the configs in the directory of a missing one."""
    folder = path.parent
    names = sorted(item.name for item in folder.glob("[!.]*.yaml")) if folder.is_dir() else []
    return f"one of {', '.join(names[:5])} in {folder}" if names else f"{folder} has no .yaml file"


def _tree(document: yaml12.Document, path: str) -> Tree:
    """Return the outermost mapping. An empty section (all commented out) has its defaults.

    Raises UserError if the outermost value is not a mapping, as there are no sections then.
    """
    if document.value is None and not document.problems:
        return {}
    if not isinstance(document.value, dict):
        expected = "a mapping of sections"
        no_mapping = Problem("the file", _shown(document.value), expected, "model: …")
        problems = secrets.clear(document.problems or [no_mapping], [])
        raise UserError(*problems, where=path)
    names = sections()
    return {
        key: {} if value is None and key in names else value
        for key, value in document.value.items()
    }


# --- overrides


def _override(tree: Tree, override: str, document: yaml12.Document) -> None:
    """Put one `section.key=value` into the tree; add its problems to those of the document."""
    name, equals, text = override.partition("=")
    parts = name.split(".")
    if not equals or not all(parts):
        expected = "section.key=value, such as training.steps=100"
        shown = secrets.hide_unparsed(override)
        document.problems.append(Problem(f"override {shown}", None, expected))
        return
    value = yaml12.parse(text)
    if value.problems:
        reason = value.problems[0].remedy or value.problems[0].expected
        shown = secrets.hide_unparsed(override).partition("=")[2]
        remedy = f"if it is a string, quote it: '{name}=\"{shown}\"'"
        document.problems.append(Problem(name, shown, f"a value in YAML ({reason})", remedy))
        return
    path, problem = _place(tree, parts, value.value)
    if problem:
        document.problems.append(problem)
        return
    for old in [old for old in document.source if old[: len(path)] == path]:
        del document.source[old]
    document.source |= {(*path, *inner): raw for inner, raw in value.source.items()}


def _place(tree: Tree, parts: list[str], value: object) -> tuple[yaml12.Path, Problem | None]:
    """Set a value in the tree, and make missing mappings on the way to it.

    Returns the path in the tree, or the problem because of which nothing was set.
    """
    here: Any = tree
    path: list[str | int] = []
    for part, inner in zip(parts, [*parts[1:], None], strict=True):
        step: str | int = part
        if isinstance(here, list):
            if not _INDEX.fullmatch(part) or int(part) >= len(here):
                return (), _no_such_item(parts, path, here)
            step = int(part)
        elif not isinstance(here, dict):
            return (), _no_mapping(parts, path, here)
        path.append(step)
        if inner is None:
            here[step] = value
        elif isinstance(step, str) and here.get(step) is None:
            here[step] = {}
        here = here[step]
    return tuple(path), None


def _no_such_item(parts: list[str], path: list[str | int], items: list[Any]) -> Problem:
    owner = yaml12.dotted_name(tuple(path))
    there = f"{owner} has {len(items)} of them, counted from 0"
    return Problem(".".join(parts), None, f"the number of an item; {there}", f"{owner}=[…]")


def _no_mapping(parts: list[str], path: list[str | int], here: object) -> Problem:
    owner = yaml12.dotted_name(tuple(path))
    remedy = f"'{owner}={{{'.'.join(parts[len(path) :])}: …}}'"
    return Problem(".".join(parts), None, f"{owner} is {_shown(here)}, not a mapping", remedy)


# --- validation


def _validate(
    tree: Tree, source: Mapping[yaml12.Path, str], rules: Sequence[Rule]
) -> tuple[Config | None, list[Problem]]:
    """Return the config if it is valid, and every problem of keys, types and rules."""
    try:
        config = Config.model_validate(tree, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        locations = [(str(item["type"]), item["loc"]) for item in errors]
    else:
        further = (rule(*(getattr(config, name) for name in names)) for rule, names in rules)
        return config, [*checks.check(config), *chain.from_iterable(further)]
    broken = {location[0] for _, location in locations if location}
    misspelt = {near_section(str(name)) for name in broken - sections()}
    locations = [  # a section that is present under a misspelt name is not missing
        (kind, location)
        for kind, location in locations
        if kind != "missing" or location[0] not in misspelt - tree.keys()
    ]
    return None, [
        *_schema_problems(tree, locations, source),
        *_partly(tree, broken | misspelt, rules),
    ]


def _partly(tree: Tree, broken: set[str | int], further: Sequence[Rule]) -> Iterator[Problem]:
    """Apply each rule whose sections are all valid by themselves."""
    for rule, names in (*checks.RULES, *further):
        if broken.isdisjoint(names):
            yield from rule(*(_section(tree, name) for name in names))


def _section(tree: Tree, name: str) -> Section:
    kind = cast("type[Section]", Config.model_fields[name].annotation)
    return kind.model_validate(tree.get(name, {}), by_alias=True, by_name=False)


def _schema_problems(
    tree: Tree,
    locations: Sequence[tuple[str, tuple[str | int, ...]]],
    source: Mapping[yaml12.Path, str],
) -> Iterator[Problem]:
    """Yield one problem for each key, however many branches of a union refused its value."""
    seen: set[yaml12.Path] = set()
    for kind, location in locations:
        path = location if kind == "extra_forbidden" else _key_path(location)
        if path in seen or (kind == "too_short" and _at(tree, path)):
            continue  # reported already; or the list has wrong items, not too few
        seen.add(path)
        key = _key(path)
        if kind == "extra_forbidden" and key is None:
            yield _unknown(path, _at(tree, path))
        elif kind == "missing":
            takes = key.takes if key else "a mapping"
            advice = key.description if key else ""
            yield Problem(yaml12.dotted_name(path), None, f"{takes}; there is no default", advice)
        elif key is None:
            takes = "{path: …}" if _name_of(path) == f"data.sources.{ITEM}" else "a mapping of keys"
            yield Problem(yaml12.dotted_name(path), _shown(_at(tree, path)), takes)
        else:
            yield _wrong_value(path, key, _at(tree, path), source.get(path))


def _key_path(location: tuple[str | int, ...]) -> yaml12.Path:
    """Return the path of the key, without the union branches and list items of the location.

    ("data", "lanes", "literal['auto']") → ("data", "lanes")
    """
    for end in range(1, len(location) + 1):
        named = _name_of(location[:end])
        if named == "data.sources" and len(location) > end:
            continue
        if any(key.name == named for key in all_keys()):
            return location[:end]
    return location


def _name_of(path: yaml12.Path) -> str:
    return ".".join(ITEM if isinstance(part, int) else part for part in path)


def _key(path: yaml12.Path) -> Key | None:
    return next((key for key in all_keys() if key.name == _name_of(path)), None)


def _at(tree: Any, path: yaml12.Path) -> object:
    """Return the value at a path; None if there is none."""
    for part in path:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return cast("object", tree)


def _unknown(path: yaml12.Path, value: object) -> Problem:
    name = yaml12.dotted_name(path)
    found = guess(name, is_section=isinstance(value, dict))
    shown = _shown(value)
    if not found.key:
        return Problem(name, shown, UNKNOWN_KEY, found.advice)
    expected = f"{UNKNOWN_KEY}; did you mean {found.key}?"
    return Problem(name, shown, expected, f"{found.key}: {found.advice}" if found.advice else "")


def _wrong_value(path: yaml12.Path, key: Key, value: object, raw: str | None) -> Problem:
    shown = raw if raw is not None and not isinstance(value, str) else _shown(value)
    return Problem(yaml12.dotted_name(path), shown, key.takes, _advice(key, value, shown))


def _advice(key: Key, value: object, shown: str) -> str:
    """Return what to write instead; "" if that is not known."""
    text = str(value).strip().lower()
    if key.name == "training.precision" and text in _HALF | {"true", "false"} | set(_OTHER_NAMES):
        instead = "bf16, or fp32 on GPUs older than Ampere"
        return _OTHER_NAMES.get(text, f"{instead}; fp16 is not offered")
    if any(isinstance(one, str) and not one.strip() for one in _list_of(value)):
        return "one that is not blank"
    if value is None:
        return f"leave it out: the default is {key.default}" if not key.required else ""
    if key.text and isinstance(value, int | float):
        return f'put it in quotes: "{shown}"'
    if isinstance(value, str):
        number = yaml12.parse(value.replace("_", "")).value
        is_number = isinstance(number, int | float) and "number" in key.takes
        return f"{value.replace('_', '')}, without quotes or underscores" if is_number else ""
    if isinstance(value, float) and value.is_integer() and "whole" in key.takes:
        return f"{int(value)}"
    return ""


def _list_of(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _shown(value: object) -> str:
    """Return a value as a message shows it: one line, at most 60 characters, no secrets.

    Secrets are removed before it is shortened, as a part of a secret would not be recognized.
    """
    text = secrets.hide_unparsed(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:59] + "…"
