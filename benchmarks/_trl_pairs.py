"""The parts `trl` and `same` of `preference.py`: runs on pairs beside TRL's DPOTrainer.

Both compute what the reference says once, before the first step, and that is counted. Neither
recomputes activations; the rest is as each of them has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import Bench, apart, around, config_of, cpu_seconds, llama, peak_mb, turns, unsaved

SHAPE = llama(192, 4, 3, 512, 50_304, 1024)
SMALL = llama(64, 2, 4, 172, 2048, 1024) | {"tie_word_embeddings": False}
SEQ_LEN, BLOCKS, ROWS = 1024, 4, 4  # of llmtrain; TRL's rows have half as many tokens, or fewer
LORA = {"kind": "lora", "r": 16, "alpha": 32}
RATE, BETA = 1e-4, 0.1
OPTIMIZER = {"learning_rate": RATE, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 1}
FIGURES = ("loss", "chosen_reward", "rejected_reward", "margin")
THEIRS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
NAMES = {"llmtrain": "llmtrain", "trl": "TRL"}
LIMIT = 1800  # seconds of a process


def speed(bench: Bench, script: str, pairs: Path, tokenizer: Path) -> None:
    """Train one epoch of the same pairs with each, a process each, in turns.

    script: whose child calls `contender`
    """
    rows = fitting(pairs, tokenizer, bench.sizes.pairs)
    base, data = base_of(bench.folder / "base", SHAPE, tokenizer), bench.folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"what": "trl", "base": str(base), "data": str(data), "count": len(rows)}
    for kind in bench.sizes.kinds:
        found: dict[str, list[dict[str, Any]]] = {}
        for turn, one in turns(NAMES, bench.sizes.turns):
            place = bench.folder / f"{kind}-{one}-{turn}"
            place.mkdir()
            own = {"kind": one, "lora": kind == "LoRA", "folder": str(place), "steps": 0}
            row = apart(script, asked | own, LIMIT, python=python_of(bench, one))
            found.setdefault(one, []).append(row)
        rate = {one: max(row["pairs"] / row["cpu"] for row in runs) for one, runs in found.items()}
        peak = {one: min(row["peak_mb"] for row in runs) for one, runs in found.items()}
        for one, name in NAMES.items():
            more = {"runs": [{k: v for k, v in run.items() if k != "steps"} for run in found[one]]}
            title = f"{kind}, {name}: pairs of an epoch, with the reference"
            bench.say(title, rate[one], "/CPU s", **more)
            bench.say("  peak memory", peak[one], "MB")
        bench.say(f"{kind}: rate over TRL", rate["llmtrain"] / rate["trl"], "×", "≥ 1.3")
        bench.say(f"{kind}: peak memory over TRL", peak["llmtrain"] / peak["trl"], "×", "≤ 0.7")


def same(bench: Bench, script: str) -> None:
    """Train the same pairs of strings in the same order with each, one after the other."""
    import numpy as np

    base, data = base_of(bench.folder / "base", SMALL, None), bench.folder / "pairs.jsonl"
    steps = bench.sizes.steps
    rows = strings(4 * steps + 40)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"what": "trl", "base": str(base), "data": str(data), "count": 0, "lora": False}
    (bench.folder / "ours").mkdir()
    own = {"kind": "llmtrain", "folder": str(bench.folder / "ours"), "steps": steps}
    ours = apart(script, asked | own, LIMIT)
    by_id = {row["id"]: row for row in rows}
    data.write_text("".join(json.dumps(by_id[one]) + "\n" for one in ours["order"]))
    own = {"kind": "trl", "folder": str(bench.folder / "theirs"), "steps": steps}
    theirs = apart(script, asked | own, LIMIT, python=str(bench.asked.trl))
    mine, other = (np.array(found["figures"]) for found in (ours, theirs))
    apart_by = np.abs(mine - other).max(axis=0)
    more = {"last": mine[-1].tolist(), "trl": theirs["version"]}
    for name, figure in zip(FIGURES, apart_by.tolist(), strict=True):
        bench.say(f"{name} of {steps} steps: most apart from TRL's", figure, "", "≤ 1e-05", **more)


def python_of(bench: Bench, one: str) -> str:
    return sys.executable if one == "llmtrain" else str(bench.asked.trl)


def strings(count: int) -> list[dict[str, str]]:
    """Rows of a prompt and two answers, which are strings."""
    words = ("the", "a", "river", "stone", "old", "runs", "under", "green", "light", "why", "yes")

    def said(n: int, length: int) -> str:
        return " ".join(words[(n * 7 + k * k + 3 * k * n) % len(words)] for k in range(length))

    return [
        {
            "id": f"pair-{n}",
            "prompt": f"{n}: {said(n, 5 + n % 7)}?\n",
            "chosen": f"Yes, {said(n + 1, 4 + n % 11)}.",
            "rejected": f"No {said(n + 2, 3 + n % 5)}!",
        }
        for n in range(count)
    ]


def fitting(pairs: Path, tokenizer: Path, count: int) -> list[dict[str, Any]]:
    """The first pairs of messages that fit into a block, as both have them."""
    from transformers import AutoTokenizer

    encode, found = AutoTokenizer.from_pretrained(tokenizer), list[dict[str, Any]]()
    for line in pairs.read_text("utf-8").splitlines():
        row = json.loads(line)
        halves = ["".join(m["content"] for m in [*row["prompt"], *row[k]]) for k in KEYS]
        if max(len(encode(text).input_ids) for text in halves) <= SEQ_LEN // 2 - 64:
            found.append({key: row[key] for key in ("prompt", *KEYS)})
        if len(found) == count:
            break
    return found


KEYS = ("chosen", "rejected")
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def base_of(directory: Path, shape: dict[str, Any], tokenizer: Path | None) -> Path:
    """A directory with random weights; tokenizer: None = that of the sample."""
    import torch
    from harness import SAMPLE
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    loaded = AutoTokenizer.from_pretrained(tokenizer or SAMPLE)
    if tokenizer is not None:
        loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        loaded.chat_template = TEMPLATE
    loaded.save_pretrained(directory)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(directory)
    return directory


def contender(**asked: Any) -> dict[str, Any]:
    """Train one, in a process of its own.

    asked: kind (llmtrain or trl), lora, base, data, folder, count of its pairs, and steps, of one
    pair each; 0 = one epoch
    """
    return (with_llmtrain if asked["kind"] == "llmtrain" else with_trl)(asked)


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):  # type: ignore[misc]  # TRL is not installed here
        """Reads its rows in order."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    began, steps = cpu_seconds(), asked["steps"]
    settings = {"max_steps": steps} if steps else {"num_train_epochs": 1}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "beta": BETA}
    settings |= {"logging_steps": 1 if steps else 1000, "save_strategy": "no", "use_cpu": True}
    settings |= {"per_device_train_batch_size": 1 if steps else ROWS, "report_to": "none"}
    settings |= {"max_length": SEQ_LEN // 2, "precompute_ref_log_probs": True, "bf16": False}
    arguments = DPOConfig(asked["folder"], gradient_checkpointing=False, **settings)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear"
    )
    trainer = InOrder(
        AutoModelForCausalLM.from_pretrained(asked["base"], dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=asked["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked["base"]),
        peft_config=lora if asked["lora"] else None,
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "rewards/margins" in line]
    return {
        "cpu": cpu_seconds() - began,
        "peak_mb": peak_mb(),
        "pairs": len(trainer.train_dataset),
        "figures": [[line[name] for name in THEIRS] for line in logged if steps],
        "version": version("trl"),
    }


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    import llmtrain
    from llmtrain.report.run import open_run
    from llmtrain.tools.data.which import which

    steps, folder = asked["steps"], Path(asked["folder"])
    began, found = cpu_seconds(), dict[str, Any]()
    path = config_of(
        folder,
        rows=1 if steps else BLOCKS,
        seq_len=256 if steps else SEQ_LEN,
        model={"from": asked["base"], "activation_checkpointing": "none"},
        data={"sources": [{"path": asked["data"]}]} | ({"packing": "single"} if steps else {}),
        chat={"too_long": "drop"},
        training={"steps": steps} if steps else {"epochs": 1, "steps": None},
        optimizer=OPTIMIZER,
        preference={"loss": "dpo", "beta": BETA},
        logging={"every_steps": 1},
        **({"adapter": LORA} if asked["lora"] else {}),
    )

    def finish(original: Any, run: Any) -> Any:
        found.update(cpu=cpu_seconds() - began, peak_mb=peak_mb())
        return original(run)

    with around(finish=finish, save=unsaved):
        llmtrain.train(llmtrain.load_config(path))
    lines = open_run(folder / "run").metrics("train")
    found["pairs"] = sum(line["pairs"] for line in lines)
    found["figures"] = [[line[name] for name in FIGURES] for line in lines]
    if steps:
        every = [which(folder / "run", step).documents for step in range(1, steps + 1)]
        found["order"] = [str(one.id) for documents in every for one in documents]
    return found
