"""One update: token-weighted over ranks and micro-batches, and the same decision on every rank."""

import json

import pytest
from helpers import uneven


def train(server, folder, world_size, micro, *more, **env):
    output = folder / "result.json"
    arguments = ["call", "helpers.uneven", "train", str(output), str(micro), *more]
    codes = server.run(arguments, world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 8), (1, 1), (1, 3), (2, 4), (2, 1), (4, 2), (4, 1)]
)
def test_uneven_masks_weigh_by_token_on_any_layout(server, tmp_path, world_size, micro):
    same_as_plain_pytorch(train(server, tmp_path, world_size, micro), uneven.reference())


@pytest.mark.parametrize(("world_size", "micro"), [(1, 8), (1, 3), (2, 4), (2, 1), (4, 2)])
def test_documents_are_trained_as_if_each_were_alone_on_any_layout(
    server, tmp_path, world_size, micro
):
    found = train(server, tmp_path, world_size, micro, "documents")
    alone = uneven.reference(hiding=True)
    same_as_plain_pytorch(found, alone)
    assert abs(alone[0][-1]["loss"] - uneven.reference()[0][-1]["loss"]) > 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_router_loss_of_single_rows_is_trained_and_reported_on_any_number_of_processes(
    server, tmp_path, world_size
):
    """With one row in a micro-batch the router's loss is that of each row."""
    found = train(server, tmp_path, world_size, 1, "", "mixtral")
    right = uneven.reference(kind="mixtral")
    same_as_plain_pytorch(found, right)
    routers = [one["router"] for one in found["numbers"]]
    assert routers == [[pytest.approx(one["router"], abs=1e-5)] for one in right[0]]
    assert min(one for (one,) in routers) > 0.9  # two of four experts, times the coefficient


def same_as_plain_pytorch(found, expected):
    numbers, weights = expected
    for one, other in zip(found["numbers"], numbers, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-4)
    for name, values in weights.items():
        assert found["weights"][name][1] == pytest.approx(values, abs=1e-4), name


def test_an_accumulation_count_in_the_environment_changes_nothing(server, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = train(server, tmp_path / "a", 2, 2)
    asked = train(server, tmp_path / "b", 2, 2, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="8")
    assert asked == plain
