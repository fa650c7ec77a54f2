"""An estimate of the device memory that each layout of a model needs, from plain values.

    states       parameters, gradients and optimizer, which stay from step to step
    of a pass    working set, activations, head and loss, which a micro-batch needs in addition
    reserve      memory of the driver, the collectives and the allocator; only on a GPU

The peak is their sum, at the end of a forward, when the gradients of earlier micro-batches and all
activations are in memory. One process with a single micro-batch a step needs less, since its
activations are freed while gradients are created. That is not counted, because the trial at the
start makes two passes without clearing gradients. A shard of FSDP2 has ceil(dim 0 / N) rows, not
1/N of the elements, so the first rank is the fullest.

The tensors that each optimizer keeps for a parameter, here and in checkpoints:

    adamw        exp_avg, exp_avg_sq   fp32, of the parameter's shape
    muon         momentum_buffer       fp32, of the parameter's shape
    adamw_8bit   state1, state2        one byte an element; fp32 of a small one, then nothing else
                 absmax1, absmax2      fp32, the scale of each block of 256 elements
                 qmap1, qmap2          fp32, the number that each of the 256 bytes stands for

`training/optimizer.py` decides which of them updates a parameter, and writes its name into the
optimizer's groups, as `algorithm`. A checkpoint stores one count of updates for all parameters.
"""

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import Protocol, assert_never

from llmtrain.distributed.launch.named import STRATEGIES
from llmtrain.distributed.plan.balance import held_passes, parts_of
from llmtrain.errors import Problem
from llmtrain.types import (
    WHOLE,
    Algorithm,
    Chunk,
    ModelCut,
    ModelShape,
    ParameterShape,
    Saved,
    StateSpec,
    TensorSpec,
    tensor_bytes,
)

# The arithmetic of a forward, as in `model.count`:
#     fp32       everything is fp32
#     bf16       parameters are bf16 in the forward (FSDP2, ZeRO)
#     autocast   parameters are fp32, and operations cast them to bf16 (DDP, one process)
Arithmetic = str

PARTS = ("parameters", "gradients", "optimizer", "working", "activations", "head", "reserve")
FSDP, ZERO = (tuple(STRATEGIES[family]) for family in ("fsdp", "zero"))
OFFLOADS = tuple(
    strategy
    for strategies in STRATEGIES.values()
    for strategy, keys in strategies.items()
    if keys.get("fsdp_offload_params") or keys.get("offload_optimizer_device") == "cpu"
)

# DeepSpeed's defaults in elements, which are our upper limits: reduce_bucket_size and
# stage3_prefetch_bucket_size.
LARGEST_BUCKET = 500_000_000
AHEAD = 50_000_000
# ZeRO-3's default in elements: parameters up to this size stay whole once they are gathered.
PERSISTENT = 100_000
# Bytes of a weight in four bits, with a byte for each 64 of them and fp32 for each 256 of these.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
_BLOCK = 256  # elements with one scale in bitsandbytes, and the number of values of a byte
_SMALL = 4096  # elements: bitsandbytes keeps the moments of smaller parameters in fp32
_GIB = 2**30
_CONTEXT = 1.0  # GiB that CUDA and NCCL take before the first tensor
_COMMUNICATOR = 0.3  # GiB for each further group of ranks
_FRAGMENTS = 0.06  # share of all other memory that the allocator cannot use


class Count(Protocol):
    """Returns what a forward of one sequence saves on a device."""

    def __call__(self, arithmetic: Arithmetic, checkpointing: str, tensor: int = 1) -> Saved:
        """Count it. tensor: how many devices share each matrix."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Nodes of the same kind with devices of the same kind.

    device_bytes: memory of a device.
    host_bytes: memory of a node; None if unknown.
    device: the device's name; speed is predicted only for known names.
    cpu: whether this is a rehearsal on CPUs.
    cut: over how many devices one model is cut.
    """

    device_bytes: int
    host_bytes: int | None
    devices_per_node: int
    nodes: int
    device: str | None = None
    cpu: bool = False
    cut: ModelCut = WHOLE

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def groups(self) -> int:
        """The number of models that these devices hold, which share the blocks of a step."""
        return self.devices // self.cut.processes


