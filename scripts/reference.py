"""Write what follows from the code: pages under docs/reference/, and the keys for completion.

    python scripts/reference.py

The pages are the config keys, the commands, the files of a run, the exit codes and the names for
Python. `python scripts/reference.py golden > tests/golden/config_keys.txt` fixes the keys.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import llmtrain
from llmtrain.checkpoint import format as checkpoint
from llmtrain.config.keys import Key, all_keys
from llmtrain.errors import EXIT_CODES
from llmtrain.rundir import contents, words
from llmtrain.types import Batch

# Functions whose results are classes without a public name.
RETURNING = ("plan", "generate", "evaluate", "export")
ROOT = Path(__file__).resolve().parents[1]


def golden() -> str:
    """One line a key: name, type, default."""
    width = max(len(key.name) for key in all_keys())
    lines = (f"{key.name:<{width}}  {key.takes}  [{key.default}]" for key in all_keys())
    return "\n".join(lines) + "\n"


def completion() -> str:
    """The list from which a shell completes: key → default and other words, as JSON."""
    keys = {
        key.name: list(dict.fromkeys([*_default(key.default), *key.words])) for key in all_keys()
    }
    lines = (f'"{name}": {json.dumps(words, ensure_ascii=False)}' for name, words in keys.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _default(text: str) -> list[str]:
    """Return a default as YAML spells it; [] for a key without one."""
    if text == "required":
        return []
    value = json.loads(text)
    return [value if isinstance(value, str) else text]


def config() -> Iterator[str]:
    """The page of all keys: first those that most people need, then those for experts."""
    yield from (
        "# Config keys",
        "",
        "A config is a YAML file. `section.key=value` on the command line takes precedence. `*` is",
        "the number of an item of a list, counted from 0. `llmtrain config show` prints the values",
        "of a config and who set them. An item of `evaluation.sources` has the keys of one of",
        "`data.sources`, but not `weight`, `max_epochs` and `id_column`.",
        "",
        "Editors check and complete a config by the JSON schema of `llmtrain config schema`. With",
        "a YAML language server, save it as `schema.json` beside the config, whose first line is",
        "`# yaml-language-server: $schema=schema.json`. In a shell, TAB completes keys and their",
        "values after `llmtrain --install-completion`.",
    )
    for title, expert in (("Basic", False), ("Expert", True)):
        yield from ("", f"## {title}")
        keys = [key for key in all_keys() if key.expert == expert and not _repeats(key)]
        for section in dict.fromkeys(key.name.partition(".")[0] for key in keys):
            inside = [key for key in keys if key.name.partition(".")[0] == section]
            yield from ("", f"### {section}{' for experts' if expert else ''}", "")
            yield from table(("key", "takes", "default", ""), map(row_of_key, inside))


def _repeats(key: Key) -> bool:
    """Whether a key of validation data means what that of `data.sources` does."""
    twin = key.name.replace("evaluation.sources.", "data.sources.")
    return any(twin == other.name != key.name for other in all_keys())


def row_of_key(key: Key) -> Sequence[str]:
    """A row of the table of keys."""
    return f"`{key.name}`", key.takes, f"`{key.default}`", key.description


def python() -> Iterator[str]:
    """The page of the public names of the package and of what they return, from docstrings."""
    yield from (
        "# Python",
        "",
        "What `import llmtrain` offers, and what its functions return. Everything else may change",
        "without notice. [Notebooks and Python](../guides/python.md) has programs that use it.",
        "",
        "## Functions",
    )
    public = [getattr(llmtrain, name) for name in llmtrain.__all__]
    for one in filter(inspect.isfunction, public):
        yield from ("", f"### {one.__name__}", "", "```text", _call(one), "```", "")
        yield from _docstring(one)
    yield from ("", "## Classes")
    returned = [get_type_hints(getattr(llmtrain, name))["return"] for name in RETURNING]
    for one in [*filter(inspect.isclass, public), *returned, Batch]:
        yield from ("", f"### {one.__name__}", "")
        yield from _docstring(one)
        yield from _members(one)


def _call(one: Any) -> str:
    """A function's name, parameters and result, as Python's own documentation writes them."""
    signature = inspect.signature(one)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    result = re.sub(r"\w+\.", "", inspect.formatannotation(signature.return_annotation)).strip("'")
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return f"{one.__name__}{re.sub(r'<function .*? at 0x[0-9a-f]+>', '…', shown)} -> {result}"


def _docstring(one: Any) -> Iterator[str]:
    """A docstring as Markdown: of `name: meaning` it makes a list."""
    for line in (inspect.getdoc(one) or "").splitlines():
        name, colon, meaning = line.partition(": ")
        yield f"- `{name}`: {meaning}" if colon and name.isidentifier() else line


def _members(one: Any) -> Iterator[str]:
    """The fields of a class that its docstring does not explain, its properties and methods."""
    names = [field.name for field in dataclasses.fields(one)] if is_dataclass(one) else []
    if left := [name for name in names if f"\n{name}: " not in (inspect.getdoc(one) or "")]:
        yield from ("", f"Other fields: {', '.join(f'`{name}`' for name in left)}.")
    lines = [
        f"- `{name}{'' if isinstance(member, property) else '()'}`: {words}"
        for name, member in vars(one).items()
        if isinstance(member, property) or inspect.isfunction(member)
        if not name.startswith(("_", "model_")) and (words := inspect.getdoc(member))
    ]
    if lines:
        yield from ("", *(" ".join(line.split()) for line in lines))


def commands() -> Iterator[str]:
    """The page of all commands."""
    import typer

    from llmtrain.cli.main import app

    every = dict(_commands(typer.main.get_command(app), "llmtrain"))
    common = _common(row for command in every.values() for row in rows_of(command))
    yield from (
        "# Commands",
        "",
        "`llmtrain COMMAND --help` shows the same in a terminal. What is printed for people goes",
        "to stderr, results go to stdout. Every command ends with one of the",
        "[exit codes](exit-codes.md). Several commands take these:",
        "",
    )
    yield from table(("argument or option", ""), common)
    for name, command in every.items():
        own = [row for row in rows_of(command) if row not in common]
        yield from ("", f"## {name}")
        if not hasattr(command, "commands"):
            words = [usage(one) for one in command.params if one.param_type_name == "argument"]
            words += ["[--json]"] * takes_json(command)
            words += ["[OPTIONS]"] * any("--" in row[0] for row in own)
            yield from ("", command.callback.__doc__.split("\n\n")[0], "")
            yield from ("```text", " ".join([name, *words]), "```")
        if own:
            yield ""
            yield from table(("argument or option", ""), own)


def usage(argument: Any) -> str:
    """The word of an argument in the line of its command: in brackets if it can be left out."""
    word: str = argument.metavar
    return word if argument.required or word.startswith("[") else f"[{word}]"


def takes_json(command: Any) -> bool:
    """Whether a command can print one object instead of text."""
    return any("--json" in one.opts for one in command.params)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command, or a group that has options and the commands in it, with their names."""
    inner = getattr(command, "commands", {})
    if not inner or rows_of(command):
        yield name, command
    for word, one in inner.items():
        yield from _commands(one, f"{name} {word}")


