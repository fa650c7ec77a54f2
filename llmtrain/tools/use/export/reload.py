"""A program that loads models as anybody would and prints their losses: the proof of an export.

    {"models": […], "ids": [[…]], "labels": [[…]], "state": {…}} ─► [loss, …]

Whole models are loaded by transformers and nothing else. Adapters are put by peft on the model that
they name, which is held as `state`, of the checkpoint, says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Read models and blocks from stdin, print the loss of each model as one line of JSON."""
    asked = json.load(sys.stdin)
    losses = [_loss(Path(path), asked) for path in asked["models"]]
    sys.stdout.write(f"{json.dumps(losses)}\n")


def _loss(directory: Path, asked: dict[str, Any]) -> float:
    """Return the mean loss of a model on the blocks, in nats. It is gone from memory then."""
    import torch
    from torch.nn import functional as F

    from llmtrain.types import NOT_TRAINED

    model, total, count = _load(directory, asked["state"]), 0.0, 0
    with torch.no_grad():
        for row, targets in zip(asked["ids"], asked["labels"], strict=True):
            logits = model(torch.tensor([row]), use_cache=False).logits[0]
            wanted = torch.tensor(targets)
            loss = F.cross_entropy(logits, wanted, ignore_index=NOT_TRAINED, reduction="sum")
            total += float(loss)
            count += int((wanted != NOT_TRAINED).sum())
    return total / max(1, count)


def _load(directory: Path, state: dict[str, Any]) -> Any:
    import torch

    if (directory / "adapter_config.json").is_file():
        from llmtrain.tools.use.load import open_model
        from llmtrain.tools.use.target import Target

        return open_model(Target(str(directory), directory, None, state)).model
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()


if __name__ == "__main__":
    main()
