"""What the loop costs: CPU time of a step over a bare PyTorch loop, with an almost free model.

    python benchmarks/loop.py [--steps 1500] [--only NAMES] [--json FILE]

A hollow Llama (hidden 16, 4 layers, 16 tokens, one block a step), so that the model's own work does
not drown the difference. Each variant runs in a thread of its own and takes its turn step by step,
so a machine that slows down slows all of them; its CPU time is that thread's. The reference of a
step is the mean of the two tuned loops' in the same round, as a thread's place in memory alone is
worth 0.1 ms. Printed: medians of the paired differences to it, with quartiles, and the goals. The
last losses must agree, or the numbers are void.

    bare              clip_grad_norm_ over model.parameters(), fused AdamW, LambdaLR, blocks made
                      before
    bare_tuned        with one list of parameters, the rate written, llmtrain's attention
    bare_tuned_again  the same thing again
    bare_item         and each step's loss read
    bare_data         `bare`, its blocks read by llmtrain's stream
    accelerate        Accelerate as its guide writes it
    trainer           transformers' Trainer; nothing is logged or saved
    llmtrain          the whole loop: stream, digest, reduction, norm, clipping, skip, metrics

Last come counts of a step of llmtrain and of `bare_tuned`, which no other work on the machine
changes: aten operations, reads of tensors by the host, calls of Python functions.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _loop_contenders as contenders
import _loop_counts
import accelerate
import torch
import transformers
import yaml

import llmtrain

WARM = 500  # steps; by then every lane is open
TUNED = ("bare_tuned", "bare_tuned_again")
GOAL_MS, GOAL_OF_TRAINER = 0.60, 0.40


def main() -> None:
    """Run all variants, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--only", help="names of variants, with commas; the tuned loops always run")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.steps <= WARM:
        parser.error(f"--steps {asked.steps}: more than {WARM}; the first {WARM} are not counted")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        only = set(asked.only.split(",")) if asked.only else None
        rows = measure(Path(folder), asked.steps, only)
    rows += goals(rows)
    with tempfile.TemporaryDirectory() as folder:
        rows.append(_loop_counts.row(write_config(Path(folder), _loop_counts.STEPS)))
    for row in rows:
        print(line(row))
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, steps: int) -> Any:
    """llmtrain's config of the hollow model."""
    path = folder / "loop.yaml"
    path.write_text(yaml.safe_dump(settings(folder / "run", steps)))
    return llmtrain.load_config(path)


def settings(run_dir: Path, steps: int) -> dict[str, Any]:
    """The config as plain values."""
    return {
        "run": {"dir": str(run_dir)},
        "model": {
            "config": {"model_type": "llama", **contenders.SHAPE},
            "tokenizer": "sample",
        },
        "data": {
            "sources": [{"path": "sample"}],
            "seq_len": contenders.SEQ_LEN,
            "heldout": 0.0,
        },
        "training": {
            "steps": steps,
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "max_grad_norm": contenders.LIMIT,
            "precision": "fp32",
        },
        "optimizer": {
            "learning_rate": contenders.RATE,
            "schedule": "constant",
            "warmup_steps": 1,
            "weight_decay": contenders.DECAY,
        },
        "checkpoint": {"every_steps": 10 * steps},
    }


def measure(folder: Path, steps: int, only: set[str] | None) -> list[dict[str, Any]]:
    """CPU time of every step of every variant."""
    config = write_config(folder, steps)
    stream = partial(llmtrain.open_stream, config)
    with stream() as batches:
        made = [torch.from_numpy(next(batches).ids).long() for _ in range(steps)]
    kinds: dict[str, Callable[[contenders.Next], float]] = {
        "bare": lambda turn: contenders.bare(turn, iter(made)),
        "bare_tuned": lambda turn: contenders.tuned(turn, iter(made)),
        "bare_tuned_again": lambda turn: contenders.tuned(turn, iter(made)),
        "bare_item": lambda turn: contenders.tuned(turn, iter(made), item=True),
        "bare_data": lambda turn: contenders.with_data(turn, stream, steps),
        "accelerate": lambda turn: contenders.by_the_book(turn, iter(made)),
        "trainer": lambda turn: contenders.trainer(turn, iter(made), folder / "trainer"),
        "llmtrain": lambda turn: contenders.ours(
            turn, config, lambda: turns.wait_for_all(steps + 1)
        ),
    }
    names = [name for name in kinds if only is None or name in only or name in TUNED]
    turns, losses = contenders.Turns(names), dict[str, float]()
    threads = [
        threading.Thread(target=take_part, args=(turns, name, kinds[name], steps, losses))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(losses) < len(names):
        raise SystemExit("a variant failed; no figures")
    return [row(name, turns, losses[name]) for name in names]


def take_part(
    turns: contenders.Turns,
    name: str,
    work: Callable[[contenders.Next], float],
    steps: int,
    losses: dict[str, float],
) -> None:
    """One variant from its first turn, in which it prepares itself, to its last."""

    def turn() -> None:
        last = len(turns.seconds[name]) == steps
        turns.done(name) if last else turns.next(name)

    try:
        turns.wait(name)
        losses[name] = work(turn)
    except BaseException:
        turns.fail()
        raise


def row(name: str, turns: contenders.Turns, loss: float) -> dict[str, Any]:
    """One variant's line of the table; milliseconds."""
    own, first, second = (
        [1000 * s for s in turns.seconds[one][1 + WARM :]] for one in (name, *TUNED)
    )
    gaps = sorted(a - (b + c) / 2 for a, b, c in zip(own, first, second, strict=True))
    return {
        "bench": "loop",
        "variant": name,
        "cpu_ms_median": statistics.median(own),
        "over_tuned_ms": statistics.median(gaps),
        "quartiles_ms": [gaps[len(gaps) // 4], gaps[3 * len(gaps) // 4]],
        "steps": len(own),
        "final_loss": loss,
        "shape": {**contenders.SHAPE, "seq_len": contenders.SEQ_LEN, "rows": 1},
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Where this runs, and how busy that is."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "load": os.getloadavg()[0],
    }


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the goals that these variants can decide."""
    over = {row["variant"]: row["over_tuned_ms"] for row in rows}
    said = []
    if "llmtrain" in over:
        said.append(("ms a step over the mean of two tuned loops", over["llmtrain"], GOAL_MS))
    if {"llmtrain", "trainer"} <= over.keys():
        ratio = over["llmtrain"] / over["trainer"]
        said.append(("of what the Trainer costs over them", ratio, GOAL_OF_TRAINER))
    return [
        {"bench": "loop", "goal": what, "at_most": goal, "figure": figure, "met": figure <= goal}
        for what, figure, goal in said
    ]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "goal" in row:
        verdict = "met" if row["met"] else "not met"
        return f"goal: {row['figure']:.3f} {row['goal']}, at most {row['at_most']:.2f}: {verdict}"
    if "counts" in row:
        return f"counts of a step: {json.dumps(row['counts'])}"
    low, high = row["quartiles_ms"]
    return (
        f"{row['variant']:<17} {row['cpu_ms_median']:7.3f} ms   over tuned "
        f"{row['over_tuned_ms']:+.3f} ({low:+.3f} … {high:+.3f})   "
        f"last loss {row['final_loss']:.4f}   load {row['load']:.1f}"
    )


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1" and hasattr(os, "sched_setaffinity"):
        # One core and one thread for everybody: torch's setting holds for the thread that makes it,
        # and the environment is read when torch is imported. So the benchmark starts itself again.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
