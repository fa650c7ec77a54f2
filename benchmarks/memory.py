"""Is the memory plan right? The planned peak of whole runs beside the measured one, on a GPU.

    python benchmarks/memory.py [--json FILE]

Three models (124 M, 350 M, 1 B) of Llama's kind for four steps of two micro-batches on the built-in
sample, one process: unwrapped (`ddp`), `fsdp2` and `fsdp2_offload`. What torch allocated at most is
compared with the plan less its reserve, which stands for what torch does not see. Without a GPU it
says so and ends with 2: resident memory of a process on a CPU is no measure of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from llmtrain.rundir import contents, record

MODELS = {
    "124M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "350M": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32},
}
STRATEGIES = ("ddp", "fsdp2", "fsdp2_offload")
SEQ_LEN, MICRO, STEPS = 1024, 8, 4


def config(model: dict[str, int], strategy: str, run_dir: Path) -> dict[str, Any]:
    """A run of four steps, two micro-batches each, with GPT-2's number of embeddings."""
    mlp = -(-8 * model["hidden_size"] // 3 // 256) * 256
    described = {"model_type": "llama", **model, "intermediate_size": mlp, "vocab_size": 50304}
    described["max_position_embeddings"] = SEQ_LEN
    return {
        "run": {"dir": str(run_dir)},
        "model": {"config": described, "tokenizer": "sample"},
        "data": {"sources": [{"path": "sample"}], "seq_len": SEQ_LEN, "workers": 0},
        "training": {
            "steps": STEPS,
            "global_batch_size": 2 * MICRO,
            "micro_batch_size": MICRO,
            "precision": "bf16",
        },
        "distributed": {"strategy": strategy},
        "checkpoint": {"every_steps": 1000},
        "evaluation": {"every_steps": 1000, "max_documents": 8},
        "logging": {"every_steps": 1},
    }


def measured(name: str, strategy: str, folder: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    run_dir = folder / f"{name}-{strategy}"
    path = folder / f"{name}-{strategy}.yaml"
    path.write_text(yaml.safe_dump(config(MODELS[name], strategy, run_dir)))
    ended = subprocess.run([sys.executable, "-m", "llmtrain", "train", str(path)], check=False)
    if ended.returncode:
        return {"model": name, "strategy": strategy, "exit_code": ended.returncode}
    lines = record.read(run_dir / contents.METRICS)
    start = next(line for line in lines if line["kind"] == "start")
    compared = next(line for line in lines if line.get("event") == "memory_compared")
    recompute = start["plan"]["activation_checkpointing"]
    return {"model": name, "strategy": strategy, "recompute": recompute, **compared["detail"]}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: no GPU", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as name:
        found = [measured(model, one, Path(name)) for model in MODELS for one in STRATEGIES]
    for one in found:
        print("  ".join(f"{key} {value}" for key, value in one.items()))
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": found}
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
