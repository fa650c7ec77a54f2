"""Records what the operators of some steps cost, with torch's profiler.

Each rank writes a trace, which chrome://tracing and perfetto.dev open. Rank 0 also writes the
operators that took longest, which the report shows.

    profile/rank-0.json.gz   profile/rank-1.json.gz   profile/operators.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmtrain import durable

_log = logging.getLogger(__name__)

_OPERATORS = 20


class Profile:
    """Profiles a range of steps. Outside of it, `begin` only compares two numbers."""

    def __init__(
        self,
        operators: Path,
        rank: int,
        device: torch.device,
        steps: tuple[int, int],
        report: Callable[..., None],
    ) -> None:
        """Prepare to profile; nothing is written yet.

        operators: the file that rank 0 writes; traces are beside it
        steps: the first and last step
        report: writes an event
        """
        self._operators = operators
        self._rank = rank
        self._device = device
        self._first, self._last = steps
        self._report = report
        self._begun = 0  # the first step that was recorded
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Begin to record before the first step of the range, and write after the last one."""
        if self._profiler is not None and step > self._last:
            self.end(step - 1)
        elif self._profiler is None and self._first <= step <= self._last:
            self._begun = step
            self._profiler = self._open()
            self._profiler.start()

    def end(self, step: int) -> None:
        """Write what was recorded up to `step`, if anything was. A second call does nothing."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or step < self._begun:
            return
        profiler.stop()
        try:
            folder = self._operators.parent
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank-{self._rank}.json.gz"))
            if self._rank == 0:
                self._write_operators(profiler, step)
        except OSError as error:  # a full disk must not end a run that can train
            _log.warning("the profile could not be written", exc_info=True)
            self._report("profile_failed", step, reason=error.strerror)
        else:
            self._report("profiled", step, steps=[self._begun, step])

    def _open(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        on_device = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        return profile(activities=[ProfilerActivity.CPU, *on_device])

    def _write_operators(self, profiler: Any, step: int) -> None:
        """Write the operators with the most time of their own, on the device if there is one."""
        kind = "device" if self._device.type == "cuda" else "cpu"
        found = profiler.key_averages()
        own = {one.key: getattr(one, f"self_{kind}_time_total") / 1e6 for one in found}
        calls = {one.key: one.count for one in found}
        whole = sum(own.values()) or 1.0
        longest = sorted(own, key=lambda name: own[name], reverse=True)[:_OPERATORS]
        operators = [
            {
                "name": name,
                "calls": calls[name],
                "seconds": own[name],
                "share": own[name] / whole,
            }
            for name in longest
        ]
        said = {
            "steps": [self._begun, step],
            "device": self._device.type,
            "operators": operators,
        }
        durable.write(self._operators, (json.dumps(said, indent=2) + "\n").encode(), sync=False)
