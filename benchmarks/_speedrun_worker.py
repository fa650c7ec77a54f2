"""One run on one core with one thread, for `speedrun.py`: its level, and the CPU time of its steps.

    python benchmarks/_speedrun_worker.py CONFIG KEY=VALUE …

It pins itself and its data workers to one core, as torch's threads wait by spinning, which counts
as CPU time. Its last line of output is one object of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

import llmtrain
from llmtrain.rundir import contents, record
from llmtrain.training import loop


class Clock:
    """The CPU seconds of this process and of its children, when each step begins and at the end.

    marks: one more than there are steps; what evaluations took is left out
    """

    def __init__(self) -> None:
        self.marks: list[float] = []
        self._left_out = 0.0
        self._begin, self._evaluate, self._finish = loop.begin, loop.evaluate, loop.finish
        loop.begin, loop.evaluate, loop.finish = self.begin, self.evaluate, self.finish

    def begin(self, *args: Any) -> None:
        """Mark the beginning of a step."""
        self.marks.append(cpu_seconds() - self._left_out)
        self._begin(*args)

    def evaluate(self, *args: Any) -> Any:
        """Evaluate, and leave its time out."""
        before = cpu_seconds()
        found = self._evaluate(*args)
        self._left_out += cpu_seconds() - before
        return found

    def finish(self, *args: Any) -> Any:
        """Mark the end of the last step, with its checkpoint."""
        self.marks.append(cpu_seconds() - self._left_out)
        return self._finish(*args)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children, ended or not."""
    own = psutil.Process()
    times = own.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    running = (child.cpu_times() for child in own.children(recursive=True))
    return float(total + sum(times.user + times.system for times in running))


def main() -> None:
    """Train, and print what was measured."""
    config = llmtrain.load_config(sys.argv[1], sys.argv[2:])
    clock = Clock()
    llmtrain.train(config)
    lines = record.read(Path(config.run.dir) / contents.METRICS)
    levels = [line["bits_per_byte"] for line in lines if line["kind"] == "eval"]
    result = {
        "bits_per_byte": levels[-1],
        "marks": clock.marks,
        "tokens": [line["tokens"] for line in lines if line["kind"] == "train"][-1],
        "whole_command_cpu_seconds": cpu_seconds(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    main()
