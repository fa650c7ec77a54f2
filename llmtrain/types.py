"""Values that several packages use: plain data, with other libraries only in annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch

    from llmtrain.pairs import Pairs, PairTensors


Compiled = Literal["off", "blocks", "model"]  # `training.compile` once it has been decided

# An object of a JSON file or of a YAML one. Who reads it checks its values.
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]

NOT_TRAINED = -100  # the label of a position without a loss, as in PyTorch and transformers


class Cursor(NamedTuple):
    """Where a lane's next block of one source begins. All numbers count from 0.

    epoch: finished passes over the data
    unit: position in this lane's list of units, in the order of that epoch
    row: position in that unit, in its own order of rows
    offset: tokens of that document that come before the block
    """

    epoch: int
    unit: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's blocks of one step, on the host.

    ids: (n, S + 1) int32
    labels: (n, S) int64; −100 = not trained
    starts: for each block, where its documents begin in ids[:-1] (int32, the first is 0, padding is
        a document of its own); None where documents may attend to each other
    cursors: lane → the cursors of all sources after that lane's last block of this step
    digest: sum of the digests of this rank's blocks, modulo 2^64
    sources: label → trained tokens, without blocks of padding
    counts: label → kind of event → how often
    ended: whether all lanes of this rank have ended
    real_tokens: positions that are not padding
    pairs: the pairs of answers in these blocks; None = the run has no preference data
    """

    ids: np.ndarray
    labels: np.ndarray
    trained_tokens: int
    starts: tuple[np.ndarray, ...] | None
    cursors: Mapping[int, tuple[Cursor, ...]]
    digest: int
    first_block: int
    sources: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]
    wait_seconds: float
    ended: bool = False
    real_tokens: int = 0
    pairs: Pairs | None = None


class MicroBatch(TypedDict, total=False):
    """The keywords of `LossModule.forward`, which says what each of them is."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    all_trained: bool
    trained: torch.Tensor
    position_ids: torch.Tensor
    cu_seq_lens: torch.Tensor
    max_length: int
    seq_idx: torch.Tensor
    real: torch.Tensor
    in_parts: bool
    pairs: PairTensors


# Dtypes that a tensor file may have: safetensors' name → bytes of an element, torch's name.
DTYPES: Mapping[str, tuple[int, str]] = {
    "F32": (4, "torch.float32"),
    "BF16": (2, "torch.bfloat16"),
    "F16": (2, "torch.float16"),
    "I64": (8, "torch.int64"),
    "I32": (4, "torch.int32"),
    "U8": (1, "torch.uint8"),
    "BOOL": (1, "torch.bool"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of one tensor in a file. dtype: one of `DTYPES`."""

    dtype: str
    shape: tuple[int, ...]


def tensor_bytes(tensor: TensorSpec) -> int:
    """Return the size of one tensor."""
    return math.prod(tensor.shape) * DTYPES[tensor.dtype][0]


# The optimizer that updates a parameter; also the names of `optimizer.name`.
Algorithm = Literal["adamw", "adamw_8bit", "muon"]

# Name → dtype and shape of each tensor that an optimizer keeps for one parameter.
StateSpec = Mapping[str, TensorSpec]

# File name → tensor name → dtype and shape, in the order of the files. Equal on all ranks.
Spec = Mapping[str, Mapping[str, TensorSpec]]


