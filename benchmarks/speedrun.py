"""How little CPU time reaches a level of held-out text? A record is a config that runs again.

The mean of three seeds has to reach 2.2835 bits per byte, as `convergence.py` did. The model is a
class of transformers from random weights, the tokenizer trained on the training articles; held out
are the 300 articles that the convergence check scores, and its whole split is left out of training;
checkpoints are on. Training and data workers count from the first step to the end of the last,
without evaluations. The baseline is the median step of `convergence.py` × 300, on the same core.
"""

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import HERE, Bench, apart, around, cpu_seconds, main, timing

RECORDS = {path.stem: path for path in sorted((HERE / "speedruns").glob("*.yaml"))}
LEVEL = 2.2835  # held-out bits per byte that convergence.py reached
STEPS, WARM = 300, 2  # of the baseline; its first steps, which are not counted
DOCUMENTS, ROWS = 300, 1000  # that are scored; rows of a parquet row group
GOAL = "≥ 8"  # times fewer; the target is 12, the stretch 16
LIMIT = 6 * 3600  # seconds of a process


def divide(data: Path, folder: Path) -> dict[str, str]:
    """Write the articles into two folders, and return the keys that name these.

    Held out is what convergence.py holds out; all of that is left out of the training documents.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from convergence import recipe

    from llmtrain.tools.use.evaluate import documents_of

    path = recipe(folder / "divide", data, 1, documents=10**12)  # the most that a config may have
    held = list(documents_of(str(path.rename(path.with_suffix(".yaml")))))  # that of a config
    out = set(held)
    kept = {
        f"train/{file.name}": [t for t in pq.read_table(file)["text"].to_pylist() if t not in out]
        for file in sorted(data.glob("*.parquet"))
    }
    for name, rows in {**kept, "heldout/heldout.parquet": held[:DOCUMENTS]}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": rows}), folder / name, row_group_size=ROWS)
    return {
        "data.sources": json.dumps([{"path": str(folder / "train")}]),
        "evaluation.sources": json.dumps([{"path": str(folder / "heldout")}]),
        "evaluation.max_documents": str(DOCUMENTS),
    }


def run(config: str, keys: dict[str, str]) -> dict[str, Any]:
    """Make one run: return its level, and the CPU seconds when each step begins and at the end.

    What evaluations took is left out.
    """
    import llmtrain

    marks, left_out = list[float](), list[float]()

    def mark(original: Any, *given: Any) -> Any:
        marks.append(cpu_seconds() - sum(left_out))
        return original(*given)

    loaded = llmtrain.load_config(config, [f"{key}={value}" for key, value in keys.items()])
    # At its end, the last step has made its checkpoint.
    with around(begin=mark, evaluate=timing(left_out, cpu_seconds), finish=mark):
        llmtrain.train(loaded)
    run = llmtrain.open_run(loaded.run_dir)
    return {
        "bits_per_byte": run.metrics("eval")[-1]["bits_per_byte"],
        "marks": marks,
        "tokens": run.metrics("train")[-1]["tokens"],
        "whole_command_cpu_seconds": cpu_seconds(),
    }


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
    seconds = [run["marks"][-1] - run["marks"][0] for run in runs]
    baseline = STEPS * step_seconds([marks for _, marks in found])
    level = statistics.mean(run["bits_per_byte"] for run in runs)
    times = baseline / statistics.mean(seconds)
    whole = [run["whole_command_cpu_seconds"] for run in runs]
    return {
        "bits_per_byte": level,
        "bits_per_byte_of_seeds": [run["bits_per_byte"] for run in runs],
        "level_reached": level <= LEVEL,
        "cpu_seconds": statistics.mean(seconds),
        "cpu_seconds_of_seeds": seconds,
        "tokens": runs[0]["tokens"],
        "whole_command_cpu_seconds": whole,
        "baseline_cpu_seconds": baseline,
        "times_fewer": times,
    }


def speedrun(bench: Bench) -> None:
    from convergence import recipe

    folder, data, sizes = bench.folder, bench.asked.data.resolve(), bench.sizes
    count = sizes.baseline_steps
    if sizes.record not in RECORDS:
        bench.refuse(f"--record {sizes.record}: one of {', '.join(RECORDS)}")
    if count < WARM + 2:
        bench.refuse(f"--baseline-steps {count}: at least {WARM + 2}")
    given, piece = divide(data, folder), recipe(folder / "piece", data, count)
    found = []
    for seed in sizes.seeds:
        runs = {}
        for name, path in (("record", RECORDS[sizes.record]), ("baseline", piece)):
            keys = {**given, "run.seed": str(seed), "run.dir": str(folder / f"{name}-{seed}")}
            keys |= {"training.steps": str(sizes.steps)} if sizes.steps else {}
            runs[name] = apart(__file__, {"config": str(path), "keys": keys}, LIMIT)
        found.append((runs["record"], runs["baseline"]["marks"]))
    result = summary(found)
    times = result["times_fewer"] if result["level_reached"] else None
    reached = "reached" if result["level_reached"] else "not reached"
    note = f"{result['bits_per_byte']:.4f} bits per byte, {LEVEL} is {reached}, in "
    note += f"{result['cpu_seconds']:.0f} CPU seconds; the baseline takes "
    note += f"{result['baseline_cpu_seconds']:,.0f}"
    more = {"record": sizes.record, "seeds": sizes.seeds, "data": data.name, **result}
    bench.say(sizes.record, times, "times fewer", GOAL, note=note, **more)


SIZES = {
    "record": ("muon", "muon"),
    "seeds": ((42, 43, 44), (42,)),
    "baseline_steps": (12, 4),
    "steps": (0, 4),  # 0: the record's own
}

if __name__ == "__main__":
    main(__doc__, speedrun, SIZES, paths={"data": True}, child=run)
