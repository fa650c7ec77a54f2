"""The data stream beside bare tokenizers and `datasets`; hand-over, waiting, opening, memory.

    python benchmarks/data.py --data DIR --tokenizer DIR [--quick] [--only PART …] [--json FILE]

DIR: parquet files with a column `text`; the files of GPT-2's tokenizer. Each line: a figure, its
goal, and whether it is met. What is compared takes turns, chunk by chunk, so that a machine that
slows down slows all of it; rates are by CPU time of one core, medians of five rounds.

    speed    the whole path (read, permute, hold out, tokenize, pack, batch, digest) in this process
             and through one worker, against tokenizers alone on the very texts that the path
             tokenized, and against `datasets`: streaming, map(tokenize), map(group), DataLoader
    waiting  the step is a sleep twice as long as its data takes; share of it spent in `next`
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

# Nothing heavy here: a data worker is spawned, and imports this file again.

SEQ_LEN, BLOCKS = 1024, 32  # of a step
PARTS = ("speed", "waiting", "opening", "memory", "order")
PACKAGES = "torch", "numpy", "pyarrow", "tokenizers", "tiktoken", "datasets"
MB = 1e6


@dataclass(frozen=True)
class Sizes:
    """How much is measured: blocks are a round's."""

    rounds: int = 5
    blocks: int = 4096  # × 1,024 × 5 = 21 M tokens
    warm: int = 1536  # before: lanes opened, windows filled
    some: int = 1024  # through a worker
    slow: int = 512  # with `tokenizers`
    documents: int = 3000  # with `datasets`
    steps: int = 200
    units: int = 2000


QUICK = Sizes(rounds=1, blocks=256, warm=32, some=128, slow=64, documents=1000, steps=10, units=60)


class Bench:
    """A prepared run: its tokenizer, and manifests of it in several forms."""

    def __init__(self, data: Path, tokenizer: Path, folder: Path, sizes: Sizes) -> None:
        from llmtrain.training.prepare import TOKENIZER, prepare

        self.data, self.gpt2, self.folder, self.sizes = data, tokenizer, folder, sizes
        prepare(self.config(), folder, 1, None)
        self.tokenizer = folder / TOKENIZER
        self.table: list[dict[str, Any]] = []

    def config(self, **data: Any) -> Any:
        """A run of GPT-2 on this data."""
        import yaml

        from llmtrain import load_config

        path = self.folder / "run.yaml"
        keys = {
            "run": {"dir": str(self.folder)},
            "model": {"config": {"model_type": "gpt2"}, "tokenizer": str(self.gpt2)},
            "data": {"sources": [{"path": str(self.data)}], "seq_len": SEQ_LEN, **data},
            "training": {"steps": 1, "global_batch_size": BLOCKS},
        }
        path.write_text(yaml.safe_dump(keys))
        return load_config(path)

    def manifest(self, backend: str = "tiktoken", **data: Any) -> Any:
        """The data with this back end, packing, lanes …"""
        from llmtrain.data.tokenizer import open_tokenizer
        from llmtrain.data.units import freeze, survey

        return freeze(survey(self.config(**data), 1), open_tokenizer(self.tokenizer, backend))

    @contextmanager
    def stream(self, manifest: Any, workers: int = 0) -> Iterator[Any]:
        """All batches of one process."""
        from llmtrain.data.readers import Reading
        from llmtrain.data.stream import open_stream

        stream = open_stream(
            manifest,
            self.tokenizer,
            blocks_per_step=BLOCKS,
            rank=0,
            world_size=1,
            workers=workers,
            reading=Reading(600),
        )
        try:
            yield stream
        finally:
            stream.close()

    def say(
        self, name: str, figure: float, unit: str, goal: str = "", /, **more: float | str | bool
    ) -> None:
        """A line of the table. goal: "≥ 80" or "≤ 1"; none: a figure to compare with."""
        met = None
        if goal:
            sign, limit = goal.split()
            met = figure >= float(limit) if sign == "≥" else figure <= float(limit)
        row = {"bench": "data", "name": name, "figure": figure, "unit": unit, "goal": goal}
        self.table.append({**row, "met": met, **more})
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        print(f"{name:<62} {figure:9.2f} {unit:<13} {goal:<8} {verdict}", flush=True)


# --- speed ---------------------------------------------------------------------------------------


