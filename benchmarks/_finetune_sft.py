"""The part `trl` of `finetune.py`: conversations to trained tokens, beside TRL's SFTTrainer.

    python benchmarks/_finetune_sft.py JSON

is one contender in a process of its own. JSON: `contender` (llmtrain, packed or padded), `lora`,
`base` and `data` (as `base_of` makes them), `folder`, `first` and `after` (numbers of steps). It
prints a JSON object. Neither recomputes activations; the rest is as each of them has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _rows import cpu_seconds, measure, peak_mb

SHAPE = {
    "vocab_size": 50_304,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
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


def base_of(folder: Path, tokenizer: Path) -> Path:
    """Return a directory with random weights, GPT-2's tokenizer and a template."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = folder / "sft-base"
    if not directory.exists():
        torch.manual_seed(3)
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        loaded.chat_template = TEMPLATE
        loaded.save_pretrained(directory)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


def rows_of(folder: Path, train: Path, rows: int | None) -> Path:
    """Return a file with the messages of conversations, and nothing else."""
    path = folder / "sft.jsonl"
    lines = [json.loads(line) for line in train.read_text("utf-8").splitlines()][:rows]
    path.write_text("".join(json.dumps({"messages": one["messages"]}) + "\n" for one in lines))
    return path


class Clock:
    """Trained tokens of the steps, and the CPU time at their ends."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.tokens: list[int] = []
        self.ends: list[float] = []

    def found(self) -> dict[str, Any]:
        """Return the figures of a run."""
        first, steps, ends = self.first, len(self.ends), self.ends
        return {
            "first_step": ends[0],
            "first_rate": sum(self.tokens[:first]) / ends[first - 1],
            "later_rate": sum(self.tokens[first:steps]) / (ends[-1] - ends[first - 1]),
            "peak_mb": peak_mb(),
            "tokens": sum(self.tokens[:steps]),
            "steps": steps,
        }


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    clock = Clock(asked["first"])

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.ends.append(cpu_seconds())

    arguments = SFTConfig(
        asked["folder"],
        max_steps=asked["first"] + asked["after"],
        per_device_train_batch_size=ROWS,
        max_length=SEQ_LEN,
        packing=asked["contender"] == "packed",
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=asked["precision"] == "bf16",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear"
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(asked["base"], dtype=torch.float32),
        arguments,
        train_dataset=datasets.load_dataset("json", data_files=asked["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked["base"]),
        peft_config=lora if asked["lora"] else None,
        callbacks=[Ends()],
    )
    collate = trainer.data_collator

    def counted(batch: list[Any]) -> Any:
        made = collate(batch)
        clock.tokens.append(int((made["labels"][:, 1:] != -100).sum()))
        return made

    trainer.data_collator = counted
    loss = trainer.train().training_loss
    from importlib.metadata import version

    return clock.found() | {"loss": loss, "precision": asked["precision"], "trl": version("trl")}


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with llmtrain."""
    import llmtrain

    path = Path(asked["folder"]) / "run.json"
    keys = {
        "run": {"dir": str(path.with_name("run"))},
        "model": {"from": asked["base"], "activation_checkpointing": "none"},
        "data": {"sources": [{"path": asked["data"]}], "seq_len": SEQ_LEN, "heldout": 0.0},
        "chat": {"too_long": "truncate"},
        "training": {
            "steps": asked["first"] + asked["after"],
            "global_batch_size": ROWS,
            "precision": asked["precision"],
        },
        **({"adapter": LORA} if asked["lora"] else {}),
    }
    path.write_text(json.dumps(keys))  # YAML is a superset
    config = llmtrain.load_config(path)
    from llmtrain.training import loop

    clock, losses = Clock(asked["first"]), []
    update, finish = loop.update, loop.finish

    def updated(run: Any, batch: Any, factor: float) -> None:
        clock.tokens.append(batch.trained_tokens)
        update(run, batch, factor)
        clock.ends.append(cpu_seconds())

    def finished(run: Any) -> Any:
        losses.append(clock.found() | {"precision": run.processes.auto.run["precision"]})
        return finish(run)

    loop.update, loop.finish = updated, finished
    loop.save = lambda run, step: None
    llmtrain.train(config)
    return losses[0]


def trl(bench: Any) -> None:
    """Compare with TRL: full fine-tuning and LoRA, a process each, in turns."""
    from llmtrain.distributed.engines.accelerator import cpu_rates

    base = base_of(bench.folder, bench.shared / "tokenizers" / "gpt2")
    data = rows_of(bench.folder, bench.shared / "sft" / "train.jsonl", bench.sizes.rows)
    precision = cpu_rates().faster
    steps = {"first": bench.sizes.first, "after": bench.sizes.after, "precision": precision}
    for lora in (False, True):
        kind, found = "LoRA" if lora else "full", {}
        for one in _turns(bench.sizes.turns):
            folder = bench.folder / f"{kind}-{one}"
            folder.mkdir(exist_ok=True)
            asked = {"contender": one, "lora": lora, "base": str(base), "data": str(data), **steps}
            python = sys.executable if one == "llmtrain" else str(bench.trl)
            # A run directory of its own each time: else the second one would resume.
            place = str(folder / f"{len(found.get(one, []))}")
            Path(place).mkdir()
            rows, wrong = measure(
                "_finetune_sft.py", asked | {"folder": place}, LIMIT, python=python
            )
            if wrong:
                sys.exit(f"{kind}, {NAMES[one]}: {wrong}")
            found.setdefault(one, []).append(rows[-1])
        _say(bench, kind, {one: _best(runs) for one, runs in found.items()}, found)


def _turns(rounds: int) -> Iterator[str]:
    names = list(NAMES)
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def _best(runs: list[dict[str, Any]]) -> dict[str, float]:
    highest = {name: max(run[name] for run in runs) for name in ("first_rate", "later_rate")}
    return highest | {name: min(run[name] for run in runs) for name in ("first_step", "peak_mb")}


def _say(bench: Any, kind: str, best: dict[str, dict[str, float]], runs: dict[str, Any]) -> None:
    first = bench.sizes.first
    for one, name in NAMES.items():
        own, more = best[one], {"runs": runs[one], "shape": SHAPE}
        title = f"{kind}, {name}: trained tokens over the first {first} steps"
        bench.say(title, own["first_rate"], "/CPU s", **more)
        bench.say("  after them", own["later_rate"], "/CPU s")
        bench.say("  to the end of the first step", own["first_step"], "CPU s")
        bench.say("  peak memory", own["peak_mb"], "MB")
    for other in ("packed", "padded"):
        for name, (field, goal) in GOALS.items():
            ratio = best["llmtrain"][field] / best[other][field]
            title = f"{kind}: {name} over {NAMES[other]}"
            bench.say(title, ratio, "×", goal if other == "packed" else "")


def main() -> None:
    """Train one contender."""
    asked = json.loads(sys.argv[1])
    work = with_llmtrain if asked["contender"] == "llmtrain" else with_trl
    print(json.dumps(work(asked)), flush=True)


if __name__ == "__main__":
    main()
