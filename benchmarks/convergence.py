"""Does a run learn what a bare PyTorch loop learns, from the same weights and blocks?

Llama-style, hidden 256, 6 layers, a byte-level BPE of 8,192 trained on the data, 300 updates of 32
× 256 tokens, AdamW 2e-3 with 30 steps of warm-up and cosine to 10 %, weight decay 0.1 on matrices,
clipping 1.0. The bare loop's bits per byte come from logits and a plain log-softmax.
"""

import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from harness import LLMTRAIN, Bench, config_of, fresh_model, llama, main
from loop import fresh_optimizer
from safetensors import safe_open
from transformers import AutoTokenizer

import llmtrain

SEQ_LEN, BATCH, WARMUP, PEAK, FLOOR = 256, 32, 30, 2e-3, 0.1
SHAPE = llama(256, 6, 4, 704, 0, 256)


def recipe(folder: Path, data: Path, steps: int, documents: int = 300) -> Path:
    """Write the recipe as a config. documents: that are scored."""
    return config_of(
        folder,
        steps=steps,
        rows=BATCH,
        seq_len=SEQ_LEN,
        model={"config": {"model_type": "llama", **SHAPE}, "tokenizer": {"train": 8192}},
        data={"sources": [{"path": str(data)}], "heldout": 0.005},
        training={"micro_batch_size": 8},
        optimizer={"learning_rate": PEAK, "warmup_steps": WARMUP, "min_lr_ratio": FLOOR},
        evaluation={"every_steps": 100, "max_documents": documents},
        checkpoint={"every_steps": 100},
        logging={"every_steps": 1},
    )


def convergence(bench: Bench) -> None:
    steps, data = bench.sizes.steps, bench.asked.data
    path, run_dir = recipe(bench.folder, data.resolve(), steps), bench.folder / "run"
    began = time.perf_counter()
    command = [*LLMTRAIN, "train", str(path), "--processes", str(bench.sizes.processes)]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    middle = time.perf_counter()
    losses, held = bare(path, run_dir, steps)
    ended = time.perf_counter()
    run = llmtrain.open_run(run_dir)
    ours = [line["loss"] for line in run.metrics("train")]
    evals = {line["step"]: line for line in run.metrics("eval")}
    gaps = [abs(own - loss) for own, loss in zip(ours, losses, strict=True)]
    levels = {step: line["bits_per_byte"] for step, line in evals.items()}
    both = [", ".join(f"{level:.4f}" for level in one.values()) for one in (levels, held)]
    note = f"held-out bits per byte after {', '.join(map(str, levels))} steps: {both[0]}; "
    more = {"loss_at_0_nats": evals[0]["loss"], "first_loss": ours[0], "last_loss": losses[-1]}
    more |= {"bits_per_byte": levels, "bits_per_byte_bare": held, "data": data.name}
    more |= {"largest_loss_gap_first_10": max(gaps[:10]), "largest_loss_gap": max(gaps)}
    more |= {"seconds": middle - began, "bare_seconds": ended - middle}
    more |= {"processes": bench.sizes.processes, "steps": steps}
    name, note = "largest difference of a step's loss", f"{note}the bare loop's: {both[1]}"
    bench.say(name, max(gaps), "nats", note=note, **more)


def bare(path: Path, run_dir: Path, steps: int) -> tuple[list[float], dict[int, float]]:
    """Train the reference: return losses by step, and held-out bits per byte by step."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    names = [f"{name}_token_id" for name in ("bos", "eos", "pad")]
    special = {name: getattr(tokenizer, name) for name in names}
    model = fresh_model(vocab_size=len(tokenizer), **special, **SHAPE)
    optimizer = fresh_optimizer(model, PEAK)
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


def factor(step: int, steps: int) -> float:
    if step <= WARMUP:
        return step / WARMUP
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def bits_per_byte(model: Any, run_dir: Path) -> float:
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


if __name__ == "__main__":
    sizes = {"steps": (300, 2), "processes": (2, 1)}
    main(__doc__, convergence, sizes, paths={"data": True}, pinned=False)
