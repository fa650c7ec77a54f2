"""Threads that wait, as llmtrain sets it and as torch does by default, alone and beside others.

    python benchmarks/threads.py [--rounds 2] [--steps 24] [--json FILE]

Steps of a small model (hidden 192, 4 layers, 8 × 256 tokens) by llmtrain and by transformers'
Trainer, with a thread for each core. Waiting threads spin briefly, then sleep (what llmtrain sets,
here for both), or spin (torch's default). Alone, and with a process that does nothing but compute
on each core. A process each, in turns; the median step of a run, of several runs the least. The
last rows are a run with one thread, as a user asks for with OMP_NUM_THREADS=1, beside that
neighbour.

On a machine that others use too nothing is alone: the load is beside each figure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _rows import Table, measure

from llmtrain.system import cores

LIMIT = 600  # seconds of a run
WARM = 4  # steps
PLACES = ("alone", "beside a busy neighbour")
GOALS = {"alone": "≤ 1.02", "beside a busy neighbour": "≤ 1"}


@contextmanager
def neighbour(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def run(contender: str, place: str, steps: int, *, brief: bool, threads: int) -> dict[str, Any]:
    """Return the times of a step."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if place != "alone":
            stack.enter_context(neighbour(cores().count))
        asked = {
            "contender": contender,
            "brief": brief,
            "threads": threads,
            "steps": steps,
            "warm": WARM,
            "folder": folder,
        }
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
        rows, wrong = measure("_threads_run.py", asked, LIMIT, environment)
    if wrong:
        sys.exit(f"{contender}, {place}: {wrong}")
    return rows[-1]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.steps < WARM + 2:
        parser.error(f"--steps {asked.steps}: at least {WARM + 2}; {WARM} are not counted")
    table, count = Table("threads", asked.json), cores().count
    found: dict[tuple[str, str, bool, int], list[dict[str, Any]]] = {}
    for turn in range(asked.rounds):
        for place in PLACES:
            for contender in ("llmtrain", "trainer"):
                kinds = [(True, count), (False, count), (True, 1)]
                for brief, threads in kinds if turn % 2 == 0 else kinds[::-1]:
                    row = run(contender, place, asked.steps, brief=brief, threads=threads)
                    found.setdefault((contender, place, brief, threads), []).append(row)
    best = {
        key: {name: min(row[name] for row in rows) for name in ("wall_ms", "cpu_ms")}
        for key, rows in found.items()
    }
    for (contender, place, brief, threads), row in best.items():
        how = "brief" if brief else "spinning"
        name = f"{contender}, {threads} thread{'s' * (threads > 1)}, {how}, {place}"
        table.say(name, row["wall_ms"], "ms a step", cpu_ms=row["cpu_ms"])
        table.say(f"  {name}: CPU time", row["cpu_ms"], "ms a step")
    for place in PLACES:
        for contender in ("llmtrain", "trainer"):
            ours, default = (best[contender, place, one, count] for one in (True, False))
            ratio = ours["wall_ms"] / default["wall_ms"]
            table.say(f"{contender}: brief over spinning, {place}", ratio, "×", GOALS[place])
    one = (
        best["llmtrain", PLACES[1], True, 1]["cpu_ms"]
        / best["llmtrain", PLACES[0], True, 1]["cpu_ms"]
    )
    name = "llmtrain, one thread: CPU time beside a busy neighbour over that alone"
    table.say(name, one, "×", "≤ 1.5")


if __name__ == "__main__":
    main()
