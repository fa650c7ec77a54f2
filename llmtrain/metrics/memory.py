"""The peak memory of a process, and the memory of the host.

The memory of a process is what torch allocated on a GPU, and the resident memory on a CPU.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

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
    import psutil

    return int(psutil.Process().memory_info().rss)


def host_bytes() -> int:
    """Return the memory of this machine, or less if control groups limit this process."""
    import psutil

    there = int(psutil.virtual_memory().total)
    limit = limit_bytes()
    return there if limit is None else min(there, limit)


def free_host_bytes() -> int:
    """Return the free memory of this machine, or less if control groups limit this process."""
    import psutil

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
