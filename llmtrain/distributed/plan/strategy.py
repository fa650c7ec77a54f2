"""The choice of a strategy: the simplest of those that fit and are about the fastest, or a remedy.

1. The candidates are the strategies of `LADDER`, each with none, selective and full activation
   checkpointing (offloads only with full), and with the largest micro-batch that fits.
2. A candidate fits if the device and the host have enough memory for it. Offloads are considered
   only if nothing else fits.
3. Of the candidates within 5 % of the fastest estimate, the first in the ladder is chosen. Without
   estimates of speed, the first that fits is chosen.

A strategy that was requested by name is estimated even if the ladder would leave it out.

If a layout does not fit, these changes are tried, each alone, the cheapest first:

1. a smaller micro-batch
2. full activation checkpointing
3. gradients that are reduced at every micro-batch
4. models that are cut over twice, four times … as many of the devices, if they can be
5. shorter blocks
6. more devices, if the strategy shards tensors
7. a device with more memory

The first four do not change the results of a run. If only the host lacks memory, the one remedy
is a larger host. Every key that is named exists.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from llmtrain.distributed.plan.balance import can_fill, micro_batch_sizes
from llmtrain.distributed.plan.memory import (
    FSDP,
    OFFLOADS,
    ZERO,
    Count,
    Hardware,
    Layout,
    MemoryPlan,
    Work,
    arithmetic_of,
    memory,
    shards,
)
from llmtrain.distributed.plan.speed import machine_of, step_time, tensor_inside
from llmtrain.errors import Problem, UserError
from llmtrain.text import size
from llmtrain.types import ModelCut, ModelShape, Saved

_SHORTEST = 128  # tokens of a block; shorter blocks are not suggested
_MOST_DEVICES = 1024


def missing(planned: MemoryPlan, hardware: Hardware) -> int:
    """Return the bytes that the device or else the host lacks; 0 if everything fits."""
    lacking = planned.total_bytes - hardware.device_bytes
    if lacking <= 0 and hardware.host_bytes is not None:
        lacking = planned.host_bytes - hardware.host_bytes
    return max(0, lacking)


def counted(count: Count, work: Work, layout: Layout, hardware: Hardware) -> Saved:
    """Return what the forward of a sequence keeps on a device in this layout."""
    arithmetic = arithmetic_of(layout.strategy, work.precision)
    return count(arithmetic, layout.activation_checkpointing, hardware.cut.tensor)


# Whether a model and the config of its run allow that it is cut so.
Cuts = Callable[[ModelCut], bool]


def remedy(
    shape: ModelShape,
    count: Count,
    work: Work,
    layout: Layout,
    hardware: Hardware,
    cuts: Cuts,
    beyond: int = 0,
) -> str:
    """Return the first change that makes this layout fit, in words.

    cuts: whether the model may be cut over devices
    beyond: bytes that a run needed on a device in addition to its plan
    """
    hardware = replace(hardware, device_bytes=hardware.device_bytes - beyond)

    def fits(saved: Saved, work: Work, layout: Layout, hardware: Hardware) -> bool:
        return not missing(memory(shape, saved, work, layout, hardware), hardware)

    saved = counted(count, work, layout, hardware)
    planned = memory(shape, saved, work, layout, hardware)
    if planned.total_bytes <= hardware.device_bytes:
        return f"a host with {_whole_gib(planned.host_bytes)} GiB of memory for each node"
    for words, changed in _other_layouts(layout, recomputes=shape.recomputes):
        if fits(counted(count, work, changed, hardware), work, changed, hardware):
            return words
    for words, changed, smaller in _other_cuts(work, layout, hardware):
        known = (work, changed, smaller)  # first what needs no count: it takes half a second
        may_fit = fits(Saved(0, 0, 0, 0), *known) and cuts(smaller.cut)
        if may_fit and fits(counted(count, *known), *known):
            return words
    length = work.seq_len // 2
    while length >= _SHORTEST:
        shorter = replace(work, seq_len=length)
        if fits(_scale(saved, length / work.seq_len), shorter, layout, hardware):
            return f"data.seq_len={length}"
        length //= 2
    for words, larger in _more_devices(work, layout, hardware):
        if fits(saved, work, layout, larger):
            return words
    needed = _whole_gib(planned.total_bytes + beyond)
    return f"a device with {needed} GiB (distributed.device_memory_gb)"


def _other_layouts(layout: Layout, *, recomputes: bool) -> Iterator[tuple[str, Layout]]:
    """Yield layouts with the same results that need less memory, each with its key and value."""
    share = layout.micro_batch_size * layout.accumulation
    for micro in range(layout.micro_batch_size - 1, 0, -1):
        if share % micro == 0:
            smaller = replace(layout, micro_batch_size=micro, accumulation=share // micro)
            yield f"training.micro_batch_size={micro}", smaller
    if recomputes and layout.activation_checkpointing != "full":
        full = replace(layout, activation_checkpointing="full")
        yield "model.activation_checkpointing=full", full
    if layout.fsdp_sync == "last":
        yield "distributed.fsdp_sync=every", replace(layout, fsdp_sync="every")


def _other_cuts(
    work: Work, layout: Layout, hardware: Hardware
) -> Iterator[tuple[str, Layout, Hardware]]:
    """Yield cuts of a model over more of the same devices, the fewest first, each with its keys."""
    micro, size, now = layout.micro_batch_size, 2, hardware.cut
    while size <= hardware.devices and layout.strategy not in ZERO:
        tensors = [1 << bit for bit in range(size.bit_length())]
        for tensor in sorted(tensors, key=lambda tensor: tensor not in (1, size)):
            pipeline = size // tensor
            cut = replace(now, tensor=tensor, pipeline=pipeline)
            other = replace(hardware, cut=cut)
            more = tensor >= now.tensor and pipeline >= now.pipeline and cut != now
            whole = more and hardware.devices % cut.processes == 0 and tensor_inside(other)
            if not whole or work.global_batch_size % (other.groups * micro):
                continue
            accumulation = work.global_batch_size // (other.groups * micro)
            alone = layout.strategy in FSDP and shards(layout.strategy, other) < 2
            if not alone and can_fill(accumulation, cut, work.pipeline_schedule):
                sizes = {"tensor": (now.tensor, tensor), "pipeline": (now.pipeline, pipeline)}
                words = " ".join(
                    f"distributed.{key}_parallel={new}"
                    for key, (old, new) in sizes.items()
                    if new != old
                )
                yield words, replace(layout, accumulation=accumulation), other
        size *= 2


def _scale(saved: Saved, share: float) -> Saved:
    """Return saved activations scaled to shorter blocks.

    They grow linearly with the tokens, because attention keeps no matrix of T × T elements.
    """
    one, two, three = (int(share * n) for n in (saved.blocks, saved.once, saved.recomputed))
    return replace(saved, blocks=one, once=two, recomputed=three)


def _more_devices(work: Work, layout: Layout, hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    """Yield twice, four times … the devices, while each has a micro-batch. HSDP: larger nodes."""
    if layout.strategy not in (*FSDP, *ZERO):
        return
    times = 2
    most = min(
        _MOST_DEVICES, work.global_batch_size // layout.micro_batch_size * hardware.cut.processes
    )
    while hardware.devices * times <= most:
        if layout.strategy == "hsdp":
            local = hardware.devices_per_node * times
            yield f"{local} devices a node", replace(hardware, devices_per_node=local)
        else:
            words = f"{hardware.devices * times} devices"
            yield words, replace(hardware, nodes=hardware.nodes * times)
        times *= 2


def _whole_gib(count: int) -> int:
    return math.ceil(count / 2**30)


LADDER = ("ddp", "hsdp", "fsdp2", "fsdp2_offload", "zero3_offload")
_CHECKPOINTING = ("none", "selective", "full")
_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout and the estimates for it.

    missing_bytes: bytes that the device or the host lacks; 0 if the layout fits.
    remedy: the change that would make it fit; "" if it fits.
    tokens_per_second: over all devices; None if it is not predicted.
    """

    layout: Layout
    memory: MemoryPlan
    missing_bytes: int
    remedy: str
    tokens_per_second: float | None

    @property
    def fits(self) -> bool:
        """Whether the device and the host lack nothing."""
        return not self.missing_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """The best candidate of each strategy, and the chosen one (None if nothing fits)."""

    chosen: PlannedLayout | None
    reason: str
    candidates: tuple[PlannedLayout, ...]

    @property
    def nearest_miss(self) -> PlannedLayout | None:
        """The candidate that does not fit and lacks the fewest bytes."""
        missed = [one for one in self.candidates if not one.fits]
        return min(missed, key=lambda one: one.missing_bytes, default=None)


