"""What does `training.same_bits` cost? CPU time of a step over one without the key, in turns.

Two processes on a core each, two micro-batches of each in a step; a Llama of 5.6 M parameters. A
figure is the ratio of the medians of all steps of all turns, both processes together. Each turn
begins with the other one of the two. Losses must agree, and the weights of no turn may differ from
those of another with the key.
"""

import os
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from harness import Bench, around, config_of, llama, main, ranks, timing, turns

SHAPE = llama(320, 4, 5, 864)
SEQ_LEN, MICRO_BATCHES = 512, 2  # of each process
SIZES = {
    "processes": (2, 1),
    "rows": ((4, 1), (1,)),  # blocks of 512 tokens in a micro-batch
    "steps": (10, 3),  # of each run; the first two are not counted
    "rounds": (3, 1),
    "strategies": (("ddp", "fsdp2"), ("ddp",)),
}
WARM = 2
GOALS = {"ddp": "≤ 1.15", "fsdp2": "≤ 1.10"}  # at 2,048 tokens a micro-batch


def cost(bench: Bench) -> None:
    processes, steps = bench.sizes.processes, bench.sizes.steps
    for strategy, rows in product(bench.sizes.strategies, bench.sizes.rows):
        seconds: dict[str, list[float]] = {"plain": [], "exact": []}
        ends: dict[str, set[str]] = {"plain": set(), "exact": set()}
        for turn, name in turns(seconds, bench.sizes.rounds):
            place = bench.folder / f"{strategy}-{rows}-{name}-{turn}"
            asked = {"strategy": strategy, "rows": rows, "exact": name == "exact"}
            asked |= {"processes": processes, "folder": str(place), "steps": steps}
            found = ranks(__file__, asked, processes)
            together = zip(*(one["seconds"] for one in found), strict=True)
            seconds[name] += [sum(step) for step in together]
            ends[name].add(found[0]["sha256"])
        if len(ends["exact"]) != 1:
            bench.refuse(f"{strategy}: the turns ended in other bits: {ends['exact']}")
        tokens = rows * SEQ_LEN
        bench.say(
            f"{strategy}: a step over one without the key, {tokens:,} tokens a micro-batch",
            statistics.median(seconds["exact"]) / statistics.median(seconds["plain"]),
            "×",
            GOALS[strategy] if tokens >= 2048 else "",
            seconds=seconds,
            shape=SHAPE,
        )


def run_of(
    strategy: str, rows: int, exact: bool, processes: int, folder: str, steps: int
) -> dict[str, Any]:
    """Train on this rank; return the CPU seconds of the steps, and rank 0's hash of the end."""
    import llmtrain
    from llmtrain.checkpoint.read import tensors_digest

    rank = int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    path = config_of(
        Path(folder) / str(rank),
        SHAPE,
        steps=steps,
        rows=rows * processes * MICRO_BATCHES,
        seq_len=SEQ_LEN,
        run={"dir": f"{folder}/run"},
        model={"activation_checkpointing": "none"},
        data={"workers": 0},
        training={"micro_batch_size": rows, "same_bits": exact},
        distributed={"strategy": strategy},
        checkpoint={"background": False},
    )
    spent: list[float] = []
    with around(update=timing(spent)):
        llmtrain.train(llmtrain.load_config(path))
    (end,) = Path(folder, "run", "checkpoints").glob(f"step-*{steps}")
    return {"seconds": spent[WARM:], "sha256": tensors_digest(end)}


if __name__ == "__main__":
    main(__doc__, cost, SIZES, child=run_of)
