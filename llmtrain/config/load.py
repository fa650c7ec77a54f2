"""Load a YAML file and `section.key=value` overrides as a `Config`, or report every mistake.

Nothing is read twice and nothing heavy is imported, so a mistake is reported within a third of a
second. Everything without a mistake is checked too, so that one start reports all mistakes.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmtrain.config import checks, secrets, yaml12
from llmtrain.config.checks import Rule
from llmtrain.config.keys import Key, all_keys, general_name, guess, near_section, sections
from llmtrain.config.schema import Config, Origin, Section
from llmtrain.errors import UNKNOWN_KEY, Problem, UserError
from llmtrain.types import JsonObject

Tree = JsonObject

_HALF = ("fp16", "float16", "half", "16", "16-mixed", "fp16-mixed", "true", "false")
_NOT_OFFERED = "bf16, or fp32 on GPUs older than Ampere; fp16 is not offered"
_OTHER_NAMES = {"bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32", "32": "fp32"}
_PRECISIONS = dict.fromkeys(_HALF, _NOT_OFFERED) | _OTHER_NAMES


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] | Mapping[str, object] = (),
    rules: Sequence[Rule] = (),
) -> Config:
    """Read a config file and apply `section.key=value` overrides to it.

    An override's value is read as YAML. A number in its key is an index in a list
    (`data.sources.0.weight=0.7`). If `run.dir` is null, it becomes `runs/<file stem>`. If nothing
    is evaluated, no best checkpoints are kept.

    overrides: strings as on the command line, or values by dotted key:
        {"training.steps": 50}
    rules: what to check besides the rules of every config. They include the split of a batch over
        processes, with which the micro-batch is checked too: a remedy for it alone may not hold.

    Raises UserError with every problem of the file and the overrides.
    """
    document = yaml12.parse(_text(Path(path)))
    tree = _tree(document, str(path))
    origins: dict[str, Origin] = {
        f"{section}.{key}": "file"
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key in keys
    }
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    for override in overrides:
        try:
            origins[_override(tree, override, document.source)] = "command line"
        except UserError as error:
            document.problems += error.problems
    config, refused = _validate(tree, document.source, rules)
    problems = secrets.clear([*document.problems, *refused], secrets.in_config(tree))
    if problems or config is None:
        raise UserError(*problems, where=str(path))
    # Defaults that depend on the file's name and on other sections.
    run, checkpoint = config.run, config.checkpoint
    if run.dir is None:
        run = run.model_copy(update={"dir": f"runs/{Path(path).stem}"})
    if not checks.evaluates(config.data, config.evaluation):
        checkpoint = checkpoint.model_copy(update={"keep_best": 0})
    complete = config.model_copy(update={"run": run, "checkpoint": checkpoint})
    complete._origins.update(origins)
    return complete


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem(str(path), None, f"UTF-8; byte {error.start} is not")
    except FileNotFoundError:
        folder = path.parent
        names = sorted(one.name for one in folder.glob("[!.]*.yaml")) if folder.is_dir() else []
        beside = f"one of {', '.join(names[:5])} in {folder}"
        remedy = beside if names else f"{folder} has no .yaml file"
        problem = Problem(str(path), None, "a config file that exists", remedy)
    except IsADirectoryError:
        inside = str(path / "config.yaml") if (path / "config.yaml").is_file() else ""
        problem = Problem(str(path), None, "a YAML file, not a directory", inside)
    except OSError as error:
        problem = Problem(str(path), None, f"a readable file ({error.strerror})")
    raise UserError(problem)


def _tree(document: yaml12.YamlDocument, path: str) -> Tree:
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
    return {
        key: {} if value is None and key in Config.model_fields else value
        for key, value in document.value.items()
    }


# --- overrides


def _override(tree: Tree, override: str, source: dict[yaml12.Path, str]) -> str:
    """Put one `section.key=value` into the tree, and return the key.

    Raises UserError if that is not possible.
    """
    name, equals, text = override.partition("=")
    parts, shown = name.split("."), secrets.hide_unparsed(override)
    if not equals or not all(parts):
        expected = "section.key=value, such as training.steps=100"
        raise UserError(Problem(f"override {shown}", None, expected))
    value = yaml12.parse(text)
    if value.problems:
        reason = value.problems[0].remedy or value.problems[0].expected
        given = shown.partition("=")[2]
        quoted, takes = f'"{given}"', {key.name: key.takes for key in all_keys()}
        if takes.get(general_name(name), "").startswith("a list"):
            items = (item.strip().strip("'\"") for item in given.strip().strip("[]").split(","))
            quoted = json.dumps([*items], ensure_ascii=False)
        remedy = f"if it is a string, quote it: '{name}={quoted}'"
        raise UserError(Problem(name, given, f"a value in YAML ({reason})", remedy))
    path = _place(tree, parts, value.value)
    for old in [old for old in source if old[: len(path)] == path]:
        del source[old]
    source |= {(*path, *inner): raw for inner, raw in value.source.items()}
    return name


def _place(tree: Tree, parts: list[str], value: object) -> yaml12.Path:
    """Set a value in the tree, make missing mappings on the way to it, and return its path.

    Raises UserError, and sets nothing, if a part is neither in a mapping nor the number of an item.
    """
    here: Any = tree
    path: yaml12.Path = ()
    for depth, part in enumerate(parts):
        owner = yaml12.dotted_name(path)
        step: str | int = part
        if isinstance(here, list):
            if not (part.isdecimal() and int(part) < len(here)):
                expected = f"the number of an item; {owner} has {len(here)} of them, counted from 0"
                raise UserError(Problem(".".join(parts), None, expected, f"{owner}=[…]"))
            step = int(part)
        elif not isinstance(here, dict):
            remedy = f"'{owner}={{{'.'.join(parts[depth:])}: …}}'"
            expected = f"{owner} is {_shown(here)}, not a mapping"
            raise UserError(Problem(".".join(parts), None, expected, remedy))
        path = (*path, step)
        if depth == len(parts) - 1:
            here[step] = value
        elif isinstance(here, dict) and here.get(step) is None:
            here[step] = {}
        here = here[step]
    return path


# --- validation


def _validate(
    tree: Tree, source: Mapping[yaml12.Path, str], rules: Sequence[Rule]
) -> tuple[Config | None, list[Problem]]:
    """Return the config if it is valid, and every problem of keys, types and rules."""
    every = [rule for rule in checks.RULES if not rules or rule is not checks.check_micro_batch]
    every += rules
    try:
        config = Config.model_validate(tree, by_alias=True, by_name=False)
        return config, list(checks.apply(every, dict(config)))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        broken = {item["loc"][0] for item in errors}
        broken |= {near_section(str(name)) for name in broken - Config.model_fields.keys()}
        problems = _schema_problems(tree, errors, source)
    valid = {
        name: cast("type[Section]", field.annotation).model_validate(
            tree.get(name, {}), by_alias=True, by_name=False
        )
        for name, field in Config.model_fields.items()
        if name not in broken
    }
    return None, [*problems, *checks.apply(every, valid)]


def _schema_problems(
    tree: Tree, errors: Sequence[ErrorDetails], source: Mapping[yaml12.Path, str]
) -> Iterator[Problem]:
    """Yield one problem for each key, however many branches of a union refused its value."""
    keys = {key.name: key for key in all_keys()}
    misspelt = {near_section(name) for name in tree.keys() - Config.model_fields.keys()}
    # A section that is present under a misspelt name is not missing.
    seen: set[yaml12.Path] = {(name,) for name in misspelt - tree.keys()}
    named = keys.keys() | sections()
    limits = {
        _known_part(error["loc"], named): f"at most {error['ctx']['le']:,.15g}"
        for error in errors
        if error["type"] == "less_than_equal"
    }
    for error in errors:
        kind, location = error["type"], error["loc"]
        path = _known_part(location, named)
        is_unknown = kind == "extra_forbidden" and path == location[:-1]
        path = location if is_unknown else path
        name, value = yaml12.dotted_name(path), _at(tree, path)
        if path in seen or (kind == "too_short" and value):
            continue  # reported already; or the list has wrong items, not too few
        seen.add(path)
        key = keys.get(general_name(name))
        takes = key.takes if key else "a mapping of keys"
        takes = takes if "≤" in takes else limits.get(path, takes)
        if is_unknown:
            meant = guess(name, is_section=isinstance(value, dict))
            expected, advice = UNKNOWN_KEY, meant.advice
            if meant.key:
                expected = f"{UNKNOWN_KEY}; did you mean {meant.key}?"
                advice = f"{meant.key}: {advice}" if advice else ""
            yield Problem(name, _shown(value), expected, advice)
        elif kind == "missing" and path == location:  # not an item of a list
            advice = key.description if key else ""
            yield Problem(name, None, f"{takes}; there is no default", advice)
        elif key is None:
            takes = "{path: …}" if isinstance(path[-1], int) else takes
            yield Problem(name, _shown(value), takes)
        else:
            shown = _shown(value) if isinstance(value, str) else source.get(path, _shown(value))
            yield Problem(name, shown, takes, _advice(key, value, shown))


def _known_part(location: yaml12.Path, known: Collection[str]) -> yaml12.Path:
    """Return the path of the key or section, without the branch of a union or an item of a list.

    ("data", "lanes", "literal['auto']") → ("data", "lanes")
    """
    while location and general_name(yaml12.dotted_name(location)) not in known:
        location = location[:-1]
    return location


def _at(tree: object, path: yaml12.Path) -> object:
    """Return the value at a path; None if nothing is there."""
    for part in path:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _advice(key: Key, value: object, shown: str) -> str:
    """Return what to write instead; "" if that is not known."""
    text = str(value).strip().lower()
    if key.name == "training.precision" and text in _PRECISIONS:
        return _PRECISIONS[text]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and not item.strip() for item in items):
        return "one that is not blank"
    if value is None:
        return f"leave it out: the default is {key.default}" if key.default != "required" else ""
    if key.takes.startswith("a string") and isinstance(value, int | float):
        return f'put it in quotes: "{shown}"'
    if isinstance(value, str):
        number = yaml12.parse(value.replace("_", "")).value
        is_number = type(number) in (int, float) and "number" in key.takes
        return f"{value.replace('_', '')}, without quotes or underscores" if is_number else ""
    if isinstance(value, float) and value.is_integer() and "whole" in key.takes:
        return f"{int(value)}"
    return ""


def _shown(value: object) -> str:
    """Return a value as a message shows it: one line, at most 60 characters, no secrets.

    Secrets are removed before it is shortened, as a part of a secret would not be recognized.
    """
    text = secrets.hide_unparsed(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:59] + "…"
