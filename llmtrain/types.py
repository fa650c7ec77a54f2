"""The values that cross rooms. Plain data; foreign types stand only in annotations."""

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

    unit counts this lane's units of `epoch`, row the rows of that unit, offset the tokens of that
    document.
    """

    epoch: int
    unit: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's blocks of one step, on the host.

    ids (n, S + 1) int32 · labels (n, S) int64, −100 = not trained · starts: for each block, where
    its documents begin in ids[:-1] (int32, the first is 0, padding is a document of its own); None
    where documents may see each other · cursors: lane → the cursors of all sources after that
    lane's last block of this step · digest: sum over this rank's blocks modulo 2^64 · sources:
    label → trained tokens, of blocks that are no padding · counts: label → what was met → how often
    · ended: all lanes of this rank have come to their end.
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
    """One tensor of a file: dtype as safetensors names it (F32, BF16, I64 …)."""

    dtype: str
    shape: tuple[int, ...]


# Ordered: file name → tensor name → what it is. Equal on all ranks.
Spec = Mapping[str, Mapping[str, TensorSpec]]


class Piece(NamedTuple):
    """A flat, contiguous range of one tensor that this rank holds: a 1-D view of the memory itself.

    start is counted in elements of the whole tensor. Pieces come in the order of the spec.
    """

    name: str
    start: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter, a tied one once. cast: autocast keeps a bf16 copy of it for the backward.

    block: number of the repeated block that it is in, None outside of them.
    """

    shape: tuple[int, ...]
    trainable: bool
    cast: bool
    block: int | None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan needs to know of a model, in elements.

    head: elements of the output head's matrix, which is the input embedding's where `tied` ·
    embedding: of the input embedding · buffers: persistent and not, in bytes · attention: Σ over
    layers of heads × head size (for the arithmetic of attention) · block_class: of the repeated
    blocks, several joined by commas, None where the model does not name them · listed: theirs all
    the same, for those who name them · recomputes: its code supports activation checkpointing.
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
        """All parameters."""
        return sum(math.prod(one.shape) for one in self.parameters)

    @property
    def trainable(self) -> int:
        """Those with gradients."""
        return sum(math.prod(one.shape) for one in self.parameters if one.trainable)


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that the forward of one sequence keeps for its backward, without head and loss.

    blocks: all repeated blocks together · once: outside of them (embedding, final norm, ids) ·
    recomputed: what the backward of the blocks holds besides, at its most: gradients, and what of
    one block is computed again · casts: bf16 copies of weights, which do not grow with the number
    of sequences.
    """

    blocks: int
    once: int
    recomputed: int
    casts: int


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failed vote. exit_code: what the rank would end with."""

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
    """What all ranks answered: failures on every rank, bodies (one a rank) only at rank 0."""

    failures: tuple[Failure, ...]
    bodies: tuple[bytes, ...] = ()


class Ranks(Protocol):
    """The processes of a run, talking over the control group (gloo). Every call is collective."""

    @property
    def rank(self) -> int:
        """0 … world_size − 1."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def gather(self, body: bytes) -> list[bytes]:
        """Every rank's body at rank 0, in the order of ranks; an empty list elsewhere."""
        ...

    def broadcast(self, body: bytes) -> bytes:
        """Rank 0's body on every rank (the others' argument is not looked at)."""
        ...

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Say whether this rank failed, and learn who did. Never raises for a rank's error."""
        ...

    def highest(self, value: int) -> int:
        """Return the largest number that any rank gives, on every rank."""
        ...


class Alone:
    """`Ranks` of a single process."""

    rank = 0
    world_size = 1

    def gather(self, body: bytes) -> list[bytes]:
        """The only body."""
        return [body]

    def broadcast(self, body: bytes) -> bytes:
        """The only body."""
        return body

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """The only vote."""
        return Vote(() if error is None else (failure(0, error),), (body,))

    def highest(self, value: int) -> int:
        """The only number."""
        return value


def failure(rank: int, error: BaseException) -> Failure:
    """An exception as a failed vote."""
    number = error.errno if isinstance(error, OSError) else None
    file = str(error.filename) if isinstance(error, OSError) and error.filename else None
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    code = getattr(error, "exit_code", 1)  # of UserError and RunError, which stand beside this file
    return Failure(rank, type(error).__name__, text, code, number, file)


@dataclass(frozen=True, slots=True)
class Flags:
    """What a rank says in the 0/1 slots of the step's vector."""

    signal: bool = False
    stop_file: bool = False
    stop_after: bool = False
    minutes_due: bool = False
    lost_launcher: bool = False
    save_file: bool = False
    writer_ready: bool = False
    writer_failed: bool = False


# What every rank puts into the step's one reduction, in order; behind them one slot for the trained
# tokens of each source. A 0/1 slot counts the ranks that say so: a sum cannot carry reasons.
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
    "lost_launcher",
    "save_file",
    "writer_ready",
    "writer_failed",
    "padding_only",
    "ended",
)


@dataclass(frozen=True, slots=True)
class StepVector:
    """fp64 (len(SLOTS) + sources,) on the device: one rank's numbers, or their sum over all ranks.

    squares: Σ g² of the gradient elements that this rank counts · digest_k: the k-th lowest 16
    bits of the batch digest (a 64-bit sum would not fit a float) · wait_seconds: divided by W ·
    padding_only: ranks that had no block but padding of ended lanes · ended: whose data is over.
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
    """loss: nats per scored token · bits_per_byte over the UTF-8 bytes of the scored documents."""

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

    padding_only, ended: of all ranks. A step without a trained token has no loss: it is NaN.
    stops: why the run shall stop · save: a checkpoint was asked for · written: every rank is
    through with its part of the one that is written in the background, well or not.
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
