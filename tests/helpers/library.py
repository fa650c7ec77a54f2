"""Runs of a program that calls `llmtrain.train` itself, several times in one process."""

import json
import os
from pathlib import Path

import torch.distributed as dist

import llmtrain
from llmtrain.errors import UserError


def fail_and_go_on(config: str, strategy: str, output: str) -> None:
    """A run whose data is not there, then one under the same strategy, then one under DDP."""
    before = dict(os.environ)
    runs = [(strategy, ["data.sources=[{path: nowhere.jsonl}]"]), (strategy, []), ("ddp", [])]
    said = []
    for number, (name, more) in enumerate(runs):
        asked = [f"run.dir=run-{number}", f"distributed.strategy={name}", *more]
        try:
            ended = llmtrain.train(llmtrain.load_config(config, asked)).state
        except UserError as error:
            ended = str(error)
        changed = {key for key in before.keys() | os.environ if before.get(key) != os.getenv(key)}
        said.append({"ended": ended, "group": dist.is_initialized(), "changed": sorted(changed)})
    Path(output).write_text(json.dumps(said))
