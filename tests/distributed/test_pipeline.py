"""Models whose blocks are shared by the processes of a pipeline: what one process trains."""

import itertools

import pytest
import torch
from helpers.tiny import STEPS, lines, tiny_config, write_config
from safetensors.torch import load_file

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "llama": {"model_type": "llama", **SMALL},
    "gpt2": {"model_type": "gpt2", **GPT2, **NO_DROPOUT},
    "qwen3": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **SMALL, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        "num_local_experts": 4,
    },
}
MODELS |= {f"{one} of two": MODELS[one] | {"num_key_value_heads": 2} for one in ("llama", "qwen3")}
MODELS["llama of five blocks"] = MODELS["llama"] | {"num_hidden_layers": 5}
KINDS = ("llama", "gpt2", "qwen3", "gemma2", "mixtral")
UNTIED = ("llama", "mixtral")  # nothing is summed in another order
SCHEDULES = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": {"pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2},
}


def run(server, folder, world_size, model, *, code=0, more=(), distributed=None, **changes):
    """A run of 20 steps: uneven masks, 3 or more micro-batches, evaluations and samples."""
    folder.mkdir(exist_ok=True)
    made = tiny_config(
        folder / "run",
        model__config=MODELS[model],
        data__document_mask=True,
        evaluation__prompts=["The planet", "It"],
        **changes,
    )
    made["distributed"] = {"timeout_minutes": 2.0} | (distributed or {})
    codes = server.run(["train", str(write_config(folder, made)), *more], world_size, folder)
    said = (folder / "output.txt").read_text()
    assert codes == [code] * world_size, said[-4000:]
    return said


def weights(run_dir):
    (last,) = sorted((run_dir / "checkpoints").glob("step-*"))[-1:]
    files = [load_file(path) for path in sorted(last.glob("*.safetensors"))]
    return {name: tensor for one in files for name, tensor in one.items()}


def same(found, expected, *, bits=False):
    """Losses, norms, batches, evaluations and samples; with `bits` the same weights and moments."""
    steps, right = lines(found, "train"), lines(expected, "train")
    assert len(steps) == len(right) == STEPS
    for one, other in zip(steps, right, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0 if bits else 1e-6, rel=0)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["batch_digest"] == other["batch_digest"]
    held, right = lines(found, "eval"), lines(expected, "eval")
    assert [one["tokens"] for one in held] == [one["tokens"] for one in right]
    assert [one["loss"] for one in held] == pytest.approx([one["loss"] for one in right], abs=1e-6)
    texts = [[line["text"] for line in lines(one, "sample")] for one in (found, expected)]
    assert texts[0] == texts[1]
    own, whole = weights(found), weights(expected)
    assert own.keys() == whole.keys()
    for name, tensor in own.items():
        if bits:
            assert torch.equal(tensor, whole[name]), name
        else:
            torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory):
    """Returns the directory of a run of one process, by the name of its model and its changes."""
    known = {}

    def get(model, **changes):
        key = (model, *sorted(changes.items()))
        if key not in known:
            known[key] = tmp_path_factory.mktemp(model)
            run(server, known[key], 1, model, **changes)
        return known[key] / "run"

    return get


def diagonal(models, schedules):
    """Each model under one schedule; the others are `wide`, or `slow` if they are interleaved."""
    turns = dict(zip(models, itertools.cycle(schedules)))
    return [
        pytest.param(
            *(model, schedule),
            marks=[]
            if turns[model] == schedule
            else [pytest.mark.slow if schedule == "interleaved" else pytest.mark.wide],
        )
        for model, schedule in itertools.product(models, schedules)
    ]


@pytest.mark.parametrize(("model", "schedule"), diagonal(KINDS, SCHEDULES))
def test_two_processes_that_share_the_blocks_train_as_one(server, tmp_path, alone, model, schedule):
    distributed = {"pipeline_parallel": 2} | SCHEDULES[schedule]
    run(server, tmp_path, 2, model, distributed=distributed)
    same(tmp_path / "run", alone(model), bits=model in UNTIED)


def test_a_pipeline_trains_a_batch_that_grows(server, tmp_path):
    sizes = ({"from_step": 1, "size": 12}, {"from_step": 8, "size": 24})
    changes = {"training__global_batch_size": [dict(one) for one in sizes]}
    run(server, tmp_path / "one", 1, "llama", **changes)
    run(server, tmp_path / "two", 2, "llama", distributed={"pipeline_parallel": 2}, **changes)
    same(tmp_path / "two" / "run", tmp_path / "one" / "run", bits=True)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("qwen3", {"strategy": "ddp"}),
        ("qwen3", {"strategy": "fsdp2"}),
        pytest.param("llama", {"strategy": "fsdp2", "fsdp_sync": "last"}, marks=pytest.mark.wide),
        pytest.param(
            "gpt2", {"strategy": "fsdp2", **SCHEDULES["interleaved"]}, marks=pytest.mark.wide
        ),
        pytest.param("mixtral", {"strategy": "ddp"}, marks=pytest.mark.wide),
    ],
)
def test_two_pipelines_train_as_one_process(server, tmp_path, alone, model, keys):
    run(server, tmp_path, 4, model, distributed={"pipeline_parallel": 2} | keys)
    same(tmp_path / "run", alone(model))


