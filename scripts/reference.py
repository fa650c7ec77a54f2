"""Write what follows from the code: pages under docs/reference/, and the keys for completion.

    python scripts/reference.py

The pages are the config keys, the commands, the files of a run, the exit codes and the names of
other trainers. `python scripts/reference.py golden > tests/golden/config_keys.txt` fixes the keys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.checkpoint import format as checkpoint
from llmtrain.config.keys import Key, all_keys
from llmtrain.config.suggestions import foreign as foreign_names
from llmtrain.errors import EXIT_CODES
from llmtrain.rundir import contents, record

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
        "of a config and who set them.",
        "",
        "Editors check and complete a config by the JSON schema of `llmtrain config schema`. With",
        "a YAML language server, save it as `schema.json` beside the config, whose first line is",
        "`# yaml-language-server: $schema=schema.json`. In a shell, TAB completes keys and their",
        "values after `llmtrain --install-completion`.",
    )
    for title, expert in (("Basic", False), ("Expert", True)):
        yield from ("", f"## {title}")
        keys = [key for key in all_keys() if key.expert == expert]
        for section in dict.fromkeys(key.name.partition(".")[0] for key in keys):
            inside = [key for key in keys if key.name.partition(".")[0] == section]
            yield from ("", f"### {section}{' for experts' if expert else ''}", "")
            yield from table(("key", "takes", "default", ""), map(row_of_key, inside))


def row_of_key(key: Key) -> Sequence[str]:
    """A row of the table of keys."""
    return f"`{key.name}`", key.takes, f"`{key.default}`", key.description


def foreign() -> Iterator[str]:
    """The page of names that other trainers use."""
    yield from (
        "# Names in other trainers",
        "",
        "The names are those of transformers' Trainer, TRL, axolotl, LLaMA-Factory, litgpt,",
        "torchtitan and Megatron. A config that has one of them is refused with the key of this",
        "table. [Coming from another trainer](../guides/coming-from.md) says what else differs.",
        "",
    )
    rows = (
        (f"`{name}`", f"`{found.key}`" if found.key else "no key", found.advice)
        for name, found in sorted(foreign_names().items())
    )
    yield from table(("you know", "here", "what differs"), rows)


def commands() -> Iterator[str]:
    """The page of all commands."""
    import typer

    from llmtrain.cli.main import app

    yield from (
        "# Commands",
        "",
        "`llmtrain COMMAND --help` shows the same in a terminal. What is printed for people goes",
        "to stderr, results go to stdout; `--json` prints one object. Every command ends with one",
        "of the [exit codes](exit-codes.md).",
    )
    yield from _commands(typer.main.get_command(app), "llmtrain")


def _commands(command: Any, name: str) -> Iterator[str]:
    """The part of a command or of a group, and the parts of the commands in it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield from ("", f"## {name}", "", command.callback.__doc__.split("\n\n")[0], "")
        words = [one.metavar for one in command.params if one.param_type_name == "argument"]
        shown = " ".join([name, *words, "[OPTIONS]"])
        yield from ("```text", shown, "```")
    if rows := [row_of_parameter(one) for one in command.params if not one.hidden]:
        yield from ("", f"## {name}", "") if inner else ("",)
        yield from table(("argument or option", "default", ""), rows)
    for word, one in inner.items():
        yield from _commands(one, f"{name} {word}")


def row_of_parameter(one: Any) -> Sequence[str]:
    """A row of the table of a command's arguments and options."""
    if one.param_type_name == "argument":
        name = one.metavar
    else:
        name = " ".join([*one.opts, *([] if one.is_flag else [one.metavar or ""])]).strip()
    default = "" if one.default in (None, False) else f"`{one.default}`"
    return f"`{name}`", "required" if one.required else default, one.help or ""


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
    yield from table(("field", "what it holds"), described(record.STATUS))
    yield from (
        "",
        "## metrics.jsonl",
        "",
        "Each line is one JSON object with these fields. After a resume the file has the lines of",
        "steps that were done again twice, and the last one counts. A number that is not finite",
        "is null.",
        "",
    )
    yield from table(("field", "what it holds"), described(record.EVERY_LINE))
    for kind, when in record.KINDS.items():
        yield from ("", f"### {kind}", "", f"Written {when}.", "")
        yield from table(("field", "what it holds"), described(record.FIELDS[kind]))
    yield from ("", "## Events", "", "A tracker shows them, too, and the report lists them.", "")
    yield from table(("event", "means"), described(record.WORDS))


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
    "foreign-keys.md": foreign,
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
