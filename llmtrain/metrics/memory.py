"""What a process uses: its peak memory, the memory of the host, and the cost of its operators.

The memory of a process is what torch allocated on a GPU, and the resident memory on a CPU.

For some steps torch's profiler records the operators. Each rank writes a trace, which
chrome://tracing and perfetto.dev open. Rank 0 also writes the operators that took longest, which
the report shows.

    profile/rank-0.json.gz   profile/rank-1.json.gz   profile/operators.json
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from llmtrain import system

if TYPE_CHECKING:
    from torch.profiler import profile

_STATUS = Path("/proc/self/status")
_REFERENCES = Path("/proc/self/clear_refs")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_RESET_PEAK = "5"  # proc(5): sets the peak of the resident set to what it is now


def reset_peak(device: torch.device) -> int:
    """Begin to measure a new peak. Returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # a measurement must not end a run; see `peak_bytes`
        _REFERENCES.write_text(_RESET_PEAK)
    return resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak`; where it is not known, the bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not every kernel has both files. A peak that cannot be reset would include earlier work.
    if not os.access(_REFERENCES, os.W_OK) or not _STATUS.is_file():
        return resident_bytes()
    lines = _STATUS.read_text().splitlines()
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return peaks[0] if peaks else resident_bytes()


def resident_bytes() -> int:
    """Return the bytes of this process's resident memory."""
    return int(psutil.Process().memory_info().rss)


def host_bytes() -> int:
    """Return the memory of this machine, or less if control groups limit this process."""
    installed = int(psutil.virtual_memory().total)
    limit = limit_bytes()
    return installed if limit is None else min(installed, limit)


def free_host_bytes() -> int:
    """Return the free memory of this machine, or less if control groups limit this process."""
    free, limit = int(psutil.virtual_memory().available), limit_bytes()
    return free if limit is None else min(free, max(0, limit - resident_bytes()))


def limit_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int | None:
    """Return the memory limit of this process's control groups; None = no limit is known."""
    if not own.is_file():
        return None
    paths = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
    folders = [root / path.lstrip("/") for path in paths]
    files = [up / "memory.max" for folder in folders for up in (folder, *folder.parents)]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return min((int(text) for text in texts if text.isdigit()), default=None)


_log = logging.getLogger(__name__)

_OPERATORS = 20


@dataclass(slots=True)
class Profile:
    """Profiles a range of steps. Outside of it, `begin` only compares two numbers.

    operators: the file that rank 0 writes; traces are beside it
    steps: the first and last step
    report: writes an event

    Making one writes nothing.
    """

    operators: Path
    rank: int
    device: torch.device
    steps: tuple[int, int]
    report: Callable[..., None]
    _begun: int = 0  # the first step that was recorded
    _profiler: profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record before the first step of the range, and write after the last one."""
        first, last = self.steps
        if self._profiler is not None and step > last:
            self.end(step - 1)
        elif self._profiler is None and first <= step <= last:
            from torch.profiler import ProfilerActivity, profile

            on_device = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._begun = step
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_device])
            self._profiler.start()

    def end(self, step: int) -> None:
        """Write what was recorded up to `step`, if anything was. A second call does nothing."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or step < self._begun:
            return
        profiler.stop()
        try:
            folder = self.operators.parent
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank-{self.rank}.json.gz"))
            if self.rank == 0:
                self._write_operators(profiler, step)
        except OSError as error:  # a full disk must not end a run that can train
            _log.warning("the profile could not be written", exc_info=True)
            self.report("profile_failed", step, reason=error.strerror)
        else:
            self.report("profiled", step, steps=[self._begun, step])

    def _write_operators(self, profiler: profile, step: int) -> None:
        """Write the operators with the most time of their own, on the device if there is one."""
        kind = "device" if self.device.type == "cuda" else "cpu"
        # One for each name: annotations are listed for the host and for the device.
        named = {one.key: one for one in profiler.key_averages()}
        operators = [
            {
                "name": one.key,
                "calls": one.count,
                "seconds": getattr(one, f"self_{kind}_time_total") / 1e6,
            }
            for one in named.values()
        ]
        whole = sum(one["seconds"] for one in operators) or 1.0
        longest = sorted(operators, key=lambda one: one["seconds"], reverse=True)[:_OPERATORS]
        content = {
            "steps": [self._begun, step],
            "device": self.device.type,
            "operators": [one | {"share": one["seconds"] / whole} for one in longest],
        }
        encoded = (json.dumps(content, indent=2) + "\n").encode()
        system.write_durably(self.operators, encoded, sync=False)
