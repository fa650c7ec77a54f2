"""Whole runs in which the documents of a block are hidden from each other."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import lines, tiny_config, write_config
from safetensors.numpy import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

SEQ_LEN, STEPS = 32, 6
# Attention of ours, and one that transformers keeps: with a window shorter than a block.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "num_key_value_heads": 1},
}


def texts():
    """Documents of one to thirty words: a block holds several of them."""
    draw = np.random.default_rng(5)
    words = ["tree", "stone", "river", "of", "the", "a", "light", "runs", "under", "old", "and"]
    lengths = draw.integers(1, 30, 2000)
    return [{"id": str(n), "text": " ".join(draw.choice(words, k))} for n, k in enumerate(lengths)]


def train(server, folder, kind, world_size, micro, *, mask=True):
    folder.mkdir(parents=True)
    (folder / "short.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts()))
    config = tiny_config(
        folder / "run",
        data__sources=[{"path": str(folder / "short.jsonl")}],
        data__document_mask=mask,
        training__steps=STEPS,
        training__micro_batch_size=micro,
        evaluation__every_steps=STEPS,
    )
    config["model"]["config"] |= {"model_type": kind, **MODELS[kind]}
    codes = server.run(["train", str(write_config(folder, config))], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return folder / "run"


@pytest.mark.parametrize("kind", MODELS)
def test_the_evaluations_loss_is_that_of_each_document_alone(server, tmp_path, kind):
    """By plain transformers, from the checkpoint as it lies and the tokens that were scored."""
    run_dir = train(server, tmp_path / "two", kind, 2, 4)
    step = f"step-{STEPS:08d}"
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / step).eval()
    held = load_file(run_dir / "eval.safetensors")
    ids = torch.from_numpy(held["ids"]).long()
    borders = set(held["starts"].tolist())
    assert len(borders) == 8
    summed, scored = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(ids) - 1, SEQ_LEN):
            last = min(first + SEQ_LEN, len(ids) - 1)
            cuts = [first, *sorted(b for b in borders if first < b < last), last]
            for begin, end in pairwise(cuts):
                targets = ids[begin + 1 : end + 1].clone()
                targets[~torch.from_numpy(held["scored"][begin + 1 : end + 1])] = -100
                logits = model(ids[None, begin:end], use_cache=False).logits[0]
                summed += float(F.cross_entropy(logits, targets, reduction="sum"))
                scored += int((targets != -100).sum())
    written = lines(run_dir, "eval")[-1]
    assert written["tokens"] == scored
    assert written["loss"] == pytest.approx(summed / scored, abs=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_losses_do_not_depend_on_processes_and_micro_batches(server, tmp_path, kind):
    one = train(server, tmp_path / "one", kind, 1, 24)
    two = train(server, tmp_path / "two", kind, 2, 3)
    for name in ("train", "eval"):
        here, there = lines(one, name), lines(two, name)
        assert len(here) == len(there) >= 2
        for ours, theirs in zip(here, there, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["tokens"] == theirs["tokens"]
    assert all(line["step_tokens"] < 24 * SEQ_LEN for line in lines(one, "train"))


def test_hiding_documents_changes_what_is_learnt(server, tmp_path):
    hidden = lines(train(server, tmp_path / "on", "llama", 1, 24), "train")
    seen = lines(train(server, tmp_path / "off", "llama", 1, 24, mask=False), "train")
    assert np.abs([a["loss"] - b["loss"] for a, b in zip(hidden, seen, strict=True)]).max() > 1e-4
    assert hidden[0]["step_tokens"] < seen[0]["step_tokens"] == 24 * SEQ_LEN