@contextmanager
def recorded(texts: list[str]) -> Iterator[None]:
    """Whatever the stream tokenizes is noted in `texts`."""
    from llmtrain.data.tokenizer import Tokenizer

    original = Tokenizer.documents

    def documents(self: Any, batch: Any) -> Any:
        texts.extend(batch)
        return original(self, batch)

    Tokenizer.documents = documents  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tokenizer.documents = original  # type: ignore[method-assign]


def cpu_of(process: int) -> float:
    """CPU seconds of another process, by its clock (Linux)."""
    return time.clock_gettime(~process << 3 | 2)


def take(stream: Any, blocks: int) -> float:
    """CPU seconds that this process needs for so many blocks."""
    began = time.process_time()
    for _ in range(blocks // BLOCKS):
        next(stream)
    return time.process_time() - began


def take_from_worker(stream: Any, blocks: int) -> tuple[float, float]:
    """The same through a worker: CPU seconds of (this process, the worker)."""
    worker = stream._items.processes[0].pid
    before = at_rest(worker)
    own = take(stream, blocks)
    return own, at_rest(worker) - before


def at_rest(worker: int) -> float:
    """A worker's CPU seconds once it has read ahead as far as it may."""
    used = cpu_of(worker)
    while True:
        time.sleep(0.05)
        now = cpu_of(worker)
        if now - used < 1e-4:
            return now
        used = now


def bare_tiktoken(bench: Bench) -> Callable[[list[str]], float]:
    """CPU seconds of `encode_ordinary` and `np.array`; made by tiktoken's own reader of files."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    import numpy as np
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    files = str(bench.gpt2 / "merges.txt"), str(bench.gpt2 / "vocab.json")
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    encoding = tiktoken.Encoding(
        "bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )

    def measure(texts: list[str]) -> float:
        began = time.process_time()
        for text in texts:
            np.array(encoding.encode_ordinary(text), dtype=np.int32)
        return time.process_time() - began

    return measure


def bare_tokenizers(bench: Bench) -> Callable[[list[str]], float]:
    """CPU seconds of `encode_batch_fast`, 64 texts a call, and of reading the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(bench.tokenizer / "tokenizer.json"))

    def measure(texts: list[str]) -> float:
        began = time.process_time()
        for i in range(0, len(texts), 64):
            for encoding in tokenizer.encode_batch_fast(texts[i : i + 64]):
                encoding.ids  # noqa: B018  # makes the list
        return time.process_time() - began

    return measure


def beside(
    stream: Any, bare: Callable[[list[str]], float], blocks: int, chunk: int
) -> tuple[float, float]:
    """CPU seconds of (the path, the tokenizer alone) for so many blocks, in turns."""
    ours = alone = 0.0
    for _ in range(blocks // chunk):
        texts: list[str] = []
        with recorded(texts):
            ours += take(stream, chunk)
        alone += bare(texts)
    return ours, alone


def with_datasets(bench: Bench) -> tuple[int, float]:
    """(tokens, CPU seconds) of what transformers' example for language models does, streaming."""
    import datasets
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.tokenizer)
    tokenizer.model_max_length = 1 << 30  # longer documents are meant

    def group(columns: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in columns.items()}
        end = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        result = {
            name: [ids[i : i + SEQ_LEN] for i in range(0, end, SEQ_LEN)]
            for name, ids in joined.items()
        }
        return {**result, "labels": result["input_ids"].copy()}

    files = sorted(str(path) for path in bench.data.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    names = rows.column_names
    rows = rows.take(bench.sizes.documents)
    tokens = rows.map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=names)
    grouped = tokens.map(group, batched=True).with_format("torch")
    began = time.process_time()
    found = sum(batch["input_ids"].numel() for batch in DataLoader(grouped, batch_size=BLOCKS))
    return found, time.process_time() - began


