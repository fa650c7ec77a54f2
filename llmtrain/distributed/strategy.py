"""Which strategy a run takes, and why: the fastest that fits, of two alike the simpler one."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.distributed.plan import Layout, MemoryPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and what is reckoned for it.

    missing_bytes: of the device or the host, 0 where it fits · remedy: the key that would make it
    fit, "" where it fits · tokens_per_second: of all devices, None where it is not predicted.
    """

    layout: Layout
    memory: MemoryPlan
    fits: bool
    missing_bytes: int
    remedy: str
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """candidates: one for each strategy, its best; chosen: one of them, None where nothing fits."""

    chosen: Candidate | None
    reason: str
    candidates: tuple[Candidate, ...]
