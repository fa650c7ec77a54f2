"""The state on the host that each step changes: this rank's blocks, and how many are consumed.

begin ──► next_batch ──► (the update) ──► advance        the blocks count as consumed
                                    └───► put_back       data failed: nothing has happened
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from llmtrain.agreement import captured
from llmtrain.batch_size import BatchSize
from llmtrain.data.stream import Stream
from llmtrain.types import NOT_TRAINED, Batch, Cursor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Before:
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