def speed(bench: Bench) -> None:
    """The rows of throughput: rates are tokens a second of CPU time."""
    sizes, found = bench.sizes, {}
    concat, slow = bench.manifest(), bench.manifest("tokenizers")
    fit = bench.manifest(packing="bestfit")
    fast_alone, slow_alone = bare_tiktoken(bench), bare_tokenizers(bench)

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with (
        bench.stream(concat) as ours,
        bench.stream(concat) as twin,
        bench.stream(concat, 1) as ahead,
        bench.stream(slow) as reference,
        bench.stream(fit) as fitted,
    ):
        for stream in (ours, twin, ahead, reference, fitted):
            take(stream, sizes.warm)
        for _ in range(sizes.rounds):
            path, alone = beside(ours, fast_alone, sizes.blocks, 128)
            note("path", sizes.blocks * SEQ_LEN / path)
            note("of tiktoken", 100 * alone / path)
            path, alone = beside(fitted, fast_alone, sizes.blocks, 128)
            note("fit", sizes.blocks * SEQ_LEN / path)
            note("fit of tiktoken", 100 * alone / path)
            path, alone = beside(reference, slow_alone, sizes.slow, 32)
            note("slow path", sizes.slow * SEQ_LEN / path)
            note("of tokenizers", 100 * alone / path)
            inside = own = worker = 0.0
            for _ in range(sizes.some // 128):
                inside += take(twin, 128)  # the same blocks
                one, other = take_from_worker(ahead, 128)
                own, worker = own + one, worker + other
            note("of inside", 100 * inside / (own + worker))
            note("hand-over", 1e6 * (own + worker - inside) / sizes.some)
            note("own", 1e3 * own / sizes.some)
            tokens, seconds = with_datasets(bench)
            note("datasets", tokens / seconds)
            note("of datasets", found["path"][-1] * seconds / tokens)
    said = {name: statistics.median(values) for name, values in found.items()}
    ends = {name: f"{min(values):.3g} … {max(values):.3g}" for name, values in found.items()}
    for key, name, unit, goal in (
        ("path", "in process, tiktoken, concat", "tokens/s", ""),
        ("of tiktoken", "  of bare encode_ordinary + np.array on these texts", "%", "≥ 80"),
        ("datasets", "datasets: streaming, map, map, DataLoader", "tokens/s", ""),
        ("of datasets", "  in process over that", "times", "≥ 25"),
        ("slow path", "in process, tokenizers, concat", "tokens/s", ""),
        ("of tokenizers", "  of bare encode_batch_fast on these texts", "%", "≥ 85"),
        ("fit", "in process, tiktoken, bestfit", "tokens/s", ""),
        ("fit of tiktoken", "  of bare encode_ordinary + np.array on these texts", "%", ""),
        ("of inside", "one worker: CPU time in process of that of both processes", "%", "≥ 75"),
        ("hand-over", "  hand-over, CPU time of both processes", "µs/block", "≤ 200"),
        ("own", "  CPU time of the main process, batches made", "ms/block", "≤ 0.17"),
    ):
        bench.say(name, said[key], unit, goal, range=ends[key])
    bench.say("padding with bestfit", 100 * padding(bench, fit), "%", "≤ 2.5")


def padding(bench: Bench, manifest: Any) -> float:
    """Share of targets that are padding."""
    blocks = empty = 0
    lanes, _ = opened(bench, manifest, 0, None)
    while blocks < bench.sizes.some:
        for lane in lanes:
            trained = lane.take().trained
            empty += 0 if trained is None else int((~trained).sum())
            blocks += 1
    return empty / (blocks * SEQ_LEN)


# --- waiting, opening, memory, order -------------------------------------------------------------


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
        waits, began = [], time.perf_counter()
        for _ in range(bench.sizes.steps):
            waits.append(next(stream).wait_seconds)
            time.sleep(seconds)
        whole = time.perf_counter() - began
    bench.say(
        "waiting for data, the step a sleep of twice its data's time",
        100 * sum(waits) / whole,
        "%",
        "≤ 1",
        step_ms=1e3 * seconds,
        wait_ms_median=1e3 * statistics.median(waits),
    )


def opened(bench: Bench, manifest: Any, g: int, cursors: Any) -> tuple[list[Any], Any]:
    """All lanes, as a process would open them from block g on, and their reader."""
    from llmtrain.data.lanes import Lane
    from llmtrain.data.packing import START
    from llmtrain.data.readers import Reader, Reading
    from llmtrain.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(bench.tokenizer, manifest.tokenizer.backend)
    reader = Reader(Reading(600))
    lanes = []
    for index in range(manifest.lanes):
        first = g + (index - g) % manifest.lanes
        at = [START] if cursors is None else [cursors[index]]
        lanes.append(Lane(manifest, tokenizer, reader, index, first, at))
    return lanes, reader


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
                reads = reader.reads
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
    more = {"units_read": round(read), "seconds": samples[-1][0], "first_mb": private[0]}
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
