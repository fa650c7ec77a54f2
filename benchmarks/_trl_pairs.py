"""The parts `trl` and `same` of `preference.py`: runs on pairs beside TRL's DPOTrainer.

Both compute what the reference says once, before the first step, and that is counted. Neither
recomputes activations; the rest is as each of them has it.
"""

import sys
from pathlib import Path
from typing import Any

import harness
from _trl import trainer_of
from harness import Bench, apart, cpu_seconds, llama, peak_mb

SHAPE = llama(192, 4, 3, 512, 50_304, 1024)
SMALL = llama(64, 2, 4, 172, 2048, 1024) | {"tie_word_embeddings": False}
SEQ_LEN, BLOCKS, ROWS = 1024, 4, 4  # of llmtrain; TRL's rows have half as many tokens, or fewer
RATE, BETA = 1e-4, 0.1
OPTIMIZER = {"learning_rate": RATE, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 1}
FIGURES = ("loss", "chosen_reward", "rejected_reward", "margin")
THEIRS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
KEYS = ("chosen", "rejected")
NAMES = {"llmtrain": "llmtrain", "trl": "TRL"}
LIMIT = 1800  # seconds of a process


def speed(bench: Bench, pairs: Path, tokenizer: Path) -> None:
    """Train one epoch of the same pairs with each, a process each, in turns."""
    rows = fitting(pairs, tokenizer, bench.sizes.pairs)
    base = harness.base_of(bench.folder / "base", SHAPE, tokenizer)
    data = harness.write_rows(bench.folder / "pairs.jsonl", rows)
    asked = {"what": "trl", "base": str(base), "data": str(data), "steps": 0}
    pythons = {"trl": bench.asked.trl}
    for kind in bench.sizes.kinds:
        each = {one: asked | {"kind": one, "lora": kind == "LoRA"} for one in NAMES}
        found = harness.contend(bench, each, bench.sizes.turns, LIMIT, pythons=pythons)
        rate = {one: max(row["pairs"] / row["cpu"] for row in runs) for one, runs in found.items()}
        peak = {one: min(row["peak_mb"] for row in runs) for one, runs in found.items()}
        for one, name in NAMES.items():
            more = {"runs": [{k: v for k, v in run.items() if k != "steps"} for run in found[one]]}
            title = f"{kind}, {name}: pairs of an epoch, with the reference"
            bench.say(title, rate[one], "/CPU s", **more)
            bench.say("  peak memory", peak[one], "MB")
        bench.say(f"{kind}: rate over TRL", rate["llmtrain"] / rate["trl"], "×", "≥ 1.3")
        bench.say(f"{kind}: peak memory over TRL", peak["llmtrain"] / peak["trl"], "×", "≤ 0.7")


def same(bench: Bench) -> None:
    """Train the same pairs of strings in the same order with each, one after the other."""
    import numpy as np

    steps = bench.sizes.steps
    rows = strings(4 * steps + 40)
    base = harness.base_of(bench.folder / "base", SMALL)
    data = harness.write_rows(bench.folder / "pairs.jsonl", rows)
    asked = {"what": "trl", "base": str(base), "data": str(data), "lora": False}
    (bench.folder / "ours").mkdir()
    own = {"kind": "llmtrain", "folder": str(bench.folder / "ours"), "steps": steps}
    ours = apart(sys.argv[0], asked | own, LIMIT)
    by_id = {row["id"]: row for row in rows}
    harness.write_rows(data, (by_id[one] for one in ours["order"]))
    own = {"kind": "trl", "folder": str(bench.folder / "theirs"), "steps": steps}
    theirs = apart(sys.argv[0], asked | own, LIMIT, python=str(bench.asked.trl))
    mine, other = (np.array(found["figures"]) for found in (ours, theirs))
    apart_by = np.abs(mine - other).max(axis=0)
    more = {"last": mine[-1].tolist(), "trl": theirs["version"]}
    for name, figure in zip(FIGURES, apart_by.tolist(), strict=True):
        bench.say(f"{name} of {steps} steps: most apart from TRL's", figure, "", "≤ 1e-05", **more)


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
    for row in harness.read_rows(pairs):
        halves = ["".join(m["content"] for m in [*row["prompt"], *row[k]]) for k in KEYS]
        if max(len(encode(text).input_ids) for text in halves) <= SEQ_LEN // 2 - 64:
            found.append({key: row[key] for key in ("prompt", *KEYS)})
        if len(found) == count:
            break
    return found


def contender(**asked: Any) -> dict[str, Any]:
    """Train one, in a process of its own.

    asked: kind (llmtrain or trl), lora, base, data, folder, and steps, of one pair each; 0 = one
    epoch
    """
    return (with_llmtrain if asked["kind"] == "llmtrain" else with_trl)(asked)


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):  # type: ignore[misc]  # TRL is not installed here
        """Reads its rows in order."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    began, steps = cpu_seconds(), asked["steps"]
    settings = {"max_steps": steps} if steps else {"num_train_epochs": 1}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "beta": BETA}
    settings |= {"logging_steps": 1 if steps else 1000, "save_strategy": "no", "use_cpu": True}
    settings |= {"per_device_train_batch_size": 1 if steps else ROWS, "report_to": "none"}
    settings |= {"max_length": SEQ_LEN // 2, "precompute_ref_log_probs": True, "bf16": False}
    arguments = DPOConfig(asked["folder"], gradient_checkpointing=False, **settings)
    trainer = trainer_of(InOrder, asked, arguments)
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
    path = harness.config_of(
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
        **({"adapter": harness.LORA} if asked["lora"] else {}),
    )

    def finish(original: Any, run: Any) -> Any:
        found.update(cpu=cpu_seconds() - began, peak_mb=peak_mb())
        return original(run)

    with harness.around(finish=finish, save=harness.unsaved):
        llmtrain.train(llmtrain.load_config(path))
    lines = open_run(folder / "run").metrics("train")
    found["pairs"] = sum(line["pairs"] for line in lines)
    found["figures"] = [[line[name] for name in FIGURES] for line in lines]
    if steps:
        every = [which(folder / "run", step).documents for step in range(1, steps + 1)]
        found["order"] = [str(one.id) for documents in every for one in documents]
    return found
