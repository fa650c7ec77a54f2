"""Write docs/reference/speed.md out of the results of the benchmarks of speed.

    python benchmarks/page.py [--results benchmarks/results] [--out docs/reference/speed.md]

It reads loop.json, head.json, defaults.json, finetune.json (what is beside TRL), threads.json,
gpu.json, scaling.json and report.json, a row a line.
A benchmark without results is named with its command. A rehearsal on a CPU is no result of a GPU
and is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_rows import SHAPES
from _rows import HERE, read_rows, spell

_HEAD = """\
# Speed

What training costs beside what one would use instead, each with the command that measures it
again. `python benchmarks/page.py` writes this page from `benchmarks/results/`. A goal that was
missed is marked, and no figure is an estimate. See also [the data](data-speed.md) and
[checkpoints](checkpoint-speed.md).
"""
_DEFAULTS = """
## From raw articles to trained tokens

```bash
python benchmarks/defaults.py --data DIR --tokenizer DIR --json benchmarks/results/defaults.json
```

One small model (Llama, hidden 192, 4 layers, a tied vocabulary of 50,304), 8 rows a step, raw
articles of Wikipedia in, trained tokens out. Both tools run with their defaults, in turns and in
processes of their own, on one core with one thread. Rates are trained tokens a second of CPU time,
children included, after the first steps; of several rounds the best one counts. Memory is the peak
of the resident set.
"""
_LOOP = """
## The loop

```bash
python benchmarks/loop.py --json benchmarks/results/loop.json
```

CPU time of a step with a hollow model, whose own work is next to nothing. The loops take turns step
by step; goals are medians of paired differences.

| what | figure | unit | goal | |
|---|---|---|---|---|
"""
_HEAD_AND_LOSS = """
## Head and loss

```bash
python benchmarks/head.py --json benchmarks/results/head.json
```

Forward and backward of head and loss alone, in chunks, by transformers and by torch's own kernel:
CPU time in one thread, and memory beyond the operands. Of conversations a half or a quarter of the
tokens is trained; the others are never multiplied.
"""
_TRL = """
## From conversations to trained tokens

```bash
python benchmarks/finetune.py --only trl --trl PYTHON --json benchmarks/results/finetune.json
```

Conversations in, trained tokens out, full and with LoRA, beside TRL's SFTTrainer in an environment
of its own (`PYTHON`): the same weights (Llama, hidden 192, 4 layers, a tied vocabulary of 50,304),
tokens and masks, 4 rows of 256 tokens a step, on one core with one thread, in turns. A rate is that
of a whole run, its start and tokenizing included, up to a step, and then from there on.
"""
_THREADS = """
## Threads

```bash
python benchmarks/threads.py --json benchmarks/results/threads.json
```

A step of a small model with a thread for each core, while waiting threads spin briefly and then
sleep, as llmtrain asks for, or spin, as they do by default. The neighbour computes on every core.
Milliseconds are wall time but where CPU time is named.
"""
_GPU = """
## One GPU

```bash
python benchmarks/gpu.py --json benchmarks/results/gpu.json
python benchmarks/gpu.py --device cpu --only tiny   # rehearses it without a GPU
```

The same model, weights and blocks for all, in bf16: a loop by hand with the same attention, loss
and compiled blocks; llmtrain with its data, clipping and log; the Trainer. `mfu` counts attention
over whole rows, as published figures do, `mfu_causal` half of it; recomputation never counts.
"""
_SCALING = """
## Growth

```bash
python benchmarks/scaling.py --json benchmarks/results/scaling.json
```

Slopes of the logarithms: 1 is a cost in proportion, 0 one that does not grow.
"""
_REPORT = """
## Reports

```bash
python benchmarks/report.py --quickstart runs/quickstart --json benchmarks/results/report.json
```

