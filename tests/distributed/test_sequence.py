"""Processes that share the positions of each row: what one process computes, in parts."""

import json

import pytest
from helpers.tiny import lines, status, tiny_config, weights, write_config
from transformers import AutoModelForCausalLM

STEPS = 6
KILLED = -9


def updates(server, folder, world_size, strategy, size, *names):
    folder.mkdir()
    output = folder / "result.json"
    arguments = ["call", "helpers.parts", "train", str(output), strategy, str(size), *names]
    codes = server.run(arguments, world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()[-4000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory):
    return updates(server, tmp_path_factory.mktemp("alone") / "one", 1, "ddp", 1)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("ddp", 2),
        ("fsdp2", 2),
        pytest.param("ddp", 4, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, marks=pytest.mark.slow),
    ],
)
def test_shared_rows_are_trained_as_by_one_process(server, tmp_path, alone, strategy, world_size):
    """20 steps with uneven masks, of four micro-batches or two."""
    found = updates(server, tmp_path / "shared", world_size, strategy, 2)
    assert found.keys() == alone.keys()
    for name, steps in found.items():
        for (loss, norm, tokens), right in zip(steps, alone[name], strict=True):
            assert loss == pytest.approx(right[0], abs=1e-6), name
            assert norm == pytest.approx(right[1], rel=1e-5), name
            assert tokens == right[2]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_attention_in_parts_is_that_of_whole_rows(server, tmp_path, size):
    """Out, and the gradients of queries, keys and values; with fewer heads of keys than parts."""
    output = tmp_path / "result.json"
    arguments = ["call", "helpers.parts", "exchange", str(output), str(size)]
    assert server.run(arguments, size, tmp_path) == [0] * size, (
        tmp_path / "output.txt"
    ).read_text()
    found = json.loads(output.read_text())
    assert len(found) == 16
    for name, difference in found.items():
        assert difference < (1e-6 if "float32" in name else 1e-2), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_activations_of_shared_rows_take_a_share_of_the_memory(server, tmp_path, size):
    """And, where SDPA needs no copy of its output, one copy of it that is exchanged back."""
    output = tmp_path / "result.json"
    arguments = ["call", "helpers.parts", "saved", str(output), str(size)]
    assert server.run(arguments, size, tmp_path) == [0] * size
    found = json.loads(output.read_text())
    whole, part = found["documents"]
    assert part == pytest.approx(whole / size, rel=5e-3)
    whole, part = found["one document a row"]
    assert whole / size < part <= found["documents"][1]


def config(run_dir, size=1, packing="auto", **model):
    """Accumulation, a checkpoint in the middle, an evaluation and samples beside it."""
    made = tiny_config(
        run_dir,
        training__steps=STEPS,
        training__global_batch_size=8,
        checkpoint__every_steps=3,
        evaluation__every_steps=3,
        evaluation__prompts=["The planet", "It"],
        # So that a shorter run is the beginning of a longer one.
        optimizer__schedule="constant",
        optimizer__warmup_steps=1,
    )
    fields = made["model"]["config"] | {"num_attention_heads": 4, "num_key_value_heads": 1} | model
    made["model"]["config"] = {name: value for name, value in fields.items() if value is not None}
    made["data"] |= {"packing": packing, "seq_len": 144}
    made["distributed"] = {"timeout_minutes": 2.0, "sequence_parallel": size}
    return made


def run(server, folder, made, world_size, *more, code=0, **env):
    path = write_config(folder, made)
    codes = server.run(["train", str(path), *more], world_size, folder, env)
    said = (folder / "output.txt").read_text()
    assert codes == [code] * world_size, said[-4000:]
    return said


