"""Does a run learn what a bare PyTorch loop learns? Same weights, same blocks, both curves.

    python benchmarks/convergence.py --data DIRECTORY [--processes 2] [--steps 300] [--json FILE]

The recipe: Llama-style, hidden 256, 6 layers, 4 heads, MLP 704, tied embeddings, a byte-level BPE
of 8,192 trained on the data, updates of 32 × 256 tokens, AdamW 2e-3 with 30 steps of warm-up and
cosine to 10 %, weight decay 0.1 on matrices, clipping 1.0. The bare loop takes its labels from
`model(ids, labels=ids)` and clips with `clip_grad_norm_`; its held-out bits per byte come from
logits and a plain log-softmax. Printed: both curves, and the largest difference of a step's loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import llmtrain
from llmtrain.rundir import contents, record

SEQ_LEN, BATCH, WARMUP, PEAK, FLOOR = 256, 32, 30, 2e-3, 0.1
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def config(data: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """The recipe as a config."""
    return {
        "run": {"dir": str(run_dir)},
        "model": {"config": {"model_type": "llama", **SHAPE}, "tokenizer": {"train": 8192}},
        "data": {"sources": [{"path": str(data)}], "seq_len": SEQ_LEN},
        "training": {
            "steps": steps,
            "global_batch_size": BATCH,
            "micro_batch_size": 8,
            "precision": "fp32",
        },
        "optimizer": {"learning_rate": PEAK, "warmup_steps": WARMUP, "min_lr_ratio": FLOOR},
        "evaluation": {"every_steps": 100, "max_documents": 300},
        "checkpoint": {"every_steps": 100},
        "logging": {"every_steps": 1},
    }


def run_llmtrain(path: Path, processes: int) -> None:
    """The run under test, through its own command."""
    command = [sys.executable, "-m", "llmtrain", "train", str(path), "--processes", str(processes)]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def run_bare(path: Path, run_dir: Path, steps: int) -> tuple[list[float], dict[int, float]]:
    """The reference: losses by step, and held-out bits per byte by step."""
    model = fresh_model(run_dir)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factor(done + 1, steps))
    losses, held = [], {0: bits_per_byte(model, run_dir)}
    with llmtrain.open_stream(llmtrain.load_config(path)) as stream:
        for step in range(1, steps + 1):
            ids = torch.from_numpy(next(stream).ids).long()
            total = 0.0
            for part in ids.split(8):
                loss = model(part, labels=part).loss * len(part) / len(ids)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total)
            if step % 100 == 0 or step == steps:
                held[step] = bits_per_byte(model, run_dir)
                print(f"bare step {step}: loss {total:.4f}, held-out {held[step]:.4f} bits/byte")
    return losses, held


def fresh_model(run_dir: Path) -> Any:
    """Random weights from the run's seed, built by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    torch.manual_seed(42)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPE,
    )
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32).train()


def factor(step: int, steps: int) -> float:
    """Linear warm-up, then cosine to the floor."""
    if step <= WARMUP:
        return step / WARMUP
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def bits_per_byte(model: Any, run_dir: Path) -> float:
    """Over the run's held-out documents, from logits."""
    with safe_open(str(run_dir / "eval.safetensors"), framework="pt") as file:
        ids, scored = file.get_tensor("ids").long(), file.get_tensor("scored").bool()
        size = json.loads(file.metadata()["heldout"])["bytes"]
    model.eval()
    nll = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, SEQ_LEN):
            window = ids[start : start + SEQ_LEN + 1]
            mask = scored[start + 1 : start + SEQ_LEN + 1]
            logits = model(window[None, :-1]).logits[0].double()
            picked = logits.log_softmax(-1).gather(1, window[1:, None])[:, 0]
            nll -= picked[mask].sum().item()
    model.train()
    return nll / (math.log(2) * size)


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (asked.run_dir or Path(folder) / "run").resolve()
        path = Path(folder) / "convergence.yaml"
        path.write_text(yaml.safe_dump(config(asked.data.resolve(), run_dir, asked.steps)))
        began = time.perf_counter()
        run_llmtrain(path, asked.processes)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        losses, held = run_bare(path, run_dir, asked.steps)
        result = compare(run_dir, losses, held)
        result |= {"seconds": seconds, "bare_seconds": time.perf_counter() - began}
    result |= {
        "bench": "convergence",
        "processes": asked.processes,
        "steps": asked.steps,
        "data": asked.data.name,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(result) + "\n")


def compare(run_dir: Path, losses: list[float], held: dict[int, float]) -> dict[str, Any]:
    """Both curves side by side."""
    lines = record.read(run_dir / contents.METRICS)
    ours = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    evals = {line["step"]: line for line in lines if line["kind"] == "eval"}
    gaps = [abs(ours[step] - loss) for step, loss in enumerate(losses, 1)]
    return {
        "loss_at_0_nats": evals[0]["loss"],
        "bits_per_byte": {step: line["bits_per_byte"] for step, line in evals.items()},
        "bits_per_byte_bare": held,
        "first_loss": ours[1],
        "last_loss": losses[-1],
        "largest_loss_gap_first_10": max(gaps[:10]),
        "largest_loss_gap": max(gaps),
    }


if __name__ == "__main__":
    main()
