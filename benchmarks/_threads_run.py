"""One run of `threads.py`, in a process of its own.

    python benchmarks/_threads_run.py JSON

JSON: `contender` (llmtrain or trainer), `brief` (whether waiting threads soon sleep), `threads`,
`steps`, `warm` (steps that are not counted), `folder`. Prints a JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SEQ_LEN, ROWS = 256, 8


class Clock:
    """Wall and CPU time at the ends of steps."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def end(self) -> None:
        """Note the end of a step."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def found(self, warm: int) -> dict[str, float]:
        """Return the medians of the steps that are counted."""
        ends = self.ends[warm:]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
        wall, cpu = (statistics.median(one) for one in zip(*steps, strict=True))
        return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu}


def with_llmtrain(asked: dict[str, Any], clock: Clock) -> None:
    """Train with llmtrain."""
    import llmtrain

    if asked["brief"]:  # as `train` does it, which is called behind the import of torch here
        llmtrain._set_variables_of_torch(os.environ)
    path = Path(asked["folder"]) / "run.json"
    keys = {
        "run": {"dir": str(path.with_name("run"))},
        "model": {"config": {"model_type": "llama", **SHAPE}, "tokenizer": "sample"},
        "data": {"sources": [{"path": "sample"}], "seq_len": SEQ_LEN, "heldout": 0.0},
        "training": {
            "steps": asked["steps"],
            "global_batch_size": ROWS,
            "precision": "fp32",
            "threads": asked["threads"],
        },
    }
    path.write_text(json.dumps(keys))  # YAML is a superset
    config = llmtrain.load_config(path)
    from llmtrain.training import loop

    update = loop.update

    def updated(*given: Any) -> None:
        update(*given)
        clock.end()

    loop.update = updated
    loop.save = lambda run, step: None
    llmtrain.train(config)


def with_trainer(asked: dict[str, Any], clock: Clock) -> None:
    """Train with transformers' Trainer."""
    import llmtrain

    if asked["brief"]:  # before torch is imported
        llmtrain._set_variables_of_torch(os.environ)
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.end()

    torch.set_num_threads(asked["threads"])
    ids = torch.randint(SHAPE["vocab_size"], (asked["steps"] * ROWS, SEQ_LEN))
    arguments = TrainingArguments(
        asked["folder"],
        max_steps=asked["steps"],
        per_device_train_batch_size=ROWS,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    Trainer(
        LlamaForCausalLM(LlamaConfig(**SHAPE)),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        data_collator=default_data_collator,
        callbacks=[Ends()],
    ).train()


def main() -> None:
    """Train one contender."""
    asked, clock = json.loads(sys.argv[1]), Clock()
    {"llmtrain": with_llmtrain, "trainer": with_trainer}[asked["contender"]](asked, clock)
    print(json.dumps(clock.found(asked["warm"])), flush=True)


if __name__ == "__main__":
    main()
