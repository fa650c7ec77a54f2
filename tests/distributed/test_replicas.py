"""Replicas on real ranks: equal after updates; those that differ are named, on every rank."""

import json

from helpers.sharded import Job

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


def compared(server, folder, world_size, strategy, flips):
    """As they are, after each of the flips, and after all are undone; the same on all ranks."""
    job = Job(strategy, "odd", micro=2, steps=2)
    arguments = ["call", "helpers.flipping", "compare", str(folder / "said"), job.text()]
    env = {"LOCAL_WORLD_SIZE": "2"} if strategy == "hsdp" else {}
    codes = server.run([*arguments, json.dumps(flips)], world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    said = [json.loads((folder / f"said.{rank}").read_text()) for rank in range(world_size)]
    assert all(one == said[0] for one in said)
    return said[0]


def test_nobody_knows_which_of_two_replicas_is_right(server, tmp_path):
    flips = [{"1": [[UP, 0]]}, {"0": [[UP, 31], [NORM, 3]]}]
    found = compared(server, tmp_path, 2, "ddp", flips)
    assert found == [{}, {UP: [0, 1]}, {UP: [0, 1], NORM: [0, 1]}, {}]


def test_of_three_replicas_the_odd_one_is_named(server, tmp_path):
    flips = [{"0": [[UP, 0]]}, {"1": [[NORM, 5]], "2": [[UP, 7]]}]
    found = compared(server, tmp_path, 3, "ddp", flips)
    assert found == [{}, {UP: [0]}, {UP: [2], NORM: [1]}, {}]


def test_shards_are_compared_with_those_of_the_other_replicas(server, tmp_path):
    """Ranks 0 and 2 hold one half, ranks 1 and 3 the other."""
    found = compared(server, tmp_path, 4, "hsdp", [{"3": [[UP, 0]]}, {"0": [[UP, 1]]}])
    assert found == [{}, {UP: [1, 3]}, {UP: [0, 2]}, {}]


def test_where_everything_is_split_nothing_is_compared(server, tmp_path):
    assert compared(server, tmp_path, 2, "fsdp2", [{"1": [[UP, 0]]}]) == [{}, {}, {}]
