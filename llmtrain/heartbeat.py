"""The heartbeat of this process: a count of finished work, and what the process is doing.

The watchdog reads it. A call costs one addition, since `beat` is called in the innermost loops: at
each micro-batch, block of an evaluation, wait for data, 64 MiB of a file, vote and stage of the
start. This module uses only the standard library.
"""

from __future__ import annotations

_count = 0
_phase = "the start"


def beat(phase: str) -> None:
    """Count a piece of work as finished. phase: what comes next, in words for people."""
    global _count, _phase
    _count += 1
    _phase = phase


def read() -> tuple[int, str]:
    """Return how often `beat` was called in this process, and its last phase."""
    return _count, _phase
