"""The heartbeat of this process: a count of finished work, and what the process is doing.

The watchdog reads it, and a person is shown it while nothing else is. A call costs a few
assignments, since `beat` is called in the innermost loops: at each micro-batch, block of an
evaluation, wait for data, 64 MiB of a file, vote and stage of the start. This module uses only the
standard library.
"""

from __future__ import annotations

_count = 0
_phase = "the start"
_done = 0
_of = 0


def beat(phase: str, done: int = 0, of: int = 0) -> None:
    """Count a piece of work as finished.

    phase: what comes next, in words for people
    done, of: number of pieces of this phase, the next one included, and of all; 0 = not known
    """
    global _count, _phase, _done, _of
    _count += 1
    _phase, _done, _of = phase, done, of


def again() -> None:
    """Count a piece of work as finished, within the phase of the last `beat`."""
    global _count
    _count += 1


def read() -> tuple[int, str]:
    """Return how often `beat` was called in this process, and its last phase."""
    return _count, _phase


def in_words() -> str:
    """Return the last phase with its count, if there is one: `looking into files (3 of 20)`."""
    phase, done, of = _phase, _done, _of
    if not done:
        return phase
    return f"{phase} ({done:,} of {of:,})" if of else f"{phase} ({done:,})"
