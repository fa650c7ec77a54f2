"""Runs that go on from one checkpoint to the next, each start under another strategy and cut."""

import json

import pytest
from helpers.tiny import lines, tiny_config, write_config
from transformers import AutoModelForCausalLM

EACH = 3  # steps of a start
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
# Name → processes, and keys of `distributed`.
STARTS = {
    "matrices beside fsdp2": (4, {"strategy": "fsdp2", "tensor_parallel": 2}),
    "blocks beside ddp": (4, {"pipeline_parallel": 2}),
    "one process": (1, {}),
    "zero3": (2, {"strategy": "zero3"}),
    "matrices and blocks": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "blocks beside fsdp2": (4, {"strategy": "fsdp2", "pipeline_parallel": 2}),
    "several stages a process": (
        2,
        {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2},
    ),
}


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_checkpoint_of_a_chain_goes_on_under_another_cut(server, tmp_path, tied):
    config = tiny_config(
        tmp_path / "run",
        model__config=LLAMA | {"tie_word_embeddings": tied},
        training__global_batch_size=8,
        training__steps=EACH * len(STARTS),
        checkpoint__every_steps=EACH,
        checkpoint__keep_last=len(STARTS),
        evaluation__every_steps=EACH,
        optimizer__warmup_steps=2,
        optimizer__schedule="constant",  # whose rates do not depend on the steps of a start
    )
    straight = json.loads(json.dumps(config))
    straight["run"]["dir"] = str(tmp_path / "straight")
    for name, made in (("straight.yaml", straight), ("chain.yaml", config)):
        write_config(tmp_path, made, name)
    assert server.run(["train", "straight.yaml"], 1, tmp_path) == [0]
    for number, (name, (world_size, keys)) in enumerate(STARTS.items(), 1):
        overrides = [f"distributed.{key}={value}" for key, value in keys.items()]
        given = ["train", "chain.yaml", f"training.steps={EACH * number}", *overrides]
        codes = server.run(given, world_size, tmp_path)
        assert codes == [0] * world_size, (name, (tmp_path / "output.txt").read_text())
        directory = tmp_path / "run" / "checkpoints" / f"step-{EACH * number:08d}"
        AutoModelForCausalLM.from_pretrained(directory)
    expected, found = (lines(tmp_path / one, "train") for one in ("straight", "run"))
    assert len(found) == len(expected) == EACH * len(STARTS)
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["batch_digest"] == other["batch_digest"]
