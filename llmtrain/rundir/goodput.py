"""The share of a run's wall time that was spent on steps that were not redone."""

from __future__ import annotations

import time
from pathlib import Path

from llmtrain.rundir import record


def goodput(run_dir: Path) -> float | None:
    """Return the seconds of steps that were not redone, divided by the run's wall seconds.

    The wall time begins with the first start and includes the time between starts. Only
    `metrics.jsonl` is read. Returns None before the first step.
    """
    lines = record.record(run_dir)
    final: dict[int, float] = {}
    for line in lines:
        if line["kind"] == "start":  # steps after the one that it resumes from are redone
            final = {step: seconds for step, seconds in final.items() if step <= line["step"]}
        elif line["kind"] == "train" and "span_seconds" in line:
            final[line["step"]] = line["span_seconds"]
    if not final:
        return None
    now = time.time()  # noqa: TID251  # compared with time stamps of earlier processes
    wall = now - min(line["time"] for line in lines)
    return min(1.0, sum(final.values()) / wall) if wall > 0 else None
