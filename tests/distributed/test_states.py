"""Bytes of model states: those of the plan against those of real processes, within 1 %."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest
from helpers import counted
from transformers import LlamaConfig

from llmtrain.distributed.plan.balance import parts_of
from llmtrain.distributed.plan.memory import Hardware, model_states, persistent_bytes
from llmtrain.model.count import count_saved
from llmtrain.model.shape import describe_parameters
from llmtrain.types import ModelCut


def count(server, folder, strategy, precision, kind, nodes=1):
    """Of every rank, two a node."""
    output, world_size = folder / "counted.json", 2 * nodes
    arguments = ["call", "helpers.counted", "count", str(output), strategy, precision, kind]
    codes = server.run(arguments, world_size, folder, {"LOCAL_WORLD_SIZE": "2"})
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    found = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(world_size)]
    return [counted.Counted(**one) for one in found]


def planned(shape, strategy, precision, nodes=1):
    return model_states(shape, strategy, precision, Hardware(2**30, None, 2, nodes, cpu=True))


@pytest.mark.parametrize(
    ("strategy", "precision", "kind", "nodes"),
    [
        ("ddp", "fp32", "even", 1),
        ("ddp", "bf16", "frozen", 1),
        ("fsdp2", "fp32", "odd", 1),
        ("fsdp2", "bf16", "tied", 1),
        ("fsdp2", "bf16", "frozen", 1),
        ("hsdp", "bf16", "odd", 2),
    ],
)
def test_states_of_the_plan_are_those_of_the_fullest_rank(
    server, tmp_path, strategy, precision, kind, nodes
):
    each = count(server, tmp_path, strategy, precision, kind, nodes)
    found = max(each, key=lambda one: one.total)
    expected = planned(counted.model_shape(kind), strategy, precision, nodes)
    assert found.parameters == pytest.approx(expected.parameters, rel=0.01)
    assert found.gradients == pytest.approx(expected.gradients, rel=0.01)
    assert found.optimizer == pytest.approx(expected.optimizer, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "precision", "kind"),
    [
        ("zero1", "fp32", "even"),
        ("zero1", "bf16", "even"),
        ("zero2", "bf16", "frozen"),
        ("zero3", "bf16", "odd"),
        ("zero3", "fp32", "frozen"),
        ("zero3_offload", "bf16", "even"),
    ],
)
def test_states_of_zero_are_those_of_the_fullest_of_two_ranks(
    server, tmp_path, strategy, precision, kind
):
    """All together: DeepSpeed's optimizer holds gradients and masters in places of its own."""
    found = count(server, tmp_path, strategy, precision, kind)
    shape = counted.model_shape(kind)
    expected = sum(astuple(planned(shape, strategy, precision)))
    if strategy.startswith("zero3"):
        expected += persistent_bytes(shape, precision)
    assert max(one.total for one in found) == pytest.approx(expected, rel=0.01)


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": 509,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_process_keeps_to_the_byte_what_the_plan_counts_of_cut_matrices(server, tmp_path, tensor):
    output, seq_len = tmp_path / "counted.json", 48
    arguments = ["call", "helpers.counted", "cut", str(output)]
    given = [*arguments, str(tensor), json.dumps(LLAMA), str(seq_len)]
    codes = server.run(given, tensor, tmp_path)
    assert codes == [0] * tensor, (tmp_path / "output.txt").read_text()
    last = json.loads(Path(f"{output}.{tensor - 1}").read_text())
    config = LlamaConfig(**LLAMA)
    for arithmetic in ("fp32", "bf16", "autocast"):
        saved = count_saved(config, seq_len, arithmetic, "none", tensor_parallel=tensor)
        # Held for the last modules that share it, but not saved: autocast has saved its cast.
        shared = 4 * seq_len * config.hidden_size if arithmetic == "autocast" else 0
        assert last[arithmetic] + shared == saved.blocks + saved.once, arithmetic
    cut = ModelCut(tensor)
    (own,) = parts_of(describe_parameters(config), cut, seq_len)
    hardware = Hardware(2**30, None, tensor, 1, cpu=True, cut=cut)
    assert last["parameters"] == model_states(own, "ddp", "fp32", hardware).parameters
