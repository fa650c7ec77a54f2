"""Accelerate files of a plan, beside those in accelerate_configs/."""

from pathlib import Path

import pytest
import yaml
from helpers.on_paper import gpus

from llmtrain.distributed.plan.memory import Hardware
from llmtrain.tools.launch.file import launch_values, read_launch_file, write_launch_file

FILES = Path(__file__).parents[3] / "accelerate_configs"
CPU = Hardware(2**33, None, 2, 1, cpu=True)


@pytest.mark.parametrize(
    ("name", "strategy", "hardware", "precision"),
    [
        ("cpu", "ddp", CPU, "fp32"),
        ("single", "ddp", gpus(1, 80), "bf16"),
        ("ddp", "ddp", gpus(8, 80), "bf16"),
        ("ddp_multinode", "ddp", gpus(8, 80, nodes=2), "bf16"),
        ("fsdp2", "fsdp2", gpus(8, 80), "bf16"),
        ("fsdp2_offload", "fsdp2_offload", gpus(8, 80), "bf16"),
        ("hsdp_multinode", "hsdp", gpus(8, 80, nodes=2), "bf16"),
        ("zero2", "zero2", gpus(8, 80), "bf16"),
        ("zero3", "zero3", gpus(8, 80), "bf16"),
        ("zero3_offload", "zero3_offload", gpus(8, 80), "bf16"),
        ("zero3_multinode", "zero3", gpus(8, 80, nodes=2), "bf16"),
    ],
)
def test_the_values_are_those_of_the_file_for_the_same_devices(name, strategy, hardware, precision):
    shipped = yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert launch_values(strategy, hardware, precision) == shipped


def test_every_shipped_file_is_compared():
    marks = test_the_values_are_those_of_the_file_for_the_same_devices.pytestmark
    compared = {case[0] for case in marks[0].args[1]}
    assert compared == {path.stem for path in FILES.glob("*.yaml")}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "fsdp2_offload"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_written_file_is_one_that_the_launcher_takes(tmp_path, strategy, devices):
    path = tmp_path / "accelerate.yaml"
    assert not write_launch_file(path, launch_values(strategy, gpus(devices, 80), "bf16"))
    assert read_launch_file(path, None).processes == devices
    assert write_launch_file(path, launch_values("ddp", gpus(2, 80), "fp32"))
    found = read_launch_file(path, None)
    assert (found.processes, found.values["mixed_precision"]) == (2, "no")


def test_a_file_for_several_nodes_says_how_to_start_it(tmp_path):
    path = tmp_path / "accelerate.yaml"
    write_launch_file(path, launch_values("ddp", gpus(8, 80, nodes=2), "bf16"))
    assert f"accelerate launch --config_file {path} --rdzv_backend c10d" in path.read_text()
