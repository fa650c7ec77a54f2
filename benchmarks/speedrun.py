"""How little CPU time reaches a level of held-out bits per byte? It runs a record again.

    python benchmarks/speedrun.py --data DIRECTORY [--record NAME] [--seeds 42 43 44] [--json FILE]

A record is a row of docs/reference/speedrun.md, whose rules hold here, and a config of
benchmarks/speedruns/.
The first row is run if none is named. The articles are divided first: those that
`benchmarks/convergence.py` holds out and scores are the held-out documents of every seed. After
each seed come some steps of the recipe of `convergence.py`, on the same core with one thread, so
that both see the same machine. Printed, and written as JSON:

    level         held-out bits per byte after the last step, the mean of the seeds
    CPU seconds   from the beginning of the first step to the end of the last one: the training
                  process and its data workers, user and system, checkpoints included, evaluations
                  and the start-up left out
    baseline      median CPU seconds of a step of `convergence.py` × its 300 steps
    times fewer   baseline / CPU seconds
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from llmtrain.tools.use.evaluate import documents_of

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from convergence import config as convergence  # noqa: E402  # it lies beside this file

RECORDS = HERE / "speedruns"
PAGE = HERE.parent / "docs" / "reference" / "speedrun.md"
LEVEL = 2.2835  # held-out bits per byte that convergence.py reached
STEPS, WARM = 300, 2  # of the baseline; its first steps, which are not counted
DOCUMENTS, ROWS = 300, 1000  # that are scored; rows of a parquet row group
FLOOR, TARGET, STRETCH = 8, 12, 16


def records(page: str) -> list[str]:
    """The names in the first column of the page's table, the newest record first."""
    return re.findall(r"^\| \[`([\w-]+)`\]", page, flags=re.M)


def divide(data: Path, folder: Path) -> dict[str, str]:
    """Write the articles into two folders, and return the keys that name these.

    Held out is what convergence.py holds out; all of that is left out of the training documents.
    """
    asked = convergence(data, folder / "none", 1)
    asked["evaluation"]["max_documents"] = 10**12  # the most that a config may have
    path = folder / "divide.yaml"
    path.write_text(yaml.safe_dump(asked))
    held = list(documents_of(str(path)))
    out = set(held)
    for name in ("train", "heldout"):
        (folder / name).mkdir()
    for file in sorted(data.glob("*.parquet")):
        kept = [text for text in pq.read_table(file)["text"].to_pylist() if text not in out]
        write(kept, folder / "train" / file.name)
    write(held[:DOCUMENTS], folder / "heldout" / "heldout.parquet")
    return {
        "data.sources": json.dumps([{"path": str(folder / "train")}]),
        "evaluation.sources": json.dumps([{"path": str(folder / "heldout")}]),
        "evaluation.max_documents": str(DOCUMENTS),
    }


def write(rows: Sequence[str], path: Path) -> None:
    """Write texts as a parquet file."""
    pq.write_table(pa.table({"text": list(rows)}), path, row_group_size=ROWS)


def work(config: Path, keys: dict[str, str]) -> dict[str, Any]:
    """Make one run in a process of its own."""
    command = [sys.executable, str(HERE / "_speedrun_worker.py"), str(config)]
    command += [f"{key}={value}" for key, value in keys.items()]
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env={**os.environ, **alone}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_seeds(
    record: Path, seeds: Sequence[int], baseline_steps: int, given: dict[str, str], folder: Path
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield, for each seed, the run of the record and the marks of a piece of the baseline."""
    piece = folder / "baseline.yaml"
    piece.write_text(yaml.safe_dump(convergence(Path("given"), folder / "none", baseline_steps)))
    for seed in seeds:
        own = {**given, "run.seed": str(seed)}
        yield (
            work(record, {**own, "run.dir": str(folder / f"record-{seed}")}),
            work(piece, {**own, "run.dir": str(folder / f"baseline-{seed}")})["marks"],
        )


def training_seconds(marks: Sequence[float]) -> float:
    """Return the CPU seconds of all steps. marks: when each step began, and the end."""
    return marks[-1] - marks[0]


def step_seconds(pieces: Sequence[Sequence[float]]) -> float:
    """Return the median step of pieces of the baseline, without first steps and checkpoints.

    pieces: the marks of each; the last step is left out too, as it ends with a checkpoint
    """
    return statistics.median(
        end - begin for marks in pieces for begin, end in pairwise(marks[WARM:-1])
    )


def summary(found: Sequence[tuple[dict[str, Any], Sequence[float]]]) -> dict[str, Any]:
    """Return the figures of all seeds. found: a run and the marks of the baseline for each."""
    runs = [run for run, _ in found]
    seconds = [training_seconds(run["marks"]) for run in runs]
    baseline = STEPS * step_seconds([marks for _, marks in found])
    level = statistics.mean(run["bits_per_byte"] for run in runs)
    return {
        "bits_per_byte": level,
        "bits_per_byte_of_seeds": [run["bits_per_byte"] for run in runs],
        "level": LEVEL,
        "level_reached": level <= LEVEL,
        "cpu_seconds": statistics.mean(seconds),
        "cpu_seconds_of_seeds": seconds,
        "tokens": runs[0]["tokens"],
        "whole_command_cpu_seconds": [run["whole_command_cpu_seconds"] for run in runs],
        "baseline_cpu_seconds": baseline,
        "times_fewer": baseline / statistics.mean(seconds),
    }


def lines(name: str, found: dict[str, Any]) -> str:
    """Return the result as text."""
    times = found["times_fewer"] if found["level_reached"] else 0.0
    goals = {"floor": FLOOR, "target": TARGET, "stretch": STRETCH}
    met = [
        f"{word} {goal} ×: {'met' if times >= goal else 'not met'}" for word, goal in goals.items()
    ]
    reached = "reached" if found["level_reached"] else "not reached"
    return "\n".join(
        [
            f"record        {name}, seeds {found['seeds']}, {found['tokens']:,} tokens each",
            f"level         {found['bits_per_byte']:.4f} bits per byte; {LEVEL} is {reached}",
            f"CPU seconds   {found['cpu_seconds']:.1f}",
            f"baseline      {found['baseline_cpu_seconds']:.0f} CPU seconds",
            f"times fewer   {found['times_fewer']:.1f} ({', '.join(met)})",
            f"load          {found['load'][0]:.1f} before, {found['load'][1]:.1f} after",
        ]
    )


def main() -> None:
    """Run a record again and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = records(PAGE.read_text("utf-8"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", choices=known, default=known[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--baseline-steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.baseline_steps < WARM + 2:
        parser.error(f"--baseline-steps {asked.baseline_steps}: at least {WARM + 2}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        given = divide(asked.data.resolve(), folder)
        record = RECORDS / f"{asked.record}.yaml"
        found = summary(list(run_seeds(record, asked.seeds, asked.baseline_steps, given, folder)))
    found = {
        "bench": "speedrun",
        "record": asked.record,
        "seeds": asked.seeds,
        **found,
        "load": [load, os.getloadavg()[0]],
        "data": asked.data.name,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(lines(asked.record, found))
    if asked.json:
        asked.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
