"""Pairs of answers and judged answers made at random, and runs on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from helpers import corpus
from helpers.bases import save_base
from helpers.tiny import tiny_config, write_config

from llmtrain.hashing import mix

WORDS = ("the", "a", "river", "stone", "of", "old", "runs", "under", "green", "light", "Why", "no")
STEPS = 6


def said(*key: int) -> str:
    """Some words that depend on the key alone."""
    draw = np.random.default_rng(mix(17, *key))
    return " ".join(draw.choice(WORDS, int(draw.integers(2, 12))))


def pairs(count: int) -> list[dict[str, Any]]:
    """Rows of `prompt`, `chosen` and `rejected` as lists of messages."""
    return [
        {
            "id": f"pair-{n}",
            "prompt": [{"role": "user", "content": f"{n}: {said(n, 0)}?"}],
            "chosen": [{"role": "assistant", "content": f"Yes, {said(n, 1)}."}],
            "rejected": [{"role": "assistant", "content": f"No {said(n, 2)}!"}],
        }
        for n in range(count)
    ]


def strings(count: int) -> list[dict[str, Any]]:
    """The same as strings, which need no template."""
    return [
        {
            "id": row["id"],
            "prompt": row["prompt"][0]["content"] + "\n",
            **{name: row[name][0]["content"] for name in ("chosen", "rejected")},
        }
        for row in pairs(count)
    ]


def feedback(count: int) -> list[dict[str, Any]]:
    """Rows of `prompt`, `completion` and `label`."""
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for n, row in enumerate(pairs(count))
        for name in (("chosen", "rejected")[n % 4 == 1],)
    ]


def config_of(folder: Path, rows: list[dict[str, Any]], loss: str = "dpo", **changes: Any) -> Any:
    """A run on these rows, from a small base in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = corpus.write_jsonl(folder / "rows.jsonl", rows)
    base = folder / "base"
    if not base.exists():
        save_base(base)
    asked: dict[str, Any] = {
        "training__steps": STEPS,
        "training__global_batch_size": 6,
        "training__micro_batch_size": 1,
        "evaluation__every_steps": STEPS,
        "optimizer__learning_rate": 1e-3,
        "optimizer__schedule": "constant",
        "optimizer__warmup_steps": 1,
        "data__seq_len": 160,
        "data__heldout": 0.1,
    }
    preference = {"loss": loss}
    for name in [name for name in changes if name.startswith("preference__")]:
        preference[name.removeprefix("preference__")] = changes.pop(name)
    adapter = changes.pop("adapter", None)
    fields = changes.pop("fields", None)
    config = tiny_config(folder / "run", **(asked | changes))
    config["data"]["sources"] = [{"path": str(path)}]
    config["model"] = {"from": str(base)}
    if fields is not None:
        config["model"] = {"config": fields, "tokenizer": "sample"}
    config["chat"] = {"template": "chatml"}
    config["preference"] = preference
    if adapter is not None:
        config["adapter"] = adapter
    return config


def write(folder: Path, config: dict[str, Any], name: str = "config.yaml") -> str:
    return str(write_config(folder, json.loads(json.dumps(config)), name))


def order_of(run_dir: Path, steps: int) -> list[list[str]]:
    """The ids of the rows that each step has trained, as `data which` names them."""
    from llmtrain.tools.data.which import which

    every = [which(run_dir, step).documents for step in range(1, steps + 1)]
    return [[str(one.id) for one in found] for found in every]


def by_hand(
    base: Path, rows: list[dict[str, Any]], order: list[list[str]], loss: str, **asked: float
) -> list[dict[str, float]]:
    """Train on pairs of strings in fp64: plain transformers, one sequence at a time, all logits."""
    import torch
    from helpers.tiny import optimizer_by_hand
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    known = {row["id"]: row for row in rows}
    beta, smooth = asked.get("beta", 0.1), asked.get("label_smoothing", 0.0)

    def worth(row: dict[str, Any], name: str) -> Any:
        """Σ log p of an answer, and its tokens."""
        asked_ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        whole = tokenizer(row["prompt"] + row[name], add_special_tokens=False)["input_ids"]
        assert whole[: len(asked_ids)] == asked_ids, "an answer that merges with its prompt"
        start = tokenizer("")["input_ids"]  # a begin token, if the tokenizer sets one
        ids = torch.tensor([[*start, *whole, tokenizer.eos_token_id]])
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        each = logits.gather(1, ids[0, 1:, None])[:, 0]
        own = each[len(start) + len(asked_ids) - 1 :]
        return own.sum(), len(own)

    with torch.no_grad():
        reference = {
            (name, half): worth(known[name], half)[0]
            for name in {one for step in order for one in step}
            for half in ("chosen", "rejected")
        }
    if loss in ("orpo", "simpo", "cpo"):
        reference = dict.fromkeys(reference, torch.zeros((), dtype=torch.float64))

    def of_pair(name: str) -> tuple[Any, float]:
        """The loss of a pair, and its margin."""
        (c, m), (r, n) = (worth(known[name], half) for half in ("chosen", "rejected"))
        c0, r0 = reference[name, "chosen"], reference[name, "rejected"]
        x, y = c - c0, r - r0
        z = beta * (x - y)
        match loss:
            case "dpo" | "cpo":
                found = -(1 - smooth) * logsigmoid(z) - smooth * logsigmoid(-z)
            case "dpo_norm":
                found = -logsigmoid(beta * (x / m - y / n))
            case "robust":
                found = (-(1 - smooth) * logsigmoid(z) + smooth * logsigmoid(-z)) / (1 - 2 * smooth)
            case "ipo":
                found = (x / m - y / n - 1 / (2 * beta)) ** 2
            case "hinge":
                found = torch.relu(1 - z)
            case "apo_zero":
                found = 1 - torch.sigmoid(beta * x) + torch.sigmoid(beta * y)
            case "orpo":
                p, q = torch.exp(c / m), torch.exp(r / n)
                odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
                found = -c / m - beta * logsigmoid(odds)
            case "simpo":
                found = -logsigmoid(beta * (c / m - r / n) - asked.get("gamma", 0.0))
            case _:
                raise AssertionError(loss)
        found = found - asked.get("sft_weight", 0.0) * c / m
        scale = (m, n) if loss in ("orpo", "simpo") else (1, 1)
        return found, float((beta * (x / scale[0] - y / scale[1])).detach())

    optimizer = optimizer_by_hand(model)
    for group in optimizer.param_groups:
        group["lr"] = asked["learning_rate"]
    lines = []
    for names in order:
        optimizer.zero_grad()
        losses, margins = zip(*(of_pair(name) for name in names), strict=True)
        mean = sum(losses) / len(names)
        mean.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        lines.append(
            {"loss": float(mean.detach()), "margin": sum(margins) / len(names), "grad_norm": norm}
        )
    return lines