@dataclass(frozen=True, slots=True)
class Work:
    """The settings of a step that the config gives; None means `auto`.

    global_batch_size: blocks of a step; of a batch that grows, the largest number that divides
        those of every step, so that a micro-batch that divides it suits all of them.
    most_tokens: the most tokens of a forward if the micro-batch is `auto`.
    wrap_class: as `distributed.wrap_class`.
    chunk: how the loss is computed where the head is plain; None = from all logits.
    pipeline_schedule: as `distributed.pipeline_schedule`.
    same_bits: as `training.same_bits`; beside each gradient of 4 bytes is an exact sum of 8.
    answers: what of answers is compared: their log-probabilities in pairs, or judged ones; None =
        texts are trained, or scores of pairs.
    """

    seq_len: int
    global_batch_size: int
    micro_batch_size: int | None
    precision: str
    activation_checkpointing: str | None
    fsdp_sync: str | None
    most_tokens: int
    wrap_class: str = "auto"
    chunk: Chunk | None = None
    pipeline_schedule: str = "1f1b"
    answers: str | None = None
    same_bits: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to distribute and divide the work of a step."""

    strategy: str
    activation_checkpointing: str
    micro_batch_size: int
    accumulation: int
    fsdp_sync: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device for each of `PARTS`, and bytes of a node's host memory."""

    parts: Mapping[str, int]
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of the device's bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on the first rank that stay from step to step, on the device or the host."""

    parameters: int
    gradients: int
    optimizer: int


