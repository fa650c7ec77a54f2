"""Does the cost grow as it should? Slopes of the logarithms, with their standard errors.

    python benchmarks/scaling.py [--quick] [--only PART …] [--json FILE]

A slope of 1 is a cost in proportion, a slope of 0 one that does not grow. All of it uses the
built-in sample, on one core with one thread.

    step        CPU time of a step over its tokens
    seek        CPU time until the first batch, opened at the cursors of a later and later step
    memory      of a data worker, over the steps that it has made
    run         the stream's and a save's CPU time, late in a run over early in it
    checkpoint  bytes and time of a checkpoint over the parameters
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from _rows import Table, one_core

# Nothing heavy here: a data worker is spawned, and imports this file again.

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SEQ_LEN, BLOCKS = 64, 4  # of the streams


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    rows: blocks of 256 tokens in a step
    steps: of each run; the first `warm` are not counted
    places: steps at whose cursors a stream is opened, and at which a worker's memory is read
    parameters: of the checkpoints
    rounds: of what is repeated; the least counts
    """

    rows: tuple[int, ...] = (2, 4, 8, 16, 32)
    steps: int = 14
    warm: int = 4
    places: tuple[int, ...] = (100, 400, 1600, 6400)
    parameters: tuple[int, ...] = (8_400_000, 16_800_000, 33_600_000, 67_200_000)
    saves: int = 30
    rounds: int = 5


QUICK = Sizes((2, 4, 8), 6, 2, (50, 100, 200), (4_200_000, 8_400_000, 16_800_000), 6, 2)


def slope(found: Mapping[float, float]) -> tuple[float, float]:
    """Return the slope of log y over log x by least squares, and its standard error.

    found: y by x, at least three points
    """
    xs = [math.log(x) for x in found]
    ys = [math.log(y) for y in found.values()]
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    square = sum((x - x_mean) ** 2 for x in xs)
    steep = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / square
    rest = [y - y_mean - steep * (x - x_mean) for x, y in zip(xs, ys, strict=True)]
    return steep, math.sqrt(sum(one**2 for one in rest) / (len(xs) - 2) / square)


def say(table: Table, name: str, found: Mapping[float, float], expected: float, unit: str) -> None:
    """Add the row of a slope; its goal is to be within 0.1 of what is expected."""
    steep, error = slope(found)
    points = {f"{x:g}": y for x, y in found.items()}
    more = {"slope": steep, "standard_error": error, "points": points, "points_unit": unit}
    note = f"slope {steep:.3f} ± {error:.3f}, expected {expected:.0f}"
    table.say(f"{name}: off the slope", abs(steep - expected), "", "≤ 0.1", note=note, **more)


def config_of(folder: Path, **sections: dict[str, Any]) -> Any:
    """Return the config of a run on the sample."""
    import llmtrain

    keys: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"config": {"model_type": "llama", **MODEL}, "tokenizer": "sample"},
        "data": {
            "sources": [{"path": "sample"}],
            "seq_len": SEQ_LEN,
            "heldout": 0.0,
            "workers": 0,
        },
        "training": {
            "steps": 1,
            "global_batch_size": BLOCKS,
            "micro_batch_size": BLOCKS,
            "precision": "fp32",
        },
        "optimizer": {"warmup_steps": 1},
        "checkpoint": {"keep_best": 0, "keep_last": 2, "background": False},
    }
    for section, values in sections.items():
        keys[section] = keys.get(section, {}) | values
    folder.mkdir(exist_ok=True)
    path = folder / "run.json"
    path.write_text(json.dumps(keys))  # YAML is a superset
    return llmtrain.load_config(path)


def step(table: Table, sizes: Sizes, folder: Path) -> None:
    """Whole runs, each with twice the rows of the one before; one micro-batch a step."""
    found = {}
    for rows in sizes.rows:
        training = {"steps": sizes.steps, "global_batch_size": rows, "micro_batch_size": rows}
        config = config_of(folder / str(rows), training=training, data={"seq_len": 256})
        began: list[float] = []
        run(config, lambda run, step, began=began: began.append(time.process_time()))
        seconds = [after - before for before, after in pairwise(began)]
        found[float(rows * 256)] = min(seconds[sizes.warm :])
    say(table, "CPU time of a step over its tokens", found, 1, "s")


def run(config: Any, beginning: Callable[[Any, int], None]) -> None:
    """Train; `beginning` is called before each step."""
    import llmtrain
    from llmtrain.training import loop

    original = loop.begin

    def begin(opened: Any, number: int) -> None:
        beginning(opened, number)
        original(opened, number)

    loop.begin = begin
    try:
        llmtrain.train(config)
    finally:
        loop.begin = original


def seek(table: Table, sizes: Sizes, folder: Path) -> None:
    """Streams that are opened where a real one stood after so many steps, and their first batch."""
    import numpy as np

    manifest, directory = prepared(folder)
    cursors = np.zeros((manifest.lanes, 1, 4), np.int64)
    found = {}
    with opened(manifest, directory) as walked:
        for number in range(1, sizes.places[-1] + 1):
            for lane, reached in next(walked).cursors.items():
                cursors[lane] = reached
            if number in sizes.places:
                seconds = [
                    first_batch(manifest, directory, number, cursors.copy())
                    for _ in range(sizes.rounds)
                ]
                found[float(number)] = min(seconds)
    say(table, "CPU time of a seek over the steps before it", found, 0, "s")


