"""`llmtrain config …` and `llmtrain init`: show, compare and write configs."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import options
from llmtrain.errors import Problem, UserError
from llmtrain.text import harmless
from llmtrain.types import JsonMapping

if TYPE_CHECKING:
    from llmtrain.config.schema import Config


app = options.App()
_argument = partial(typer.Argument, autocompletion=options.configs_and_runs)


@app.command(help="every value, and who set it")
def show(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    all_: Annotated[bool, typer.Option("--all", help="Show the keys for experts, too.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print the values of a config with their origins; secrets are not shown."""
    from llmtrain.config.load import load_config

    values = dict(_values(load_config(config, overrides or []), experts=all_))
    if as_json:
        print(json.dumps({key: {"value": v, "set_by": by} for key, (v, by) in values.items()}))
        return
    options.show(_listing(values))


@app.command(help="a JSON schema, with which editors check and complete configs")
def schema() -> None:
    """Print the JSON schema of a config."""
    from llmtrain.config.schema import Config

    json.dump(Config.model_json_schema(by_alias=True), sys.stdout, indent=2)
    print()


@app.command(help="the keys in which two configs differ")
def diff(
    one: Annotated[str, _argument(metavar="A", help="A YAML file, or a run directory.")],
    other: Annotated[str, _argument(metavar="B", help="Another one.")],
) -> None:
    """Print the keys whose values differ, with both values."""
    left, right = (_values_of(name) for name in (one, other))
    sides = {key: (_side(left, key), _side(right, key)) for key in {**left, **right}}
    changes = [f"{key}: {a} → {b}" for key, (a, b) in sides.items() if a != b]
    options.show(changes or ["no key differs"])


def _values_of(name: str) -> JsonMapping:
    """Return every value by its dotted key, those of a model or a source one by one.

    name: a config file, or a run directory; the length of a run is that which was trained
    """
    from llmtrain.config import secrets
    from llmtrain.config.binding import bind
    from llmtrain.config.load import load_config
    from llmtrain.report.collect import collect, with_length
    from llmtrain.rundir.contents import CONFIG, METRICS

    run_dir = Path(name)
    of_run = (run_dir / CONFIG).is_file()
    values: JsonMapping = bind(load_config(run_dir / CONFIG if of_run else name)).values
    if of_run and (run_dir / METRICS).is_file():
        values = with_length(values, collect(run_dir).starts)
    without_secrets: JsonMapping = secrets.hidden(values, secrets.hider(os.environ))
    return without_secrets


def _side(values: JsonMapping, key: str) -> str:
    return _text(values[key]) if key in values else "not set"


def _values(config: Config, *, experts: bool) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield (key, (value, origin)) in the order of the schema, without secrets."""
    from llmtrain.config import secrets
    from llmtrain.config.keys import all_keys

    hide = secrets.hider(os.environ)
    tree = secrets.hidden(config.model_dump(mode="json", by_alias=True), hide)
    hidden = {key.name for key in all_keys() if key.expert and not experts}
    for section, keys in tree.items():
        for key, value in keys.items():
            name = f"{section}.{key}"
            origin = _origin(name, config.origins)
            if name not in hidden or origin != "default":
                yield name, (value, origin)


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Return who has set a key or, by an override, a part of it."""
    parts = [by for key, by in origins.items() if key == name or key.startswith(f"{name}.")]
    return "command line" if "command line" in parts else parts[0] if parts else "default"


def _listing(values: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Yield a heading for each section, and below it a line for each key."""
    section, width = "", max(len(key.partition(".")[2]) for key in values)
    for name, (value, origin) in values.items():
        head, _, key = name.partition(".")
        if head != section:
            section = head
            yield f"{head}:"
        by = "" if origin == "default" else f"   # {origin}"
        yield f"  {key:<{width}}  {_text(value)}{by}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+=")


def write(given: Sequence[str], base: str | None, recipe: str | None, out: Path | None) -> None:
    """Write the file, and print its path; for data, then the two commands to give.

    given: places of data, and `section.key=value`
    """
    from llmtrain.tools.recipes import write_recipe

    data = [one for one in given if not _OVERRIDE.match(one)]
    overrides = [one for one in given if _OVERRIDE.match(one)]
    if recipe is not None or not (data or base or overrides):
        if given or base is not None:
            expected = "left out beside data: a recipe is written as it is"
            raise UserError(Problem("--recipe", recipe, expected))
        print(write_recipe(recipe, out))
        return
    if not all(map(str.strip, data or [""])):
        expected = "files, folders or Hub ids to train on"
        raise UserError(Problem("DATA", None, expected, "llmtrain init chat.jsonl --from BASE"))
    if base is not None and not base.strip():
        expected = "a directory, a run, or a model of the Hub"
        raise UserError(Problem("--from", base, expected, "leave it out for a new model"))
    from llmtrain.tools.init import write_config

    path = write_config(data, base, out, overrides)
    command = shlex.quote(harmless(str(path)))
    print(path)
    print(f"  look at the data   llmtrain data inspect {command}")
    print(f"  train              llmtrain train {command}")
