"""The commands of docs/guides/use.md, as they are written."""

from __future__ import annotations

import shlex
from pathlib import Path

from helpers import used
from helpers.ranks import ROOT, Server
from helpers.tiny import lines, tiny_config, write_config
from markdown_it import MarkdownIt


def commands() -> list[str]:
    """The lines of all bash fences that are to be run."""
    tokens = MarkdownIt().parse((ROOT / "docs" / "guides" / "use.md").read_text("utf-8"))
    fences = [token.content for token in tokens if token.type == "fence" and token.info == "bash"]
    return [line for fence in fences for line in fence.splitlines()]


def test_the_commands_do_what_the_page_says(server: Server, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "runs" / "quickstart", training__steps=4, checkpoint__every_steps=4
    )
    config["evaluation"]["every_steps"] = 4
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    shown = {}
    for line in commands():
        shown[line] = used.given(server, tmp_path, shlex.split(line))
    losses = {
        line["step"]: line["loss"] for line in lines(tmp_path / "runs" / "quickstart", "eval")
    }
    for line, text in shown.items():
        if "evaluate" in line:
            assert f"loss       {losses[4]:.4f}" in text
        if "generate" in line:
            assert text.startswith("The planet")
    assert (tmp_path / "exported" / "model.safetensors").is_file()
