"""A run that is small enough for a test: the built-in sample and a model of 0.1 M parameters."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from llmtrain.rundir import record

STEPS = 20


def tiny_config(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A config as a dict; changes are `section__key=value`."""
    config: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "tie_word_embeddings": True,
            },
            "tokenizer": "sample",
        },
        "data": {"sources": [{"path": "sample"}], "seq_len": 32},
        "training": {
            "steps": STEPS,
            "global_batch_size": 24,
            "micro_batch_size": 2,
            "precision": "fp32",
        },
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5},
        "checkpoint": {"every_steps": 1000},
        "evaluation": {"every_steps": 1000, "max_documents": 8},
        "logging": {"every_steps": 1},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        config[section][key] = value
    return config


def write_config(folder: Path, config: dict[str, Any], name: str = "config.yaml") -> Path:
    """Write it where a run can read it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, oldest first; of a step that was trained again, the last."""
    found = [line for line in record.record(run_dir) if line["kind"] == kind]
    if kind != "train":
        return found
    last = {line["step"]: line for line in found}
    return [last[step] for step in sorted(last)]


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def weights(run_dir: Path, step: int) -> dict[str, bytes]:
    """The bytes of the weight and optimizer files of a checkpoint."""
    directory = run_dir / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def optimizer_by_hand(model: Any) -> Any:
    """What this config means, by PyTorch alone: embeddings, gains and biases do not decay."""
    import torch

    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    spared = {id(p) for one in tables for p in one.parameters()}
    spared |= {id(p) for p in model.parameters() if p.ndim < 2}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if id(p) not in spared], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) in spared], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def rate_by_hand(step: int) -> float:
    """The learning rate of a step of this config."""
    if step <= 5:
        return 2e-3 * step / 5
    return 2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / (STEPS - 5))) / 2)
