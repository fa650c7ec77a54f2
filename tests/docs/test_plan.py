"""The command of docs/understand/plan.md, and the tables of docs/reference/plan-figures.md."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import ROOT
from markdown_it import MarkdownIt

from llmtrain.tools.launch.file import read_launch_file

PAGE = (ROOT / "docs" / "understand" / "plan.md").read_text("utf-8")
FIGURES = (ROOT / "docs" / "reference" / "plan-figures.md").read_text("utf-8")
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))


def fence(kind: str) -> str:
    tokens = MarkdownIt().parse(PAGE)
    (found,) = (token.content for token in tokens if token.type == "fence" and token.info == kind)
    return found


def table(name: str) -> list[str]:
    """The lines between the marks."""
    _, _, rest = FIGURES.partition(f"<!-- {name} -->\n\n")
    return rest.partition("\n\n<!-- end -->")[0].splitlines()


def test_the_command_shows_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", fence("bash")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == fence("text")
    assert read_launch_file(tmp_path / "accelerate.yaml", None).processes == 2


@pytest.mark.parametrize("name", ["1 B", "70 B"])
def test_the_choices_of_the_page_are_those_of_the_plan(name: str) -> None:
    expected = list(BENCHMARK["choices"](list(BENCHMARK["plans"]([name]))))
    assert [row for row in table("choices") if row.startswith(f"| {name} |")] == expected[2:]
    assert table("choices")[:2] == expected[:2]


def test_the_published_runs_of_the_page_are_those_of_the_scaling_model() -> None:
    assert table("scaling") == list(BENCHMARK["scaling"]())
    assert sum("*miss:*" in row for row in table("scaling")) == 2


def test_every_model_stands_in_the_table() -> None:
    places = BENCHMARK["PLACES"]
    assert len(table("choices")) == 2 + sum(len(one) for one in places.values())
    assert len(table("parts")) == 2 + 4