def choose_strategy(
    shape: ModelShape,
    count: Count,
    work: Work,
    hardware: Hardware,
    allowed: Sequence[str],
    cuts: Cuts = lambda _cut: False,
) -> Choice:
    """Choose the strategy, micro-batch and checkpointing of a run on this hardware.

    work: its global batch must be a multiple of the number of models.
    allowed: `LADDER`, or the one strategy that was requested by name.
    cuts: for the remedies alone: models are cut as the hardware says.

    Raises UserError for a requested strategy whose classes to shard are not known.
    """
    steps = possible(shape, work, hardware, allowed)
    by_strategy = [list(_candidates(name, shape, count, work, hardware, cuts)) for name in steps]
    fitting = [one for layouts in by_strategy for one in layouts if one.fits]
    pool = [one for one in fitting if one.layout.strategy not in OFFLOADS] or fitting
    chosen = _fastest(pool)
    candidates = tuple(
        chosen if chosen in layouts else _best(layouts) for layouts in by_strategy if layouts
    )
    return Choice(chosen, _reason(chosen, candidates, hardware), candidates)


def possible(
    shape: ModelShape, work: Work, hardware: Hardware, allowed: Sequence[str]
) -> tuple[str, ...]:
    """Return the strategies that this model and hardware allow.

    A strategy that was requested by name is always returned. Raises UserError if it is one of
    FSDP2's and the classes to shard are not known.
    """
    blocks_known = shape.block_class is not None or work.wrap_class != "auto"
    if len(allowed) == 1:
        if allowed[0] in FSDP and not blocks_known:
            # As `fsdp.wrap_classes` raises it, but before the model is built.
            classes = "the class of the model's repeated blocks, which it does not name"
            expected = f"{classes}, for {allowed[0]}"
            named = f"distributed.wrap_class={shape.listed}, or " if shape.listed else ""
            other = f"{named}distributed.strategy=zero3"
            raise UserError(Problem("distributed.wrap_class", "auto", expected, other))
        return tuple(allowed)
    absent = () if blocks_known else FSDP
    apart = hardware.cut.weights  # devices that hold different weights
    if hardware.nodes == 1 or hardware.devices_per_node <= apart:
        absent = (*absent, "hsdp")
    if hardware.devices == apart:
        absent = (*absent, "fsdp2")
    if hardware.cut.processes > 1:  # DeepSpeed shards whole models
        absent = (*absent, *ZERO, *(FSDP if hardware.devices == apart else ()))
    if apart > 1:  # what is on the host cannot be exchanged
        absent = (*absent, "fsdp2_offload")
    return tuple(name for name in LADDER if name in allowed and name not in absent)


