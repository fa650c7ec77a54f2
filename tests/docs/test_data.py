"""The commands of docs/understand/data.md, as they are written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from helpers import used
from helpers.corpus import articles, write_jsonl
from helpers.ranks import ROOT, Server
from helpers.tiny import status
from markdown_it import MarkdownIt


def fences(kind: str) -> list[str]:
    """What the page shows as code of this kind."""
    tokens = MarkdownIt().parse((ROOT / "docs" / "understand" / "data.md").read_text("utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == kind]


def commands() -> list[str]:
    """The lines of all bash fences."""
    return [line for fence in fences("bash") for line in fence.splitlines() if line.strip()]


def test_the_commands_do_what_the_page_says(server: Server, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_jsonl(tmp_path / "my-data" / "a.jsonl.gz", articles(20))
    inspect, which, tokenize, train, repack = commands()
    which = which.replace("runs/quickstart --step 260", "runs/cached --step 2")
    shown = {
        line: used.given(server, tmp_path, shlex.split(line))
        for line in (inspect, tokenize, f"{train} training.steps=2", which, repack)
    }
    assert shown[inspect] == fences("text")[0]
    assert "\nchecked: metrics.jsonl has the same digest\n" in shown[which]
    assert json.loads((tmp_path / "tokens" / "sample.json").read_text())["documents"] == 2364
    assert status(tmp_path / "runs" / "cached")["step"] == 2
    assert (tmp_path / "my-data-small" / "a.jsonl.gz.parquet").is_file()
