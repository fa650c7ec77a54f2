"""Bytes of a device for each way to spread a model out: arithmetic on plain values.

    states       parameters, gradients, optimizer: what stays from step to step
    of a pass    working set, activations, head and loss: what one micro-batch needs besides
    reserve      what the driver, the collectives and the allocator take; on a GPU alone

The peak is their sum, at the end of a forward: gradients of earlier micro-batches are there, all
activations too. One process with a single micro-batch a step stays below it, since activations go
as gradients come; the trial at the start makes two passes without clearing, so that is not counted.
The trap: a shard has ceil(dim 0 / N) rows, not 1/N of the elements: the first rank is the fullest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from llmtrain.types import ModelShape, ParameterShape, Saved

# Arithmetic of a forward, as `model.count` counts it: bf16 = parameters are bf16 while computing
# (FSDP2, ZeRO), autocast = fp32 parameters are cast on the way (DDP, one process).
Arithmetic = str
# (arithmetic, activation checkpointing) → what a forward keeps.
Count = Callable[[Arithmetic, str], Saved]

PARTS = ("parameters", "gradients", "optimizer", "working", "activations", "head", "reserve")
FSDP = ("fsdp2", "hsdp", "fsdp2_offload")
ZERO = ("zero1", "zero2", "zero3", "zero3_offload")
OFFLOADS = ("fsdp2_offload", "zero3_offload")

# DeepSpeed's own, in elements, which `distributed.zero` never goes above: reduce_bucket_size and
# stage3_prefetch_bucket_size.
LARGEST_BUCKET = 500_000_000
AHEAD = 50_000_000
# ZeRO-3 by default: smaller parameters stay whole once they were
# gathered.
PERSISTENT = 100_000
_GIB = 2**30
_CONTEXT = 1.0  # GiB that CUDA and NCCL take before the first tensor
_COMMUNICATOR = 0.3  # GiB for each further group of ranks
_FRAGMENTS = 0.06  # of all else: what the allocator cannot give out


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal devices on equal nodes.

    host_bytes: of a node; None where it is not known.
    device: its name, for tables of speed; without a known one no speed is predicted.
    cpu: a rehearsal on processors.
    """

    device_bytes: int
    host_bytes: int | None
    devices_per_node: int
    nodes: int
    device: str | None = None
    cpu: bool = False

    @property
    def devices(self) -> int:
        """The devices of all nodes."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes; None means `auto`.

    most_tokens: the most tokens of a forward, where the micro-batch is `auto`.
    wrap_class: as `distributed.wrap_class`.
    """

    seq_len: int
    global_batch_size: int
    micro_batch_size: int | None
    precision: str
    activation_checkpointing: str | None
    fsdp_sync: str | None
    most_tokens: int
    wrap_class: str = "auto"


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to do the work."""

    strategy: str
    activation_checkpointing: str
    micro_batch_size: int
    accumulation: int
    fsdp_sync: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device by part (`PARTS`), and of a node's host memory."""

    parts: Mapping[str, int]
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """All bytes of the device."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of the first rank that stay from step to step, on the device or the host."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.parameters + self.gradients + self.optimizer


def arithmetic_of(strategy: str, precision: str) -> Arithmetic:
    """The arithmetic of a strategy at a precision."""
    if precision == "fp32":
        return "fp32"
    return "bf16" if strategy in (*FSDP, *ZERO) else "autocast"


def shards(strategy: str, hardware: Hardware) -> int:
    """Over how many devices a sharded tensor is spread."""
    if strategy == "hsdp":
        return hardware.devices_per_node
    return hardware.devices if strategy in (*FSDP, *ZERO) else 1


def memory(
    shape: ModelShape, saved: Saved, work: Work, layout: Layout, hardware: Hardware
) -> MemoryPlan:
    """Bytes of the fullest device, and of a node's host memory.

    saved: for `arithmetic_of` the layout's strategy and its activation checkpointing.
    """
    states = model_states(shape, layout.strategy, work.precision, hardware)
    micro = layout.micro_batch_size
    head = head_bytes(shape, work, layout)
    again = max(0, micro * saved.recomputed - head)  # begins when the head has given back its room
    resident = 0 if layout.strategy in OFFLOADS else 1
    parts = {
        "parameters": resident * states.parameters + shape.buffers,
        "gradients": resident * states.gradients,
        "optimizer": resident * states.optimizer,
        "working": _working(shape, saved, work, layout),
        "activations": micro * (saved.blocks + saved.once) + again,
        "head": head,
    }
    parts["reserve"] = _reserve(sum(parts.values()), layout.strategy, hardware)
    host = _host(shape, states, sum(parts.values()), layout.strategy, hardware)
    return MemoryPlan(parts, host)


def model_states(shape: ModelShape, strategy: str, precision: str, hardware: Hardware) -> States:
    """AdamW with two fp32 moments; gradients are fp32. ZeRO has fp32 masters beside its weights."""
    count, trainable = shape.parameters, trained_parameters(shape)
    across = shards(strategy, hardware)
    if strategy in FSDP:
        mine = _by_rows(trainable, across)
        return States(4 * _by_rows(count, across), 4 * mine, 8 * mine)
    if strategy in ZERO:
        return _zero_states(shape, strategy, precision, across)
    return States(4 * shape.count, 4 * shape.trainable, 8 * shape.trainable)


def _zero_states(shape: ModelShape, strategy: str, precision: str, across: int) -> States:
    """Weights of the forward, fp32 gradients, and of the trained ones fp32 masters and moments.

    ZeRO-1 sums up whole gradients. Offloading keeps fp32 gradients for the host's update a second
    time.
    """
    compute = _compute_bytes(precision)
    if strategy in ("zero1", "zero2"):
        mine = -(-shape.trainable // across)
        summed = shape.trainable if strategy == "zero1" else mine
        return States(compute * shape.count, 4 * summed, 12 * mine)
    mine = _by_elements(trained_parameters(shape), across)
    moments = 16 if strategy in OFFLOADS else 12
    return States(compute * _by_elements(shape.parameters, across), 4 * mine, moments * mine)


def persistent_bytes(shape: ModelShape, precision: str) -> int:
    """Bytes of the small parameters that ZeRO-3 leaves whole, beside its shards of them."""
    sizes = (math.prod(one.shape) for one in shape.parameters)
    return _compute_bytes(precision) * sum(size for size in sizes if size <= PERSISTENT)


def head_bytes(shape: ModelShape, work: Work, layout: Layout) -> int:
    """The most bytes of the logits of one micro-batch and their loss.

    The peak is in the loss's backward, where the logarithms of the probabilities, their gradient
    and that of the logits exist in fp32. With few tokens it is where the head's own gradient is
    computed beside the one of earlier micro-batches.
    """
    arithmetic = arithmetic_of(layout.strategy, work.precision)
    tokens = layout.micro_batch_size * work.seq_len
    logits, inputs = tokens * shape.vocabulary, tokens * shape.hidden
    if arithmetic == "autocast":
        return max(12 * logits + 2 * inputs, 4 * shape.head + 4 * inputs)
    size = _compute_bytes(work.precision)
    return max(12 * logits + size * inputs, size * (logits + shape.head + 2 * inputs))


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of a checkpoint's weights and moments in fp32 (small files add a few MB at most)."""
    return 4 * shape.count + 8 * shape.trainable


