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
# The others launch as these do; tests/distributed/test_accelerate_configs.py says what differs.
SOME = ("fsdp2", "zero2")


def test_there_is_a_line_for_every_file():
    assert set(COMMANDS) == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len(COMMANDS) == len(pages.command_lines(FENCE.text))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME)) for name in COMMANDS],
)
def test_a_launch_file_is_rehearsed_on_cpus(name, tmp_path):
    for folder in ("configs", "accelerate_configs", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    line = f"{COMMANDS[name]} training.steps=2 evaluation.prompts=[]"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = run(["bash", "-c", line], tmp_path, PATH=path)
    assert ended.returncode == 0, ended.stderr
    run_dir = tmp_path / "runs" / f"cpu_{name}"
    assert status(run_dir)["state"] == "finished"
    assert ended.stdout.splitlines()[-1] == f"runs/cpu_{name}/report.html"
    (start,) = lines(run_dir, "start")
    expected = "ddp" if name in ("cpu", "single") else name.removesuffix("_multinode")
    assert start["strategy"] == expected
