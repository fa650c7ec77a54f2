"""Whole runs of adapters: killed and resumed, under each strategy, and loaded by peft."""

import json
import shutil
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import used
from helpers.bases import save_base
from helpers.chats import rows_of
from helpers.corpus import articles, write_jsonl
from helpers.ranks import until
from helpers.tiny import lines, status, tiny_config, weights, write_config
from safetensors.numpy import load_file

from llmtrain.hashing import mix

STEPS, EVERY = 6, 2
RANK = 4
KINDS, STRATEGIES = ("lora", "dora", "rslora"), ("ddp", "fsdp2", "zero3")
DIAGONAL = tuple(zip(KINDS, STRATEGIES, strict=True))
CASES = [
    pytest.param(kind, strategy, marks=() if (kind, strategy) in DIAGONAL else pytest.mark.slow)
    for kind, strategy in product(KINDS, STRATEGIES)
]
# Kills under ZeRO-3 are the dearest, three starts of DeepSpeed each: a sweep.
KILLED = [
    pytest.param(kind, strategy, marks=pytest.mark.slow) if strategy == "zero3" else case
    for case, (kind, strategy) in zip(CASES, product(KINDS, STRATEGIES), strict=True)
]
SHAPES = [(32, 32)] * 4 + [(64, 32)] * 2 + [(32, 64)]  # of the linear layers of a block
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("weights") / "base")


def config(run_dir, base, kind, strategy, **changes):
    made = tiny_config(
        run_dir,
        training__steps=STEPS,
        training__global_batch_size=8,
        checkpoint__every_steps=EVERY,
        evaluation__every_steps=EVERY,
        optimizer__learning_rate=1e-2,
        optimizer__schedule="constant",  # so that a shorter run is the beginning of a longer one
        optimizer__warmup_steps=1,
        **changes,
    )
    made["model"] = {"from": str(base)}
    made["adapter"] = {"kind": kind, "r": RANK, "alpha": 8, "dropout": 0.1}
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    return made


def train(server, folder, made, *more, world=2):
    path = write_config(folder, made)
    codes = server.run(["train", str(path), *more], world, folder)
    assert codes == [0] * world, (folder / "output.txt").read_text()[-4000:]


def refused(server, folder, made, world=1):
    path = write_config(folder, made)
    assert server.run(["train", str(path)], world, folder) == [2] * world
    said = (folder / "output.txt").read_text()
    assert said.count("error:") == 1
    assert "Traceback" not in said
    return " ".join(said.split())


@pytest.fixture(scope="module")
def straight(server, base, tmp_path_factory):
    """Run directories by kind and strategy, each trained when it is first asked for."""

    class Trained(dict[tuple[str, str], Path]):
        def __missing__(self, key):
            folder = tmp_path_factory.mktemp("-".join(key))
            train(server, folder, config(folder / "run", base, *key))
            self[key] = folder / "run"
            return self[key]

    return Trained()


def saved(run_dir, step=STEPS):
    return run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize(("kind", "strategy"), KILLED)
