"""The lines of docs/guides/devices.md that rehearse the launch files on CPUs, as written there."""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers import pages
from helpers.launcher import CONFIGS, run
from helpers.ranks import ROOT
from helpers.tiny import lines, status

(FENCE,) = (
    fence
    for fence in pages.fences("guides/devices.md")
    if "test_a_launch_file_is_rehearsed_on_cpus" in fence.options.get("reason", "")
)
COMMANDS = {
    re.findall(r"accelerate_configs/(\w+)\.yaml", line)[0]: line
    for line in pages.command_lines(FENCE.text)
}
STEPS = 4
# The others differ from these in what a single machine without a GPU does not do.
SOME = ("fsdp2", "zero2")


def test_there_is_a_line_for_every_file():
    assert set(COMMANDS) == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len(COMMANDS) == len(pages.command_lines(FENCE.text))


def rehearse(folder, name):
    """The run directory of the line with this file, shortened, and the losses of its steps."""
    for linked in ("configs", "accelerate_configs", "scripts"):
        (folder / linked).symlink_to(ROOT / linked)
    line = f"{COMMANDS[name]} training.steps={STEPS} logging.every_steps=1 evaluation.prompts=[]"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = run(["bash", "-c", line], folder, PATH=path)
    assert ended.returncode == 0, ended.stderr
    run_dir = folder / "runs" / f"cpu_{name}"
    assert status(run_dir)["state"] == "finished"
    assert ended.stdout.splitlines()[-1] == f"runs/cpu_{name}/report.html"
    return run_dir, [line["loss"] for line in lines(run_dir, "train")]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run_dir, losses = rehearse(tmp_path_factory.mktemp("single"), "single")
    (start,) = lines(run_dir, "start")
    assert (start["strategy"], start["world_size"]) == ("ddp", 1)
    return losses


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME))
        for name in COMMANDS
        if name != "single"
    ],
)
def test_a_launch_file_is_rehearsed_on_cpus(name, tmp_path, single):
    """It trains what it says, with the losses of one process."""
    run_dir, losses = rehearse(tmp_path, name)
    (start,) = lines(run_dir, "start")
    expected = name.removesuffix("_multinode").removesuffix("_tp")
    assert start["strategy"] == ("ddp" if name in ("cpu", "tp") else expected)
    assert start["tensor_parallel"] == (2 if name in ("tp", "fsdp2_tp") else 1)
    assert start["world_size"] == (4 if name in ("hsdp_multinode", "fsdp2_tp") else 2)
    assert len(set(single)) == STEPS
    assert losses == pytest.approx(single, rel=0, abs=1e-5)
    said_offload = "rehearsed without offload" in (run_dir / "logs" / "rank-0.log").read_text()
    assert said_offload == (name == "fsdp2_offload")  # torch needs a device for it
