"""A run while it is open: what the loop works with, how it is put together and how it ends.

The stages of a start stand in `opening.py` and `data_side.py`, its ends in `ending.py`; here they
follow each other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain import faults
from llmtrain.checkpoint.read import Found
from llmtrain.config.schema import Config
from llmtrain.data.state import roll
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.engine import Engine
from llmtrain.distributed.ranks import (
    ControlGroup,
    sum_over_ranks,
)
from llmtrain.metrics.logfile import LogFile
from llmtrain.metrics.meter import DataFailedError, Meter
from llmtrain.model.attention import backend
from llmtrain.model.documents import document_tensors, on
from llmtrain.rundir import failures
from llmtrain.training import saving
from llmtrain.training.ending import (
    Result,
    asked_to_stop,
    end_without_data,
    heed_a_stop,
    recorded,
    stoppable,
    stopped_alone,
    tell_of_documents,
)
from llmtrain.training.run import rng
from llmtrain.training.run.due import Due, agreed_stop
from llmtrain.training.run.guards import Guards
from llmtrain.training.run.journal import Expected, Journal, RunLog
from llmtrain.training.run_state import documents_met
from llmtrain.training.schedule import learning_rate_factor
from llmtrain.training.start import data as data_side
from llmtrain.training.start import processes as opening
from llmtrain.training.start import resuming
from llmtrain.training.start.announce import announce, tell_what_changed
from llmtrain.training.start.claim import Auto, Place, claim
from llmtrain.training.start.data import DataSide
from llmtrain.training.start.planning import Planned
from llmtrain.training.start.processes import ModelSide, Processes
from llmtrain.training.stop import signals as stop
from llmtrain.training.stop.requests import Requests
from llmtrain.training.watchdog import watching
from llmtrain.types import Batch, Cursor, Flags, Spec, StepVector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# A batch queue kills some 30 s after its signal; a network that is away may be waited for longer.
_PATIENCE_SECONDS = 10.0
_COMPARE_AFTER = 3  # steps: by then the optimizer has run and everything was allocated once
_OPENING_SECONDS = 1.0  # before the first step there is nothing that more patience would save


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What a step changes on the host, as it was in front of `step`."""

    step: int
    cursors: dict[int, tuple[Cursor, ...]]
    counts: dict[str, Counter[str]]
    rng: rng.States


