"""Which strategy a run takes, and why: the fastest that fits, of two alike the simpler one.

    ladder      ddp · hsdp · fsdp2 · fsdp2_offload · zero3_offload, each with none, selective and
                full activation checkpointing (the offloads: full alone)
    fits        the largest micro-batch that the device and the host have room for
    chosen      fastest on paper; within 5 % of it the earliest; offloads only if nothing else fits

Where no speed is known, the order of the ladder decides. A single allowed strategy was asked for by
name: it is estimated even where the ladder would leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmtrain.distributed.plan.memory import (
    FSDP,
    OFFLOADS,
    Count,
    Hardware,
    Layout,
    MemoryPlan,
    Work,
    arithmetic_of,
    memory,
)
from llmtrain.distributed.plan.remedies import gib, missing, remedy
from llmtrain.distributed.plan.speed import machine_of, step_time
from llmtrain.errors import Problem, UserError
from llmtrain.types import ModelShape, Saved

LADDER = ("ddp", "hsdp", "fsdp2", "fsdp2_offload", "zero3_offload")
_CHECKPOINTING = ("none", "selective", "full")
_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and the estimates for it.

    missing_bytes: of the device or the host; 0 where it fits.
    remedy: the key that would make it fit; "" where it fits.
    tokens_per_second: of all devices; None where it is not predicted.
    """

    layout: Layout
    memory: MemoryPlan
    fits: bool
    missing_bytes: int
    remedy: str
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The best candidate of each strategy, and the one that is chosen; None where nothing fits."""

    chosen: Candidate | None
    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def nearest_miss(self) -> Candidate | None:
        """The candidate that misses by the fewest bytes."""
        missed = [one for one in self.candidates if not one.fits]
        return min(missed, key=lambda one: one.missing_bytes, default=None)


def choose_strategy(
    shape: ModelShape, count: Count, work: Work, hardware: Hardware, allowed: Sequence[str]
) -> Choice:
    """The strategy, micro-batch and checkpointing of a run on this hardware.

    allowed: `LADDER` where no strategy was asked for by name.

    The global batch is a multiple of the devices.
    Raises UserError for a named strategy whose classes to shard are not known.
    """
    steps = possible(shape, work, hardware, allowed)
    by_strategy = [list(_candidates(name, shape, count, work, hardware)) for name in steps]
    fitting = [one for found in by_strategy for one in found if one.fits]
    pool = [one for one in fitting if one.layout.strategy not in OFFLOADS] or fitting
    chosen = _fastest(pool)
    candidates = tuple(
        chosen if chosen in found else _best(found) for found in by_strategy if found
    )
    return Choice(chosen, _reason(chosen, candidates, hardware), candidates)


def possible(
    shape: ModelShape, work: Work, hardware: Hardware, allowed: Sequence[str]
) -> tuple[str, ...]:
    """The strategies that this model and hardware allow; one that was asked for by name stays.

    Raises UserError for a named strategy of FSDP2 if the classes to shard are not known.
    """
    blocks_known = shape.block_class is not None or work.wrap_class != "auto"
    if len(allowed) == 1:
        if allowed[0] in FSDP and not blocks_known:
            raise UserError(_without_blocks(shape, allowed[0]))
        return tuple(allowed)
    absent = () if blocks_known else FSDP
    if hardware.nodes == 1 or hardware.devices_per_node == 1:
        absent = (*absent, "hsdp")
    if hardware.devices == 1:
        absent = (*absent, "fsdp2")
    return tuple(name for name in LADDER if name in allowed and name not in absent)


def _without_blocks(shape: ModelShape, strategy: str) -> Problem:
    """As `fsdp.wrap_classes` refuses it, but before anything is built."""
    expected = f"the class of the model's repeated blocks, which it does not name, for {strategy}"
    named = f"distributed.wrap_class={shape.listed}, or " if shape.listed else ""
    return Problem("distributed.wrap_class", "auto", expected, f"{named}distributed.strategy=zero3")


def _candidates(
    strategy: str, shape: ModelShape, count: Count, work: Work, hardware: Hardware
) -> Iterator[Candidate]:
    """For each kind of checkpointing the largest micro-batch that fits, else the smallest.

    Where the best layout of a kind fits, no other kind follows: to recompute more is not faster.
    """
    asked = work.activation_checkpointing
    kinds = ("full",) if strategy in OFFLOADS else _CHECKPOINTING
    if not shape.recomputes:
        kinds = ("none",)
    for checkpointing in (asked,) if asked else kinds:
        saved = count(arithmetic_of(strategy, work.precision), checkpointing)
        layouts = list(_layouts(strategy, checkpointing, work, hardware))
        estimated = [_estimate(shape, saved, work, one, hardware) for one in layouts]
        fitting = [one for one in estimated if one.fits]
        if fitting:
            yield fitting[0]
            if estimated[0].fits:
                return
        else:
            words = remedy(shape, count, work, layouts[-1], hardware)
            yield replace(estimated[-1], remedy=words)


def _layouts(strategy: str, checkpointing: str, work: Work, hardware: Hardware) -> Iterator[Layout]:
    """All layouts, from the best, if it fits, to the one that needs least."""
    share = work.global_batch_size // hardware.devices
    for micro in _micro_batches(share, work):
        accumulation = share // micro
        for sync in _syncs(strategy, accumulation, work.fsdp_sync):
            yield Layout(strategy, checkpointing, micro, accumulation, sync)


def _syncs(strategy: str, accumulation: int, asked: str | None) -> tuple[str, ...]:
    """`last` is faster and needs more memory; with a single micro-batch both are the same."""
    if strategy not in FSDP:
        return ("every",)
    if asked:
        return (asked,)
    return ("last", "every") if accumulation > 1 else ("every",)


def _micro_batches(share: int, work: Work) -> list[int]:
    """The divisors of a device's blocks, falling; the one that was asked for is never lowered."""
    if work.micro_batch_size is not None:
        return [work.micro_batch_size]
    most = min(share, max(1, work.most_tokens // work.seq_len))
    return [size for size in range(most, 0, -1) if share % size == 0]


def _estimate(
    shape: ModelShape, saved: Saved, work: Work, layout: Layout, hardware: Hardware
) -> Candidate:
    planned = memory(shape, saved, work, layout, hardware)
    lacking = missing(planned, hardware)
    machine = None if hardware.cpu else machine_of(hardware.device)
    speed = None
    if machine is not None:
        speed = step_time(shape, work, layout, hardware, machine).tokens_per_second
    return Candidate(layout, planned, not lacking, lacking, "", speed)


def _fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The first of those within 5 % of the fastest."""
    if not candidates:
        return None
    enough = _ALIKE * max(one.tokens_per_second or 0.0 for one in candidates)
    return next(one for one in candidates if (one.tokens_per_second or 0.0) >= enough)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of one strategy that fits, else the one that misses least."""
    found = _fastest([one for one in candidates if one.fits])
    return found or min(candidates, key=lambda one: one.missing_bytes)


def _reason(chosen: Candidate | None, candidates: Sequence[Candidate], hardware: Hardware) -> str:
    """The reason for the choice in one sentence."""
    if chosen is None:
        return _refusal(candidates, hardware)
    name = layout_in_words(chosen.layout)
    others = [one for one in candidates if one is not chosen]
    misses = [f"{one.layout.strategy} {gib(one.missing_bytes)}" for one in others if not one.fits]
    lacking = f"; missing are, for {', '.join(misses)}" if misses else ""
    return f"{name} {_merit(chosen, [one for one in others if one.fits])}{lacking}"


def _merit(chosen: Candidate, fitting: Sequence[Candidate]) -> str:
    """Why this one was taken of those that fit."""
    offloaded = chosen.layout.strategy in OFFLOADS
    rivals = [one for one in fitting if offloaded or one.layout.strategy not in OFFLOADS]
    if not rivals:
        return (
            "fits, which nothing does that keeps its state on the device" if offloaded else "fits"
        )
    if chosen.tokens_per_second is None:
        return "is the simplest that fits"
    if all(chosen.tokens_per_second >= (one.tokens_per_second or 0.0) for one in rivals):
        return "is the fastest that fits"
    return "is the simplest within 5 % of the fastest that fits"


def _refusal(candidates: Sequence[Candidate], hardware: Hardware) -> str:
    near = min(candidates, key=lambda one: one.missing_bytes)
    name = layout_in_words(near.layout)
    where = "the host" if near.memory.total_bytes <= hardware.device_bytes else "a device"
    return (
        f"nothing fits {gib(hardware.device_bytes)}: {name} comes nearest and "
        f"misses {gib(near.missing_bytes)} of {where}"
    )


def layout_in_words(layout: Layout) -> str:
    """A layout in words: ddp with full activation checkpointing, micro-batch 8,"""
    kept = layout.activation_checkpointing
    recompute = "" if kept == "none" else f" with {kept} activation checkpointing"
    return f"{layout.strategy}{recompute}, micro-batch {layout.micro_batch_size},"
