"""The commands of docs/data.md, as they are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.corpus import articles, write_jsonl
from helpers.ranks import ROOT
from helpers.tiny import status
from markdown_it import MarkdownIt


def commands() -> list[str]:
    """The lines of all bash fences."""
    tokens = MarkdownIt().parse((ROOT / "docs" / "data.md").read_text("utf-8"))
    fences = [token.content for token in tokens if token.type == "fence" and token.info == "bash"]
    return [line for fence in fences for line in fence.splitlines() if line.strip()]


def test_the_commands_do_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_jsonl(tmp_path / "my-data" / "a.jsonl.gz", articles(20))
    tokenize, train, repack = commands()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    for line in (tokenize, f"{train} training.steps=2", repack):
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "tokens" / "sample.json").read_text())["documents"] == 2364
    assert status(tmp_path / "runs" / "cached")["step"] == 2
    assert (tmp_path / "my-data-small" / "a.jsonl.gz.parquet").is_file()