def test_adapters_that_were_killed_and_resumed_end_in_the_same_bits(
    server, tmp_path, straight, base, kind, strategy
):
    run_dir = tmp_path / "run"
    path = write_config(tmp_path, config(run_dir, base, kind, strategy))
    seed = time.time_ns()
    for kill in range(3 if (kind, strategy) not in DIAGONAL else 1):
        after = kill * EVERY + mix(seed, kill) % 2 + 1
        ranks = server.start(["train", str(path)], 2, tmp_path)
        until(lambda: len(lines(run_dir, "train")) >= after, f"{after} steps")  # noqa: B023
        ranks.kill()
    train(server, tmp_path, config(run_dir, base, kind, strategy))
    expected = weights(straight[kind, strategy], STEPS)
    assert expected.keys() == {FILE, "optimizer-00001-of-00001.safetensors"}
    assert weights(run_dir, STEPS) == expected, f"seed {seed}"
    digests = [line["batch_digest"] for line in lines(run_dir, "train")]
    assert digests == [line["batch_digest"] for line in lines(straight[kind, strategy], "train")]


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_a_checkpoint_holds_every_adapter_whole_and_nothing_of_the_base(
    straight, base, kind, strategy
):
    directory = saved(straight[kind, strategy])
    found = load_file(directory / FILE)
    shapes = sorted(tuple(one.shape) for one in found.values())
    parts = [part for rows, columns in SHAPES for part in ((RANK, columns), (rows, RANK))]
    parts += [(rows,) for rows, _ in SHAPES] if kind == "dora" else []
    assert shapes == sorted(2 * parts)
    moments = load_file(directory / "optimizer-00001-of-00001.safetensors")
    assert moments.keys() == {f"{n}.{m}" for n in found for m in ("exp_avg", "exp_avg_sq")}
    (start,) = lines(straight[kind, strategy], "start")
    trained = sum(one.size for one in found.values())
    assert start["trainable_parameters"] == trained
    everything = sum(one.size for one in load_file(base / "model.safetensors").values())
    assert start["parameters"] == trained + everything
    names = {path.name for path in directory.iterdir()}
    assert {"adapter_config.json", "adapter.json", "generation_config.json"} <= names
    assert "tokenizer.json" in names
    assert not {"config.json", "model.safetensors"} & names


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_the_adapters_of_every_rank_are_trained(straight, kind, strategy):
    """B begins at zero: rows that a rank does not train would still be zero."""
    first, last = (load_file(saved(straight[kind, strategy], n) / FILE) for n in (EVERY, STEPS))
    for name, tensor in last.items():
        if ".lora_B." in name:
            assert np.abs(tensor).sum(1).all(), name
        else:
            assert (tensor != first[name]).reshape(len(tensor), -1).any(1).all(), name


