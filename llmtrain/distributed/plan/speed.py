"""An estimate of the time of a step, from its arithmetic and the traffic between devices.

    seconds = (max(links, pace + 0.3 · links) + exchanges) · (1 + 0.004 · log2 nodes)

The pace of models that are not cut is their arithmetic. Over t·p devices that share a model, each
does 1/t of the slowest of p stages, and waits for its sums of activations, which nothing hides:

    pace        (slowest stage / t + sums) · (m·v + p − 1) / (m·v)
    sums        L/p · n · 2(t − 1)/t · tokens · h · b / inside
    exchanges   2v · tokens · h · b / link, from stage to stage

with m micro-batches, v stages a device, and n = 4, or 6 where blocks are recomputed. This part was
compared with no run. For the rest, arithmetic hides most of the traffic; both constants were fitted
to the published runs in the tests, so these runs are no evidence for other machines: expect errors
of ten percentage points. The estimate was never compared with devices without NVLink, DDP on slow
links, or offloading.
"""

import math
from dataclasses import dataclass, replace

from llmtrain.distributed.plan.balance import parts_of, slowest_share
from llmtrain.distributed.plan.memory import (
    FSDP,
    OFFLOADS,
    ZERO,
    Hardware,
    Layout,
    Work,
    compute_bytes,
    shards,
)
from llmtrain.types import ModelShape

OVERLAP = 0.7  # share of the traffic that arithmetic hides
PER_DOUBLING = 0.004  # share of the time that each doubling of the nodes adds
HFU = 0.40  # share of the peak that arithmetic reaches, if nothing was measured
_HOST = 200e9  # bytes a second that a node's CPUs read and write in an offloaded update
_FORWARDS_AGAIN = {"none": 0, "selective": 1, "full": 2}  # operations per parameter and token


@dataclass(frozen=True, slots=True)
class Machine:
    """The speeds of a device, and the sizes of the elements that it sends.

    peak: operations a second in bf16.
    peak_fp32: operations a second in fp32.
    inside: effective bytes a second between devices of a node.
    across: effective bytes a second of a whole node's network; a ring brings each byte into a node
        once.
    pcie: effective bytes a second to the host.
    hfu: share of the peak that is reached.
    gather: bytes of each element of a gathered weight; None: those of the forward's dtype.
    reduce: bytes of each element of a reduced gradient.
    """

    peak: float
    peak_fp32: float
    inside: float
    across: float
    pcie: float
    hfu: float = HFU
    gather: int | None = None
    reduce: int = 4


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step in seconds, and its tokens over all devices.

    compute: seconds of arithmetic.
    links: seconds of traffic, including that of offloading.
    sums: seconds of the sums of tensor parallelism, or the exchanges of sequence parallelism.
    seconds: the time of the step.
    tokens: tokens of the step, over all devices.
    """

    compute: float
    links: float
    sums: float
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Share of the step's time that arithmetic takes."""
        return self.compute / self.seconds


_NVLINK_H100 = Machine(989e12, 67e12, 360e9, 340e9, 40e9)
_NVLINK_A100 = Machine(312e12, 19.5e12, 240e9, 170e9, 20e9)
# (words that must all be in a device's name, its speeds); the first match is used.
_MACHINES: tuple[tuple[tuple[str, ...], Machine], ...] = (
    (("H100", "PCIE"), Machine(756e12, 51e12, 40e9, 10e9, 40e9)),
    (("A100", "PCIE"), Machine(312e12, 19.5e12, 20e9, 10e9, 20e9)),
    (("H200",), _NVLINK_H100),
    (("H100",), _NVLINK_H100),
    (("A100",), _NVLINK_A100),
    (("L40S",), Machine(362e12, 91.6e12, 20e9, 10e9, 20e9)),
    (("RTX 4090",), Machine(165e12, 82.6e12, 20e9, 2.6e9, 20e9)),
    (("RTX 3090",), Machine(71e12, 35.6e12, 20e9, 2.6e9, 20e9)),
)
# Nominal GiB of a device → the device that a plan without a device name assumes.
_BY_MEMORY = {24: "RTX 4090", 40: "A100", 48: "L40S", 80: "H100", 141: "H200"}


def machine_of(device: str | None) -> Machine | None:
    """Return the speeds of a device by its name; None if they are unknown."""
    name = (device or "").upper()
    return next((known for words, known in _MACHINES if all(word in name for word in words)), None)


def device_by_memory(gib: float) -> str | None:
    """Return the name of a device with about this much memory; None if no size is close."""
    near = min(_BY_MEMORY, key=lambda size: abs(size - gib))
    return _BY_MEMORY[near] if abs(near - gib) <= 0.06 * near else None


