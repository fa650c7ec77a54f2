"""Every file of `accelerate_configs/`, run as a file by accelerate's own launcher, on CPUs.

Two launches at a time: while one imports, which one core does, the other trains.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers.launcher import ACCELERATE, CONFIGS, SCRIPT, launch_file, rehearsal, run
from helpers.tiny import lines, status, tiny_config, write_config

STEPS = 4
# File → what it trains, on how many processes.
FILES = {
    "cpu": ("ddp", 2),
    "single": ("ddp", 1),
    "ddp": ("ddp", 2),
    "ddp_multinode": ("ddp", 2),
    "fsdp2": ("fsdp2", 2),
    "fsdp2_offload": ("fsdp2_offload", 2),
    "hsdp_multinode": ("hsdp", 4),
    "zero2": ("zero2", 2),
    "zero3": ("zero3", 2),
    "zero3_offload": ("zero3_offload", 2),
    "zero3_multinode": ("zero3", 2),
    "tp": ("ddp", 2),
    "fsdp2_tp": ("fsdp2", 4),
}
# Those that differ from another one in what a single machine without a GPU does not do; FSDP2 is
# launched by torchrun (DI-04), on two nodes and by a plain launch, too, ZeRO by `llmtrain train`.
ALIKE = {
    *("ddp", "ddp_multinode", "fsdp2", "fsdp2_offload", "zero2"),
    *("hsdp_multinode", "zero3", "zero3_offload", "zero3_multinode"),
}
Ended = tuple[Path, CompletedProcess[str]]


def train(folder, name):
    """A few steps under this file; the run directory and what the launcher said."""
    folder = folder / name
    config = write_config(folder, tiny_config(folder / "run", training__steps=STEPS))
    file = launch_file(folder, rehearsal(name))
    return folder / "run", run([*ACCELERATE, "--config_file", file, SCRIPT, str(config)], folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, request):
    """All launches that are asked for, of which two run at a time."""
    folder = tmp_path_factory.mktemp("files")
    here = {item.name for item in request.session.items if item.path == request.path}
    asked = [name for name in FILES if any(test.endswith(f"[{name}]") for test in here)]
    with ThreadPoolExecutor(2) as pool:
        started = ["single", *(name for name in asked if name != "single")]  # the reference
        yield {name: pool.submit(train, folder, name) for name in started}


def losses(run_dir):
    return [line["loss"] for line in lines(run_dir, "train")]


def test_there_is_a_row_for_every_file():
    assert set(FILES) == {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE), id=name) for name in FILES],
)
def test_a_launch_file_trains_what_it_says_with_the_losses_of_one_process(ended, name):
    strategy, processes = FILES[name]
    run_dir, said = ended[name].result()
    assert status(run_dir)["state"] == "finished", said.stderr
    (start,) = lines(run_dir, "start")
    assert (start["strategy"], start["world_size"]) == (strategy, processes)
    assert start["tensor_parallel"] == (2 if name in ("tp", "fsdp2_tp") else 1)
    found, expected = losses(run_dir), losses(ended["single"].result()[0])
    assert len(expected) == STEPS
    assert len(set(expected)) == STEPS
    assert found == pytest.approx(expected, rel=0, abs=1e-5)
    assert all(map(math.isfinite, found))
    said_offload = "rehearsed without offload" in (run_dir / "logs" / "rank-0.log").read_text()
    assert said_offload == (name == "fsdp2_offload")  # torch needs a device for it
