"""Whether the disk has room for the checkpoints that a run keeps.

A run needs room for the checkpoints that its policy keeps, one that is being written and one that
is being deleted. Those that it has already are subtracted.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.retention import is_of_run
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import Problem, raise_any


def most_at_once(policy: CheckpointConfig, steps: int) -> int:
    """Return how many checkpoints a run of `steps` can have at one time."""
    spaced = steps // policy.keep_every if policy.keep_every else 0
    return policy.keep_last + policy.keep_best + spaced + 2


def check_room(
    root: Path,
    policy: CheckpointConfig,
    steps: int,
    checkpoint_bytes: int,
    checkpoint_files: int,
    run_id: str | None = None,
) -> int:
    """Return how many bytes must be free; UserError, with both numbers, if the disk has fewer.

    Counts bytes and, if the file system has a limit, files, of at least one checkpoint. `root` need
    not exist yet.

    run_id: only checkpoints of this run are subtracted, as no others will be deleted for it; None =
        those of any run
    """
    names = form.complete_names(root)
    there = sum(run_id is None or is_of_run(root / name, run_id) for name in names)
    missing = max(1, most_at_once(policy, steps) - there)
    disk = os.statvfs(next(path for path in (root, *root.absolute().parents) if path.exists()))
    free, files = disk.f_bavail * disk.f_frsize, missing * (checkpoint_files + 2)
    needed = missing * checkpoint_bytes
    remedy = "free some, put run.dir on another disk, or lower checkpoint.keep_last or keep_every"
    problems = []
    if free < needed:
        expected = f"{size(needed)} free for the checkpoints that the run keeps, not {size(free)}"
        problems.append(Problem("run.dir", root, f"{expected} ({needed} and {free} bytes)", remedy))
    if disk.f_files and disk.f_favail < files:
        expected = f"room for {files} files (inodes), not {disk.f_favail}"
        problems.append(Problem("run.dir", root, expected, remedy))
    raise_any(problems)
    return needed


def size(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
