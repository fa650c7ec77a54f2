"""What do threads that wait cost, as llmtrain sets them and as torch does by default?

A step of a small model with a thread for each core, by llmtrain and by transformers' Trainer, alone
and beside a process that computes on each core. Waiting threads spin briefly, then sleep (what
llmtrain sets), or spin. The median step of a run, of several runs the least.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import Bench, apart, around, config_of, fresh_model, llama, main, turns, unsaved

import llmtrain
from llmtrain.system import cores, set_variables_of_torch

WARM = 4  # steps that are not counted
CONTENDERS = "llmtrain", "trainer"
ALONE, BESIDE = "alone", "beside a busy neighbour"
GOALS = {ALONE: "≤ 1.02", BESIDE: "≤ 1"}
SHAPE = llama(192, 4, 3, 512, 2048, 256)
SEQ_LEN, ROWS = 256, 8


@contextmanager
def neighbour(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def threads(bench: Bench) -> None:
    steps, count = bench.sizes.steps, cores().count
    if steps < WARM + 2:
        bench.refuse(f"--steps {steps}: at least {WARM + 2}; {WARM} are not counted")
    every = list(product(GOALS, CONTENDERS, [(True, count), (False, count), (True, 1)]))
    found: dict[Any, list[dict[str, Any]]] = {one: [] for one in every}
    for _, one in turns(every, bench.sizes.rounds):
        place, contender, (brief, number) = one
        asked = {"contender": contender, "brief": brief, "threads": number, "steps": steps}
        env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(number)}
        with TemporaryDirectory() as folder, neighbour(count * (place == BESIDE)):
            found[one].append(apart(__file__, asked | {"folder": folder}, env=env))
    best = {
        key: {name: min(row[name] for row in rows) for name in ("wall_ms", "cpu_ms")}
        for key, rows in found.items()
    }
    for (place, contender, (brief, number)), row in best.items():
        how = "brief" if brief else "spinning"
        name = f"{contender}, {number} thread{'s' * (number > 1)}, {how}, {place}"
        bench.say(name, row["wall_ms"], "ms a step", cpu_ms=row["cpu_ms"])
    for place, contender in product(GOALS, CONTENDERS):
        ours, default = (best[place, contender, (brief, count)] for brief in (True, False))
        ratio = ours["wall_ms"] / default["wall_ms"]
        bench.say(f"{contender}: brief over spinning, {place}", ratio, "×", GOALS[place])
    beside, alone = (best[place, "llmtrain", (True, 1)]["cpu_ms"] for place in (BESIDE, ALONE))
    name = "llmtrain, one thread: CPU time beside a busy neighbour over that alone"
    bench.say(name, beside / alone, "×", "≤ 1.5")


# One run, in a process of its own


def run(contender: str, *, brief: bool, threads: int, steps: int, folder: str) -> dict[str, float]:
    """Train one contender. brief: whether waiting threads soon sleep."""
    if brief:  # as `train` does it, before torch is imported
        set_variables_of_torch(os.environ)
    ends: list[tuple[float, float]] = []  # wall and CPU time at the ends of steps

    def end() -> None:
        ends.append((time.perf_counter(), time.process_time()))

    if contender == "trainer":
        import torch
        from loop import trainer

        torch.set_num_threads(threads)
        ids = torch.randint(SHAPE["vocab_size"], (steps * ROWS, SEQ_LEN))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        settings = {"max_steps": steps, "per_device_train_batch_size": ROWS, "use_cpu": True}
        trainer(end, fresh_model(**SHAPE), rows, Path(folder), **settings)
    else:
        more = {"training": {"threads": threads}}
        path = config_of(Path(folder), SHAPE, steps=steps, rows=ROWS, seq_len=SEQ_LEN, **more)

        def update(original: Any, *given: Any) -> None:
            original(*given)
            end()

        with around(update=update, save=unsaved):
            llmtrain.train(llmtrain.load_config(path))
    taken = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends[-(steps - WARM) :])]
    wall, cpu = (statistics.median(one) for one in zip(*taken, strict=True))
    return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu}


if __name__ == "__main__":
    main(__doc__, threads, {"rounds": (2, 1), "steps": (24, 6)}, child=run, pinned=False)
