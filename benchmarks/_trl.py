"""The part `trl` of `finetune.py`: full fine-tuning and LoRA beside TRL's SFTTrainer.

Neither recomputes activations; the rest is as each of them has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import Bench, Clock, apart, config_of, llama, peak_mb, turns

SHAPE = llama(192, 4, 3, 512, 50_304, 512)
SEQ_LEN, ROWS = 256, 4
LORA = {"kind": "lora", "r": 16, "alpha": 32}
# ChatML. TRL trains on what is between the tags, to us they say nothing: the end of a turn is in.
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}\
{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
NAMES = {"llmtrain": "llmtrain", "packed": "TRL, packed", "padded": "TRL, padded"}
LIMIT = 3600  # seconds of a process
GOALS = {
    "rate over the first steps": ("first_rate", "≥ 1.3"),
    "rate after them": ("later_rate", "≥ 2.5"),
    "peak memory": ("peak_mb", "≤ 0.7"),
    "CPU time to the first step": ("first_step", "≤ 0.75"),
}


def compare(bench: Bench, script: str, train: Path, tokenizer: Path) -> None:
    """Run every contender, a process each, in turns. script: whose child calls `contender`."""
    from llmtrain.distributed.engines.accelerator import cpu_rates

    sizes = bench.sizes
    data = bench.folder / "sft.jsonl"
    lines = [json.loads(text) for text in train.read_text("utf-8").splitlines()][: sizes.rows]
    data.write_text("".join(json.dumps({"messages": one["messages"]}) + "\n" for one in lines))
    asked = {"what": "trl", "base": str(base_of(bench.folder, tokenizer)), "data": str(data)}
    asked |= {"first": sizes.first, "after": sizes.after, "precision": cpu_rates().faster}
    for kind in ("full", "LoRA"):
        found: dict[str, list[dict[str, Any]]] = {}
        for turn, one in turns(NAMES, sizes.turns):
            place = bench.folder / f"{kind}-{one}-{turn}"  # its own, else a run would resume
            place.mkdir()
            own = {"kind": one, "lora": kind == "LoRA", "folder": str(place)}
            python = sys.executable if one == "llmtrain" else str(bench.asked.trl)
            row = apart(script, asked | own, LIMIT, python=python)
            found.setdefault(one, []).append(row)
        best = {
            one: {name: max(run[name] for run in runs) for name in ("first_rate", "later_rate")}
            | {name: min(run[name] for run in runs) for name in ("first_step", "peak_mb")}
            for one, runs in found.items()
        }
        for one, name in NAMES.items():
            more = {"runs": found[one], "shape": SHAPE}
            title = f"{kind}, {name}: trained tokens over the first {sizes.first} steps"
            bench.say(title, best[one]["first_rate"], "/CPU s", **more)
            bench.say("  after them", best[one]["later_rate"], "/CPU s")
            bench.say("  to the end of the first step", best[one]["first_step"], "CPU s")
            bench.say("  peak memory", best[one]["peak_mb"], "MB")
        for other in ("packed", "padded"):
            for name, (field, goal) in GOALS.items():
                ratio = best["llmtrain"][field] / best[other][field]
                title = f"{kind}: {name} over {NAMES[other]}"
                bench.say(title, ratio, "×", goal if other == "packed" else "")


def base_of(folder: Path, tokenizer: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = folder / "sft-base"
    torch.manual_seed(3)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    loaded.chat_template = TEMPLATE
    loaded.save_pretrained(directory)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


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
        "peak_mb": peak_mb(),
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

    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTTrainer

    clock = Clock()
    settings = {"packing": asked["kind"] == "packed", "assistant_only_loss": True}
    settings |= {"save_strategy": "no", "max_steps": asked["first"] + asked["after"]}
    arguments = sft_config(asked, SEQ_LEN, ROWS, **settings)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear"
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(asked["base"], dtype=torch.float32),
        arguments,
        train_dataset=datasets.load_dataset("json", data_files=asked["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked["base"]),
        peft_config=lora if asked["lora"] else None,
    )
    loss = clock.train(trainer)
    more = {"loss": loss, "precision": asked["precision"], "trl": version("trl")}
    return figures_of(clock, asked["first"]) | more


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    path = config_of(
        Path(asked["folder"]),
        steps=asked["first"] + asked["after"],
        rows=ROWS,
        seq_len=SEQ_LEN,
        model={"from": asked["base"], "activation_checkpointing": "none"},
        data={"sources": [{"path": asked["data"]}]},
        chat={"too_long": "truncate"},
        training={"precision": asked["precision"]},
        **({"adapter": LORA} if asked["lora"] else {}),
    )
    clock, found = Clock(), dict[str, Any]()

    def ended(run: Any) -> None:
        found.update(figures_of(clock, asked["first"]))
        found["precision"] = run.processes.auto.run["precision"]

    clock.train_llmtrain(path, ended)
    return found
