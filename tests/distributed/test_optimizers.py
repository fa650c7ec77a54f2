"""Muon and 8-bit AdamW on real ranks: what they train, and that a resume changes no bit of it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers.rings import needs
from helpers.sharded import Job
from helpers.sharded_models import build
from helpers.tiny import lines, status, tiny_config, weights, write_config
from safetensors import safe_open

TWO_NODES = {"LOCAL_WORLD_SIZE": "2"}
STEPS = 6


def train(server, folder, world_size, job):
    output = folder / "result.json"
    arguments = ["call", "helpers.sharded", "work", str(output), job.text()]
    env = TWO_NODES if job.strategy == "hsdp" else {}
    codes = server.run(arguments, world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("world_size", "job"),
    [
        (2, Job("fsdp2", "thin", micro=4, optimizer="muon")),
        (4, Job("fsdp2", "odd", micro=2, optimizer="muon")),
        (4, Job("hsdp", "thin", micro=2, optimizer="muon")),
    ],
    ids=["one row", "fewer rows than ranks", "hsdp"],
)
def test_muon_trains_matrices_of_any_shape_where_they_are_sharded(
    server, tmp_path, world_size, job
):
    """An update is that of the whole matrix, but for sums in another order."""
    one, before = replace(job, steps=1), dict(build(job.kind).named_parameters())
    sharded = train(server, tmp_path, world_size, one)
    whole = train(server, tmp_path, 1, replace(one, strategy="ddp", micro=8))
    assert sharded["numbers"][0]["loss"] == pytest.approx(whole["numbers"][0]["loss"], abs=1e-5)
    for name, parameter in before.items():
        start = parameter.detach().flatten()
        first, second = (torch.tensor(found["weights"][name]) - start for found in (sharded, whole))
        if parameter.ndim == 2 and min(parameter.shape) > 1 and "_proj" in name:
            assert torch.cosine_similarity(first, second, dim=0) > 0.98, name
        else:
            torch.testing.assert_close(first, second, rtol=0, atol=2e-5)
    numbers = train(server, tmp_path, world_size, job)["numbers"]
    assert numbers[-1]["loss"] < 2 * numbers[0]["loss"]


def config(run_dir, strategy, optimizer):
    """Accumulation, and a checkpoint in the middle; one group has a rate of its own."""
    made = tiny_config(
        run_dir,
        training__steps=STEPS,
        checkpoint__every_steps=STEPS // 2,
        optimizer__name=optimizer,
        optimizer__groups=[{"match": "*.mlp.*", "learning_rate": 1e-3}],
    )
    # Matrices of which the 8-bit optimizer keeps 8 bits, and dropout, which draws random numbers.
    made["model"]["config"] |= {"intermediate_size": 160, "attention_dropout": 0.1}
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    return made


def run(server, folder, made, world_size):
    env = TWO_NODES if world_size == 4 else {}
    path = write_config(folder, made)
    codes = server.run(["train", str(path)], world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()[-4000:]


def resumed(server, folder, strategy, world_size, optimizer):
    """A run that is killed behind its first checkpoint ends in the bits of a straight one."""
    straight = folder / "straight" / "run"
    run(server, folder / "straight", config(straight, strategy, optimizer), world_size)
    killed = folder / "killed" / "run"
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints" / f"step-{STEPS:08d}")
    run(server, folder / "killed", config(killed, strategy, optimizer), world_size)
    assert lines(killed, "start")[-1]["resumed_from"] == f"step-{STEPS // 2:08d}"
    assert status(killed)["state"] == "finished"
    assert weights(killed, STEPS) == weights(straight, STEPS)
    found, expected = lines(killed, "train"), lines(straight, "train")
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_resumed_run_with_muon_ends_in_the_bits_of_a_straight_one(server, tmp_path, strategy):
    resumed(server, tmp_path, strategy, 2, "muon")
    saved = tmp_path / "killed" / "run" / "checkpoints" / f"step-{STEPS:08d}"
    with safe_open(saved / "optimizer-00001-of-00001.safetensors", "pt") as file:
        names = {name.rpartition(".")[2] for name in file.keys() if "_proj" in name}  # noqa: SIM118
    assert names == {"momentum_buffer"}


@needs("bitsandbytes")
def test_a_resumed_run_with_8_bit_moments_ends_in_the_bits_of_a_straight_one(server, tmp_path):
    resumed(server, tmp_path, "ddp", 2, "adamw_8bit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "strategy", "world_size"),
    [
        *(("muon", name, n) for name, n in (("ddp", 1), ("ddp", 3), ("fsdp2", 1), ("fsdp2", 3))),
        ("muon", "hsdp", 4),
        # Its moments are not sharded.
        *(pytest.param("adamw_8bit", "ddp", n, marks=needs("bitsandbytes")) for n in (1, 3)),
    ],
)
def test_any_optimizer_is_resumed_in_equal_bits_however_it_is_spread_out(
    server, tmp_path, optimizer, strategy, world_size
):
    resumed(server, tmp_path, strategy, world_size, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_a_run_with_muon_goes_on_under_another_strategy(server, tmp_path, first, second):
    run_dir = tmp_path / "run"
    made = config(run_dir, first, "muon")
    run(server, tmp_path, made, 2)
    made["distributed"]["strategy"] = second
    made["training"]["steps"] = STEPS + 2
    run(server, tmp_path, made, 2)
    assert [line["strategy"] for line in lines(run_dir, "start")] == [first, second]
    found = lines(run_dir, "train")
    assert [line["step"] for line in found] == list(range(1, STEPS + 3))
    assert found[-1]["loss"] < found[0]["loss"]
