"""What the loop costs: CPU time of a step over a bare PyTorch loop, with an almost free model.

    python benchmarks/loop.py [--steps 2000] [--json FILE]

A hollow Llama (hidden 16, 4 layers, 16 tokens, one block a step), so that the model's own work does
not drown the difference. Each variant runs in a thread of its own and takes its turn step by step,
so a machine that slows down slows all of them; its CPU time is that thread's. Printed: the median
of the paired differences to `bare`, with quartiles. `bare_again` is the noise, and the last losses
must agree, or the numbers are void.

    bare        clip_grad_norm_ over model.parameters(), fused AdamW, LambdaLR, blocks made before
    bare_data   the same, its blocks read by llmtrain's stream
    llmtrain    the whole loop: stream, digest, reduction, norm, clipping, skip, metrics
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

import llmtrain
from llmtrain.hashing import mix, permutation
from llmtrain.training import loop
from llmtrain.training.run.run import Run

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
SEQ_LEN, WARM = 16, 500  # by then every lane is open


class Turns:
    """Threads that take turns, in another order each round: a step pays for what ran before it."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._condition = threading.Condition()
        self._taken = 0  # turns so far
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._began = 0.0

    def wait(self, name: str) -> None:
        """Sleep until it is this variant's turn; its clock starts."""
        with self._condition:
            self._condition.wait_for(lambda: self._next() == name)
        self._began = time.thread_time()

    def done(self, name: str) -> None:
        """The step is over: stop the clock, wake the next variant."""
        self.seconds[name].append(time.thread_time() - self._began)
        with self._condition:
            self._taken += 1
            self._condition.notify_all()

    def _next(self) -> str:
        round_, position = divmod(self._taken, len(self._names))
        return self._names[permutation(len(self._names), mix(round_))[position]]


def fresh_model() -> Any:
    """The weights that llmtrain begins with, built by transformers alone."""
    torch.manual_seed(42)
    config = LlamaConfig(vocab_size=2048, bos_token_id=0, eos_token_id=0, pad_token_id=0, **SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def bare(turns: Turns, name: str, model: Any, batches: Iterator[torch.Tensor], steps: int) -> float:
    """A loop as one writes it by hand. Returns its last loss."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    loss = torch.zeros(())
    for _ in range(steps):
        turns.wait(name)
        ids = next(batches)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turns.done(name)
    return loss.item()


def ours(turns: Turns, name: str, config: Any) -> float:
    """llmtrain's own `train`; a step lasts from one `begin` to the next."""
    original, finish = loop.begin, loop.finish

    def begin(run: Run, step: int) -> None:
        if step > 1:
            turns.done(name)
        turns.wait(name)
        original(run, step)

    def end(run: Run) -> Any:
        turns.done(name)
        return finish(run)

    loop.begin, loop.finish = begin, end
    llmtrain.train(config)
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if '"train"' in line][-1]


def main() -> None:
    """Run all variants, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.steps <= WARM:
        parser.error(f"--steps {asked.steps}: more than {WARM}; the first {WARM} are not counted")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), asked.steps)
    for row in rows:
        print(
            f"{row['variant']:<10} {row['cpu_ms_median']:7.3f} ms   over bare "
            f"{row['over_bare_ms']:+.3f} ({row['quartiles_ms'][0]:+.3f} … "
            f"{row['quartiles_ms'][1]:+.3f})   last loss {row['final_loss']:.4f}"
        )
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, steps: int) -> list[dict[str, Any]]:
    """CPU time of every step of every variant."""
    path = folder / "loop.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"dir": str(folder / "run")},
                "model": {"config": {"model_type": "llama", **SHAPE}, "tokenizer": "sample"},
                "data": {"sources": [{"path": "sample"}], "seq_len": SEQ_LEN, "heldout": 0.0},
                "training": {
                    "steps": steps,
                    "global_batch_size": 1,
                    "micro_batch_size": 1,
                    "precision": "fp32",
                },
                "optimizer": {
                    "learning_rate": 1e-5,
                    "schedule": "constant",
                    "warmup_steps": 1,
                    "weight_decay": 0.1,
                },
                "checkpoint": {"every_steps": 10 * steps},
            }
        )
    )
    config = llmtrain.load_config(path)
    with llmtrain.open_stream(config) as stream:
        made = [torch.from_numpy(next(stream).ids).long() for _ in range(steps)]
    turns = Turns(["bare", "bare_again", "bare_data", "llmtrain"])
    losses: dict[str, float] = {}
    models = [fresh_model() for _ in range(3)]  # here: the random state is the whole process's
    with llmtrain.open_stream(config) as stream:
        read = (torch.from_numpy(next(stream).ids).long() for _ in range(steps))
        work: dict[str, Callable[[], float]] = {
            "bare": lambda: bare(turns, "bare", models[0], iter(made), steps),
            "bare_again": lambda: bare(turns, "bare_again", models[1], iter(made), steps),
            "bare_data": lambda: bare(turns, "bare_data", models[2], read, steps),
            "llmtrain": lambda: ours(turns, "llmtrain", config),
        }
        threads = [
            threading.Thread(target=lambda n=name, w=one: losses.update({n: w()}))  # type: ignore[misc]
            for name, one in work.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [row(name, turns, losses[name]) for name in turns.seconds]


def row(name: str, turns: Turns, loss: float) -> dict[str, Any]:
    """One variant's line of the table; milliseconds."""
    own = [1000 * s for s in turns.seconds[name][WARM:]]
    base = [1000 * s for s in turns.seconds["bare"][WARM:]]
    gaps = sorted(a - b for a, b in zip(own, base, strict=False))
    return {
        "bench": "loop",
        "variant": name,
        "cpu_ms_median": statistics.median(own),
        "over_bare_ms": statistics.median(gaps),
        "quartiles_ms": [gaps[len(gaps) // 4], gaps[3 * len(gaps) // 4]],
        "steps": len(own),
        "final_loss": loss,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "shape": {**SHAPE, "seq_len": SEQ_LEN, "rows": 1},
    }


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1" and hasattr(os, "sched_setaffinity"):
        # One core and one thread for everybody: torch's setting holds for the thread that makes it,
        # and the environment is read when torch is imported. So the benchmark starts itself again.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
