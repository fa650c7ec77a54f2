"""One contender of `defaults.py`, in a process of its own: raw articles to trained tokens.

    python benchmarks/_defaults_runs.py JSON

JSON: `contender`, `precision` (of a Trainer: fp32 or bf16; of llmtrain: auto, too), `data`,
`tokenizer`, `tokens` to count, `folder`. Prints a JSON object.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _group_texts import articles, group_texts
from _rows import cpu_seconds, peak_mb

SHAPE = {
    "vocab_size": 50_304,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SEQ_LEN, ROWS, PADDED = 256, 8, 1024
PADDED_STEPS = 4  # at least, as articles differ in length
WARM = 2  # steps that are not counted; one where a step has four times the tokens


class Clock:
    """Trained tokens of the steps, and CPU seconds at their ends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[float] = []

    def end(self) -> None:
        """Note the end of a step."""
        self.ends.append(cpu_seconds())

    def found(self, warm: int) -> dict[str, Any]:
        """Return the figures; the first `warm` steps are not in the rate."""
        tokens = sum(self.tokens[warm : len(self.ends)])
        return {
            "tokens_per_cpu_second": tokens / (self.ends[-1] - self.ends[warm - 1]),
            "first_step_cpu_seconds": self.ends[0],
            "peak_mb": peak_mb(),
            "tokens": tokens,
            "steps": len(self.ends) - warm,
        }


def with_trainer(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with transformers' Trainer and its defaults."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    clock, warm = Clock(), WARM if asked["contender"] == "grouped" else 1
    steps = warm + math.ceil(asked["tokens"] / (ROWS * SEQ_LEN))
    if asked["contender"] == "padded":  # a step of it takes eight times as long
        steps = warm + max(PADDED_STEPS, math.ceil(asked["tokens"] / (2 * ROWS * PADDED)))
    more: dict[str, Any] = {}
    if asked["contender"] == "by_length":
        steps = warm + 8  # from the longest batch of one sorted part to its shortest
        more["train_sampling_strategy"] = "group_by_length"
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    lengths: list[int] = []
    rows, collate = DATA[asked["contender"]](tokenizer, asked, steps, lengths)

    def counted(batch: list[Any]) -> Any:
        made = collate(batch)
        clock.tokens.append(int((made["labels"][:, 1:] != -100).sum()))
        return made

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.end()

    arguments = TrainingArguments(
        asked["folder"],
        max_steps=steps,
        bf16=asked["precision"] == "bf16",
        use_cpu=True,
        report_to="none",
        **more,
    )
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32)
    trainer = Trainer(
        model, arguments, train_dataset=rows, data_collator=counted, callbacks=[Ends()]
    )
    loss = trainer.train().training_loss
    if lengths:  # few steps are made: their rows count as the average of a thousand articles
        clock.tokens = [round(ROWS * sum(lengths) / len(lengths))] * steps
    return clock.found(warm) | {"settings": trainer_settings(arguments), "mean_loss": loss}


def grouped(
    tokenizer: Any, asked: dict[str, Any], steps: int, lengths: list[int]
) -> tuple[Any, Callable[..., Any]]:
    """Return what transformers' example for language models does: tokenize, join, cut."""
    from transformers import default_data_collator

    rows = articles(Path(asked["data"]))
    return group_texts(rows, tokenizer, SEQ_LEN), default_data_collator


def padded(
    tokenizer: Any, asked: dict[str, Any], steps: int, lengths: list[int]
) -> tuple[Any, Callable[..., Any]]:
    """Return what most tutorials do: an article a row, cut and padded to the maximum.

    lengths: becomes the trained tokens of each article that is tokenized
    """
    from transformers import DataCollatorForLanguageModeling

    tokenizer.pad_token = tokenizer.eos_token

    def tokenize(batch: dict[str, list[str]]) -> Any:
        made = tokenizer(batch["text"], truncation=True, max_length=PADDED, padding="max_length")
        lengths.extend(sum(mask) - 1 for mask in made["attention_mask"])
        return made

    rows = articles(Path(asked["data"]))
    rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    return rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)


def by_length(
    tokenizer: Any, asked: dict[str, Any], steps: int, lengths: list[int]
) -> tuple[Any, Callable[..., Any]]:
    """Return as many articles as make sorted parts of as many batches as there are steps.

    They are tokenized before the first step, as this needs their lengths.
    """
    import datasets
    from transformers import DataCollatorForLanguageModeling

    tokenizer.pad_token = tokenizer.eos_token
    some = (
        articles(Path(asked["data"]))
        .shuffle(seed=42, buffer_size=2000)
        .take(4 * ROWS * (steps - 1))
    )
    rows = datasets.Dataset.from_list(list(some))
    rows = rows.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=PADDED),
        batched=True,
        remove_columns=rows.column_names,
    )
    return rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)