class Piece(NamedTuple):
    """A contiguous range of one flat tensor that this rank has, as a 1-D view of its memory.

    start: index of its first element in the flat tensor

    Pieces are in the order of the spec.
    """

    name: str
    start: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of a model; a tied one is listed once.

    trainable: whether it has a gradient
    cast: whether autocast keeps a bf16 copy of it for the backward
    block: number of the repeated block that it is in; None outside of them
    algorithm: the optimizer that updates it
    quantized: whether it is held in four bits
    used: share of its elements that each token is multiplied with: of experts the chosen ones
    axis: the dimension along which tensor parallelism cuts it; None = each process has all of it
    """

    shape: tuple[int, ...]
    trainable: bool
    cast: bool
    block: int | None
    algorithm: Algorithm = "adamw"
    quantized: bool = False
    used: float = 1.0
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that a plan needs.

    embedding: elements of the input embedding
    head: elements of the output head's matrix; if `tied`, it is that of the input embedding
    vocabulary: logits of a position; 1 of a model that scores
    block_class: class of the repeated blocks (several are joined by commas); None if the model
        does not name it
    attention: Σ over layers of heads × head size (to count the operations of attention)
    buffers: bytes of all buffers, persistent or not
    recomputes: whether the model's code supports activation checkpointing
    listed: as `block_class`, but found from the blocks themselves; for messages
    adapted: whether adapters are trained, beside weights that are held in the dtype of the forward
    token_rows: number of tokens whose embeddings are trained with the adapters
    head_trained: whether the head's matrix gets a gradient
    """

    parameters: tuple[ParameterShape, ...]
    hidden: int
    vocabulary: int
    embedding: int
    head: int
    tied: bool
    blocks: int
    block_class: str | None
    attention: int
    buffers: int
    recomputes: bool = True
    listed: str = ""
    adapted: bool = False
    token_rows: int = 0
    head_trained: bool = True

    @property
    def count(self) -> int:
        """Number of all parameters."""
        return sum(math.prod(one.shape) for one in self.parameters)

    @property
    def trainable(self) -> int:
        """Number of the parameters with gradients."""
        return sum(math.prod(one.shape) for one in self.parameters if one.trainable)


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that the forward of one sequence keeps for its backward, without head and loss.

    blocks: in all repeated blocks
    once: outside of the blocks (embedding, final norm, ids)
    recomputed: peak of what the backward of the blocks needs in addition: gradients, and what is
        recomputed of one block
    casts: bf16 copies of weights, which do not grow with the number of sequences
    plain_head: whether the loss can be computed from the decoder's output, in chunks
    """

    blocks: int
    once: int
    recomputed: int
    casts: int
    plain_head: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """How much of the loss of a linear head is in memory at once.

    least_rows: rows whose logits are in memory
    logits_bytes: as long as their fp32 logits take no more than this, there are more rows
    piece_bytes: of them, rows whose softmax is computed at once take no more than this in fp32
    wide: whether narrow operands are multiplied into fp32
    """

    least_rows: int
    logits_bytes: int
    piece_bytes: int
    wide: bool

    def rows(self, vocabulary: int) -> int:
        """Return the number of rows of a chunk."""
        return max(self.least_rows, self.logits_bytes // (4 * vocabulary))

    def piece(self, vocabulary: int) -> int:
        """Return the number of rows of a piece."""
        return max(1, self.piece_bytes // (4 * vocabulary))


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failed vote.

    kind: the class of the error
    exit_code: the exit code that the rank would end with
    errno, file: those of an OSError
    """

    rank: int
    kind: str
    text: str
    exit_code: int = 1
    errno: int | None = None
    file: str | None = None

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file and self.file not in self.text else ""
        return f"rank {self.rank}: {self.kind}: {self.text}{where}"


@dataclass(frozen=True, slots=True)
class Vote:
    """The answers of all ranks: failures on every rank, bodies (one a rank) only at rank 0."""

    failures: tuple[Failure, ...]
    bodies: tuple[bytes, ...] = ()


