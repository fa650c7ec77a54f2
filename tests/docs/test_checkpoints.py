"""The rehearsals of docs/understand/checkpoints.md, and that they find what the page promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import pages
from helpers.ranks import ROOT

FENCES = pages.fences("understand/checkpoints.md")
(PLACE,) = (n for n, fence in enumerate(FENCES) if "checkpoints rehearse" in fence.text)
REHEARSE, UNDER_FSDP2 = FENCES[PLACE].text.splitlines()


@pytest.fixture
def run(tmp_path):
    """Gives a command as the page has it, and returns what it prints."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}

    def given(line):
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return given


@pytest.mark.slow
def test_a_rehearsal_finds_the_same_bytes(run, tmp_path):
    assert pages.prints(FENCES[PLACE + 1].text, run(REHEARSE))
    assert [file.name for file in tmp_path.iterdir()] == ["configs"]  # and leaves nothing


@pytest.mark.slow
def test_a_rehearsal_under_fsdp2_finds_the_same_numbers(run):
    straight, killed, resumed, batches, losses, verdict = run(UNDER_FSDP2).splitlines()
    assert (straight, resumed) == ("straight   ddp, 2 processes", "resumed    fsdp2, 2 processes")
    assert killed == "killed     in step 6, resumed from step-00000003"
    assert (batches[11:], losses[11:22]) == ("of 8 steps, by digest", "of 8 steps,")
    assert verdict.startswith("the same, in ")
