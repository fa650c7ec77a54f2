"""The commands and the Python of docs/guides/report.md, as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import runs
from helpers.ranks import ROOT
from markdown_it import MarkdownIt


def fences(page: str) -> list[tuple[str, str]]:
    """(language, text) of all fences of a page."""
    tokens = MarkdownIt().parse((ROOT / "docs" / page).read_text("utf-8"))
    return [(token.info, token.content) for token in tokens if token.type == "fence"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    config = (ROOT / "configs" / "quickstart.yaml").read_text()
    for name, seed in (("a", 42), ("b", 7)):
        text = config.replace("dir: runs/quickstart", f"dir: runs/{name}\n  seed: {seed}")
        runs.write_run(root / "runs" / name, runs.history(), config=text)
    return root


def test_the_page_of_reports_does_what_it_says(folder: Path) -> None:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = []
    for language, text in fences("guides/report.md"):
        if language == "text":
            continue
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == "runs/a/report.html\n"
    assert said[1].startswith("comparison.html\n")
    assert "run.seed: 42 → 7" in said[1]
    assert "finished" in said[2]
    assert said[3].startswith("<Run a: Finished.")
    page = (folder / "comparison.html").read_text("utf-8")
    assert "<td>run.seed</td>" in page


def test_the_page_of_other_trainers_names_is_current() -> None:
    command = [sys.executable, "scripts/config_keys.py", "foreign"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "reference" / "foreign-keys.md").read_text("utf-8")