class Ranks(Protocol):
    """The processes of a run, which exchange data on the CPU. Every call is collective."""

    @property
    def rank(self) -> int:
        """Number of this process, 0 … world_size − 1."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def gather(self, body: bytes) -> list[bytes]:
        """Return every rank's body at rank 0, in the order of ranks; an empty list elsewhere."""

    def broadcast(self, body: bytes) -> bytes:
        """Return rank 0's body on every rank; the others' argument is ignored."""

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Send this rank's error to all ranks and return theirs. Never raises a rank's error."""

    def highest(self, value: int) -> int:
        """Return the largest number that any rank gives, on every rank."""


@dataclass(frozen=True, slots=True)
class ModelCut:
    """Over how many processes one model is cut, in each way; 1 = it is not cut so.

    tensor: processes that share each matrix
    pipeline: processes that share the blocks
    sequence: processes that share the positions of a row
    stages: parts of the blocks that each process of a pipeline holds
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stages: int = 1

    @property
    def processes(self) -> int:
        """The number of processes that see the same blocks of data."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def weights(self) -> int:
        """The number of processes that have different weights."""
        return self.tensor * self.pipeline

    def to_json(self) -> JsonObject:
        """Return the fields of a `start` line that tell of it."""
        sizes = self.tensor, self.pipeline, self.sequence
        return dict(zip(_CUT_FIELDS, sizes, strict=True))


WHOLE = ModelCut()
_CUT_FIELDS = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")


def cut_of(start: JsonMapping) -> ModelCut:
    """Return the cut that a `start` line tells of; older versions cut no model."""
    return ModelCut(*(start.get(name, 1) for name in _CUT_FIELDS))


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over the processes that share each matrix.

    axis: 0 = by rows, 1 = by columns
    sizes: how many rows or columns each process has
    shape: of the whole parameter
    """

    axis: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def first(self, rank: int) -> int:
        """Return the number of the first row or column of a process."""
        return sum(self.sizes[:rank])

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a process's part of the whole parameter, as a view."""
        return whole.narrow(self.axis, self.first(rank), self.sizes[rank])

    def offset(self, rank: int) -> int:
        """Return how many elements the parts of the processes before this one have."""
        return math.prod(self.shape) // self.shape[self.axis] * self.first(rank)