def _candidates(
    strategy: str, shape: ModelShape, count: Count, work: Work, hardware: Hardware, cuts: Cuts
) -> Iterator[PlannedLayout]:
    """Yield for each kind of checkpointing the best layout that fits, otherwise the smallest.

    If the best layout of a kind fits, no further kind is tried: recomputing more is not faster.
    """
    asked = work.activation_checkpointing
    kinds = ("full",) if strategy in OFFLOADS else _CHECKPOINTING
    if not shape.recomputes:
        kinds = ("none",)
    for checkpointing in (asked,) if asked else kinds:
        layouts = list(_layouts(strategy, checkpointing, work, hardware))
        saved = counted(count, work, layouts[0], hardware)
        estimated = [_estimate(shape, saved, work, one, hardware) for one in layouts]
        fitting = [one for one in estimated if one.fits]
        if fitting:
            yield fitting[0]
            if estimated[0].fits:
                return
        else:
            words = remedy(shape, count, work, layouts[-1], hardware, cuts)
            yield replace(estimated[-1], remedy=words)


def _layouts(strategy: str, checkpointing: str, work: Work, hardware: Hardware) -> Iterator[Layout]:
    """Yield all layouts, from the fastest to the one that needs the least memory."""
    share = work.global_batch_size // hardware.groups
    most = max(1, work.most_tokens // work.seq_len)
    micro_batches = micro_batch_sizes(share, most, hardware.cut, work.pipeline_schedule)
    if work.micro_batch_size is not None:
        micro_batches = [work.micro_batch_size]
    for micro in micro_batches:
        accumulation = share // micro
        # `last` is faster and needs more memory. With a single micro-batch both are the same.
        syncs = ("last", "every") if accumulation > 1 and strategy in FSDP else ("every",)
        if work.fsdp_sync and strategy in FSDP:
            syncs = (work.fsdp_sync,)
        for sync in syncs:
            yield Layout(strategy, checkpointing, micro, accumulation, sync)


def _estimate(
    shape: ModelShape, saved: Saved, work: Work, layout: Layout, hardware: Hardware
) -> PlannedLayout:
    planned = memory(shape, saved, work, layout, hardware)
    machine = None if hardware.cpu else machine_of(hardware.device)
    time = step_time(shape, work, layout, hardware, machine) if machine else None
    speed = time.tokens_per_second if time else None
    return PlannedLayout(layout, planned, missing(planned, hardware), "", speed)


def _fastest(candidates: Sequence[PlannedLayout]) -> PlannedLayout | None:
    """Return the first candidate within 5 % of the fastest."""
    if not candidates:
        return None
    enough = _ALIKE * max(one.tokens_per_second or 0.0 for one in candidates)
    return next(one for one in candidates if (one.tokens_per_second or 0.0) >= enough)


def _best(candidates: Sequence[PlannedLayout]) -> PlannedLayout:
    """Return the fastest candidate that fits, otherwise the one that lacks the fewest bytes."""
    fastest = _fastest([one for one in candidates if one.fits])
    return fastest or min(candidates, key=lambda one: one.missing_bytes)


def _reason(
    chosen: PlannedLayout | None, candidates: Sequence[PlannedLayout], hardware: Hardware
) -> str:
    """Return the reason for the choice in one sentence."""
    if chosen is None:
        near = min(candidates, key=lambda one: one.missing_bytes)
        where = "the host" if near.memory.total_bytes <= hardware.device_bytes else "a device"
        return (
            f"nothing fits {size(hardware.device_bytes)}: {layout_in_words(near.layout)} comes "
            f"nearest and misses {size(near.missing_bytes)} of {where}"
        )
    name = layout_in_words(chosen.layout)
    others = [one for one in candidates if one is not chosen]
    merit = _merit(chosen, [one for one in others if one.fits])
    misses = [one for one in others if not one.fits]
    lacking = ", ".join(f"{one.layout.strategy} lacks {size(one.missing_bytes)}" for one in misses)
    return f"{name} {merit}" + (f"; {lacking}" if lacking else "")


def _merit(chosen: PlannedLayout, fitting: Sequence[PlannedLayout]) -> str:
    """Return why this candidate was chosen from those that fit."""
    offloaded = chosen.layout.strategy in OFFLOADS
    rivals = [one for one in fitting if offloaded or one.layout.strategy not in OFFLOADS]
    if not rivals:
        return "fits, as nothing without offload does" if offloaded else "fits"
    if chosen.tokens_per_second is None:
        return "is the simplest that fits"
    if all(chosen.tokens_per_second >= (one.tokens_per_second or 0.0) for one in rivals):
        return "is the fastest that fits"
    return "is the simplest within 5 % of the fastest that fits"


def layout_in_words(layout: Layout) -> str:
    """Return a layout in words: "ddp with full activation checkpointing, micro-batch 8,"."""
    checkpointing = layout.activation_checkpointing
    recompute = "" if checkpointing == "none" else f" with {checkpointing} activation checkpointing"
    return f"{layout.strategy}{recompute}, micro-batch {layout.micro_batch_size},"
