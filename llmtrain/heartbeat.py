"""The heartbeat of this process: a count that work raises, and what the process is doing.

The watchdog reads it. Standard library only, and one addition a call, since it is called in the
innermost loops: at each micro-batch, block of an evaluation, wait for data, 64 MiB of a file, vote
and stage of the start.
"""

from __future__ import annotations

_count = 0
_phase = "the start"


def beat(phase: str) -> None:
    """Count some work as done, and name what comes next. People read `phase`."""
    global _count, _phase
    _count += 1
    _phase = phase


def read() -> tuple[int, str]:
    """Return how often `beat` was called in this process, and its last phase."""
    return _count, _phase