def step_time(
    shape: ModelShape, work: Work, layout: Layout, hardware: Hardware, machine: Machine
) -> StepTime:
    """Estimate the time of a step of `work` in this layout."""
    cut = hardware.cut
    tokens = layout.micro_batch_size * layout.accumulation * work.seq_len  # of one model
    used = sum(one.used * math.prod(one.shape) for one in shape.parameters)
    again = _FORWARDS_AGAIN[layout.activation_checkpointing] * used
    compute = (flops(shape, work.seq_len) + again + more_flops(shape, work)) * tokens
    compute /= cut.processes
    compute /= _peak(work, machine) * machine.hfu
    links = _links(shape, work, layout, hardware, machine)
    sums = seconds_of_sums(shape, work, layout, hardware, machine)
    pace, exchanges = compute + sums, 0.0
    if cut.pipeline > 1:
        slowest = cut.pipeline * slowest_share(shape, cut, work.seq_len)
        passes = layout.accumulation * cut.stages
        pace = (slowest * compute + sums) * (passes + cut.pipeline - 1) / passes
        sent = 2 * cut.stages * tokens / cut.sequence * shape.hidden * compute_bytes(work.precision)
        exchanges = sent / (machine.inside if hardware.nodes == 1 else machine.across)
    moved = 0.0  # seconds of an offloaded layout's traffic over PCIe, and of its update on the host
    if layout.strategy in OFFLOADS:
        mine, trained = (count / hardware.devices for count in (shape.count, shape.trainable))
        moved = (8 * mine * layout.accumulation + 8 * trained) / machine.pcie
        moved += 28 * trained * hardware.devices_per_node / _HOST
    growth = 1 + PER_DOUBLING * math.log2(hardware.nodes)
    seconds = (max(links, pace + (1 - OVERLAP) * links) + exchanges) * growth + moved
    return StepTime(compute, links + moved, sums, seconds, tokens * hardware.groups)


def seconds_of_sums(
    shape: ModelShape, work: Work, layout: Layout, hardware: Hardware, machine: Machine
) -> float:
    """Return the seconds that a device waits for the others that share its matrices or rows.

    Tensor parallelism sums two activations of a block forwards and two backwards. Sequence
    parallelism sends queries, keys, values and results to other devices, and the gradients back.
    """
    cut = hardware.cut
    tokens = layout.micro_batch_size * layout.accumulation * work.seq_len / cut.sequence
    rows = tokens * compute_bytes(work.precision) / cut.pipeline
    times = 4 if layout.activation_checkpointing == "none" else 6
    summed = times * 2 * (cut.tensor - 1) / cut.tensor * shape.blocks * shape.hidden
    sent = times * 2 * (cut.sequence - 1) / cut.sequence * shape.attention
    of_tensor = rows * summed / (machine.inside if tensor_inside(hardware) else machine.across)
    return of_tensor + rows * sent / (machine.inside if hardware.nodes == 1 else machine.across)


def tensor_inside(hardware: Hardware) -> bool:
    """Whether all devices that share a matrix are on one node."""
    return hardware.devices_per_node % hardware.cut.tensor == 0


def across_nodes(
    shape: ModelShape, work: Work, layout: Layout, hardware: Hardware
) -> tuple[str, str] | None:
    """Return what sums of tensor parallelism across nodes cost, and what to do; None on one node.

    The seconds are those of a step, by the formula, where the speed of the network is known.
    """
    cut, local = hardware.cut, hardware.devices_per_node
    if tensor_inside(hardware):
        return None
    cost = f"distributed.tensor_parallel = {cut.tensor} crosses nodes of {local}"
    machine = None if hardware.cpu else machine_of(hardware.device)
    if machine is not None:
        far, near = (
            seconds_of_sums(shape, work, layout, hardware, one)
            for one in (machine, replace(machine, across=machine.inside))
        )
        compute = step_time(shape, work, layout, hardware, machine).compute
        cost += (
            f": its sums take {far:.2g} s of a step by the formula, {near:.2g} s inside a node, "
            f"beside {compute:.2g} s of arithmetic"
        )
    else:
        cost += ": four sums of activations a block and micro-batch go over the network"
    most = max(size for size in range(1, local + 1) if local % size == 0 and size < cut.tensor)
    return cost, f"distributed.tensor_parallel={most}, with distributed.pipeline_parallel"


def flops(shape: ModelShape, seq_len: int) -> float:
    """Return the operations per token of a training step in which nothing is recomputed.

    That is 6 for each parameter in a product, and 12 · attention · seq_len: forward, gradient of
    the input, gradient of the weight. A frozen weight has no third part, and what lies below all
    trained ones no second. Attention counts in full, as if it were not causal: so do published
    numbers (PaLM, appendix B). Embeddings are in no product and count nothing: with them a small
    model of a large vocabulary would look faster than it is.
    """
    lowest = _lowest_trained(shape)
    above = 1 - max(lowest, 0) / max(shape.blocks, 1)  # share of the blocks with gradients
    total = (4 + 8 * above) * shape.attention * seq_len
    for one in shape.parameters:
        through = lowest < shape.blocks if one.block is None else lowest <= one.block
        total += (2 + 2 * through + 2 * one.trainable) * one.used * math.prod(one.shape)
    return total