The record is made up, its lines are as long as real ones. CPU time is that of a process of its own,
imports included, the least of three. Drawn means: the load event of Chromium. `watch` shows the
same record in a terminal while a line a second is appended.
"""
_TABLE = "| what | figure | unit | goal | | load |\n|---|---|---|---|---|---|\n"
_PARTS = (
    ("head", _HEAD_AND_LOSS),
    ("defaults", _DEFAULTS),
    ("finetune", _TRL),
    ("threads", _THREADS),
    ("gpu", _GPU),
    ("scaling", _SCALING),
    ("report", _REPORT),
)


def page(results: Path) -> str:
    """Return the whole page."""
    loop = [row for row in read_rows(results / "loop.json") if "counts" not in row]
    parts = [_HEAD, _LOOP, *map(loop_line, loop)]
    for name, text in _PARTS:
        rows = read_rows(results / f"{name}.json")
        if name == "finetune":
            rows = [row for row in rows if row["part"] == "trl"]
        if name == "gpu":
            rows = [row for row in rows if row.get("device") not in (None, "cpu")]
        parts += [text, "\n", section(name, rows)]
    return "".join(parts)


def section(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return what was measured, and on what."""
    if not rows:
        return unmeasured() if name == "gpu" else "Not measured.\n"
    lines = "".join(map(line, rows))
    differing = [text for row in rows for text in row.get("lines", ())]
    more = "".join(f"- {text}\n" for text in differing)
    return f"{origin(rows)}\n{_TABLE}{lines}" + (
        f"\nDefaults that differ:\n\n{more}" if more else ""
    )


def origin(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on the machine."""
    first, loads = rows[-1], [row["load"] for row in rows]
    device = f"{first['device']}, " if first.get("device") not in (None, "cpu") else ""
    commit = first.get("git", "a commit before it")
    return (
        f"Measured on {first['date']} at {commit} on {device}{first['cpus']} cores "
        f"({first['cpu']}), {first['machine']}, Python {first['python']}, torch {first['torch']}, "
        f"transformers {first['transformers']}, accelerate {first['accelerate']}; load average "
        f"{min(loads):.0f} to {max(loads):.0f}.\n"
    )


def line(row: dict[str, Any]) -> str:
    """Return the line of a row."""
    name = row["name"].replace("  ", "— ", 1) if row["name"].startswith("  ") else row["name"]
    shown = "not measured" if row["figure"] is None else spell(row["figure"])
    shares = [f"{key} {row[key]:.1%}" for key in ("mfu", "mfu_causal") if row.get(key)]
    notes = [*shares, *([row["note"]] if row.get("note") else [])]
    name += f" ({'; '.join(notes)})" if notes else ""
    met = {True: "met", False: "**missed**", None: ""}[row["met"]]
    return f"| {name} | {shown} | {row['unit']} | {row['goal']} | {met} | {row['load']} |\n"


def loop_line(row: dict[str, Any]) -> str:
    """Return the line of a row of `loop.py`: of a contender, or of a goal."""
    if "variant" in row:
        return f"| `{row['variant']}` | {row['cpu_ms_median']:.3f} | ms | | |\n"
    met = "met" if row["met"] else "**missed**"
    return f"| {row['goal']} | {row['figure']:.3f} | | ≤ {row['at_most']} | {met} |\n"


def unmeasured() -> str:
    """Return the goals of one H200, of which no figure is known."""
    lines = [
        f"| {name}, {shape.seq_len:,} tokens a block | not measured: no GPU "
        f"| {' / '.join(f'{goal:,}' for goal in shape.goals)} |\n"
        for name, shape in SHAPES.items()
        if shape.goals
    ]
    others = (
        ("a step over the bare loop's with the same parts", "≤ 1.01 ×"),
        ("waits for the device in 20 steps", "0"),
        ("tokens/s over `Trainer(bf16=True)`; over its `torch_compile=True`", "≥ 1.3; ≥ 1.15 ×"),
        ("head and loss, V 128,256, 16 k tokens: memory; time", "≤ 0.15; ≤ 1.10 ×"),
        ("1.5 B parameters: training held up by a save; torch.save over it", "≤ 1 s; ≥ 10 ×"),
    )
    lines += [f"| {what} | not measured: no GPU | {goal} |\n" for what, goal in others]
    head = "| what, on one H200 | figure | goal (tokens a second: floor / target / stretch) |\n"
    return f"{head}|---|---|---|\n{''.join(lines)}"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "reference" / "speed.md")
    asked = parser.parse_args()
    asked.out.write_text(page(asked.results), "utf-8")


if __name__ == "__main__":
    main()
