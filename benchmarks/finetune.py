"""The cost of chat data, adapters, export and sharded loading, beside what one would use instead.

    python benchmarks/finetune.py [--shared DIR] [--trl PYTHON] [--turns N] [--quick]
                                  [--only PART …] [--json FILE]

DIR: has `sft/train.jsonl`, `tokenizers/qwen3` and `tokenizers/gpt2` (default: ../shared/data beside
this repository). PYTHON: the interpreter of an environment with `trl`; it needs no llmtrain.
Parts that need them are skipped, by name, where they are missing. Each line: a figure, its goal,
whether it is met, and the load of the machine. All of it runs on one core with one thread, and
times are CPU time; what is compared takes turns, and minima are compared. Rows of FILE that belong
to other parts stay as they are.

    speed       rows of train.jsonl to ids and masks, with Qwen3's tokenizer and template, beside a
                bare `tokenizers` encode of the texts of the same sequences
    opening     the first batch of a chat stream, and of its resume in the middle of an epoch, each
                in a process of its own, without and with opening the tokenizer, which every process
                does once; how full the blocks of that epoch are
    checkpoint  the files of a LoRA run's checkpoint over the bytes of its tensors
    export      peak memory of `llmtrain export`, whole and with merged adapters, above that of a
                process that has imported torch and transformers (which alone loads little: with
                the class of its models it is another figure)
    shards      memory of a rank above 0 under FSDP2 while the model is loaded, over its shard
    step        a step of a LoRA run beside a loop of transformers, peft and torch
    trl         full fine-tuning and LoRA on conversations beside TRL's SFTTrainer, packed and
                padded: the same weights, template and tokens; whole runs, tokenizing included
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _finetune_data import TOKENIZER, TRAIN, opening, speed
from _finetune_runs import checkpoint, export, shards
from _finetune_sft import trl
from data import machine, one_core

# Nothing heavy here: the parts import what they measure.

NEEDED = {
    "speed": (TRAIN, TOKENIZER),
    "opening": (TRAIN, TOKENIZER),
    "trl": (TRAIN, "tokenizers/gpt2"),
}
PACKAGES = ("transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    rounds: times that rows are encoded
    rows: of train.jsonl; None = all
    starts: processes of each kind that open a stream, or whose memory is measured
    layers: of the model whose checkpoints, export and shards are measured
    steps: of each loop; the first `warm` of them are not counted
    turns: runs of each contender beside TRL, each of `first` steps and `after` more
    """

    rounds: int = 5
    rows: int | None = None
    starts: int = 5
    layers: int = 16
    steps: int = 80
    warm: int = 10
    turns: int = 2
    first: int = 50
    after: int = 10


QUICK = Sizes(rounds=1, rows=300, starts=1, layers=2, steps=12, warm=6, turns=1, first=2, after=2)


class Bench:
    """The table, and what the parts share.

    shared: the directory with conversations and tokenizers
    trl: the interpreter of an environment with TRL; None = there is none
    folder: a place for files, deleted at the end
    """

    def __init__(self, shared: Path, trl: Path | None, folder: Path, sizes: Sizes) -> None:
        self.shared, self.trl, self.folder, self.sizes = shared, trl, folder, sizes
        self.table: list[dict[str, Any]] = []
        self.part = ""

    def say(self, name: str, figure: float | None, unit: str, goal: str = "", **more: Any) -> None:
        """Add a line. goal: "≥ 0.4" or "≤ 1"; none: a figure to compare with."""
        met = None
        if goal and figure is not None:
            sign, limit = goal.replace(",", "").split()
            met = figure >= float(limit) if sign == "≥" else figure <= float(limit)
        load = round(os.getloadavg()[0], 1)
        row = {"bench": "finetune", "part": self.part, "name": name, "figure": figure}
        self.table.append({**row, "unit": unit, "goal": goal, "met": met, "load": load, **more})
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        text = "not measured" if figure is None else f"{figure:12,.3f} {unit}"
        print(f"{name:<70} {text:<22} {goal:<10} {verdict:<6} (load {load})", flush=True)


def step(bench: Bench) -> None:
    """Measure a step; what its loops need is imported with the module."""
    import _finetune_step

    _finetune_step.step(bench)


PARTS: dict[str, Callable[[Bench], None]] = {
    "speed": speed,
    "opening": opening,
    "checkpoint": checkpoint,
    "export": export,
    "shards": shards,
    "step": step,
    "trl": trl,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--trl", type=Path, metavar="PYTHON")
    parser.add_argument("--turns", type=int, help="runs of each contender beside TRL")
    parser.add_argument("--quick", action="store_true", help="a look whether it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shared = asked.shared or Path(__file__).resolve().parents[2] / "shared" / "data"
    about = machine() | {name: version(name) for name in PACKAGES}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sizes = QUICK if asked.quick else Sizes()
        sizes = replace(sizes, turns=asked.turns or sizes.turns)
        bench = Bench(shared.resolve(), asked.trl, Path(folder), sizes)
        for part in asked.only:
            bench.part = part
            absent = [name for name in NEEDED.get(part, ()) if not (bench.shared / name).exists()]
            if absent:
                bench.say(f"{part}: skipped, as --shared has no {', '.join(absent)}", None, "")
            elif part == "trl" and bench.trl is None:
                bench.say("trl: skipped, as no --trl names an environment with it", None, "")
            else:
                PARTS[part](bench)
    if asked.json:
        # Each row has the load of its own time.
        rows = others(asked.json, asked.only) + [{**about, **row} for row in bench.table]
        rows.sort(key=lambda row: list(PARTS).index(row["part"]))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        asked.json.write_text("".join(lines), "utf-8")


def others(path: Path, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run for the parts that are not measured now."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in rows if row["part"] not in parts]


if __name__ == "__main__":
    # Before anything is imported that reads them. Processes that are started inherit all of it.
    threads = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ |= {**dict.fromkeys(threads, "1"), "TOKENIZERS_PARALLELISM": "false"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    one_core()
    main()
