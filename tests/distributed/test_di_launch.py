"""Launchers that start something else than was asked for: refused, or made right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import ROOT
from helpers.tiny import lines, status, tiny_config, write_config

SCRIPT = str(ROOT / "scripts" / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
PORT = ["--main_process_port", "0"]
CPU_YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
use_cpu: true
mixed_precision: 'no'
num_machines: 1
num_processes: 2
machine_rank: 0
"""


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "WORLD"))}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "home")}
    return subprocess.run(
        command, cwd=folder, env={**clean, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_config(tmp_path / "run", training__steps=2))


def yaml(folder: Path, kind: str, more: str = "") -> str:
    path = folder / "launch.yaml"
    path.write_text(CPU_YAML.format(kind=kind) + more)
    return str(path)


def refused(ended: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert ended.returncode != 0
    for word in words:
        assert word in ended.stderr, ended.stderr
    assert not lines(folder / "run", "train")


def test_the_simple_launcher_that_starts_one_of_two_is_refused(
    config: Path, tmp_path: Path
) -> None:
    ended = run([*ACCELERATE, "--cpu", "--num_processes", "2", SCRIPT, str(config)], tmp_path)
    refused(ended, tmp_path, "MASTER_ADDR", "the launcher started one", "cpu.yaml")


def test_two_processes_that_would_each_think_they_are_alone_become_two(
    config: Path, tmp_path: Path
) -> None:
    file = yaml(tmp_path, "MULTI_GPU")  # on a CPU nothing in its environment says so
    ended = run([*ACCELERATE, "--config_file", file, *PORT, SCRIPT, str(config)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert status(tmp_path / "run")["world_size"] == 2


def test_an_fsdp_launch_is_refused_and_never_plain_ddp(config: Path, tmp_path: Path) -> None:
    file = yaml(tmp_path, "FSDP", "fsdp_config:\n  fsdp_version: 2\n")
    ended = run([*ACCELERATE, "--config_file", file, *PORT, SCRIPT, str(config)], tmp_path)
    refused(ended, tmp_path, "the strategy that is trained = ddp")


def test_torchrun_trains_with_the_ranks_it_started(config: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    ended = run([*torchrun, "--standalone", SCRIPT, str(config)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert lines(tmp_path / "run", "start")[0]["world_size"] == 2


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_stale_size_in_the_environment_is_named_and_nothing_hangs(
    config: Path, tmp_path: Path, name: str
) -> None:
    ended = run([sys.executable, SCRIPT, str(config)], tmp_path, **{name: "2"})
    assert ended.returncode == 2
    refused(ended, tmp_path, f"unset {name}")


def test_accelerates_own_default_config_is_named_in_the_log(config: Path, tmp_path: Path) -> None:
    default = tmp_path / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(CPU_YAML.format(kind="'NO'").replace("num_processes: 2", "num_processes: 1"))
    ended = run([*ACCELERATE, SCRIPT, str(config)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "default_config.yaml" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


def test_processes_inside_a_launcher_are_refused(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmtrain", "train", str(config), "--processes", "2"]
    ended = run(command, tmp_path, LOCAL_RANK="0")
    assert ended.returncode == 2
    refused(ended, tmp_path, "LOCAL_RANK", "no launcher around this process")
