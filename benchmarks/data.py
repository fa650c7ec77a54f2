"""The data stream beside bare tokenizers and `datasets`; hand-over, waiting, opening, memory.

    python benchmarks/data.py --data DIR --tokenizer DIR [--quick] [--only PART …] [--json FILE]

DIR: parquet files with a column `text`; the files of GPT-2's tokenizer. Each line: a figure, its
goal, and whether it is met. What is compared takes turns, chunk by chunk, so that a machine that
slows down slows all of it; rates are by CPU time of one core, medians of five rounds.

    speed    the whole path (read, permute, hold out, tokenize, pack, batch, digest) in this process
             and through one worker, against tokenizers alone on the very texts that the path
             tokenized, and against `datasets`: streaming, map(tokenize), map(group), DataLoader
    waiting  the step is a sleep twice as long as its data takes; share of it in which `next` waits
    opening  48 lanes at the cursors of step 10 and of step 1,000,000 (begun far into the data)
    memory   of a worker, over units read as fast as it can
    order    a permutation of a million units
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _data_bench import BLOCKS, QUICK, Bench, Sizes, opened
from _data_speed import speed

# Nothing heavy here: a data worker is spawned, and imports this file again.

PARTS = ("speed", "waiting", "opening", "memory", "order")
PACKAGES = "torch", "numpy", "pyarrow", "tokenizers", "tiktoken", "datasets"
MB = 1e6


def waiting(bench: Bench) -> None:
    """Steps that are sleeps of twice the time that a worker needs for their data."""
    with bench.stream(bench.manifest(), 1) as stream:
        for _ in range(10):
            next(stream)
        began = time.perf_counter()
        for _ in range(40):
            next(stream)
        seconds = 2 * (time.perf_counter() - began) / 40
        time.sleep(1)
        taking, working, began = [], [], time.perf_counter()
        for _ in range(bench.sizes.steps):
            at, used = time.perf_counter(), time.process_time()
            next(stream)
            taking.append(time.perf_counter() - at)
            working.append(time.process_time() - used)
            time.sleep(seconds)
        whole = time.perf_counter() - began
    name = "waiting: share of a step that is twice as long as its data takes"
    more = {"step_ms": 1e3 * seconds, "median_ms": 1e3 * statistics.median(taking)}
    bench.say(name, 100 * (sum(taking) - sum(working)) / whole, "%", "≤ 1", **more)
    usual = statistics.median(t - w for t, w in zip(taking, working, strict=True))
    bench.say("  of the median step", 100 * usual * len(taking) / whole, "%")
    bench.say("  own work: unpacking blocks, making batches", 100 * sum(working) / whole, "%")


def opening(bench: Bench) -> None:
    """The first block of every lane, at a real cursor."""
    for packing in ("concat", "bestfit"):
        manifest = bench.manifest(lanes=48, packing=packing)
        for step in (10, 1_000_000):
            g = step * BLOCKS
            cursors = at_step(bench, manifest, step)
            seconds, reads = [], 0
            for _ in range(bench.sizes.rounds):
                lanes, reader = opened(bench, manifest, g, cursors)
                began = time.process_time()
                for lane in lanes:
                    lane.take()
                seconds.append(time.process_time() - began)
                reads = reader.units.reads
            name = f"opening 48 lanes at step {step:,}, {packing}"
            bench.say(name, statistics.median(seconds), "s", "≤ 1", units_read=reads)


def at_step(bench: Bench, manifest: Any, step: int) -> dict[int, Any]:
    """The cursors of a step: ten steps behind the place in the data where it should be.

    Its epoch is as if all units were equally long; no run of a million steps was made.
    """
    from llmtrain.types import Cursor

    epoch = (step - 10) * BLOCKS // 20_959  # blocks of the whole text
    first = (step - 10) * BLOCKS
    start = dict.fromkeys(range(48), Cursor(epoch, 0, 0, 0))
    lanes, _ = opened(bench, manifest, first, start)
    for g in range(first, step * BLOCKS):
        lanes[g % 48].take()
    return {index: lane.cursors[0] for index, lane in enumerate(lanes)}


def memory(bench: Bench) -> None:
    """A worker that reads as fast as it can: its memory, and how much that grows."""
    lanes = 24
    manifest = bench.manifest(lanes=lanes)
    units = len(manifest.sources[0].units)
    with bench.stream(manifest, 1) as stream:
        worker = stream._items.processes[0].pid
        samples: list[tuple[float, float, float]] = []
        read, began = 0.0, time.perf_counter()
        while read < bench.sizes.units:
            cursors = next(stream).cursors.values()
            if time.perf_counter() - began > len(samples):
                samples.append((time.perf_counter() - began, *memory_of(worker)))
            read = sum(c.epoch * units / lanes + c.unit for (c,) in cursors)
            read *= lanes / len(cursors)
        samples.append((time.perf_counter() - began, *memory_of(worker)))
    late = samples[len(samples) // 3 :]
    minutes = [seconds / 60 for seconds, _, _ in late]
    private = [one for _, one, _ in late]
    slope = statistics.linear_regression(minutes, private).slope if len(late) > 1 else 0.0
    goal = f"≤ {350 + 6 * lanes}"
    bench.say(f"memory of a worker with {lanes} lanes, private", max(private), "MB", goal)
    bench.say("  resident, with shared pages", max(rss for _, _, rss in late), "MB", goal)
    n = len(private)
    tenths = [round(statistics.median(private[i * n // 10 :][: n // 10 + 1])) for i in range(10)]
    more = {"units_read": round(read), "seconds": round(samples[-1][0]), "tenths_mb": tenths}
    bench.say(f"  growth over {read:,.0f} units at full speed", slope, "MB/min", "≤ 1", **more)


def memory_of(process: int) -> tuple[float, float]:
    """(private, resident) memory in MB (Linux)."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 / MB for line in lines}
    return found["Private_Clean"] + found["Private_Dirty"], found["Rss"]


def order(bench: Bench) -> None:
    """Of the units of an epoch."""
    from llmtrain.hashing import mix, permutation

    seconds = []
    for epoch in range(bench.sizes.rounds):
        began = time.process_time()
        permutation(1_000_000, mix(42, 1, 0, epoch))
        seconds.append(time.process_time() - began)
    bench.say("order of a million units", statistics.median(seconds), "s", "≤ 0.5")


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
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="default: tokenizers/gpt2 beside the data")
    parser.add_argument("--quick", action="store_true", help="a look whether it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--units", type=int, help="that are read for the growth of memory")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else Sizes()
    if asked.units:
        sizes = replace(sizes, units=asked.units)
    gpt2 = asked.tokenizer or asked.data.parent.parent / "tokenizers" / "gpt2"
    before = machine()
    print(", ".join(f"{key} {value}" for key, value in before.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asked.data.resolve(), gpt2.resolve(), Path(folder), sizes)
        for part in asked.only:
            if part in ("waiting", "memory") and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
            {
                "speed": speed,
                "waiting": waiting,
                "opening": opening,
                "memory": memory,
                "order": order,
            }[part](bench)
            one_core()
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if asked.json:
        more = {**before, "load_end": round(os.getloadavg()[0], 1)}
        lines = [json.dumps({**row, **more}, ensure_ascii=False) + "\n" for row in bench.table]
        asked.json.write_text("".join(lines))


def one_core() -> None:
    """This process and its children on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # The environment is read when libraries are imported, so the benchmark starts itself again.
        one_core()
        threads = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        os.environ.update(dict.fromkeys(threads, "1"), TOKENIZERS_PARALLELISM="false")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
