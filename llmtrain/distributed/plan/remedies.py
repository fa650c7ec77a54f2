"""The changes that would make a layout fit, each tried alone, the cheapest first.

1. a smaller micro-batch
2. full activation checkpointing
3. gradients that are reduced at every micro-batch
4. shorter blocks
5. more devices, if the strategy shards tensors
6. a device with more memory

The first three do not change the results of a run. If only the host lacks memory, the one remedy
is a larger host. Every key that is named exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from llmtrain.distributed.plan.memory import (
    FSDP,
    ZERO,
    Count,
    Hardware,
    Layout,
    MemoryPlan,
    Work,
    arithmetic_of,
    memory,
)
from llmtrain.types import ModelShape, Saved

_SHORTEST = 128  # tokens of a block; shorter blocks are not suggested
_MOST_DEVICES = 1024


def missing(planned: MemoryPlan, hardware: Hardware) -> int:
    """Return the bytes that the device or else the host lacks; 0 if everything fits."""
    lacking = planned.total_bytes - hardware.device_bytes
    if lacking <= 0 and hardware.host_bytes is not None:
        lacking = planned.host_bytes - hardware.host_bytes
    return max(0, lacking)


def remedy(
    shape: ModelShape,
    count: Count,
    work: Work,
    layout: Layout,
    hardware: Hardware,
    beyond: int = 0,
) -> str:
    """Return the first change that makes this layout fit, in words.

    beyond: bytes that a run needed on a device in addition to its plan
    """
    hardware = replace(hardware, device_bytes=hardware.device_bytes - beyond)

    def fits(saved: Saved, work: Work, layout: Layout, hardware: Hardware) -> bool:
        return not missing(memory(shape, saved, work, layout, hardware), hardware)

    saved = count(arithmetic_of(layout.strategy, work.precision), layout.activation_checkpointing)
    planned = memory(shape, saved, work, layout, hardware)
    if planned.total_bytes <= hardware.device_bytes:
        return f"a host with {_whole_gib(planned.host_bytes)} GiB of memory for each node"
    for words, changed in _other_layouts(layout, recomputes=shape.recomputes):
        arithmetic = arithmetic_of(changed.strategy, work.precision)
        kept = count(arithmetic, changed.activation_checkpointing)
        if fits(kept, work, changed, hardware):
            return words
    for words, shorter in _shorter(work):
        if fits(_scale(saved, shorter.seq_len / work.seq_len), shorter, layout, hardware):
            return words
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


def _shorter(work: Work) -> Iterator[tuple[str, Work]]:
    length = work.seq_len // 2
    while length >= _SHORTEST:
        yield f"data.seq_len={length}", replace(work, seq_len=length)
        length //= 2


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
    while hardware.devices * times <= min(
        _MOST_DEVICES, work.global_batch_size // layout.micro_batch_size
    ):
        if layout.strategy == "hsdp":
            local = hardware.devices_per_node * times
            yield f"{local} devices a node", replace(hardware, devices_per_node=local)
        else:
            words = f"{hardware.devices * times} devices"
            yield words, replace(hardware, nodes=hardware.nodes * times)
        times *= 2


def _whole_gib(count: int) -> int:
    return math.ceil(count / 2**30)
