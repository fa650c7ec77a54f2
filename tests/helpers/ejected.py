"""What `llmtrain eject` has written, started in a rank of the server of ranks."""

import contextlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.ranks import ROOT, Server


def write(program: str, config: str, *overrides: str) -> None:
    """Eject a config."""
    write_first("", program, config, *overrides)


def write_first(steps: str, program: str, config: str, *overrides: str) -> None:
    """Eject a config with the tokens of so many steps."""
    from llmtrain.config.load import load_config
    from llmtrain.tools.eject import eject

    eject(load_config(config, overrides), Path(program), int(steps) if steps else None)


def start(program: str, output: str, *arguments: str) -> None:
    """Run a program as Python would, with its lines in a file."""
    sys.argv = [program, *arguments]
    with Path(output).open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(program, run_name="__main__")


def run(server: Server, program: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines that a program prints."""
    output = program.with_suffix(".jsonl")
    words = ["call", "helpers.ejected", "start", str(program), str(output), *arguments]
    codes = server.run(words, 1, program.parent)
    assert codes == [0], (program.parent / "output.txt").read_text()[-4000:]
    return [json.loads(line) for line in output.read_text().splitlines()]


def lint(text: str) -> str:
    """What ruff finds in a program with the settings of this project, as in one of its scripts."""
    found = ""
    for command in (["check", "--output-format=concise"], ["format", "--diff"]):
        words = [Path(sys.executable).with_name("ruff"), *command, "--stdin-filename"]
        ended = subprocess.run(
            [*words, "scripts/train_one.py", "-"],
            input=text, capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        found += ended.stdout if ended.returncode else ""
    return found
