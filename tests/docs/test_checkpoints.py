"""The commands of docs/checkpoints.md, as they are written, and what the page says they show.

Two rehearsals through the launcher are among them: the page promises their verdict.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.ranks import ROOT
from markdown_it import MarkdownIt

PAGE = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")


def fences(kind: str) -> list[str]:
    """What the page shows as code of this kind."""
    tokens = MarkdownIt().parse(PAGE)
    return [token.content for token in tokens if token.type == "fence" and token.info == kind]


def shape(text: str) -> str:
    """A text without its numbers that are measured: times, sizes and losses."""
    return re.sub(r"\d+\.\d+(e[+-]\d+)?|in \d+ s", "#", re.sub(r" +", " ", text))


def test_the_commands_show_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    train, look, verify, prune, rehearse, under_fsdp2 = "".join(fences("bash")).splitlines()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(train)
    shown = [run(line) for line in (look, verify, prune, rehearse)]
    assert [shape(text) for text in shown] == [shape(text) for text in fences("text")]
    other = run(under_fsdp2).splitlines()
    assert other[2] == "resumed    fsdp2, 2 processes"
    assert other[-1].startswith("the same, in ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["configs", "runs"]
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["kept"]


def test_every_exit_code_has_its_row() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    row = re.compile(r"^\| (\d+) \|", flags=re.M)
    assert sorted(row.findall(PAGE)) == sorted(row.findall(index))
