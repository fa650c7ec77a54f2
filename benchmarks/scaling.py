"""Does the cost grow as it should? Slopes of the logarithms, with their standard errors.

A slope of 1 is a cost in proportion. Along a run, its end is compared with its beginning. All of it
is on the built-in sample.
"""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, around, config_of, llama, main, prepared, stream_of, timed, timing

SHAPE = llama(128, 4, 4, 352)
BLOCKS = 4  # of the streams, of 64 tokens
SIZES = {
    "rows": ((2, 4, 8, 16, 32), (2, 4, 8)),  # blocks of 256 tokens in a step
    "steps": (14, 6),  # of each run; the first `warm` are not counted
    "warm": (4, 2),
    "stream": ((100, 19_200), (50, 600)),  # steps that open all lanes, and that are counted
    "parameters": (tuple(8_400_000 * n for n in (1, 2, 4, 8)), (4_200_000, 8_400_000, 16_800_000)),
    "saves": (30, 6),
    "rounds": (5, 2),  # of what is repeated; the least counts
}


def slope(found: Mapping[float, float]) -> tuple[float, float]:
    """Return the slope of log y over log x by least squares, and its standard error.

    found: y by x, at least three points
    """
    xs, ys = np.log(list(found)), np.log(list(found.values()))
    (steep, _), covariance = np.polyfit(xs, ys, 1, cov=True)
    return float(steep), math.sqrt(covariance[0, 0])


def say(bench: Bench, name: str, seconds: Mapping[float, float]) -> None:
    """Add the row of a slope; its goal is to be within 0.1 of 1."""
    steep, error = slope(seconds)
    points = {f"{x:g}": y for x, y in seconds.items()}
    more = {"slope": steep, "standard_error": error, "points": points, "points_unit": "s"}
    note = f"slope {steep:.3f} ± {error:.3f}, expected 1"
    bench.say(f"{name}: off the slope", abs(steep - 1), "", "≤ 0.1", note=note, **more)


def sample_run(folder: Path, rows: int = BLOCKS, saving: Any = None, **more: Any) -> Path:
    return config_of(
        folder,
        SHAPE,
        rows=rows,
        data={"workers": 0},
        training={"micro_batch_size": rows},
        optimizer={"warmup_steps": 1},
        checkpoint={"keep_best": 0, "keep_last": 2, "background": False, **(saving or {})},
        **more,
    )


def step(bench: Bench) -> None:
    from llmtrain import load_config, train

    found = {}
    for rows in bench.sizes.rows:
        began: list[float] = []

        def begin(original: Any, run: Any, step: int, began: list[float] = began) -> None:
            began.append(time.process_time())
            original(run, step)

        with around(begin=begin):
            path = sample_run(bench.folder / str(rows), rows, steps=bench.sizes.steps, seq_len=256)
            train(load_config(path))
        seconds = [after - before for before, after in pairwise(began)]
        found[float(rows * 256)] = min(seconds[bench.sizes.warm :])
    say(bench, "CPU time of a step over its tokens", found)


def late_over_early(values: list[float]) -> float:
    """Return the least of the last third over that of the first: other work only adds time."""
    third = len(values) // 3
    return min(values[-third:]) / min(values[:third])


def say_late(bench: Bench, what: str, seconds: list[float], **more: Any) -> None:
    name = f"CPU time of {what}, late in a run over early: off 1"
    bench.say(name, abs(late_over_early(seconds) - 1), "", "≤ 0.1", **more)


def along_a_run(bench: Bench) -> None:
    from llmtrain import load_config, train

    manifest, directory = prepared(sample_run(bench.folder / "stream"))
    reading, count = list[float](), 100
    opening, counted = bench.sizes.stream
    with stream_of(manifest, directory, BLOCKS) as stream:
        for _ in range(opening):
            next(stream)
        for _ in range(counted // count):
            with timed(reading):
                for _ in range(count):
                    next(stream)
    say_late(bench, "the stream", reading, steps=len(reading) * count)
    saves: list[float] = []
    with around(save=timing(saves)):
        steps = 2 * (bench.sizes.saves + 1)  # the first save, which warms up, is left out
        train(load_config(sample_run(bench.folder, saving={"every_steps": 2}, steps=steps)))
    say_late(bench, "a save", saves[1:], saves=len(saves) - 1)


def checkpoint(bench: Bench) -> None:
    from checkpoint import saved, spec_of, values_of

    seconds = defaultdict[float, list[float]](list)
    for _ in range(bench.sizes.rounds):
        for parameters in bench.sizes.parameters:
            spec, root = spec_of(parameters), bench.folder / "root"
            count = float(sum(math.prod(one.shape) for one in spec["model.safetensors"].values()))
            values = values_of(spec)
            with timed(seconds[count], time.perf_counter):
                saved(root, 1, spec, values)
            shutil.rmtree(root)
    least = {count: min(taken) for count, taken in seconds.items()}
    say(bench, "time of a checkpoint over the parameters", least)


if __name__ == "__main__":
    parts = {"step": step, "run": along_a_run, "checkpoint": checkpoint}
    main(__doc__, parts, SIZES)