def split(count: int, of: int) -> tuple[int, ...]:
    """Return the sizes of `of` parts of `count`, which differ by at most 1."""
    return tuple(count * (k + 1) // of - count * k // of for k in range(of))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of a process in the run, whose models are held by groups of processes.

    Everything about data depends on the data rank: all processes of a group see the same blocks. So
    that these count once, one process of the group tells what all of them have read.

    data_rank, data_size: number of its group, and how many groups share the blocks of a step
    sequence_rank, sequence_size: number of its part of each row, and how many parts there are
    stage: number of its part of the model's blocks, and last_stage: whether it is the last one
    tensor_rank: number of its part of each matrix
    replicas: how many processes hold the same part of the model, and have gradients to add up
    leads: whether it tells what its group has read
    tells_loss: whether it tells the loss of its part of the rows
    """

    world_size: int
    data_rank: int
    data_size: int
    sequence_rank: int
    sequence_size: int
    stage: int
    last_stage: bool
    tensor_rank: int
    replicas: int
    leads: bool
    tells_loss: bool

    def positions(self, width: int) -> slice:
        """Return which positions of a row it computes. width: of a row, a multiple of its parts"""
        share = width // self.sequence_size
        return slice(self.sequence_rank * share, (self.sequence_rank + 1) * share)

    @property
    def tells_pairs(self) -> bool:
        """Whether it tells what is known of pairs, which is the same for all parts of a row."""
        return self.tells_loss and self.sequence_rank == 0


def rank_layout(rank: int, world_size: int, cut: ModelCut = WHOLE) -> RankLayout:
    """Return the place of a rank.

    rank = ((data_rank · sequence + sequence_rank) · pipeline + stage) · tensor + tensor_rank

    So processes that share each matrix, which exchange the most, are neighbours.
    """
    data_rank, inside = divmod(rank, cut.processes)
    sequence_rank, within = divmod(inside, cut.pipeline * cut.tensor)
    stage, tensor_rank = divmod(within, cut.tensor)
    last_stage = stage == cut.pipeline - 1
    return RankLayout(
        world_size,
        data_rank,
        world_size // cut.processes,
        sequence_rank,
        cut.sequence,
        stage,
        last_stage,
        tensor_rank,
        replicas=world_size // cut.weights,
        leads=inside == 0,
        tells_loss=last_stage and tensor_rank == 0,
    )


class Flags(NamedTuple):
    """A rank's values for the 0/1 slots of its `StepVector`."""

    signal: bool = False
    stop_file: bool = False
    stop_after: bool = False
    minutes_due: bool = False
    launcher_lost: bool = False
    save_file: bool = False
    writer_ready: bool = False
    writer_failed: bool = False


# The flags that stop a run, the most important first; they are also the names of the stop reasons.
# A lost launcher comes before a signal: when the launcher dies, each rank gets a new parent and a
# signal, one rank after another.
STOPS = ("launcher_lost", "signal", "stop_file", "stop_after")

FLAGS = Flags._fields

# The slots of the vector that all ranks reduce once in a step, in order. One slot for each source
# follows, with its trained tokens, and then those that only some runs have. The sum of a 0/1 slot
# is the number of ranks that set it.
SLOTS = (
    "loss_sum",
    "squares",
    "not_finite",
    "data_failed",
    *(f"digest_{k}" for k in range(4)),
    "wait_seconds",
    *FLAGS,
    "padding_only",
    "ended",
    "real_tokens",
)


@dataclass(frozen=True)
class StepVector:
    """One rank's numbers of a step, or their sum over all ranks.

    data: fp64 (len(SLOTS) + sources + others,) on the device
    others: number of slots after those of the sources: those of `PAIR_SLOTS` in a run on pairs,
        then 1 with a router loss (its sum)

    Some of the slots:
    squares: Σ g² of the gradient elements that this rank counts
    digest_k: bits 16k … 16k + 15 of the batch digest (a 64-bit sum would not fit a float)
    wait_seconds: divided by the number of ranks, so that the sum is their mean
    padding_only: number of ranks whose blocks are all padding of ended lanes
    ended: number of ranks whose data has ended
    real_tokens: positions that are not padding
    """

    data: torch.Tensor
    others: int = 0

    def __getitem__(self, slot: str) -> torch.Tensor:
        return self.data[SLOTS.index(slot)]

    @property
    def tokens(self) -> torch.Tensor:
        """Return the number of trained tokens of all sources: () fp64."""
        return self.data[len(SLOTS) : len(self.data) - self.others].sum()

    @cached_property
    def values(self) -> list[float]:
        """The numbers on the host. Waits for the device."""
        return self.data.tolist()

    @property
    def has_tokens(self) -> bool:
        """Whether any token was trained. Waits for the device."""
        return any(self.values[len(SLOTS) : len(self.values) - self.others])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation on held-out data.

    loss: nats per scored token
    bits_per_byte: over the UTF-8 bytes of the scored documents; None if some are conversations,
        whose bytes include those of a template
    seconds: how long it took; 0 in a result of `sources`, as all are scored together
    sources: label → the result on its documents, if there are several sources
    pairs: what `pair_figures` returns, in a run on pairs; then `loss` is that of a pair, in nats
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int
    bytes: int
    documents: int
    seconds: float
    sources: Mapping[str, Evaluation] = field(default_factory=dict)
    pairs: Mapping[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the text that follows it, which took `seconds` to write."""

    prompt: str
    text: str
    seconds: float


class Numbers(NamedTuple):
    """The numbers of a finished step, on the host and equal on all ranks.

    Units are those of `metrics.jsonl`.

    loss: NaN in a step without a trained token
    router_loss: what the router's loss adds to it in training; None if the model has none
    real_tokens: positions of this step that are not padding
    padding_only, ended: whether this is so on all ranks
    stops: names of the reasons to stop the run, as in `STOPS`
    save: whether a checkpoint was asked for, or is due after some minutes
    written: whether every rank has finished its part of a checkpoint in the background, or failed
    pairs: what `pair_figures` returns, in a run on pairs; then `loss` is that of a pair
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    step_tokens: int
    seconds: float
    data_wait_seconds: float
    batch_digest: int
    skipped: bool
    sources: Mapping[str, int]
    data_failed: bool
    padding_only: bool = False
    ended: bool = False
    stops: tuple[str, ...] = ()
    save: bool = False
    written: bool = False
    router_loss: float | None = None
    real_tokens: int = 0
    pairs: Mapping[str, float | None] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second of this step, over all ranks."""
        return self.step_tokens / self.seconds if self.seconds > 0 else 0.0