def same(found, expected):
    """As close as sums in another order: losses, batches, evaluations; and the same samples."""
    steps, right = lines(found, "train"), lines(expected, "train")
    assert [one["batch_digest"] for one in steps] == [one["batch_digest"] for one in right]
    for one, other in zip(steps, right, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["step_tokens"] == other["step_tokens"]
    held, right = lines(found, "eval"), lines(expected, "eval")
    assert [one["tokens"] for one in held] == [one["tokens"] for one in right]
    assert [one["loss"] for one in held] == pytest.approx([one["loss"] for one in right], abs=1e-6)
    texts = [[line["text"] for line in lines(one, "sample")] for one in (found, expected)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("packing", "strategy", "world_size"),
    [
        ("bestfit", "ddp", 2),
        ("single", "fsdp2", 2),
        pytest.param("concat", "fsdp2", 4, marks=pytest.mark.wide),
        pytest.param("single", "ddp", 4, marks=pytest.mark.wide),
        pytest.param("bestfit", "hsdp", 4, marks=pytest.mark.wide),
    ],
)
def test_a_run_in_parts_is_the_run_of_one_process_and_goes_on_as_one(
    server, tmp_path, packing, strategy, world_size
):
    one, parts = tmp_path / "one", tmp_path / "parts"
    run(server, one, config(one / "run", packing=packing), 1)
    made = config(parts / "run", 2, packing)
    made["distributed"]["strategy"] = strategy
    nodes = {"LOCAL_WORLD_SIZE": "2"} if strategy == "hsdp" else {}
    run(server, parts, made, world_size, "training.steps=3", **nodes)
    made["distributed"]["sequence_parallel"] = 1
    run(server, parts, made, 1, "distributed.strategy=auto")
    same(parts / "run", one / "run")
    starts = lines(parts / "run", "start")
    assert [line["world_size"] for line in starts] == [world_size, 1]
    assert starts[1]["resumed_from"] == "step-00000003"
    AutoModelForCausalLM.from_pretrained(parts / "run" / "checkpoints" / "step-00000003")


def test_a_killed_process_of_a_group_ends_the_others_and_the_same_command_ends_in_equal_bits(
    server, tmp_path
):
    """The launch file says how many share rows."""
    straight, struck = tmp_path / "straight", tmp_path / "struck"
    launched = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    fault = {"LLMTRAIN_FAULTS": "loop.micro@rank=1@step=5@nth=2=kill"}
    for folder in (straight, struck):
        made = config(folder / "run", "auto", "bestfit", hidden_size=64)
        made["model"]["activation_checkpointing"] = "full"
        path = str(write_config(folder, made))
        if folder == struck:
            assert server.run(["train", path], 2, folder, launched | fault) == [75, KILLED]
            assert status(folder / "run")["exit_code"] == 75
        run(server, folder, made, 2, **launched)
    resumed = [line["resumed_from"] for line in lines(struck / "run", "start")]
    assert resumed == [None, "step-00000003"]
    assert weights(struck / "run", STEPS) == weights(straight / "run", STEPS)
    assert list(json.loads((struck / "run" / "auto.json").read_text())["launches"]) == [
        "ddp/cpu/2/sequence-2"
    ]


NO_HEADS = {"num_attention_heads": None, "num_key_value_heads": None}
REFUSED = {
    "a window": (
        {"model_type": "mistral", "sliding_window": 32},
        "distributed.sequence_parallel = 2",
        "its masks are not plainly causal",
    ),
    "a state-space model": (
        {"model_type": "mamba", "intermediate_size": 64, **NO_HEADS},
        "distributed.sequence_parallel = 2",
        "it has no attention layer",
    ),
    "attention beside another layer": (
        {
            "model_type": "lfm2",
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
        "distributed.sequence_parallel = 2",
        "its logits differ by",
    ),
    "positions by slopes": (
        {"model_type": "bloom", "intermediate_size": None, "num_key_value_heads": None},
        "distributed.sequence_parallel = 2",
        "transformers' attention interface",
    ),
    "a router": (
        {"model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True},
        "model.config.output_router_logits = True",
        "false with distributed.sequence_parallel = 2",
    ),
    "other heads": (
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        "distributed.sequence_parallel = 2",
        "a divisor of the 1 query heads",
    ),
    "local and global layers": (
        {"model_type": "gemma3_text", "sliding_window": 16, "head_dim": 8},
        "distributed.sequence_parallel = 2",
        "processes cannot share the rows of this model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_rows_cannot_be_shared_is_refused(server, tmp_path, name):
    fields, key, reason = REFUSED[name]
    said = run(server, tmp_path, config(tmp_path / "run", 2, **fields), 2, code=2)
    refused(said, key, reason)
    assert not (tmp_path / "run" / "checkpoints").exists()


def refused(said, key, reason):
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert key in said
    assert reason in said


@pytest.mark.parametrize(
    ("more", "key", "reason"),
    [
        (["data.seq_len=63"], "data.seq_len = 63", "62 or 64"),
        (["training.compile=blocks"], "training.compile = blocks", "not compiled"),
        (["distributed.strategy=zero2"], "distributed.strategy = zero2", "ddp, fsdp2 or hsdp"),
        (
            ["distributed.sequence_parallel=3"],
            "distributed.sequence_parallel = 3",
            "a divisor of the number of processes, 2",
        ),
    ],
)
def test_what_does_not_go_with_shared_rows_is_refused(server, tmp_path, more, key, reason):
    refused(run(server, tmp_path, config(tmp_path / "run", 2), 2, *more, code=2), key, reason)
