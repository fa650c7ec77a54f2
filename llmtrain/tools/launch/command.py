"""Find the config and run directory in a command that starts a run, and hide its secrets.

accelerate launch --config_file a.yaml scripts/train.py my.yaml run.dir=runs/x
                                                        └ config └ override
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from llmtrain.config.secrets import HIDDEN, hider, is_secret, is_secret_name
from llmtrain.errors import Problem, UserError

_CONFIGS_OF_LAUNCHERS = ("--config_file", "--config-file", "--accelerate")
_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)
_SECTION = re.compile(r"^(\w+)[ \t]*:", re.MULTILINE)
# NAME=value or NAME='a value' inside a word, which may be a line of shell.
_ASSIGNMENT = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s;&|"']*)""")


def config_in(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the config in a training command and the overrides after it; None without a config.

    The config is the first `*.yaml` or `*.yml` that is not the launcher's own config.
    """
    for index, word in enumerate(command):
        of_launcher = index > 0 and command[index - 1] in _CONFIGS_OF_LAUNCHERS
        if word.endswith((".yaml", ".yml")) and not word.startswith("-") and not of_launcher:
            return word, [one for one in command[index + 1 :] if _OVERRIDE.fullmatch(one)]
    return None


def checked_run_dir(command: Sequence[str], run_dir: Path | None) -> Path:
    """Return the run directory of a command, after checking that its config may use it.

    run_dir: the one that the user named, if any

    Raises UserError if the config is wrong or names another directory than `run_dir`, and if there
    is neither a config nor a `run_dir`.
    """
    from llmtrain.config.load import load_config
    from llmtrain.training.start import claim

    found = config_in(command)
    if run_dir is not None and (found is None or not _is_config(Path(found[0]))):
        return run_dir
    if found is None:
        expected = "a command with the config (*.yaml) of the run, or --run DIR"
        raise UserError(Problem("COMMAND", shown(command), expected))
    config = load_config(*found)
    named = config.run_dir
    if run_dir is not None and run_dir.resolve() != named.resolve():
        expected = f"{named}, the run.dir of {found[0]} in the command"
        remedy = f"leave --run out, or put run.dir={run_dir} behind {found[0]}"
        raise UserError(Problem("--run", run_dir, expected, remedy))
    claim.check(config)
    return named


def shown(command: Sequence[str]) -> str:
    """Return the command as a line of shell, without the secrets in it.

    These are hidden: values of secrets in the environment, text that looks like a secret, and the
    value after the name of a secret (`HF_TOKEN=…`, `--hub-token …`), also inside a line of shell.
    """
    hide = hider(os.environ)  # used before quoting, which may put quotes inside a secret
    words = [
        HIDDEN if _asks_for_secret(before) else _mask(hide(word))
        for before, word in zip(["", *command], command, strict=False)
    ]
    return shlex.join(words)


def _asks_for_secret(word: str) -> bool:
    return word.startswith("--") and "=" not in word and is_secret_name(word)


def _mask(text: str) -> str:
    name, equals, value = text.partition("=")
    if equals and _is_secret(name, value) and not re.search(r"\s", name):
        return f"{name}={HIDDEN}"
    return _ASSIGNMENT.sub(lambda found: f"{found[1]}={_mask_value(found[1], found[2])}", text)


def _mask_value(name: str, value: str) -> str:
    return HIDDEN if _is_secret(name, value.strip("\"'")) else _mask(value)


def _is_secret(name: str, value: str) -> bool:
    """Whether the value is a secret. Only a dotted key may be a field of a model instead."""
    return is_secret(name, value) if "." in name else is_secret_name(name)


def _is_config(path: Path) -> bool:
    """Whether it is a config of llmtrain, valid or not: launchers have other YAML files."""
    from llmtrain.config.schema import Config

    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # the command may run elsewhere and see another file, as in a container
    return len(set(_SECTION.findall(text)) & set(Config.model_fields)) >= 2
