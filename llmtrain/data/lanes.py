"""A lane: one of L small deterministic machines that the blocks are dealt from.

    epoch e:  U = order of all units;  lane l walks U[(l + rotation) mod L :: L]
    unit u:   its rows in an order of their own;  a document's tokens go to the packer

Where a lane's list of units ends, this lane goes on to epoch e + 1; the others are not asked. Its
whole state is one cursor a source. The trap: lanes share nothing but memory of decoded units, so
that the blocks of one never depend on which others this process has opened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from llmtrain.data.manifest import Manifest
from llmtrain.data.mixing import shares, source_of
from llmtrain.data.packing import Document, Packed, Span, concat
from llmtrain.data.readers import Reader
from llmtrain.data.rows import Rows
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

FEW_UNITS = 768
START = Cursor(0, 0, 0, 0)
MAX_AHEAD = 64  # documents that are tokenized in one call
MAX_AHEAD_CHARACTERS = 1 << 18
EMPTY_EPOCHS = 64  # times the lanes: so long a lane may find no document


def default_lanes(processes: int, units: int) -> int:
    """L of a fresh run: by the data, so that other numbers of processes see the same batches.

    processes: ranks × data workers (at least 1 each) · units: before slicing, over all sources.
    """
    return math.lcm(24 if units < FEW_UNITS else 48, processes)


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    ids, starts, trained, spans: as in `Packed` · source: −1 = padding, its lane has ended · counts:
    dropped (null, empty, blank), replaced (invalid UTF-8) and held-out documents met, and skipped
    units and lines · cursors: its lane's of all sources, behind this block.
    """

    ids: np.ndarray
    starts: np.ndarray
    trained: np.ndarray | None
    spans: tuple[Span, ...]
    source: int
    counts: Mapping[str, int]
    cursors: tuple[Cursor, ...]


class Lane:
    """Lane `index`, to be asked for its blocks one after the other.

    next_block: number (over all lanes) of the block that comes next · cursors: one a source, of
    where that block would begin.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        reader: Reader,
        index: int,
        next_block: int,
        cursors: Sequence[Cursor],
    ) -> None:
        assert next_block % manifest.lanes == index
        self.next_block = next_block
        self.cursors = tuple(cursors)
        self._parts = (manifest, tokenizer, reader)
        self._index = index
        self._shares = shares(manifest.weights)
        self._packers: dict[int, Iterator[Packed]] = {}

    def take(self) -> Block:
        """Block `next_block`. Raises UserError for bad data, RunError if it cannot be read."""
        k = source_of(self.next_block, self._shares)
        if k not in self._packers:
            self._packers[k] = self._open(k)
        packed = next(self._packers[k])
        self.cursors = (*self.cursors[:k], packed.cursor, *self.cursors[k + 1 :])
        self.next_block += self._parts[0].lanes
        return Block(*packed[:4], k, dict(packed.counts), self.cursors)

    def _open(self, k: int) -> Iterator[Packed]:
        cursor = self.cursors[k]
        documents = walk(*self._parts, k, self._index, cursor)
        return concat(documents, self._parts[0].seq_len, cursor.offset)


def walk(
    manifest: Manifest, tokenizer: Tokenizer, reader: Reader, k: int, lane: int, cursor: Cursor
) -> Iterator[Document]:
    """A lane's training documents of source k for ever, tokenized a few at a time.

    The first is the one that `cursor` names: it was counted before, unless nothing was read yet.
    First one, then two, four …: opening a lane is cheap, and going on is fast.
    """
    texts = _texts(manifest, reader, k, lane, cursor)
    ahead = 1
    known = cursor != START
    while True:
        batch: list[Text] = []
        characters = 0
        while len(batch) < ahead and characters < MAX_AHEAD_CHARACTERS:
            batch.append(next(texts))
            characters += len(batch[-1].text)
        for text, ids in zip(batch, tokenizer.documents([t.text for t in batch]), strict=True):
            if known:
                _still_there(ids, cursor)
            counts = Counter[str]() if known else text.counts
            known = False
            yield Document(text.epoch, text.unit, text.row, ids, counts)
        ahead = min(2 * ahead, MAX_AHEAD)


class Text(NamedTuple):
    """A training document before it is tokenized (places and counts as in `Document`)."""

    epoch: int
    unit: int
    row: int
    text: str
    counts: Counter[str]


def _texts(manifest: Manifest, reader: Reader, k: int, lane: int, cursor: Cursor) -> Iterator[Text]:
    source = manifest.sources[k]
    last_epoch = cursor.epoch
    counts: Counter[str] = Counter()
    for epoch, position, rows, heldout in _units(manifest, reader, k, lane, cursor):
        if epoch - last_epoch > EMPTY_EPOCHS * manifest.lanes:
            raise _no_documents(source.label, lane)
        first = cursor.row if (epoch, position) == cursor[:2] else 0
        if rows.skipped:
            counts["skipped"] += rows.skipped
        for row in range(first, len(rows)):
            text, replaced = rows.text(row)
            if text is None:
                counts["dropped"] += 1
            elif heldout and rows.hash(row, manifest.seed) < source.threshold:
                counts["heldout"] += 1
            else:
                counts["replaced"] += replaced
                last_epoch = epoch
                yield Text(epoch, position, row, text, +counts)
                counts.clear()


def units_of(source_units: int, seed: int, k: int, epoch: int, lane: int, lanes: int) -> np.ndarray:
    """The units of source k that a lane walks in an epoch, in order: indices (n,).

    The rotation gives the surplus of an uneven deal to other lanes in every epoch.
    """
    order = _order(source_units, mix(seed, 1, k, epoch))
    return order[(lane + mix(seed, 6, k, epoch)) % lanes :: lanes]


@lru_cache(maxsize=8)
def _order(n: int, key: int) -> np.ndarray:
    return permutation(n, key)


def _units(
    manifest: Manifest, reader: Reader, k: int, lane: int, cursor: Cursor
) -> Iterator[tuple[int, int, Rows, bool]]:
    """(epoch, position in the lane's list, rows in the lane's order, may they be held out?)."""
    source, seed = manifest.sources[k], manifest.seed
    heldout = frozenset(source.heldout_units)
    epoch, position = cursor.epoch, cursor.unit
    while True:
        units = units_of(len(source.units), seed, k, epoch, lane, manifest.lanes)
        for index in range(position, len(units)):
            u = int(units[index])
            needed = cursor != START and (epoch, index) == cursor[:2]
            rows = reader.rows(source, source.units[u], epoch, needed=needed)
            order = permutation(len(rows), mix(seed, 2, k, epoch, u))
            yield epoch, index, rows.take(pa.array(order)), u in heldout
        epoch, position = epoch + 1, 0


def _still_there(ids: np.ndarray, cursor: Cursor) -> None:
    if cursor.offset >= len(ids):
        expected = f"a document of more than {cursor.offset} tokens, as when the cursor was saved"
        raise UserError(
            Problem(
                f"document at {tuple(cursor)}", f"{len(ids)} tokens", expected, "restore the data"
            )
        )


def _no_documents(label: str, lane: int) -> UserError:
    expected = "a document that can be trained on (not empty, not held out)"
    return UserError(Problem(f"source {label}, lane {lane}", "none in many epochs", expected))