def head_flops(shape: ModelShape) -> float:
    """Return the part of `flops` that the output head takes: only trained positions need it."""
    through = _lowest_trained(shape) < shape.blocks
    return (2 + 2 * through + 2 * shape.head_trained) * shape.head


def forward_flops(shape: ModelShape, seq_len: int) -> float:
    """Return the part of `flops` that a forward takes."""
    products = sum(one.used * math.prod(one.shape) for one in shape.parameters)
    return 4.0 * shape.attention * seq_len + 2 * products


def more_flops(shape: ModelShape, work: Work) -> float:
    """Return what a step that compares answers takes beside `flops`, per token.

    What a position weighs is known only after the forward, so the products of a head that is
    trained are computed once more in the backward. Judged answers have a forward before, by which
    all of the step are compared with the reference.
    """
    if work.answers is None:
        return 0.0
    again = 2.0 * shape.head if shape.head_trained else 0.0
    return again + (forward_flops(shape, work.seq_len) if work.answers == "feedback" else 0.0)


def _lowest_trained(shape: ModelShape) -> int:
    """Return the number of the lowest block with a trained parameter.

    It is −1 if something before the blocks is trained, and `blocks` if nothing below the head is.
    """
    for one in shape.parameters:  # in the order of the forward
        if one.trainable:
            return -1 if one.block is None else one.block
        if one.block is not None:
            break
    numbers = [one.block for one in shape.parameters if one.trainable and one.block is not None]
    return min(numbers, default=shape.blocks)


def seconds_at_peak(
    shape: ModelShape, work: Work, hardware: Hardware, trained: float = 1.0, real: float = 1.0
) -> float | None:
    """Return the seconds of a step at the peak of all devices; None if the peak is not known.

    Recomputation does not count, so that the share of the peak, `mfu`, can be compared.

    trained: share of the positions whose head is computed
    real: share of the positions that are not padding
    """
    machine = None if hardware.cpu else machine_of(hardware.device)
    if machine is None:
        return None
    operations = real * flops(shape, work.seq_len) - (real - trained) * head_flops(shape)
    operations *= work.seq_len * work.global_batch_size
    return operations / (_peak(work, machine) * hardware.devices)


def _peak(work: Work, machine: Machine) -> float:
    return machine.peak_fp32 if work.precision == "fp32" else machine.peak


def _links(
    shape: ModelShape, work: Work, layout: Layout, hardware: Hardware, machine: Machine
) -> float:
    """Return the seconds of all traffic between models, without overlap.

    Of a model that is cut, each device exchanges its part with those that hold the same one. The
    devices of a node share its network.
    """
    across, cut = shards(layout.strategy, hardware), hardware.cut
    gather = machine.gather or compute_bytes(work.precision)
    replicas = hardware.devices // cut.weights
    if replicas < hardware.devices:
        shape = max(parts_of(shape, cut, work.seq_len), key=lambda one: one.count)
    if hardware.nodes > 1:
        rings = min(cut.weights, hardware.devices_per_node)
        machine = replace(machine, across=machine.across / rings)
    if layout.strategy in FSDP:
        times = 1 if layout.fsdp_sync == "last" else layout.accumulation
        total = 2 * gather * shape.count * layout.accumulation
        total += machine.reduce * shape.trainable * times
        if layout.strategy != "hsdp":
            return _ring(total, across, hardware, machine)
        # Once a step replicas reduce their gradients. The devices of a node share its network.
        between = 8 * shape.trainable * (hardware.nodes - 1) / hardware.nodes / machine.across
        return _ring(total, across, replace(hardware, nodes=1), machine) + between
    if layout.strategy in ZERO:
        # Stage 3 gathers in each pass, stages 1 and 2 once a step. Stage 1 reduces once a step,
        # stages 2 and 3 at each micro-batch.
        gathered = shape.trainable
        if layout.strategy in ("zero3", "zero3_offload"):
            gathered = 2 * shape.count * layout.accumulation
        times = 1 if layout.strategy == "zero1" else layout.accumulation
        total = gather * gathered + machine.reduce * shape.trainable * times
        return _ring(total, across, hardware, machine)
    width = 8 if work.same_bits else 4  # of a gradient; each is sent twice
    return _ring(2 * width * shape.trainable, replicas, hardware, machine)


def _ring(total: int, ranks: int, hardware: Hardware, machine: Machine) -> float:
    """Return the seconds of a collective that moves `total` bytes."""
    speed = machine.inside if hardware.nodes == 1 else machine.across
    return total * (ranks - 1) / ranks / speed
