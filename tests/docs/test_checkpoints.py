"""The commands of docs/understand/checkpoints.md, as they are written, and what they show.

Two rehearsals through the launcher are among them: the page promises their verdict.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import used
from helpers.ranks import ROOT, Server
from markdown_it import MarkdownIt

PAGE = (ROOT / "docs" / "understand" / "checkpoints.md").read_text("utf-8")


def fences(kind: str) -> list[str]:
    """What the page shows as code of this kind."""
    tokens = MarkdownIt().parse(PAGE)
    return [token.content for token in tokens if token.type == "fence" and token.info == kind]


def shape(text: str) -> str:
    """A text without its numbers that are measured: times, sizes and losses."""
    return re.sub(r"\d+\.\d+(e[+-]\d+)?|in \d+ s", "#", re.sub(r" +", " ", text))


TRAIN, LOOK, VERIFY, PRUNE, REHEARSE, UNDER_FSDP2 = "".join(fences("bash")).splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], str]:
    """Gives a command as the page has it, and returns what it prints."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}

    def given(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return given


def test_the_commands_show_what_the_page_says(server: Server, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shown = [
        shape(used.given(server, tmp_path, shlex.split(line)))
        for line in (TRAIN, LOOK, VERIFY, PRUNE)
    ][1:]
    assert shown == [shape(text) for text in fences("text")[:3]]


@pytest.mark.slow
def test_a_rehearsal_finds_the_same_bytes(run: Callable[[str], str], tmp_path: Path) -> None:
    assert shape(run(REHEARSE)) == shape(fences("text")[3])
    assert [file.name for file in tmp_path.iterdir()] == ["configs"]  # and leaves nothing


@pytest.mark.slow
def test_a_rehearsal_under_fsdp2_finds_the_same_numbers(run: Callable[[str], str]) -> None:
    straight, killed, resumed, batches, losses, verdict = run(UNDER_FSDP2).splitlines()
    assert (straight, resumed) == ("straight   ddp, 2 processes", "resumed    fsdp2, 2 processes")
    assert killed == "killed     in step 6, resumed from step-00000003"
    assert (batches[11:], losses[11:22]) == ("of 8 steps, by digest", "of 8 steps,")
    assert verdict.startswith("the same, in ")