@dataclass(slots=True)
class Run:
    """What the loop works with. `step` counts finished steps; the rest is set once."""

    config: Config
    run_dir: Path
    run_id: str
    strategy: str
    device: torch.device
    ranks: ControlGroup
    engine: Engine
    model: nn.Module
    unwrapped: PreTrainedModel
    spec: Spec
    data: DataSide
    planned: Planned
    micro_batch_size: int
    meter: Meter
    journal: Journal
    log: RunLog
    guards: Guards
    due: Due
    signals: stop.Signals
    auto: Auto
    versions: dict[str, str]
    resumed_from: str | None
    first_step: int
    step: int
    full_step: Tensor  # () fp32: trained tokens of a step whose blocks are all full
    requests: Requests
    checkpoints: saving.Saves
    cursors: dict[int, tuple[Cursor, ...]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    data_error: Exception | None = None
    before: deque[Before] = field(default_factory=lambda: deque(maxlen=2))

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return opening.total_steps(self.config)

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients are scaled down to it."""
        return self.config.training.max_grad_norm

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the sources."""
        return self.data.manifest.labels

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on one rank."""
        share = self.config.training.global_batch_size // self.ranks.world_size
        return share // self.micro_batch_size

    @property
    def data_failed(self) -> bool:
        """Whether this rank's stream is broken."""
        return self.data_error is not None

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints lie."""
        return self.run_dir / "checkpoints"

    def begin(self, step: int) -> None:
        """Start the clock of a step, and keep the state to return to if its data fails."""
        faults.hit("loop.step", step=step)
        counts = {label: Counter(met) for label, met in self.counts.items()}
        state = Before(step, dict(self.cursors), counts, rng.capture(self.device))
        self.before.append(state)
        self.meter.begin(step)
        self.signals.begin()

    def next_batch(self) -> Batch:
        """This rank's blocks of the next step.

        A stream that fails cannot say so to peers that are already in the step. It is not asked
        again: from then on this rank hands out padding, and its vector says that its data failed.
        """
        if self.data_error is None:
            try:
                return next(self.data.stream)
            except Exception as error:  # voted on when the step's vector arrives, see open_run
                self.data_error = error
                _log.warning("the data of this rank failed", exc_info=True)
        return self._padding()

    def _padding(self) -> Batch:
        rows = self.config.training.global_batch_size // self.ranks.world_size
        seq_len = self.config.data.seq_len
        ids = np.zeros((rows, seq_len + 1), dtype=np.int32)
        labels = np.full((rows, seq_len), -100, dtype=np.int64)
        return Batch(ids, labels, 0, None, {}, 0, 0, {}, {}, 0.0)

    def trained_tokens(self, batch: Batch) -> Tensor:
        """() fp32 on the device: trained tokens of the step over all ranks."""
        if self.data.manifest.always_full:
            return self.full_step
        mine = torch.tensor(float(batch.trained_tokens), device=self.device)
        return sum_over_ranks(mine)

    def micro_batches(self, batch: Batch) -> list[dict[str, Any]]:
        """The step's forwards: keywords of `LossModule.forward`, tensors on the device."""
        ids = on(self.device, batch.ids[:, :-1].astype(np.int64))
        labels = on(self.device, batch.labels)
        size = self.micro_batch_size
        parts = [slice(first, first + size) for first in range(0, len(ids), size)]
        rows = [{"input_ids": ids[part], "labels": labels[part]} for part in parts]
        if batch.starts is None:  # documents see each other
            return rows
        return [
            row | self.documents(batch.starts[part]) for row, part in zip(rows, parts, strict=True)
        ]

    def documents(self, starts: Sequence[np.ndarray]) -> dict[str, Any]:
        """What hides the documents of a micro-batch from each other. starts: as in `Batch`."""
        return document_tensors(
            starts, self.config.data.seq_len, backend(self.unwrapped), self.device
        )

    def sum(self, vector: StepVector) -> StepVector:
        """The step's reduction."""
        return StepVector(sum_over_ranks(vector.data))

    def flags(self) -> Flags:
        """What this rank has to say to the others."""
        return replace(self.requests.flags(self.signals.reason), **self.checkpoints.flags())

    def advance(self, step: int, batch: Batch) -> None:
        """A step is done: its blocks count as consumed."""
        self.step = step
        self.cursors.update(batch.cursors)
        for label, met in batch.counts.items():
            self.counts.setdefault(label, Counter()).update(met)

    def put_back(self, step: int) -> None:
        """The state in front of `step`: neither it nor the one behind it was applied.

        Their vectors said that data failed, so weights, moments and counted tokens are untouched.
        """
        before = next(one for one in self.before if one.step == step)
        self.step = self.journal.step = step - 1
        self.cursors, self.counts = before.cursors, before.counts
        rng.restore(before.rng, self.device)

    def save(self, step: int) -> None:
        """Complete the checkpoint in flight, then save the state after `step` if that is due."""
        saving.commit(self)
        if self.due.begins(step):
            saving.begin(self, step, self.due.reason(step), last=self.due.stop(step))

    def finish(self) -> Result:
        """The end line and the last status."""
        finished = self.due.finished(self.step)
        state = "finished" if finished else "stopped"
        ended = "data_ended" if self.due.data_ended else None
        reason = ended if finished else self.due.stop_reason
        for label, met in documents_met(self).items():
            tell_of_documents(self.journal, self.step, label, met)
        self.requests.stopped()
        self.journal.end(state, 0, reason)
        _log.info("%s at step %d%s", state, self.step, f" ({reason})" if reason else "")
        return Result(self.run_dir, state, 0, reason, self.step)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Open everything, resume the state, and close it all behind the loop.

    Raises UserError or RunError, the same on all ranks where they can still talk; `status.json`
    then says so.
    """
    started = time.perf_counter()
    rank = int(os.environ.get("RANK", "0"))  # until there is a group, the environment's
    with ExitStack() as stack:
        signals = stop.install()
        logfile = stack.enter_context(closing(LogFile(rank)))
        place = stack.enter_context(_claim(config)) if rank == 0 else None
        run_dir = opening.run_directory(config)
        if place is None:  # rank 0 has its own removed with the lock held
            failures.clear(run_dir, rank, int(os.environ["WORLD_SIZE"]))
        signals.before_exit = partial(failures.write, run_dir, rank)
        journal = stack.enter_context(
            closing(Journal(run_dir, rank, place.lock if place else None))
        )
        watchdog = stack.enter_context(watching(journal, config.distributed.timeout_minutes))
        if place is not None:
            journal.step = place.step
            logfile.open(run_dir)
            stack.enter_context(signals.stacks_in(logfile.descriptor))
            logfile.show(journal.note)
        with recorded(journal, failures.digest(config)):
            alone = signals.alone(partial(stopped_alone, journal))
            processes = opening.start_processes(config, place, alone, stack)
            if place is None:
                logfile.open(run_dir)
                stack.enter_context(signals.stacks_in(logfile.descriptor))
            ranks = processes.launched.ranks
            asked = partial(asked_to_stop, signals)
            with stoppable(ranks, signals, journal):
                run_id = processes.run_id
                found = resuming.find_checkpoint(config, ranks, run_id, place, journal, asked)
            stopping = threading.Event()
            signals.cut_short(_OPENING_SECONDS, stopping.set)
            heed_a_stop(ranks, signals, journal)
            revision = opening.base_revision(config, processes, found)
            with stoppable(ranks, signals, journal):
                data = data_side.open_data(config, processes, found, revision, stack, stopping)
                config = data_side.with_steps(config, processes, data, found, stopping)
            signals.cut_short(_PATIENCE_SECONDS, data.stream.interrupt)
            journal.expect(opening.total_steps(config))
            heed_a_stop(ranks, signals, journal)
            model = opening.build_model(config, processes, found, revision)
            heed_a_stop(ranks, signals, journal)
            with stoppable(ranks, signals, journal):
                same = not found or resuming.fill_state(config, processes, model, found, asked)
            run = _assemble(config, processes, found, data, model, journal, signals)
            watchdog.follow(run.guards.median_seconds)
            announce(run, time.perf_counter() - started)
            tell_what_changed(run, place, processes, found, same_randomness=same)
            run.due.ask(agreed_stop(ranks, run.flags()))
            try:
                yield run
            except DataFailedError as failed:  # all ranks are here
                end_without_data(run, failed.step)
                raise


def _claim(config: Config) -> AbstractContextManager[Place]:
    asked = config.distributed.strategy
    strategy = None if asked == "auto" else asked  # chosen later, see `plan_start`
    return claim(config, int(os.environ.get("WORLD_SIZE", "1")), strategy)


def _assemble(
    config: Config,
    processes: Processes,
    found: Found | None,
    data: DataSide,
    model: ModelSide,
    journal: Journal,
    signals: stop.Signals,
) -> Run:
    saved = found.state if found else {}
    first = found.step if found else 0
    evaluation = saved.get("evaluation")
    launched = processes.launched
    due = Due(
        config,
        first,
        evaluation["step"] if evaluation else None,
        heldout=data.heldout is not None,
        ended=data.ended,
    )
    return Run(
        config=config,
        run_dir=journal.run_dir,
        run_id=processes.run_id,
        strategy=launched.strategy,
        device=launched.device,
        ranks=launched.ranks,
        engine=launched.engine,
        model=model.prepared,
        unwrapped=model.bare,
        spec=model.spec,
        planned=processes.planned,
        micro_batch_size=model.micro_batch_size,
        data=data,
        meter=_meter(config, launched, data, saved.get("sources", {})),
        journal=journal,
        log=RunLog(journal, due, launched.device, evaluation, _expected(processes, model, first)),
        guards=Guards(config.training, saved.get("skipped_in_a_row", 0), journal.event),
        due=due,
        signals=signals,
        auto=processes.auto,
        versions=processes.versions,
        resumed_from=found.name if found else None,
        first_step=first,
        step=first,
        full_step=torch.tensor(
            float(config.training.global_batch_size * config.data.seq_len), device=launched.device
        ),
        requests=Requests(journal.run_dir, config.checkpoint, launched.ranks.rank, signals.started),
        checkpoints=saving.opened(config, launched, journal.run_dir),
    )


def _expected(processes: Processes, model: ModelSide, first: int) -> Expected:
    plan = processes.planned.memory
    planned = plan.total_bytes - plan.parts["reserve"] if plan else None
    return Expected(planned, model.held_before, first + _COMPARE_AFTER)


def _meter(config: Config, launched: Launched, data: DataSide, sources: dict[str, int]) -> Meter:
    def learning_rate(step: int) -> float:
        factor = learning_rate_factor(config.optimizer, opening.total_steps(config), step)
        return config.optimizer.learning_rate * factor

    digest = data.state.stream_digest
    labels = data.manifest.labels
    return Meter(
        launched.device,
        labels,
        learning_rate,
        roll,
        world_size=launched.ranks.world_size,
        sources=sources,
        stream_digest=digest,
    )
