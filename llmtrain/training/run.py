"""An open run: the values that the loop works with, as its start made them and passed them on.

What is done with a run (`update`, `evaluate`, `save`, `finish`) is a function that takes it, in a
module that imports this one; this module imports none of them. `start/open.py` makes the run. Its
parts are the processes, the data, the model, how checkpoints are written, and the checkpoint in
flight between two boundaries.

Each step changes one of them, this rank's blocks and how many are consumed:

    begin ──► next_batch ──► (the update) ──► advance        the blocks count as consumed
                                        └───► put_back       data failed: nothing has happened
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from llmtrain.agreement import captured
from llmtrain.batch_size import BatchSize
from llmtrain.checkpoint.background import Writer
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.checkpoint.write import OpenSave
from llmtrain.config.binding import Bound
from llmtrain.config.schema import Answers, CheckpointConfig, Config
from llmtrain.data.documents.reader import Reading
from llmtrain.data.heldout import HeldOut
from llmtrain.data.manifest import DataManifest
from llmtrain.data.state import DataState
from llmtrain.data.stream import Stream
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.engine import Engine
from llmtrain.distributed.plan.memory import Hardware, Layout, MemoryPlan
from llmtrain.metrics.meter import Meter
from llmtrain.model.base import Base
from llmtrain.model.loss import LossModule
from llmtrain.rundir.reference import Column
from llmtrain.rundir.status import FrozenChoices
from llmtrain.system import CpuCount
from llmtrain.training.due import Due
from llmtrain.training.guards import Guards
from llmtrain.training.journal import Journal, RunLog
from llmtrain.training.stop import Requests, Signals
from llmtrain.types import (
    NOT_TRAINED,
    Batch,
    Compiled,
    Cursor,
    JsonObject,
    ModelShape,
    RankLayout,
    Ranks,
    Spec,
)

_log = logging.getLogger(__name__)


class Before(NamedTuple):
    """The state on the host before `step`."""

    step: int
    cursors: dict[int, tuple[Cursor, ...]]
    counts: dict[str, Counter[str]]


@dataclass(slots=True)
class Feed:
    """The blocks of one start of a run.

    step: number of finished steps
    batch: how many blocks a step has
    data_size: number of ranks with other blocks
    seq_len: trained positions of a block
    cursors: lane → the cursors of all sources, for lanes that this start has trained on
    counts: source → event → how often it happened in this start
    error: why the stream of this rank failed; None if it did not
    before: the states before the last two steps that began
    """

    stream: Stream
    step: int
    batch: BatchSize
    data_size: int
    seq_len: int
    cursors: dict[int, tuple[Cursor, ...]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    error: Exception | None = None
    before: deque[Before] = field(default_factory=lambda: deque(maxlen=2))

    def begin(self, step: int) -> None:
        """Keep the state to restore if the data of `step` fails."""
        self.before.append(Before(step, self.cursors, self.counts))

    def next_batch(self) -> Batch:
        """Return this rank's blocks of the next step.

        If the stream fails, the other ranks are already in the step and must not be left waiting.
        So from then on this rank returns padding, and its vector reports that its data failed.
        """
        if self.error is None:
            outcome = captured(lambda: next(self.stream))
            if outcome.error is None:
                return outcome.result()
            self.error = outcome.error  # all ranks vote on it in `end_without_data`
            _log.warning("the data of this rank failed", exc_info=outcome.error)
        rows = self.batch.of(self.before[-1].step) // self.data_size
        ids = np.zeros((rows, self.seq_len + 1), dtype=np.int32)
        labels = np.full((rows, self.seq_len), NOT_TRAINED, dtype=np.int64)
        return Batch(ids, labels, 0, None, {}, 0, 0, {}, {}, 0.0)

    def advance(self, step: int, batch: Batch) -> None:
        """Count the blocks of a finished step as consumed.

        The dicts are replaced, not changed: `before` has the earlier ones.
        """
        self.step = step
        self.cursors = {**self.cursors, **batch.cursors}
        for label, met in batch.counts.items():
            counted = Counter(self.counts.get(label, {}))
            counted.update(met)
            self.counts = {**self.counts, label: counted}

    def put_back(self, step: int) -> None:
        """Restore the state before `step`, whose data failed.

        Neither this step nor the next was applied: their vectors reported failed data, so weights,
        moments and counted tokens did not change.
        """
        before = next(one for one in self.before if one.step == step)
        self.step = step - 1
        self.cursors, self.counts = before.cursors, before.counts


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a start.

    memory: None if it could not be planned
    reason: why this layout was chosen
    decided_again: whether the values that an earlier start of this kind froze no longer fit
    """

    layout: Layout
    shape: ModelShape
    hardware: Hardware
    memory: MemoryPlan | None
    reason: str
    decided_again: bool = False

    def to_json(self) -> JsonObject:
        """Return the plan in the form of the `start` line."""
        parts = dict(self.memory.parts) if self.memory else None
        total = self.memory.total_bytes if self.memory else None
        memory = {"reason": self.reason, "parts": parts, "total_bytes": total}
        return {**asdict(self.layout), **memory, "device_bytes": self.hardware.device_bytes}


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this start, and the values frozen for them.

    base: the weights that the run begins with; None = random ones
    decided_again: whether values were chosen again, because no earlier start was of the same kind
        (strategy, device type, number of processes) or because what one froze no longer fits
    precision, why_precision: of the run, bf16 or fp32, and the reason
    threads_before: those that earlier launches of this kind had; None = there was none
    """

    bound: Bound
    launched: Launched
    planned: Planned
    base: Base | None
    run_id: str
    auto: FrozenChoices
    versions: dict[str, str]
    decided_again: bool
    precision: str
    why_precision: str
    threads: CpuCount
    threads_before: int | None


@dataclass(frozen=True, slots=True)
class DataSide:
    """The data, opened at the position of the checkpoint.

    reading: how units are read while the run is opened, which a request to stop ends
    heldout: None = nothing is held out
    changed: parts of the fingerprint that differ from the checkpoint's, all of them accepted
    ended: whether no block is left to train on
    answers: what the sources have, if they are pairs of answers; None = they are not
    reference: what the pairs were worth to the weights that the run began with; None = there are no
        pairs, or the loss has no reference
    """

    manifest: DataManifest
    encoder: DocumentEncoder
    reading: Reading
    heldout: HeldOut | None
    stream: Stream
    state: DataState
    changed: tuple[str, ...]
    ended: bool
    answers: Answers | None
    reference: Column | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, which knows no control tokens in texts."""
        return self.encoder.tokenizer


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The model, and the module that is prepared for its strategy.

    loss: the module around `model` that computes the loss; `prepared` is it, or is around it
    spec: the tensors of its checkpoints
    held_before: bytes in use on the device, on a CPU by the process, before there was a model
    adapter: the files beside an adapter's tensors, by name; {} if all weights are trained
    compiled: what of the model torch compiles
    hiding: the attention that hides documents from each other, or `documents.JOINED`; None = there
        is nothing to hide
    """

    model: PreTrainedModel
    loss: LossModule
    prepared: nn.Module
    spec: Spec
    micro_batch_size: int
    held_before: int
    adapter: Mapping[str, bytes]
    compiled: Compiled = "off"
    hiding: str | None = None


# The error if this rank could not write its part, else None; and what it wrote.
Written = tuple[BaseException | None, Extents]


@dataclass(frozen=True, slots=True)
class Flight:
    """A checkpoint between begin and commit.

    cursors: the line for `cursors.jsonl`, at rank 0
    last: whether this start makes no step after it
    blocked: seconds for which training has waited so far, without those that the writer counts
    written: the result if it was written in line; None if the background writer writes it
    """

    step: int
    reason: str
    begun: OpenSave
    cursors: bytes
    last: bool
    blocked: float
    written: Written | None


@dataclass(slots=True)
class Saves:
    """How this start writes checkpoints, and the checkpoint in flight.

    policy: the section that names the checkpoints to keep
    writer: the background writer; None if checkpoints are written in line
    rank0_writes: whether ranks send their parts to rank 0; with collectives, so in line
    replicas_shared: whether the ranks divide the writing of what all of them have copies of
    flight: the checkpoint in flight
    kept: names of the checkpoints that existed after the last retention (rank 0)
    failed_in_a_row: number of saves in a row that failed
    has_room: whether each host was found to have the memory for the copies
    grace_told: whether the warning that a launcher may not wait for a save was given
    """

    policy: CheckpointConfig
    writer: Writer | None
    rank0_writes: bool
    replicas_shared: bool
    flight: Flight | None = None
    kept: set[str] = field(default_factory=set)
    failed_in_a_row: int = 0
    has_room: bool = False
    grace_told: bool = False

    def wait_snapshot(self) -> None:
        """Wait until the writer has copied the weights and moments, so that they may change."""
        if self.writer is not None:
            self.writer.wait_snapshot()

    def flags(self) -> dict[str, bool]:
        """Return what this rank's writer reports in the step's vector."""
        state = self.writer.state if self.writer and self.flight else "idle"
        return {"writer_ready": state == "ready", "writer_failed": state == "failed"}


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a run.

    found: the checkpoint that it resumes from, None in a new run
    built: the model
    feed: the state on the host that each step changes, such as the number of finished steps
    checkpoints: how it saves, and the checkpoint in flight
    """

    config: Config
    found: ResumePoint | None
    processes: Processes
    data: DataSide
    built: ModelSide
    feed: Feed
    meter: Meter
    journal: Journal
    log: RunLog
    guards: Guards
    due: Due
    signals: Signals
    requests: Requests
    checkpoints: Saves

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.feed.step

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.config.total_steps

    @property
    def max_grad_norm(self) -> float | None:
        """The largest gradient norm: larger gradients are scaled down to it. None = no limit."""
        return self.config.training.max_grad_norm

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.config.run_dir

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.processes.launched.device

    @property
    def ranks(self) -> Ranks:
        """The communication with the other processes."""
        return self.processes.launched.ranks

    @property
    def layout(self) -> RankLayout:
        """The place of this process among the others."""
        return self.processes.launched.layout

    @property
    def engine(self) -> Engine:
        """The engine of the strategy."""
        return self.processes.launched.engine

    @property
    def model(self) -> nn.Module:
        """The module whose forward is called."""
        return self.built.prepared