DATA = {"grouped": grouped, "padded": padded, "by_length": by_length}


def trainer_settings(arguments: Any) -> dict[str, Any]:
    """Return the Trainer's defaults under llmtrain's names."""
    return {
        "training.precision": "bf16" if arguments.bf16 else "fp32",
        "training.max_grad_norm": arguments.max_grad_norm,
        "optimizer.name": arguments.optim,
        "optimizer.learning_rate": arguments.learning_rate,
        "optimizer.weight_decay": arguments.weight_decay,
        "optimizer.betas": [arguments.adam_beta1, arguments.adam_beta2],
        "optimizer.schedule": str(arguments.lr_scheduler_type.value),
        "optimizer.warmup_steps": arguments.warmup_steps,
        "data.workers": arguments.dataloader_num_workers,
        "checkpoint.every_steps": arguments.save_steps,
        "logging.every_steps": arguments.logging_steps,
        "order of the articles": "as in the files",
    }


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's SFTTrainer, its rows packed."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    clock = Clock()
    steps = WARM + math.ceil(asked["tokens"] / (ROWS * SEQ_LEN))
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    tokenizer.pad_token = tokenizer.eos_token
    some = articles(Path(asked["data"])).take(4 * ROWS * steps)
    rows = datasets.Dataset.from_list([{"text": one["text"]} for one in some])

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.end()

    arguments = SFTConfig(
        asked["folder"],
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        max_length=SEQ_LEN,
        packing=True,
        gradient_checkpointing=False,
        bf16=asked["precision"] == "bf16",
        use_cpu=True,
        report_to="none",
    )
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32)
    trainer = SFTTrainer(
        model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[Ends()]
    )
    collate = trainer.data_collator

    def counted(batch: list[Any]) -> Any:
        made = collate(batch)
        clock.tokens.append(int((made["labels"][:, 1:] != -100).sum()))
        return made

    trainer.data_collator = counted
    loss = trainer.train().training_loss
    return clock.found(WARM) | {"settings": trainer_settings(arguments), "mean_loss": loss}


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with llmtrain and its defaults; nothing is held out: the Trainer has no evaluation."""
    import llmtrain

    path = Path(asked["folder"]) / "run.json"
    precision = {} if asked["precision"] == "auto" else {"precision": asked["precision"]}
    steps = WARM + math.ceil(asked["tokens"] / (ROWS * SEQ_LEN))
    keys = {
        "run": {"dir": str(path.with_name("run"))},
        "model": {
            "config": {"model_type": "llama", **SHAPE},
            "tokenizer": asked["tokenizer"],
        },
        "data": {"sources": [{"path": asked["data"]}], "seq_len": SEQ_LEN, "heldout": 0.0},
        "training": {"steps": steps, "global_batch_size": ROWS, **precision},
    }
    path.write_text(json.dumps(keys))  # YAML is a superset
    config = llmtrain.load_config(path)
    from llmtrain.training import loop

    clock = Clock()
    begin, finish = loop.begin, loop.finish

    def began(run: Any, step: int) -> None:
        if step > 1:
            clock.end()
        clock.tokens.append(ROWS * SEQ_LEN)  # blocks are full
        begin(run, step)

    found: dict[str, Any] = {}

    def finished(run: Any) -> Any:
        clock.end()
        found.update(clock.found(WARM))
        found["settings"] = llmtrain_settings(config, run)
        return finish(run)

    loop.begin, loop.finish = began, finished
    loop.save = lambda run, step: None  # the last step's: the Trainer's is not counted either
    llmtrain.train(config)
    return found


def llmtrain_settings(config: Any, run: Any) -> dict[str, Any]:
    """Return llmtrain's defaults, `auto` resolved."""
    dumped = config.model_dump(mode="json")
    names = (
        "training.max_grad_norm optimizer.name optimizer.learning_rate optimizer.weight_decay "
        "optimizer.betas optimizer.schedule optimizer.warmup_steps data.workers "
        "checkpoint.every_steps logging.every_steps"
    )
    found = {name: dumped[name.split(".")[0]][name.split(".")[1]] for name in names.split()}
    return found | {
        "training.precision": run.processes.auto.run["precision"],
        "order of the articles": "permuted",
    }


def main() -> None:
    """Train one contender."""
    asked = json.loads(sys.argv[1])
    works = {"llmtrain": with_llmtrain, "trl": with_trl}
    print(json.dumps(works.get(asked["contender"], with_trainer)(asked)), flush=True)


if __name__ == "__main__":
    main()
