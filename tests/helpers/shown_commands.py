"""Whether a command of a page could be given, found out without giving it.

Each program that a page names has its check: ours is parsed by its own parser, and the config by
`load_config`; launchers are parsed by theirs; targets of make and files of the project exist.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

import typer
from helpers.pages import command_lines
from helpers.ranks import ROOT

from llmtrain.cli.main import app
from llmtrain.config.keys import all_keys, general_name, sections
from llmtrain.config.load import load_config
from llmtrain.errors import UserError

OURS = r"(?:configs|accelerate_configs|scripts|benchmarks|tests)/[\w./-]+\.(?:ya?ml|py|sh|sbatch)"
SHELL = {"for", "done", "fi", "wait", "while", "if", "else", "esac", "exit", "export"}
SYSTEM = {
    *("cat", "cd", "cp", "du", "echo", "git", "grep", "head", "jq", "kill", "less", "ls", "mkdir"),
    *("mv", "nvidia-smi", "pip", "rm", "rsync", "scp", "sha256sum", "sleep", "source", "tail"),
    *("tee", "tensorboard", "touch", "mlflow", "trackio", "wandb", "squeue", "scancel", "curl"),
    *("try_versions.sh", "uv", "venv"),
}


class CannotBeGivenError(Exception):
    """A command of a page that would be refused, and why."""


def check(text: str) -> None:
    """Check every command of a bash fence. Raises CannotBeGivenError."""
    for line in command_lines(text):
        if "…" in line or line.startswith("$ "):
            raise CannotBeGivenError(f"no line that can be copied: {line}")
        for name in re.findall(rf"(?<![\w/.-]){OURS}", line):
            if not (ROOT / name).is_file():
                raise CannotBeGivenError(f"there is no {name}: {line}")
        for words in _simple_commands(line):
            try:
                check_words(words)
            except CannotBeGivenError as error:
                raise CannotBeGivenError(f"{error}: {line}") from error


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell: without operators, redirections and variables."""
    split = shlex.shlex(re.sub(r"(?<=\s)\d(?=>)", "", line), posix=True, punctuation_chars=True)
    split.whitespace_split = True
    found: list[str] = []
    for word in [*split, ";"]:
        if not set(word) <= set("();<>|&"):
            found.append(word)
        elif set(word) & set("<>"):
            found.append(">")
        elif found:
            yield _bare(found)
            found = []


def _bare(words: list[str]) -> list[str]:
    """Without `VAR=value`, `do`, `nohup` … in front, and without redirections behind."""
    kept = [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if word != ">" and before != ">"
    ]
    while kept and (re.match(r"[A-Z_]+=", kept[0]) or kept[0] in ("do", "then", "nohup", "exec")):
        kept = kept[1:]
    return kept


def check_words(words: Sequence[str]) -> None:
    """Check one simple command. Raises CannotBeGivenError."""
    if not words:
        return
    program = PurePath(words[0]).name
    if program in SHELL or program in SYSTEM:
        return
    if program not in CHECKS:
        raise CannotBeGivenError(f"{program} is no program that pages name")
    CHECKS[program](words[1:])


def _llmtrain(words: Sequence[str]) -> None:
    context = _parse(words)
    values = context.params
    if context.info_name == "supervise":
        check_words(values["command"])
    elif values.get("config") and "overrides" in values:
        check_config(values["config"], values["overrides"] or ())


def _parse(words: Sequence[str]) -> Any:
    """The context of the command, whose parameters are parsed."""
    command: Any = typer.main.get_command(app)
    name, context, rest = "llmtrain", None, list(words)
    try:
        while True:
            context = command.make_context(name, rest, parent=context)
            if not hasattr(command, "commands"):
                return context
            name, command, rest = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
    except Exception as error:
        kind = type(error).__name__
        if kind == "Exit":  # --help or --version
            return context or command.make_context("llmtrain", ["watch", "RUN"])
        raise CannotBeGivenError(f"{kind}: {getattr(error, 'message', error)}") from error


def check_config(config: str, overrides: Sequence[str]) -> None:
    """Load a config of ours with overrides; of another one, check the keys."""
    if (ROOT / config).is_file():
        try:
            load_config(ROOT / config, list(overrides))
        except UserError as error:
            raise CannotBeGivenError(str(error)) from error
        return
    known = {key.name for key in all_keys()} | sections()
    for one in overrides:
        name, equals, _ = one.partition("=")
        inner = general_name(name).startswith("model.config.")
        if not equals or not (inner or general_name(name) in known):
            raise CannotBeGivenError(f"no key of a config: {one}")


def _accelerate(words: Sequence[str]) -> None:
    if words[0] != "launch":
        return
    from accelerate.commands.launch import launch_command_parser

    asked = _by_argparse(launch_command_parser(), words[1:])
    _script(asked.training_script, asked.training_script_args, module=asked.module)


def _torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    asked = _by_argparse(get_args_parser(), words)
    _script(asked.training_script, asked.training_script_args, module=asked.module)


def _by_argparse(parser: Any, words: Sequence[str]) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(list(words))
    except SystemExit as error:
        raise CannotBeGivenError(said.getvalue().strip().splitlines()[-1]) from error


def _script(name: str, words: Sequence[str], *, module: bool) -> None:
    if module and name == "llmtrain":
        _llmtrain(words)
    elif name == "scripts/train.py":
        _llmtrain(["train", *words])


def _python(words: Sequence[str]) -> None:
    """A script of the project: it is there, and its text has the options."""
    if words[:1] == ["-m"]:
        check_words(words[1:])
        return
    file = ROOT / words[0]
    if file.is_file():
        beside = [file.parent / "harness.py"] if file.parent.name == "benchmarks" else []
        text = "".join(one.read_text("utf-8") for one in (file, *beside))
        asked = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        if beside:  # whose options are named by what they set
            asked = {word for word in asked if f'"{word[2:].replace("-", "_")}": ' not in text}
        unknown = sorted(option for option in asked if f'"{option}"' not in text)
        if unknown:
            raise CannotBeGivenError(f"{words[0]} has no {', '.join(unknown)}")


def _make(words: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M))
    asked = {word for word in words if "=" not in word and not word.startswith("-")}
    if asked - targets:
        raise CannotBeGivenError(f"no target of make: {asked - targets}")


def _pytest(words: Sequence[str]) -> None:
    named = [word.partition("::")[0] for word in words if word.startswith("tests")]
    missing = [word for word in named if not (ROOT / word).exists()]
    if missing:
        raise CannotBeGivenError(f"there is no {missing}")


def _other_host(words: Sequence[str]) -> None:
    check(words[-1])


def _submit(words: Sequence[str]) -> None:
    """sbatch, srun: the first word that is a script or a program, and what is behind it."""
    programs = [place for place, word in enumerate(words) if PurePath(word).name in CHECKS]
    scripts = [place for place, word in enumerate(words) if word.endswith("train.sbatch")]
    if programs:
        check_words(words[programs[0] :])
    elif scripts:
        check_words(["llmtrain", "train", *words[scripts[0] + 1 :]])


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "llmtrain": _llmtrain,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "torch.distributed.run": _torchrun,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pytest": _pytest,
    "ssh": _other_host,
    "sbatch": _submit,
    "srun": _submit,
}


@cache
def tests_there() -> frozenset[str]:
    """Every test as `tests/FOLDER/test_x.py::test_name`."""
    return frozenset(
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text("utf-8"), re.M)
    )
