"""`docs/reference/checkpoint-speed.md` out of the rows of `checkpoint.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HEAD = """\
# Speed of checkpoints

What saving, verifying and loading cost beside what they cannot do without, side by side:

```bash
python benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json \\
    --markdown docs/reference/checkpoint-speed.md
```

This page is written by that command. Measured on {date} on {cpus} cores ({cpu}), {machine},
Python {python}, torch {torch}, safetensors {safetensors}, xxhash {xxhash}; load average of the
machine {low:.0f} to {high:.0f}. What is compared takes turns within a round, and a ratio is the
median of the rounds' ratios: ratios hold better than rates where other work shares cores and disk.

| what | figure | unit | goal | | load |
|---|---|---|---|---|---|
"""
_TAIL = """
What the rows mean:

- **A save** is all of it: small files, tensor files with their room, digests in flight, fsync of
  files and directories, manifest, rename. **A plain write** is the same bytes in one file, front
  to end, and fsync.
- Where other processes fsync at the same time (a load far above the number of cores), a plain
  write loses more than a save, whose files have their room beforehand: a ratio above 100 % tells of
  that load, not of a disk that is left alone.
- **Digests** are taken of each block just before it is written; their share is the time spent in
  them within a save.
- **Verifying** opens every file and compares every digest, as before a load; **reading** takes the
  same files, front to end, into one buffer. *From the disk*: the page cache was told to forget the
  files, as far as the system does so.
- The rows of **1 M parameters** are of whole runs. Resuming is what a start does more when there is
  a checkpoint: search, verify, load; the start itself plans memory and prepares the data.
- **Blocked** is what a run notes as `blocked_seconds`: making the files, waiting for the copy
  before the update, and the commit. The other work is matrix products that outlast the copy. The
  first save of a start, which takes the memory for its copy, is left out.
- **Memory** is the peak of resident memory above what a process held with its state alone, each in
  a process of its own. Rank 0 of a sharded run that writes for all may hold the largest tensor
  besides.
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    loads = [row["load"] for row in rows]
    return _HEAD.format(**rows[0], low=min(loads), high=max(loads)) + table(rows) + _TAIL


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row."""
    lines = []
    for row in rows:
        name = row["name"].replace("  ", "— ", 1) if row["name"].startswith("  ") else row["name"]
        figure, unit = row["figure"], row["unit"]
        shown = "not measured: no GPU" if figure is None else spelled(figure)
        met = {True: "met", False: "**missed**", None: ""}[row["met"]]
        lines.append(f"| {name} | {shown} | {unit} | {row['goal']} | {met} | {row['load']} |\n")
    return "".join(lines)


def spelled(figure: float) -> str:
    """Three digits."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
