"""The values that several rooms use. Plain data; foreign types are only in annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


NOT_TRAINED = -100  # the label of a position without a loss, as PyTorch and transformers have it


class Cursor(NamedTuple):
    """Where a lane's next block of one source begins: positions in the permuted lists.

    epoch: passes over the data
    unit: number among this lane's units of that epoch
    row: number in that unit
    offset: tokens of that document before the block
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
    digest: sum over this rank's blocks modulo 2^64
    sources: label → trained tokens, without blocks of padding
    counts: label → kind of event → how often
    ended: whether all lanes of this rank have ended
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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of one tensor of a file. dtype: safetensors' name (F32, BF16, I64 …)."""

    dtype: str
    shape: tuple[int, ...]


# Ordered: file name → tensor name → what it is. Equal on all ranks.
Spec = Mapping[str, Mapping[str, TensorSpec]]


class Piece(NamedTuple):
    """A flat, contiguous range of one tensor that this rank holds: a 1-D view of the memory itself.

    start: in elements of the whole tensor

    Pieces are in the order of the spec.
    """

    name: str
    start: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter; a tied one is listed once.

    trainable: whether it has a gradient
    cast: whether autocast keeps a bf16 copy of it for the backward
    block: number of the repeated block that it is in; None outside of them
    """

    shape: tuple[int, ...]
    trainable: bool
    cast: bool
    block: int | None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan needs to know of a model, in elements.

    head: elements of the output head's matrix, which is the input embedding's if `tied`
    embedding: of the input embedding
    block_class: of the repeated blocks, several joined by commas; None if the model does not name
        them
    attention: Σ over layers of heads × head size (for the arithmetic of attention)
    buffers: persistent and not, in bytes
    recomputes: whether its code supports activation checkpointing
    listed: classes of its blocks, for messages, also if it does not name them
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

    blocks: of all repeated blocks
    once: outside of them (embedding, final norm, ids)
    recomputed: peak of what the backward of the blocks needs besides: gradients, and what is
        recomputed of one block
    casts: bf16 copies of weights, which do not grow with the number of sequences
    """

    blocks: int
    once: int
    recomputed: int
    casts: int


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failed vote.

    kind: the class of the error
    exit_code: what the rank would end with
    errno, file: of an OSError
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
        """0 … world_size − 1."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def gather(self, body: bytes) -> list[bytes]:
        """Return every rank's body at rank 0, in the order of ranks; an empty list elsewhere."""
        ...

    def broadcast(self, body: bytes) -> bytes:
        """Return rank 0's body on every rank; the others' argument is ignored."""
        ...

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Tell all ranks this rank's error and return theirs. Never raises for a rank's error."""
        ...

    def highest(self, value: int) -> int:
        """Return the largest number that any rank gives, on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Flags:
    """What a rank puts into the 0/1 slots of the step's vector."""

    signal: bool = False
    stop_file: bool = False
    stop_after: bool = False
    minutes_due: bool = False
    launcher_lost: bool = False
    save_file: bool = False
    writer_ready: bool = False
    writer_failed: bool = False


# The flags that stop a run, and the names of its stop reasons, the most important first. A lost
# launcher comes before a signal: ranks are reparented one after another, each with a signal.
STOPS = ("launcher_lost", "signal", "stop_file", "stop_after")

# What every rank puts into the step's one reduction, in order; after them one slot for the trained
# tokens of each source. The sum of a 0/1 slot is the number of ranks that set it.
SLOTS = (
    "loss_sum",
    "squares",
    "not_finite",
    "data_failed",
    "digest_0",
    "digest_1",
    "digest_2",
    "digest_3",
    "wait_seconds",
    "signal",
    "stop_file",
    "stop_after",
    "minutes_due",
    "launcher_lost",
    "save_file",
    "writer_ready",
    "writer_failed",
    "padding_only",
    "ended",
)


@dataclass(frozen=True, slots=True)
class StepVector:
    """fp64 (len(SLOTS) + sources,) on the device: one rank's numbers, or their sum over all ranks.

    squares: Σ g² of the gradient elements that this rank counts
    digest_k: the k-th lowest 16 bits of the batch digest (a 64-bit sum would not fit a float)
    wait_seconds: divided by the number of ranks
    padding_only: ranks whose blocks are all padding of ended lanes
    ended: ranks whose data has ended
    """

    data: torch.Tensor

    def __getitem__(self, slot: str) -> torch.Tensor:
        return self.data[SLOTS.index(slot)]

    @property
    def tokens(self) -> torch.Tensor:
        """() trained tokens of the step."""
        return self.data[len(SLOTS) :].sum()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation on held-out data.

    loss: nats per scored token
    bits_per_byte: over the UTF-8 bytes of the scored documents
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the text that follows it."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """One finished step, as all ranks agreed on it (host values; units as in `metrics.jsonl`).

    loss: NaN in a step without a trained token
    padding_only, ended: true for all ranks
    stops: why the run must stop
    save: whether a checkpoint was asked for
    written: whether every rank has finished its part of a checkpoint in the background, or failed
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
    stops: tuple[str, ...] = field(default=())
    save: bool = False
    written: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second of this step, over all ranks."""
        return self.step_tokens / self.seconds if self.seconds > 0 else 0.0
