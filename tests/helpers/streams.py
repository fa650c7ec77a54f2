"""The data side of a run, played without a model: starts, saves, kills and resumes.

run = Run(manifest, place)
run.start(4, steps=5, lost=2)      4 ranks make 7 steps; the last 2 are lost with them
run.start(2, steps=3)              2 ranks go on from the state after step 5
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers import reference_stream

from llmtrain.batch_size import BatchSize
from llmtrain.data.documents.reader import Reading
from llmtrain.data.manifest import DataManifest
from llmtrain.data.state import DataState, contribution, merge_cursors, roll
from llmtrain.data.stream import Stream, open_stream
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.types import Batch

BLOCKS = 12  # of a step


class Row(NamedTuple):
    """A block as it is trained on."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    starts: tuple[int, ...] | None


class Run:
    """What a run was trained on: rows by number of block, digests by step, the state after each."""

    def __init__(
        self,
        manifest: DataManifest,
        place: Path,
        state: DataState | None = None,
        blocks_per_step: int = BLOCKS,
    ) -> None:
        """Begin at `state`. The tokenizer is in `place`."""
        self.manifest = manifest
        self.place = place
        self.blocks_per_step = blocks_per_step
        self.states = [state or DataState.fresh(manifest)]
        self.rows: list[Row] = []
        self.digests: list[int] = []
        self.ranks: list[list[Batch]] = []  # of the last start, by rank

    def start(self, world_size: int, steps: int, *, lost: int = 0, workers: int = 0) -> Run:
        """Ranks that make steps, of which the last `lost` are not saved."""
        with ExitStack() as stack:
            streams = [self.open(rank, world_size, workers, stack) for rank in range(world_size)]
            self.ranks = [[next(s) for _ in range(steps + lost)] for s in streams]
        return self.taken(steps)

    def taken(self, steps: int) -> Run:
        """The first steps of `ranks` count: a save behind each."""
        state = self.states[-1]
        for step in range(steps):
            self.rows += self._dealt([batches[step] for batches in self.ranks], state.next_block)
            self.digests.append(sum(batches[step].digest for batches in self.ranks) % 2**64)
            self.states.append(self._saved(state, step))
        return self

    def open(self, rank: int, world_size: int, workers: int, stack: ExitStack) -> Stream:
        """One rank's stream from the newest state on."""
        state = self.states[-1]
        stream = open_stream(
            self.manifest,
            self.place / "tokenizer",
            batch=BatchSize.constant(self.blocks_per_step),
            rank=rank,
            world_size=world_size,
            workers=workers,
            next_block=state.next_block,
            cursors=state.cursors,
            reading=Reading(60),
        )
        return stack.enter_context(closing(stream))

    def resumed(self, step: int) -> Run:
        """A run that goes on from what was written after `step`."""
        state = replace(self.states[step], cursors=self.states[step].cursors.copy())
        return Run(self.manifest, self.place, state, self.blocks_per_step)

    def after(self, step: int, steps: int | None = None) -> list[Row]:
        """The rows of the steps behind `step`."""
        end = None if steps is None else (step + steps) * self.blocks_per_step
        return self.rows[step * self.blocks_per_step : end]

    def first_step_in(self, epoch: int) -> int:
        """The first step after which all lanes of the first source are in this epoch."""
        return next(
            step
            for step, state in enumerate(self.states)
            if (state.cursors[:, 0, 0] == epoch).all()
        )

    def _dealt(self, batches: list[Batch], first_block: int) -> list[Row]:
        """The rows of a step in order of their numbers. first_block: of this start."""
        rows = [iter(rows_of(batch)) for batch in batches]
        first = batches[0].first_block
        numbers = range(first - first_block, first - first_block + self.blocks_per_step)
        return [next(rows[number % len(batches)]) for number in numbers]

    def _saved(self, old: DataState, step: int) -> DataState:
        """The state after a step of the last start, as it comes back from a checkpoint."""
        first, world_size = old.next_block, len(self.ranks)
        span = {"first_block": first, "next_block": first + (step + 1) * self.blocks_per_step}
        parts = []
        for rank, batches in enumerate(self.ranks):
            consumed = {}
            for batch in batches[: step + 1]:
                consumed |= batch.cursors
            here = {"rank": rank, "world_size": world_size}
            parts.append(contribution(consumed, old.cursors.shape[:2], **span, **here))
        cursors = merge_cursors(old.cursors, parts, **span)
        digest = roll(self.states[-1].stream_digest, self.digests[-1])
        moved = {"cursors": cursors, "stream_digest": digest, "counts": {}}
        state = replace(old, next_block=span["next_block"], **moved)
        return DataState.from_json(json.loads(json.dumps(state.to_json())))


def rows_of(batch: Batch) -> list[Row]:
    """The rows of one rank."""
    starts = [None if batch.starts is None else tuple(s.tolist()) for s in batch.starts or ()]
    return [
        Row(tuple(ids), tuple(labels), starts[index] if starts else None)
        for index, (ids, labels) in enumerate(
            zip(batch.ids.tolist(), batch.labels.tolist(), strict=True)
        )
    ]


def lane_documents(
    manifest: DataManifest, tokenizer: Tokenizer, rows: list[Row]
) -> list[list[str]]:
    """Of each lane the documents in the order trained on, without the last, which may be cut.

    rows: from block 0 on, `concat`, one source.
    """
    found = []
    for lane in range(manifest.lanes):
        mine = rows[lane :: manifest.lanes]
        tokens = np.array([row.ids[:-1] for row in mine], np.int32).ravel()
        pieces = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos) + 1)
        found.append([tokenizer.decode(piece[:-1]) for piece in pieces[:-1]])
    return found


def whole_epochs(manifest: DataManifest, lanes: list[list[str]]) -> list[list[list[str]]]:
    """[epoch][lane] the documents, of the epochs that all lanes have behind them."""
    taken, epochs = [0] * manifest.lanes, []
    while True:
        epoch = len(epochs)
        counts = [
            len(list(reference_stream.lane_documents(manifest, 0, lane, epoch)))
            for lane in range(manifest.lanes)
        ]
        ends = [start + count for start, count in zip(taken, counts, strict=True)]
        if any(end > len(lane) for end, lane in zip(ends, lanes, strict=True)):
            return epochs
        epochs.append([lane[a:b] for lane, a, b in zip(lanes, taken, ends, strict=True)])
        taken = ends


def named(texts: list[str]) -> list[int]:
    """The numbers of the articles that begin in these texts, in order."""
    return [int(number) for text in texts for number in re.findall(r"Article (\d+)\n", text)]
