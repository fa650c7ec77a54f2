"""A real `accelerate launch`, and other launchers, around a run: on the CPUs of this machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from helpers.ranks import ROOT

SCRIPT = str(ROOT / "scripts" / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
LLMTRAIN = [sys.executable, "-m", "llmtrain"]
CONFIGS = ROOT / "accelerate_configs"
_STALE = ("ACCELERATE", "FSDP", "PARALLELISM_CONFIG", "WORLD_SIZE", "LOCAL_RANK", "MASTER")


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in a folder, with no device, no launch in the environment and no user's defaults."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(_STALE)}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env={**clean, **env}, capture_output=True, text=True, check=False
    )


def launch_file(folder: Path, values: Mapping[str, Any]) -> str:
    """A file of accelerate with these values, for two CPU processes where they say nothing else."""
    here = {
        "compute_environment": "LOCAL_MACHINE",
        "use_cpu": True,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump({**here, **values}), encoding="utf-8")
    return str(path)


def rehearsal(name: str) -> dict[str, Any]:
    """A file of `accelerate_configs/` as it can run here: on CPUs, on one machine, in fp32."""
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    values |= {"use_cpu": True, "mixed_precision": "no", "num_machines": 1, "main_process_port": 0}
    for key in ("main_process_ip", "rdzv_backend", "same_network"):
        values.pop(key, None)
    values["num_processes"] = {"single": 1, "hsdp_multinode": 4, "fsdp2_tp": 4}.get(name, 2)
    if mesh := values.get("parallelism_config"):
        values["parallelism_config"] = dict.fromkeys(mesh, 2)
    return values
