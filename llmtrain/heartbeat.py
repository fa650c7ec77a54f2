"""How far this process has come: a count that work raises, and what it is at.

The watchdog looks at it. Standard library only, and one addition a call, since it stands in the
innermost loops: at each micro-batch, block of an evaluation, wait for data, 64 MiB of a file, vote
and stage of the start.
"""

from __future__ import annotations

_count = 0
_phase = "the start"


def beat(phase: str) -> None:
    """Some work was done, and `phase` is what comes now. The text is read by people."""
    global _count, _phase
    _count += 1
    _phase = phase


def read() -> tuple[int, str]:
    """How often `beat` was called in this process, and its last phase."""
    return _count, _phase
