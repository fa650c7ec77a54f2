"""The part `trl` of `finetune.py`: full fine-tuning and LoRA beside TRL's SFTTrainer.

Neither recomputes activations; the rest is as each of them has it.
"""

from pathlib import Path
from typing import Any

import harness
from harness import Bench, Clock, llama

SHAPE = llama(192, 4, 3, 512, 50_304, 512)
SEQ_LEN, ROWS = 256, 4
NAMES = {"llmtrain": "llmtrain", "packed": "TRL, packed", "padded": "TRL, padded"}
LIMIT = 3600  # seconds of a process
BEST = {"first_rate": max, "later_rate": max, "first_step": min, "peak_mb": min}  # of all runs
GOALS = {
    "rate over the first steps": ("first_rate", "≥ 1.3"),
    "rate after them": ("later_rate", "≥ 2.5"),
    "peak memory": ("peak_mb", "≤ 0.7"),
    "CPU time to the first step": ("first_step", "≤ 0.75"),
}


def compare(bench: Bench, train: Path, tokenizer: Path) -> None:
    """Run every contender, a process each, in turns."""
    from llmtrain.distributed.engines.accelerator import cpu_rates

    sizes = bench.sizes
    rows = harness.read_rows(train)[: sizes.rows]
    talks = ({"messages": row["messages"]} for row in rows)
    data = harness.write_rows(bench.folder / "sft.jsonl", talks)
    base = harness.base_of(bench.folder / "base", SHAPE, tokenizer)
    asked = {"what": "trl", "base": str(base), "data": str(data)}
    asked |= {"first": sizes.first, "after": sizes.after, "precision": cpu_rates().faster}
    pythons = dict.fromkeys(("packed", "padded"), bench.asked.trl)
    for kind in ("full", "LoRA"):
        each = {one: asked | {"kind": one, "lora": kind == "LoRA"} for one in NAMES}
        found = harness.contend(bench, each, sizes.turns, LIMIT, pythons=pythons)
        figures = {
            one: {name: best(run[name] for run in runs) for name, best in BEST.items()}
            for one, runs in found.items()
        }
        for one, name in NAMES.items():
            own = figures[one]
            more = {"runs": found[one], "shape": SHAPE}
            title = f"{kind}, {name}: trained tokens over the first {sizes.first} steps"
            bench.say(title, own["first_rate"], "/CPU s", **more)
            bench.say("  after them", own["later_rate"], "/CPU s")
            bench.say("  to the end of the first step", own["first_step"], "CPU s")
            bench.say("  peak memory", own["peak_mb"], "MB")
        for other in ("packed", "padded"):
            for name, (field, goal) in GOALS.items():
                ratio = figures["llmtrain"][field] / figures[other][field]
                title = f"{kind}: {name} over {NAMES[other]}"
                bench.say(title, ratio, "×", goal if other == "packed" else "")


def contender(**asked: Any) -> dict[str, Any]:
    """Train one, in a process of its own.

    asked: kind (llmtrain, packed or padded), lora, base, data, folder, precision, first and after
    (numbers of steps)
    """
    return (with_llmtrain if asked["kind"] == "llmtrain" else with_trl)(asked)


def figures_of(clock: Clock, first: int) -> dict[str, Any]:
    """Return the figures of a run; the start and tokenizing are in those of the first steps."""
    steps = len(clock.ends)
    return {
        "first_step": clock.ends[0],
        "first_rate": clock.rate(0, first),
        "later_rate": clock.rate(first, steps),
        "peak_mb": harness.peak_mb(),
        "tokens": sum(clock.tokens[:steps]),
        "steps": steps,
    }


def sft_config(asked: dict[str, Any], seq_len: int, rows: int, **settings: Any) -> Any:
    """TRL's, without what it has beyond the others by default."""
    from trl import SFTConfig

    settings |= {"bf16": asked["precision"] == "bf16", "use_cpu": True, "report_to": "none"}
    settings |= {"max_length": seq_len, "per_device_train_batch_size": rows}
    return SFTConfig(asked["folder"], gradient_checkpointing=False, **settings)


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    from trl import SFTTrainer

    clock = Clock()
    settings = {"packing": asked["kind"] == "packed", "assistant_only_loss": True}
    settings |= {"save_strategy": "no", "max_steps": asked["first"] + asked["after"]}
    arguments = sft_config(asked, SEQ_LEN, ROWS, **settings)
    loss = clock.train(trainer_of(SFTTrainer, asked, arguments))
    more = {"loss": loss, "precision": asked["precision"], "trl": version("trl")}
    return figures_of(clock, asked["first"]) | more


def trainer_of(kind: Any, asked: dict[str, Any], arguments: Any) -> Any:
    """Return one of TRL's trainers with what the others are given, too."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return kind(
        AutoModelForCausalLM.from_pretrained(asked["base"], dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=asked["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked["base"]),
        peft_config=harness.peft_lora() if asked["lora"] else None,
    )


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    path = harness.config_of(
        Path(asked["folder"]),
        steps=asked["first"] + asked["after"],
        rows=ROWS,
        seq_len=SEQ_LEN,
        model={"from": asked["base"], "activation_checkpointing": "none"},
        data={"sources": [{"path": asked["data"]}]},
        chat={"too_long": "truncate"},
        training={"precision": asked["precision"]},
        **({"adapter": harness.LORA} if asked["lora"] else {}),
    )
    clock = Clock()
    return clock.train_llmtrain(path, lambda: figures_of(clock, asked["first"]))