def test_five_blocks_are_trained_as_one_process_by_two(server, tmp_path, alone):
    run(server, tmp_path, 2, "llama of five blocks", distributed={"pipeline_parallel": 2})
    same(tmp_path / "run", alone("llama of five blocks"), bits=True)


@pytest.mark.parametrize(
    "model", ["llama of two", pytest.param("qwen3 of two", marks=pytest.mark.slow)]
)
def test_pipelines_of_cut_matrices_train_as_one_process(server, tmp_path, alone, model):
    keys = {"pipeline_parallel": 2, "tensor_parallel": 2}
    run(server, tmp_path, 4, model, distributed=keys)
    same(tmp_path / "run", alone(model))


@pytest.mark.wide
def test_a_pipeline_of_four_ties_its_ends(server, tmp_path, alone):
    run(server, tmp_path, 4, "qwen3", distributed={"pipeline_parallel": 4})
    same(tmp_path / "run", alone("qwen3"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model__activation_checkpointing": "full"},
        pytest.param({"model__activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param({"training__z_loss": 1e-3}, marks=pytest.mark.slow),
        pytest.param({"training__loss_kernel": "logits"}, marks=pytest.mark.slow),
        pytest.param({"optimizer__name": "muon"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "training__z_loss": 1e-3,
                "training__loss_kernel": "logits",
                "optimizer__name": "muon",
            },
            marks=pytest.mark.wide,
        ),
        pytest.param({"data__packing": "single"}, marks=pytest.mark.wide),
        pytest.param({"checkpoint__background": True}, marks=pytest.mark.wide),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_what_else_a_run_asks_for_is_as_on_one_process(server, tmp_path, alone, changes):
    run(server, tmp_path, 2, "llama", distributed={"pipeline_parallel": 2}, **changes)
    same(tmp_path / "run", alone("llama", **changes))


def test_adapters_are_trained_as_on_one_process_and_go_on_there(server, tmp_path, alone):
    (base,) = (alone("qwen3") / "checkpoints").iterdir()
    runs = {"one": (1, {}), "two": (2, {"pipeline_parallel": 2})}
    for name, (world_size, keys) in runs.items():
        made = tiny_config(tmp_path / name)
        made |= {"model": {"from": str(base)}, "adapter": {"kind": "lora"}, "distributed": keys}
        path = write_config(tmp_path, made, f"{name}.yaml")
        assert server.run(["train", str(path)], world_size, tmp_path) == [0] * world_size
    same(tmp_path / "two", tmp_path / "one")
    more = ["distributed.pipeline_parallel=1", f"training.steps={STEPS + 1}"]
    assert server.run(["train", str(tmp_path / "two.yaml"), *more], 1, tmp_path) == [0]
    assert lines(tmp_path / "two", "train")[-1]["step"] == STEPS + 1


@pytest.mark.parametrize(
    ("keys", "more", "expected"),
    [
        (
            {"strategy": "zero2"},
            (),
            "distributed.strategy = zero2\n    expected: ddp, fsdp2 or hsdp with",
        ),
        (
            {},
            ("training.micro_batch_size=24",),
            "training.micro_batch_size = 24\n    expected: at most 12 with "
            "distributed.pipeline_parallel = 2 and 1f1b: the 24 rows that a pipeline has of a step "
            "are 1 micro-batch\n    try:      training.micro_batch_size=12",
        ),
        (
            SCHEDULES["interleaved"],
            ("model.config.num_hidden_layers=3",),
            "distributed.pipeline_parallel = 2\n"
            "    expected: at most 1: 3 blocks for 4 stages, of which each process has 2",
        ),
        (
            {},
            ("training.compile=blocks",),
            "training.compile = blocks\n"
            "    expected: off with distributed.pipeline_parallel = 2, whose stages are not",
        ),
        (
            {},
            ("model.config.model_type=mixtral", "model.config.output_router_logits=true"),
            "model.config.output_router_logits = True\n    expected: false with "
            "distributed.pipeline_parallel = 2: the loss of a router is one of all blocks together",
        ),
        (
            {},
            ("model.freeze=['model.embed_tokens*', 'model.layers.[012].*']",),
            "expected: stages with a trained parameter each: process 0 of 2 has none",
        ),
    ],
    ids=["zero", "micro-batches", "blocks", "compiled", "router", "frozen"],
)
def test_what_a_pipeline_cannot_do_is_refused(server, tmp_path, keys, more, expected):
    said = run(
        server, tmp_path, 2, "llama", code=2, more=more, distributed={"pipeline_parallel": 2} | keys
    )
    assert expected in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_micro_batch_that_is_left_open_is_one_that_fills_the_pipeline(server, tmp_path):
    run(
        server,
        tmp_path,
        2,
        "llama",
        training__micro_batch_size="auto",
        training__global_batch_size=8,
        training__steps=2,
        distributed={"pipeline_parallel": 2},
    )
    (start,) = lines(tmp_path / "run", "start")
    assert (start["micro_batch_size"], start["accumulation"]) == (4, 2)
