"""Saves and resumes of whole runs, for `checkpoint.py`: one process each, on the built-in sample.

    python benchmarks/_checkpoint_runs.py CONFIG

trains that config twice in one process (the second start resumes) and prints, as JSON, how long
the second took until its first step, and how much of that the resuming was.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}  # 1 M parameters


def config(folder: Path, model: dict[str, int], **keys: Any) -> Path:
    """A run's file. keys: steps, every (steps between saves), background, seq_len, blocks."""
    described = {"model_type": "llama", "intermediate_size": 4 * model["hidden_size"], **model}
    asked = {
        "run": {"dir": str(folder / "run")},
        "model": {"config": described, "tokenizer": "sample"},
        "data": {"sources": [{"path": "sample"}], "seq_len": keys.get("seq_len", 64), "workers": 0},
        "training": {
            "steps": keys["steps"],
            "global_batch_size": keys.get("blocks", 2),
            "micro_batch_size": keys.get("blocks", 2),
            "precision": "fp32",
        },
        "checkpoint": {
            "every_steps": keys["every"],
            "background": keys["background"],
            "keep_best": 0,
            "keep_last": 2,
        },
        "evaluation": {"every_steps": 10_000, "max_documents": 8},
        "logging": {"every_steps": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"  # YAML is a superset
    path.write_text(json.dumps(asked))
    return path


def ran(path: Path) -> dict[str, Any]:
    """The run in a process of its own, twice; what it said and its lines of checkpoints."""
    command = [sys.executable, __file__, str(path)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    from llmtrain.rundir import contents, record

    lines = record.read(path.parent / "run" / contents.METRICS)
    saves = [line for line in lines if line["kind"] == "checkpoint"]
    steps = [line["seconds"] for line in lines if line["kind"] == "train"]
    return {"saves": saves, "step_seconds": steps, **json.loads(told.splitlines()[-1])}


def small(bench: Any, folder: Path) -> None:
    """What a save and a resume cost where there is next to nothing to write."""
    rounds = bench.sizes.rounds
    work = {"steps": 6 * rounds, "every": 6}
    model = "1 M parameters"
    found = ran(config(folder / "line", SMALL, background=False, **work))
    size = found["saves"][0]["bytes"]
    seconds = 1e3 * statistics.median(line["seconds"] for line in found["saves"])
    bench.say(f"a save of {model} ({size / 1e6:.0f} MB) in line", seconds, "ms", "≤ 150")
    resumed = found["resumed"]
    bench.say("a resume of it: searching, verifying, loading", resumed["resuming"], "s", "≤ 1")
    bench.say("  that whole start, from `train` to its first step", resumed["start"], "s")
    bench.say("  CPU time of it", resumed["start_cpu"], "s")
    beside = ran(config(folder / "beside", SMALL, background=True, **work))
    blocked = 1e3 * statistics.median(line["blocked_seconds"] for line in beside["saves"])
    bench.say(f"a save of {model} beside the training: blocked", blocked, "ms", "≤ 60")


def main() -> None:
    """Two starts of one config: the second has one more step to make, so it resumes."""
    from llmtrain import load_config, train
    from llmtrain.checkpoint import read
    from llmtrain.training import loop

    path = Path(sys.argv[1])
    steps = json.loads(path.read_text())["training"]["steps"]
    told: dict[str, float] = {"resuming": 0.0}
    with contextlib.redirect_stdout(sys.stderr):
        train(load_config(path))
        for name in ("find", "fill"):
            setattr(read, name, timed(getattr(read, name), told))
        begin, began = loop.begin, (time.perf_counter(), time.process_time())

        def noted(run: Any, step: int) -> None:
            told.setdefault("start", time.perf_counter() - began[0])
            told.setdefault("start_cpu", time.process_time() - began[1])
            begin(run, step)

        loop.begin = noted  # the only place that knows
        train(load_config(path, [f"training.steps={steps + 1}"]))
    print(json.dumps({"resumed": told}))


def timed(function: Callable[..., Any], told: dict[str, float]) -> Callable[..., Any]:
    """The same, which adds up the seconds it takes."""

    def wrapped(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            told["resuming"] += time.perf_counter() - began

    return wrapped


if __name__ == "__main__":
    main()
