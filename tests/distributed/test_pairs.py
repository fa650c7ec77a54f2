"""Pairs of answers are trained on several processes as on one: the same losses and margins."""

import json

import pytest

CASES = (
    "llama dpo",
    "llama simpo frozen",
    "llama kto",
    "gemma2 ipo",
    "phi orpo",
    "llama dpo logits",
)


def launch(server, folder, world_size, strategy="ddp", *, precision="fp32", cases=CASES, **cuts):
    folder.mkdir()
    output = folder / "result.json"
    call = ["call", "helpers.paired", "work", str(output), json.dumps(cases), strategy]
    codes = server.run([*call, json.dumps(cuts), precision], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()[-6000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory):
    return launch(server, tmp_path_factory.mktemp("alone") / "one", 1)


def same(found, expected, within=1e-6):
    """Of 20 steps, of rows with 0, 1 or 2 pairs; and the sums of both answers of some pairs."""
    for case, of in found.items():
        right = expected[case]
        for step, (one, other) in enumerate(zip(of["steps"], right["steps"], strict=True)):
            most = within * (1 if step < 6 else 10)
            assert one[:2] == pytest.approx(other[:2], abs=most, rel=most), case
            assert one[2] == pytest.approx(other[2], rel=100 * within), case
        (sums, slots), *others = of["each"]
        assert all(other == [sums, slots] for other in others)
        expected_sums, expected_slots = right["each"][0]
        for pair, right_pair in zip(sums, expected_sums, strict=True):
            assert pair == pytest.approx(right_pair, abs=100 * within)
        assert slots == pytest.approx(expected_slots, abs=1000 * within)


@pytest.mark.parametrize(
    ("world_size", "strategy", "cuts"),
    [
        (2, "ddp", {}),
        (2, "fsdp2", {}),
        (2, "ddp", {"tensor_parallel": 2}),
        (2, "ddp", {"pipeline_parallel": 2}),
        pytest.param(4, "fsdp2", {"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=["DDP", "FSDP2", "TP2", "PP2", "TP2 × FSDP2"],
)
def test_several_processes_train_the_same_margins_as_one(
    server, tmp_path, alone, world_size, strategy, cuts
):
    same(launch(server, tmp_path / "several", world_size, strategy, **cuts), alone)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_processes_that_share_rows_train_the_same_margins_as_one(server, tmp_path, alone, strategy):
    """An answer's positions may be on both; some rows have none on one of them."""
    cases = [case for case in CASES if not case.startswith("gemma2")]  # its attention is its own
    same(launch(server, tmp_path / "two", 2, strategy, cases=cases, sequence_parallel=2), alone)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_in_bf16_the_reference_keeps_its_bits(server, tmp_path, strategy):
    """FSDP2 would round all tensors of floating point that a forward is given."""
    folder, output = tmp_path / "two", tmp_path / "result.json"
    folder.mkdir()
    codes = server.run(["call", "helpers.paired", "given", str(output), strategy], 2, folder)
    assert codes == [0, 0], (folder / "output.txt").read_text()[-6000:]
    rewards, dtypes = json.loads(output.read_text())
    assert rewards == [0.0, 0.0]
    assert set(dtypes) == {"torch.float64"}