def prepared(folder: Path) -> tuple[Any, Path]:
    """Return the manifest and the tokenizer of a run that was prepared."""
    from llmtrain.rundir import contents
    from llmtrain.training.start.prepare import load_manifest, prepare

    config = config_of(folder / "prepared")
    config.run_dir.mkdir()
    prepare(config, config.run_dir, 1)
    return load_manifest(config, config.run_dir), config.run_dir / contents.TOKENIZER


def opened(manifest: Any, directory: Path, workers: int = 0, **more: Any) -> Any:
    """Return a stream that closes itself at the end of a `with`."""
    from contextlib import closing

    from llmtrain.data.documents.reader import Reading
    from llmtrain.data.stream import open_stream

    return closing(
        open_stream(
            manifest,
            directory,
            blocks_per_step=BLOCKS,
            rank=0,
            world_size=1,
            workers=workers,
            reading=Reading(600),
            **more,
        )
    )


def first_batch(manifest: Any, directory: Path, number: int, cursors: Any) -> float:
    """Return the CPU seconds until each lane has given its first block after a step."""
    began = time.process_time()
    place = {"next_block": number * BLOCKS, "cursors": cursors}
    with opened(manifest, directory, **place) as stream:
        for _ in range(manifest.lanes // BLOCKS):
            next(stream)
    return time.process_time() - began


def memory(table: Table, sizes: Sizes, folder: Path) -> None:
    """The private memory of a worker."""
    import psutil

    manifest, directory = prepared(folder)
    found = {}
    with opened(manifest, directory, workers=1) as stream:
        worker = psutil.Process(stream._items.processes[0].pid)
        for number in range(1, sizes.places[-1] + 1):
            next(stream)
            if number in sizes.places:
                found[float(number)] = worker.memory_full_info().uss / 1e6
    say(table, "memory of a data worker over its steps", found, 0, "MB")


def late_over_early(values: list[float]) -> float:
    """Return the least of the last third over that of the first: other work only adds time."""
    third = len(values) // 3
    return min(values[-third:]) / min(values[:third])


def along_a_run(table: Table, sizes: Sizes, folder: Path) -> None:
    """The stream's time in thirds of many steps, and that of saves in thirds of a run."""
    manifest, directory = prepared(folder)
    reading, count = [], 100
    with opened(manifest, directory) as stream:
        for _ in range(sizes.places[0]):  # every lane is open
            next(stream)
        for _ in range(sizes.places[-1] // count * 3):
            began = time.process_time()
            for _ in range(count):
                next(stream)
            reading.append(time.process_time() - began)
    name = "CPU time of the stream, late in a run over early"
    off = abs(late_over_early(reading) - 1)
    table.say(f"{name}: off 1", off, "", "≤ 0.1", steps=len(reading) * count)
    saves = saving_times(folder, sizes.saves)
    name = "CPU time of a save, late in a run over early"
    table.say(f"{name}: off 1", abs(late_over_early(saves) - 1), "", "≤ 0.1", saves=len(saves))


def saving_times(folder: Path, count: int) -> list[float]:
    """Return the CPU seconds of each save of a run; the first, which warms up, is left out."""
    from llmtrain.training import loop

    config = config_of(
        folder / "saves",
        training={"steps": 2 * (count + 1)},
        checkpoint={"every_steps": 2},
    )
    save, found = loop.save, []

    def timed(opened: Any, number: int) -> None:
        began = time.process_time()
        save(opened, number)
        found.append(time.process_time() - began)

    loop.save = timed
    try:
        run(config, lambda run, step: None)
    finally:
        loop.save = save
    return found[1:]


def checkpoint(table: Table, sizes: Sizes, folder: Path) -> None:
    """Saves of weights and AdamW's moments, in turns; the least of all rounds."""
    from _checkpoint_disk import saved, spec_of, values_of

    bytes_: dict[float, float] = {}
    seconds: dict[float, float] = {}
    for _ in range(sizes.rounds):
        for parameters in sizes.parameters:
            spec = spec_of(parameters)
            count = sum(math.prod(one.shape) for one in spec["model.safetensors"].values())
            values, root = values_of(spec), folder / "root"
            began = time.perf_counter()
            path = saved(root, 1, spec, values)
            took = time.perf_counter() - began
            seconds[float(count)] = min(took, seconds.get(float(count), took))
            bytes_[float(count)] = float(sum(file.stat().st_size for file in path.iterdir()))
            shutil.rmtree(root)
    say(table, "bytes of a checkpoint over the parameters", bytes_, 1, "bytes")
    say(table, "time of a checkpoint over the parameters", seconds, 1, "s")


PARTS: dict[str, Callable[[Table, Sizes, Path], None]] = {
    "step": step,
    "seek": seek,
    "memory": memory,
    "run": along_a_run,
    "checkpoint": checkpoint,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look whether it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    table = Table("scaling", asked.json)
    for part in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](table, QUICK if asked.quick else Sizes(), Path(folder))


if __name__ == "__main__":
    one_core()
    main()