def states(algorithm: Algorithm, shape: tuple[int, ...]) -> StateSpec:
    """Return the tensors that an optimizer keeps for a parameter of this shape, or a part of it."""
    whole = TensorSpec("F32", shape)
    match algorithm:
        case "adamw":
            return {"exp_avg": whole, "exp_avg_sq": whole}
        case "muon":
            return {"momentum_buffer": whole}
        case "adamw_8bit":
            if math.prod(shape) < _SMALL:
                return {"state1": whole, "state2": whole}
            codes, values = TensorSpec("U8", shape), TensorSpec("F32", (_BLOCK,))
            scales = TensorSpec("F32", (-(-math.prod(shape) // _BLOCK),))
            first = {"state1": codes, "qmap1": values, "absmax1": scales}
            return first | {"state2": codes, "qmap2": values, "absmax2": scales}
        case _:
            assert_never(algorithm)


@cache
def state_bytes(algorithm: Algorithm, shape: tuple[int, ...]) -> int:
    """Return the bytes of all these tensors."""
    return sum(tensor_bytes(tensor) for tensor in states(algorithm, shape).values())


def missing_package(algorithm: Algorithm) -> list[Problem]:
    """Return the problem of an optimizer whose package is not installed. It imports nothing."""
    if algorithm != "adamw_8bit" or importlib.util.find_spec("bitsandbytes"):
        return []
    remedy = "pip install 'llmtrain[quantized]'"
    return [Problem("optimizer.name", algorithm, "an installed bitsandbytes", remedy)]


def arithmetic_of(strategy: str, precision: str) -> Arithmetic:
    """Return the arithmetic of a strategy at a precision."""
    if precision == "fp32":
        return "fp32"
    return "bf16" if strategy in (*FSDP, *ZERO) else "autocast"


def shards(strategy: str, hardware: Hardware) -> int:
    """Return over how many devices a strategy shards a tensor; 1 if it does not."""
    apart = hardware.cut.weights
    if strategy == "hsdp":
        return hardware.devices_per_node // apart
    return hardware.devices // apart if strategy in (*FSDP, *ZERO) else 1


def memory(
    shape: ModelShape, saved: Saved, work: Work, layout: Layout, hardware: Hardware
) -> MemoryPlan:
    """Return the bytes of the fullest device and of a node's host memory.

    saved: counted with the layout's activation checkpointing, the arithmetic of its strategy, and
        the hardware's tensor parallelism.
    """
    places, cut = parts_of(shape, hardware.cut, work.seq_len), hardware.cut
    micro, cast = layout.micro_batch_size, sum(map(_cast, places))
    resident = 0 if layout.strategy in OFFLOADS else 1
    plans = []
    for place, model_part in enumerate(places):  # one, unless the model is cut into stages
        states = model_states(model_part, layout.strategy, work.precision, hardware)
        last = place == len(places) - 1
        head, gradient = (
            head_bytes(model_part, saved, work, layout, cut.sequence) if last else (0, 0)
        )
        # Recomputed activations are needed only when the head's memory is free again; a tied head's
        # gradient waits for that of the embedding.
        recomputed = micro * saved.recomputed // cut.sequence
        again = max(0, recomputed - head + (gradient if model_part.tied else 0))
        casts = saved.casts * _cast(model_part) // max(cast, 1)
        parts = {
            "parameters": resident * states.parameters + model_part.buffers,
            "gradients": resident * states.gradients * (3 if work.same_bits else 1),
            "optimizer": resident * states.optimizer,
            "working": _working(model_part, casts, work, layout, cut),
            "activations": kept_bytes(model_part, place, saved, work, layout, cut, shape.blocks)
            + again,
            "head": head,
        }
        parts["reserve"] = _reserve(sum(parts.values()), layout.strategy, hardware)
        host = _host(shape, states, sum(parts.values()), layout.strategy, hardware)
        plans.append(MemoryPlan(parts, host))
    return max(plans, key=lambda one: one.total_bytes)


def _cast(shape: ModelShape) -> int:
    """Return the elements of which autocast keeps copies."""
    return sum(math.prod(one.shape) for one in shape.parameters if one.cast)


def kept_bytes(
    model_part: ModelShape,
    place: int,
    saved: Saved,
    work: Work,
    layout: Layout,
    cut: ModelCut,
    blocks: int,
) -> int:
    """Return the bytes that forwards keep for their backwards on a device.

    model_part: what the device holds of a model of so many blocks, at this place of its pipeline

    In a pipeline a device keeps several forwards of its blocks, and has a buffer for what each
    micro-batch of a step brings from its neighbour.
    """
    micro = layout.micro_batch_size
    if cut.pipeline == 1:
        row_bytes = saved.blocks + saved.once
        if cut.sequence > 1 and layout.activation_checkpointing == "none":
            # Attention keeps the result of its own heads, and a block that of all heads.
            row_bytes += work.seq_len * model_part.attention * compute_bytes(work.precision)
        return micro * row_bytes // cut.sequence
    passes = held_passes(place, layout.accumulation, cut, work.pipeline_schedule)
    of_blocks = saved.blocks * model_part.blocks // max(blocks, 1) // cut.stages
    ends = saved.once if place in (0, cut.pipeline - 1) else 0
    tokens = micro * work.seq_len // cut.sequence
    buffers = layout.accumulation * tokens * model_part.hidden * compute_bytes(work.precision)
    return passes * micro * (of_blocks + ends) // cut.sequence + buffers


def model_states(shape: ModelShape, strategy: str, precision: str, hardware: Hardware) -> States:
    """Return the bytes of parameters, fp32 gradients and the optimizer's state on a rank.

    shape: of what the rank holds of a model that is cut

    For ZeRO, which has AdamW alone, the optimizer's bytes include the fp32 masters.
    """
    across = shards(strategy, hardware)
    if strategy in ZERO:
        return _zero_states(shape, strategy, precision, across)
    trainable = trained_parameters(shape)
    mine = _by_rows(trainable, across)
    # Beside adapters, in the dtype of the forward, or in four bits with their scales.
    held = compute_bytes(precision) if shape.adapted else 4
    frozen = sum(
        math.ceil((FOUR_BITS if one.quantized else held) * _by_rows([one], across))
        for one in shape.parameters
        if not one.trainable
    )
    optimizer = sum(state_bytes(one.algorithm, _rows(one, across)) for one in trainable)
    return States(4 * mine + frozen, 4 * mine, optimizer)


def _zero_states(shape: ModelShape, strategy: str, precision: str, across: int) -> States:
    """Return the bytes of ZeRO's weights, fp32 gradients, and fp32 masters and moments.

    ZeRO-1 accumulates whole gradients. Offloading keeps a second copy of the fp32 gradients for the
    host's update.
    """
    compute = compute_bytes(precision)
    if strategy in ("zero1", "zero2"):
        mine = -(-shape.trainable // across)
        summed = shape.trainable if strategy == "zero1" else mine
        return States(compute * shape.count, 4 * summed, 12 * mine)
    mine = _by_elements(trained_parameters(shape), across)
    moments = 16 if strategy in OFFLOADS else 12
    return States(compute * _by_elements(shape.parameters, across), 4 * mine, moments * mine)


def persistent_bytes(shape: ModelShape, precision: str) -> int:
    """Return the bytes of the small parameters that ZeRO-3 keeps whole in addition to shards."""
    sizes = (math.prod(one.shape) for one in shape.parameters)
    return compute_bytes(precision) * sum(size for size in sizes if size <= PERSISTENT)


def head_bytes(
    shape: ModelShape, saved: Saved, work: Work, layout: Layout, sequence: int = 1
) -> tuple[int, int]:
    """Return the peak bytes of head and loss of one micro-batch, and the head's gradient in them.

    With t tokens, V entries and h hidden, for fp32, bf16 and autocast:

        logits    12tV + 4th,  12tV + 2th,  12tV + 2th
        chunks    4Vh + 8th + chunk,  4Vh + 6th + max(chunk, 2Vh),  4Vh + 10th + chunk

    Logits need the most in the loss's backward, when the log-probabilities, their gradient and that
    of the logits are in memory in fp32. With few tokens it is when the gradient of the head's
    weight is computed while that of earlier micro-batches is in memory. Chunks need the most at the
    end of the forward, when the gradients of the weight, unless it is frozen, and of the decoder's
    output are in memory, in fp32.

    shape: of what a device holds
    sequence: how many processes share the tokens
    """
    arithmetic = arithmetic_of(layout.strategy, work.precision)
    tokens = layout.micro_batch_size * work.seq_len // sequence
    logits, inputs = tokens * shape.vocabulary, tokens * shape.hidden
    size = compute_bytes(work.precision)
    if work.chunk is not None and saved.plain_head:
        gradient = 4 * shape.head if shape.head_trained else 0
        rows = min(work.chunk.rows(shape.vocabulary), tokens)
        wide = rows if work.chunk.wide else min(work.chunk.piece(shape.vocabulary), tokens)
        # In fp32 the gradient takes the place of the logits.
        chunk = shape.vocabulary * (4 * rows if size == 4 else size * rows + 4 * wide)
        if arithmetic == "bf16":
            return gradient + 6 * inputs + max(chunk, gradient // 2), gradient
        return gradient + (8 if arithmetic == "fp32" else 10) * inputs + chunk, gradient
    # Rows of a head that are trained are put into a copy of it, whose gradient is made whole.
    copied = 2 * size * shape.head if shape.token_rows else 0
    if arithmetic == "autocast":
        return copied + max(12 * logits + 2 * inputs, 4 * shape.head + 4 * inputs), 0
    whole = max(12 * logits + size * inputs, size * (logits + shape.head + 2 * inputs))
    return copied + whole, 0


def checkpoint_bytes(shape: ModelShape) -> int:
    """Return the bytes of a checkpoint's tensors. Other files add a few MB.

    Of adapters only what is trained is saved.
    """
    saved = shape.trainable if shape.adapted else shape.count
    trained = trained_parameters(shape)
    return 4 * saved + sum(state_bytes(one.algorithm, one.shape) for one in trained)


def trained_parameters(shape: ModelShape) -> list[ParameterShape]:
    """Return the parameters with gradients."""
    return [one for one in shape.parameters if one.trainable]


def largest_block(shape: ModelShape, *, trainable: bool = False) -> int:
    """Return the elements of the largest repeated block, or of the largest parameter if none is."""
    sizes: dict[int, int] = {}
    for one in trained_parameters(shape) if trainable else shape.parameters:
        if one.block is not None:
            sizes[one.block] = sizes.get(one.block, 0) + math.prod(one.shape)
    return max(sizes.values(), default=_largest(shape.parameters))


def bucket_elements(shape: ModelShape) -> int:
    """Return how many elements of gradients DeepSpeed reduces at once."""
    return min(LARGEST_BUCKET, 2 * largest_block(shape))


def compute_bytes(precision: str) -> int:
    """Return the bytes of an element of an activation."""
    return 4 if precision == "fp32" else 2


def _by_rows(parameters: Iterable[ParameterShape], across: int) -> int:
    """Return the first rank's elements, the most of all ranks, if dim 0 is split over ranks."""
    return sum(math.prod(_rows(one, across)) for one in parameters)


def _rows(one: ParameterShape, across: int) -> tuple[int, ...]:
    """Return the shape of the first rank's part of a parameter."""
    return (-(-one.shape[0] // across), *one.shape[1:]) if one.shape else ()


def _by_elements(parameters: Iterable[ParameterShape], across: int) -> int:
    """Return a rank's elements if each parameter is flattened, padded and split evenly."""
    return sum(-(-math.prod(one.shape) // across) for one in parameters)


def _largest(parameters: Iterable[ParameterShape]) -> int:
    return max((math.prod(one.shape) for one in parameters), default=0)


def _outside(shape: ModelShape) -> list[ParameterShape]:
    """Return the parameters outside of blocks: embedding, final norm, head."""
    return [one for one in shape.parameters if one.block is None]


def _working(shape: ModelShape, casts: int, work: Work, layout: Layout, cut: ModelCut) -> int:
    """Return the bytes that a strategy needs in addition while it computes.

    casts: bytes that autocast's copies of weights take
    """
    compute = compute_bytes(work.precision)
    if layout.strategy in FSDP:
        # The bytes of FSDP2's gathered parameters and of the gradients that it reduces. The final
        # norm and the head stay gathered, and with them two blocks. The gradients of two blocks
        # are there in the compute dtype and in fp32. With `fsdp_sync: last`, and in a pipeline,
        # whole gradients are accumulated until the last micro-batch.
        outside = sum(math.prod(one.shape) for one in _outside(shape))
        stays = outside if shape.tied else outside - shape.embedding
        gathered = compute * (stays + 2 * largest_block(shape))
        reduced = (compute + 4) * 2 * largest_block(shape, trainable=True)
        whole = (layout.fsdp_sync == "last" or cut.pipeline > 1) and layout.accumulation > 1
        return gathered + reduced + (4 * shape.trainable if whole else 0)
    if layout.strategy in ("zero1", "zero2"):
        return 3 * 4 * bucket_elements(shape)
    if layout.strategy in ZERO:
        # ZeRO-3's reduce bucket, and gathered, prefetched and small weights.
        two = 2 * largest_block(shape)
        live = max(two, _largest(_outside(shape)))
        gathered = compute * (live + min(AHEAD, two)) + persistent_bytes(shape, work.precision)
        return 4 * bucket_elements(shape) + gathered
    return casts


def _reserve(rest: int, strategy: str, hardware: Hardware) -> int:
    if hardware.cpu:
        return 0
    further = {"hsdp": 2}.get(strategy, 1 if strategy in ZERO and hardware.devices > 1 else 0)
    return int((_CONTEXT + _COMMUNICATOR * further) * _GIB + _FRAGMENTS * rest)


def _host(shape: ModelShape, states: States, device: int, strategy: str, hardware: Hardware) -> int:
    """Return the bytes of a node's host memory.

    Each rank of a node first builds the whole model in host memory; under FSDP2 with several
    devices only rank 0 does, and fills the shards of all ranks from it. Offloaded states stay in
    host memory.
    """
    built = 4 * shape.count + shape.buffers
    offloaded = strategy in OFFLOADS
    stays = sum(astuple(states)) if offloaded else 0
    if hardware.cpu:  # the device is the host
        stays += device
    if strategy not in FSDP or hardware.devices == 1:
        return hardware.devices_per_node * max(built, stays)
    filled = states.parameters if offloaded or hardware.cpu else 0
    return max(built + hardware.devices_per_node * filled, hardware.devices_per_node * stays)