def trained_parameters(shape: ModelShape) -> list[ParameterShape]:
    """The parameters with gradients."""
    return [one for one in shape.parameters if one.trainable]


def largest_block(shape: ModelShape, *, trainable: bool = False) -> int:
    """Elements of the largest repeated block; of the largest parameter where none repeats."""
    sizes: dict[int, int] = {}
    for one in trained_parameters(shape) if trainable else shape.parameters:
        if one.block is not None:
            sizes[one.block] = sizes.get(one.block, 0) + math.prod(one.shape)
    return max(sizes.values(), default=_largest(shape.parameters))


def bucket_elements(shape: ModelShape) -> int:
    """Gradients that DeepSpeed reduces at once."""
    return min(LARGEST_BUCKET, 2 * largest_block(shape))


def _compute_bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def _by_rows(parameters: Iterable[ParameterShape], across: int) -> int:
    """Elements of the first rank where dim 0 is cut: the last ranks may have less, or nothing."""
    return sum(
        -(-one.shape[0] // across) * math.prod(one.shape[1:]) if one.shape else 1
        for one in parameters
    )


def _by_elements(parameters: Iterable[ParameterShape], across: int) -> int:
    """Elements of a rank where each parameter is cut as one row of numbers, padded."""
    return sum(-(-math.prod(one.shape) // across) for one in parameters)


def _largest(parameters: Iterable[ParameterShape]) -> int:
    return max((math.prod(one.shape) for one in parameters), default=0)


def _outside(shape: ModelShape) -> list[ParameterShape]:
    """Embedding, final norm, head."""
    return [one for one in shape.parameters if one.block is None]


def _working(shape: ModelShape, saved: Saved, work: Work, layout: Layout) -> int:
    """What a strategy needs in addition while it computes."""
    if layout.strategy in FSDP:
        return _fsdp_working(shape, work, layout)
    if layout.strategy in ("zero1", "zero2"):
        return 3 * 4 * bucket_elements(shape)
    if layout.strategy in ZERO:
        return _zero3_working(shape, work.precision)
    return saved.casts


def _fsdp_working(shape: ModelShape, work: Work, layout: Layout) -> int:
    """Gathered: norm and head, which stay, and two blocks; reduced: two blocks, in fp32 as well.

    With `fsdp_sync: last` whole gradients are added up until the last micro-batch.
    """
    compute = _compute_bytes(work.precision)
    outside = sum(math.prod(one.shape) for one in _outside(shape))
    stays = outside if shape.tied else outside - shape.embedding
    gathered = compute * (stays + 2 * largest_block(shape))
    reduced = (compute + 4) * 2 * largest_block(shape, trainable=True)
    whole = layout.fsdp_sync == "last" and layout.accumulation > 1
    return gathered + reduced + (4 * shape.trainable if whole else 0)


def _zero3_working(shape: ModelShape, precision: str) -> int:
    """The reduce bucket, gathered parameters, those read ahead, and the small ones that stay."""
    compute, two = _compute_bytes(precision), 2 * largest_block(shape)
    live = max(two, _largest(_outside(shape)))
    gathered = compute * (live + min(AHEAD, two)) + persistent_bytes(shape, precision)
    return 4 * bucket_elements(shape) + gathered


def _reserve(rest: int, strategy: str, hardware: Hardware) -> int:
    if hardware.cpu:
        return 0
    further = {"hsdp": 2}.get(strategy, 1 if strategy in ZERO and hardware.devices > 1 else 0)
    return int((_CONTEXT + _COMMUNICATOR * further) * _GIB + _FRAGMENTS * rest)


def _host(shape: ModelShape, states: States, device: int, strategy: str, hardware: Hardware) -> int:
    """Each rank of a node builds the whole model first; what is offloaded stays there.

    With FSDP2 only one rank does, and fills the shards of all ranks from it.
    """
    built = 4 * shape.count + shape.buffers
    offloaded = strategy in OFFLOADS
    stays = states.total if offloaded else 0
    if hardware.cpu:  # the device is the host
        stays += device
    if strategy not in FSDP or hardware.devices == 1:
        return hardware.devices_per_node * max(built, stays)
    filled = states.parameters if offloaded or hardware.cpu else 0
    return max(built + hardware.devices_per_node * filled, hardware.devices_per_node * stays)