def _common(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the rows that three commands have, if most commands with that name mean the same."""
    counts = Counter(tuple(row) for row in rows).most_common()
    often = [row for row, count in counts if count >= 3]
    return [row for row in often if [other[0] for other in often].count(row[0]) == 1]


def rows_of(command: Any) -> list[tuple[str, ...]]:
    """The rows of the table of a command's arguments and options."""
    return [row_of_parameter(one) for one in command.params if not one.hidden]


def row_of_parameter(one: Any) -> tuple[str, ...]:
    """A row of the table of a command's arguments and options."""
    if one.param_type_name == "argument":
        name = one.metavar
    else:
        name = " ".join([*one.opts, *([] if one.is_flag else [one.metavar or ""])]).strip()
    words = [one.help or ""]
    if one.default not in (None, False):
        words += [f"Default: `{one.default}`."]
    elif one.required and one.param_type_name == "option":
        words += ["Required."]
    return f"`{name}`", " ".join(words)


def exit_codes() -> Iterator[str]:
    """The page of exit codes."""
    yield from (
        "# Exit codes",
        "",
        "Every command and every process of a run ends with one of these codes.",
        "",
    )
    rows = [(f"{code}", means, do) for code, (means, do) in EXIT_CODES.items()]
    yield from table(("code", "means", "do"), rows)
    yield from (
        "",
        "A launcher has exit codes of its own: `accelerate launch` and torchrun return 1 for any",
        "process that failed. The run's own code is in [`status.json`](files.md#statusjson). In a",
        "shell, a process that a signal killed has 128 and the signal: 137 after `kill -9`.",
        "[Stop and resume](../guides/stop-and-resume.md#what-is-started-again) says what",
        "`llmtrain supervise` does after each.",
    )


def files() -> Iterator[str]:
    """The page of the files of a run, and of what is in them."""
    yield from (
        "# Files of a run",
        "",
        "Everything that a run knows is in its directory, `run.dir`. There is no database and no",
        "service.",
        "",
    )
    yield from table(("path", "what it holds"), described(contents.WORDS))
    yield from (
        "",
        "## A checkpoint",
        "",
        "`from_pretrained` of transformers, or of peft for adapters, opens the directory.",
        "",
    )
    yield from table(("file", "what it holds"), described(checkpoint.WORDS))
    yield from ("", "## status.json", "")
    yield from table(("field", "what it holds"), described(words.STATUS))
    yield from (
        "",
        "## metrics.jsonl",
        "",
        "Each line is one JSON object with these fields. After a resume the file has the lines of",
        "steps that were done again twice, and the last one counts. A number that is not finite",
        "is null.",
        "",
    )
    yield from table(("field", "what it holds"), described(words.EVERY_LINE))
    for kind, when in words.KINDS.items():
        yield from ("", f"### {kind}", "", f"Written {when}.", "")
        yield from table(("field", "what it holds"), described(words.FIELDS[kind]))
    yield from ("", "## Events", "", "A tracker shows them, too, and the report lists them.", "")
    yield from table(("event", "means"), described(words.WORDS))


def described(words: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """The rows of a table of names and what they mean."""
    return ((f"`{name}`" if " files" not in name else name, said) for name, said in words.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(head)} |".replace("  ", " ")
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


PAGES = {
    "config.md": config,
    "commands.md": commands,
    "files.md": files,
    "exit-codes.md": exit_codes,
    "python.md": python,
}


def page(name: str) -> str:
    """The text of one of the pages."""
    return "\n".join(PAGES[name]()) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["golden"]:
        print(golden(), end="")
    else:
        for name in PAGES:
            (ROOT / "docs" / "reference" / name).write_text(page(name), "utf-8")
        (ROOT / "llmtrain" / "config" / "keys.json").write_text(completion(), "utf-8")