@pytest.mark.parametrize(
    ("kind", "strategy", "other"),
    [
        ("dora", "fsdp2", "ddp"),
        pytest.param("rslora", "zero3", "fsdp2", marks=pytest.mark.slow),
        pytest.param("lora", "ddp", "zero3", marks=pytest.mark.slow),
        pytest.param("lora", "fsdp2", "zero2", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_adapters_goes_on_under_another_strategy(
    server, tmp_path, base, kind, strategy, other
):
    """Without dropout, whose masks depend on the ranks."""
    found = {}
    for second in (strategy, other):
        folder = tmp_path / second
        made = config(folder / "run", base, kind, strategy)
        made["adapter"]["dropout"] = 0.0
        train(server, folder, made, f"training.steps={EVERY}")
        made["distributed"]["strategy"] = second
        train(server, folder, made)
        found[second] = load_file(saved(folder / "run") / FILE)
        assert [one["resumed_from"] for one in lines(folder / "run", "start")] == [
            None,
            f"step-{EVERY:08d}",
        ]
    for name, tensor in found[strategy].items():
        assert np.allclose(tensor, found[other][name], atol=2e-5), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft's
def test_peft_loads_a_checkpoint_as_it_is(straight, base):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for key in DIAGONAL:
        directory = saved(straight[key])
        bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(directory)("The planet", return_tensors="pt").input_ids
        with torch.no_grad():
            before = bare(ids).logits
            model = PeftModel.from_pretrained(bare, directory)
            assert not torch.allclose(model(ids).logits, before, atol=1e-3)
        held = {name.replace(".default", ""): one for name, one in model.named_parameters()}
        for name, tensor in load_file(directory / FILE).items():
            found = held.get(name, held.get(f"{name}.weight"))
            assert np.array_equal(found.detach().numpy(), tensor), name


def test_an_adapter_lowers_the_held_out_loss(straight):
    for key in DIAGONAL:
        losses = [line["loss"] for line in lines(straight[key], "eval")]
        assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_in_bf16_a_bf16_base_trains_fp32_adapters(server, tmp_path, base, strategy):
    made = config(tmp_path / "run", base, "lora", strategy, training__precision="bf16")
    made["training"]["steps"] = EVERY
    train(server, tmp_path, made)
    found = load_file(saved(tmp_path / "run", EVERY) / FILE)
    assert {one.dtype for one in found.values()} == {np.dtype("float32")}
    rounded = [one.view(np.uint32) & 0xFFFF for one in found.values()]
    assert all(one.any() for one in rounded)  # not values of bf16


def test_an_evaluation_of_text_and_conversations_in_bf16_is_repeated_to_the_last_bit(
    server, tmp_path, base
):
    """On an adapter, with rows for the tokens of the template, that two processes trained."""
    made = config(tmp_path / "run", base, "lora", "ddp", training__precision="bf16")
    made["training"]["steps"] = EVERY
    talks = write_jsonl(tmp_path / "chat.jsonl", rows_of(60))
    other = write_jsonl(tmp_path / "other.jsonl", rows_of(9, 100))
    text = write_jsonl(tmp_path / "text.jsonl", articles(9))
    made["data"] |= {"sources": [{"path": str(talks)}], "seq_len": 256}
    made["evaluation"]["sources"] = [{"path": str(text)}, {"path": str(other)}]
    made["chat"] = {"template": "chatml"}
    train(server, tmp_path, made)
    evaluated = {line["split"]: line for line in lines(tmp_path / "run", "eval")}
    labels = ("evaluation/text.jsonl", "evaluation/other.jsonl")
    assert evaluated.keys() == {"heldout", *(f"heldout/{one}" for one in labels)}
    words = ["llmtrain", "evaluate", str(tmp_path / "run"), "--json"]
    found = json.loads(used.given(server, tmp_path, words))
    figures = ("loss", "perplexity", "bits_per_byte", "tokens", "bytes", "documents")
    for key in ("step", *figures):
        assert found[key] == evaluated["heldout"][key], key
    assert found["bits_per_byte"] is None
    assert found["sources"].keys() == set(labels)
    for label in labels:
        line = evaluated[f"heldout/{label}"]
        assert {key: found["sources"][label][key] for key in figures} == {
            key: line[key] for key in figures
        }
    assert found["sources"][labels[0]]["bits_per_byte"] > 0
    assert found["sources"][labels[1]]["bits_per_byte"] is None


def test_rows_of_named_tokens_are_trained_and_saved_alike_under_each_strategy(
    server, tmp_path, base
):
    held: dict[str, dict[str, np.ndarray]] = {}
    for strategy in STRATEGIES:
        run_dir = tmp_path / strategy / "run"
        made = config(run_dir, base, "lora", strategy)
        made["adapter"] |= {"train_tokens": ["Ġthe", "<|endoftext|>"], "targets": "q_proj"}
        made["adapter"]["dropout"] = 0.0
        made["training"]["steps"] = EVERY
        train(server, tmp_path / strategy, made)
        held[strategy] = load_file(saved(run_dir, EVERY) / FILE)
        (start,) = lines(run_dir, "start")
        assert start["trainable_parameters"] == sum(one.size for one in held[strategy].values())
    rows = held["ddp"]["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    directory = saved(tmp_path / "ddp" / "run", EVERY)
    ids = json.loads((directory / "adapter_config.json").read_text())["trainable_token_indices"]
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"][ids]
    assert rows.shape == before.shape == (2, 32)
    assert (rows != before).any(1).all()
    for strategy in ("fsdp2", "zero3"):
        assert held[strategy].keys() == held["ddp"].keys()
        for name, tensor in held["ddp"].items():
            assert np.allclose(held[strategy][name], tensor, atol=1e-5), (strategy, name)


def test_a_base_that_is_gone_or_changed_is_refused_at_a_resume(server, tmp_path):
    base = save_base(tmp_path / "base", seed=3)
    made = config(tmp_path / "run", base, "lora", "ddp")
    train(server, tmp_path, made, f"training.steps={EVERY}", world=1)
    shutil.rmtree(base)
    said = refused(server, tmp_path / "gone", made)
    assert "model.from" in said
    save_base(tmp_path / "base", seed=2)
    said = refused(server, tmp_path / "changed", made)
    assert "has other weights now" in said
    assert status(tmp_path / "run")["exit_code"] == 0  # of the start before, which had finished
    events = lines(tmp_path / "run", "event")
    refusals = [line["detail"]["reason"] for line in events if line["event"] == "start_refused"]
    assert len(refusals) == 2
    assert all("model.from" in reason for reason in refusals)
    shutil.rmtree(base)
    save_base(tmp_path / "base", seed=3)
    train(server, tmp_path, made, world=1)
    assert lines(tmp_path / "run", "start")[-1]["resumed_from"] == f"step-{EVERY:08d}"


def test_four_bits_without_cuda_are_refused(server, tmp_path, base):
    said = refused(server, tmp_path, config(tmp_path / "run", base, "qlora", "ddp"))
    assert "adapter.kind = qlora" in said
    assert "a CUDA device" in said
    assert "adapter.kind=lora" in said
