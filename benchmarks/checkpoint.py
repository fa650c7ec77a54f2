"""Saving, verifying and loading checkpoints, side by side with what one would use instead.

    python benchmarks/checkpoint.py [--dir DIR] [--quick] [--only PART …]
                                    [--json FILE] [--markdown FILE]

DIR: on the disk to be measured (default: the system's place for temporary files). Each line: a
figure, its goal, and whether it is met. Rows of FILE that belong to other parts stay as they are.

    writing     a save beside a plain sequential write, torch.save, save_file, DCP, all with fsync;
                digests' share of it
    verifying   all digests beside a sequential read, from the page cache and from the disk
    small       what a save and a resume of a run of 1 M parameters cost
    beside      a save beside other work, of a model whose save in line takes seconds
    memory      peaks above a process's own state, of save and load, at three sizes
    gpu         not measured without one
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _checkpoint_disk import beside, verifying, writing
from _checkpoint_memory import measured
from _checkpoint_page import page
from _checkpoint_runs import small

PARTS = ("writing", "verifying", "small", "beside", "memory", "gpu")
PACKAGES = "torch", "safetensors", "xxhash"
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """In parameters: written and verified · large: saved beside other work, `saves` times ·
    memory: of three processes."""

    rounds: int = 5
    parameters: int = 42_000_000
    large: int = 160_000_000
    saves: int = 5
    memory: tuple[int, ...] = (4 * MIB, 16 * MIB, 48 * MIB)


QUICK = Sizes(1, 4_200_000, 8_400_000, 1, (2 * MIB, 4 * MIB, 6 * MIB))


class Bench:
    """The table."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.table: list[dict[str, Any]] = []
        self.part = ""

    def say(self, name: str, figure: float | None, unit: str, goal: str = "", **more: Any) -> None:
        """A line. goal: "≥ 80" or "≤ 1"; none: a figure to compare with. figure None: not known."""
        met = None
        if goal and figure is not None:
            sign, limit = goal.split()
            met = figure >= float(limit) if sign == "≥" else figure <= float(limit)
        row = {
            "bench": "checkpoint",
            "part": self.part,
            "name": name,
            "figure": figure,
            "unit": unit,
            "goal": goal,
        }
        load = round(os.getloadavg()[0], 1)
        self.table.append({**row, "met": met, "load": load, **more})
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        text = "not measured: no GPU" if figure is None else f"{figure:9.2f} {unit}"
        print(f"{name:<62} {text:<23} {goal:<8} {verdict}  (load {load})", flush=True)


def memory(bench: Bench, folder: Path) -> None:
    """Each figure from a process of its own."""
    for what, name in [
        ("save", "a save in line"),
        ("load", "a load, with its verifying"),
        ("rank0", "a save of two ranks' halves by rank 0"),
    ]:
        for parameters in bench.sizes.memory:
            place = folder / f"memory-{parameters}"
            found = measured(what, parameters, place)
            # Rank 0 of a sharded run holds one tensor of the others besides.
            more = found["largest_bytes"] if what == "rank0" else 0
            state = found["state_bytes"] / MIB
            limit = f"≤ {128 + more / MIB:.0f}"
            above = found["above_bytes"] / MIB
            bench.say(f"memory of {name}, state of {state:,.0f} MiB", above, "MiB", limit)


def gpu(bench: Bench, folder: Path) -> None:
    """What needs a GPU is named and left open."""
    if torch.cuda.is_available():
        return beside(bench, folder)
    bench.say("1.5 B parameters on an H200: blocked", None, "s", "≤ 1")
    return None


def machine() -> dict[str, Any]:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": model or platform.processor(),
        "cpus": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--quick", action="store_true", help="a look whether it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    bench = Bench(QUICK if asked.quick else Sizes())
    parts = {
        "writing": writing,
        "verifying": verifying,
        "small": small,
        "beside": beside,
        "memory": memory,
        "gpu": gpu,
    }
    kept = before(asked.json, asked.only)
    for part in asked.only:
        bench.part = part
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            parts[part](bench, Path(folder))
        rows = kept + [{**row, **about} for row in bench.table]
        rows.sort(key=lambda row: PARTS.index(row["part"]))
        if asked.json:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            asked.json.write_text("".join(lines), "utf-8")
        if asked.markdown:
            asked.markdown.write_text(page(rows), "utf-8")


def before(path: Path | None, anew: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of an earlier run for the parts that are not measured anew."""
    if path is None or not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in rows if row["part"] not in anew]


if __name__ == "__main__":
    main()
