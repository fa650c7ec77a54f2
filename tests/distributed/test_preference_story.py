"""From a small base to a model that prefers what people chose: on real pairs, with two seeds."""

import json
import math

import pytest
import torch
from helpers import preferred
from helpers.tiny import lines
from helpers.vocabularies import shared
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.hashing import mix
from llmtrain.tools.use.export import export

pytestmark = pytest.mark.slow

HELD_OUT = 120
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def base(server, tmp_path_factory):
    """A small model that was tuned on conversations."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "run": {"dir": str(folder / "run"), "seed": 1},
        "model": {"config": MODEL, "tokenizer": {"train": 4096}},
        "data": {"sources": [{"path": str(shared("sft") / "train.jsonl")}], "seq_len": 512},
        "chat": {"template": "chatml", "too_long": "truncate"},
        "training": {"steps": 80, "global_batch_size": 16, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 20},
    }
    config["training"]["precision"] = "fp32"
    path = preferred.write(folder, config)
    assert server.run(["train", path], 1, folder) == [0], (folder / "output.txt").read_text()
    return folder / "run"


@pytest.mark.parametrize("seed", [1, 2])
def test_held_out_pairs_are_told_apart_after_tuning(server, base, tmp_path, seed):
    text = (shared("preference") / "train.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rows.sort(key=lambda row: mix(seed, *row["id"].encode()))
    for name, part in (("heldout", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    config = {
        "run": {"dir": str(tmp_path / "run"), "seed": seed},
        "model": {"from": str(base)},
        "data": {
            "sources": [{"path": str(tmp_path / "train.jsonl")}],
            "seq_len": 2048,
            "heldout": 0.0,
        },
        "chat": {"template": "chatml", "too_long": "drop"},
        "preference": {"loss": "dpo"},
        "training": {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 2e-4, "schedule": "linear", "warmup_steps": 0.1},
        "evaluation": {
            "sources": [{"path": str(tmp_path / "heldout.jsonl")}],
            "every_steps": 1000,
            "max_documents": HELD_OUT,
        },
    }
    config["training"]["precision"] = "fp32"
    config["optimizer"]["weight_decay"] = 0.0
    path = preferred.write(tmp_path, config)
    assert server.run(["train", path], 1, tmp_path) == [0], (tmp_path / "output.txt").read_text()
    first, last = (line for line in lines(tmp_path / "run", "eval"))
    assert first["accuracy"] == 0.5
    assert last["pairs"] >= 100
    certain = 0.5 + 2 * math.sqrt(0.25 / last["pairs"])
    assert last["accuracy"] > certain
    exported = tmp_path / "exported"
    export(tmp_path / "run", exported)
    right, count = by_hand(exported, base, rows[:HELD_OUT])
    assert count == last["pairs"]
    assert right / count == pytest.approx(last["accuracy"], abs=1.5 / count)


def by_hand(exported, base, rows):
    """How many pairs the tuned model prefers rightly more than the base does, and of how many."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    start = max((base / "checkpoints").iterdir())
    tuned, before = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (exported, start))

    def ids_of(row, name):
        how = {"tokenize": False}
        asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **how)
        said = row[name][0]["content"] + "<|im_end|>"
        given = tokenizer(asked, add_special_tokens=False)["input_ids"]
        return given, tokenizer(asked + said, add_special_tokens=False)["input_ids"]

    def worth(model, given, whole):
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, :-1].double().log_softmax(-1)
        each = logits.gather(1, torch.tensor(whole)[1:, None])[:, 0]
        return float(each[len(given) - 1 :].sum())

    right = count = 0
    for row in rows:
        halves = [ids_of(row, name) for name in ("chosen", "rejected")]
        if sum(len(whole) for _, whole in halves) > 2048:
            continue
        gains = [worth(tuned, *half) - worth(before, *half) for half in halves]
        right, count = right + (gains[0] > gains[1]), count + 1
    return right, count
