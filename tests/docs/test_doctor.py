"""The command and the table of docs/start/doctor.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.ranks import ROOT
from markdown_it import MarkdownIt

from llmtrain.tools.doctor.doctor import NAMES

PAGE = (ROOT / "docs" / "start" / "doctor.md").read_text("utf-8")


def test_the_command_finds_this_machine_ready(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (fence,) = (one for one in MarkdownIt().parse(PAGE) if one.info == "bash")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", fence.content],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"\d+ checks: (all is well|\d+ warnings?)", done.stdout.splitlines()[-1])
    assert not (tmp_path / "runs").exists()


def test_every_check_has_its_row_and_no_other() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.M)) == set(NAMES)
