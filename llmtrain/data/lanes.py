"""Lanes: L independent, deterministic walks over the data; block g is made by lane g mod L.

    epoch e:  U = order of all units;  lane l walks U[(l + rotation) mod L :: L]
    unit u:   its rows in an order of their own;  a document's tokens go to the packer

After the last unit of its list a lane continues with epoch e + 1, without waiting for the others.
Its whole state is one cursor per source. The trap: lanes share nothing but a cache of decoded
units, so that the blocks of one lane never depend on which others this process has opened.

Which source block g comes from is a pure function of g, without state to resume: g times the golden
ratio, modulo 1, is spread evenly over [0, 1) in any stretch of blocks, and this interval is cut
into parts, one for each source, as long as the source's share. In any 32 blocks in a row, each
source then has its share to within 2 blocks.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from llmtrain.data.documents.reader import Reader, bad_row, row_order, unit_at, units_of
from llmtrain.data.documents.units import Rows
from llmtrain.data.manifest import DataManifest
from llmtrain.data.packing import START, Document, Packed, Packing, PlacedPair, Span, open_packing
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.tokens.encode import Encoded, Encodes
from llmtrain.errors import Problem, UserError
from llmtrain.types import Cursor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return each weight's share of 2^32 as an integer, at least 1."""
    total = sum(weights)
    return tuple(max(1, round(2**32 * weight / total)) for weight in weights)


def source_of(g: int, integers: Sequence[int]) -> int:
    """Return the source of block g.

    integers: `shares(weights)`, with 0 for sources that have ended
    """
    x = (((g * _GOLDEN) & _MASK) * sum(integers)) >> 64
    for index, share in enumerate(integers):
        if x < share:
            return index
        x -= share
    raise AssertionError("x is below the sum of all shares")


FEW_UNITS = 768
CHAT_LANES = 8
LEAST_UNITS = 8  # of conversations, for each of these lanes …
LEAST_BLOCKS = 32  # … and blocks: with fewer, some lanes end long before the others
NOTHING: Counter[str] = Counter()  # most documents have no counts
MAX_AHEAD = 64  # documents that are tokenized in one call
MAX_AHEAD_CHARACTERS = 1 << 18
LATE = 3  # quarters of a unit, after which the next is read ahead: lanes in order of their need
EMPTY_EPOCHS = 64  # times the number of lanes: epochs without a document, then a lane gives up
NO_IDS = np.empty(0, dtype=np.int32)
NOTED = ("rejected", "truncated", "split", "untrained", "too_long")  # of a conversation


def default_lanes(processes: int, units: int) -> int:
    """Return the number of lanes of a new run on texts.

    It is a multiple of 24 or 48, depending on the data: all numbers of processes that divide that
    number see the same batches.

    processes: ranks × data workers (at least 1 each)
    units: over all sources, before slicing
    """
    return math.lcm(24 if units < FEW_UNITS else 48, processes)


def default_chat_lanes(processes: int, units: int, blocks: float) -> int:
    """Return the number of lanes of a new run that ends with its conversations.

    It is a multiple of 8, since a start renders a window of them in each lane. Where there are few
    conversations it is 8 or 1, whatever the number of processes: lanes that are empty, or end long
    before the others, would make the run longer by steps that train nothing.

    units: the most that the data can be cut into
    blocks: about how many it fills
    """
    most = min(units / LEAST_UNITS, blocks / LEAST_BLOCKS)
    return next((n for n in (math.lcm(CHAT_LANES, processes), CHAT_LANES) if n <= most), 1)


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    ids, starts, trained, spans, pairs: as in `Packed`
    source: index of its source; −1 = padding, since its lane has ended
    counts: source → what was found → how often: documents that were dropped (null, empty, blank),
        replaced (invalid UTF-8) or held out, units and lines that were skipped, and tokens that
        fill no block where a source ends (left_over_tokens)
    cursors: those of its lane after this block, one per source
    """

    ids: np.ndarray
    starts: np.ndarray
    trained: np.ndarray | None
    spans: tuple[Span, ...]
    source: int
    counts: Mapping[int, Mapping[str, int]]
    cursors: tuple[Cursor, ...]
    pairs: tuple[PlacedPair, ...] = ()


class Untokenized(NamedTuple):
    """A training document before it is tokenized, as `Document`.

    content: its text, or its ids if it is in a token cache; None = there are no more
    """

    epoch: int
    unit: int
    row: int
    content: Any
    counts: Counter[str]


def document(place: Sequence[int], encoded: Encoded, counts: Counter[str]) -> Document:
    """Return an encoded document. place: its epoch, unit and row. counts: as in `Document`"""
    epoch, unit, row = place
    ids, cuts, trained, _, _, second, answer, desirable = encoded
    return Document(epoch, unit, row, ids, counts, cuts, trained, second, answer, desirable)


class Lane:
    """Lane `index`, which gives its blocks one after the other.

    Before every block, each source with `max_epochs` is checked: if what is left of it in this lane
    does not fill a block, it is left out. With concat a block takes seq_len + 1 ids; with bestfit
    any document will do, since its block is filled up. So the choice depends on g and the cursors
    alone, and is the same after a resume. Once no source is left, all blocks are padding.

    next_block: number (over all lanes) of the lane's next block
    cursors: for each source, where its next block begins
    """

    def __init__(
        self,
        manifest: DataManifest,
        encoder: Encodes,
        reader: Reader,
        index: int,
        next_block: int,
        cursors: Sequence[Cursor],
    ) -> None:
        assert next_block % manifest.lanes == index
        self.next_block = next_block
        self.cursors = tuple(cursors)
        self._manifest = manifest
        self._encoder = encoder
        self._reader = reader
        self._index = index
        self._shares = list(shares(manifest.weights))  # 0 once a source has ended in this lane
        self._packings: dict[int, Packing] = {}
        self._ready: dict[int, Packed] = {}  # the next block of each source that can end

    def take(self) -> Block:
        """Return block `next_block`.

        Raises UserError for bad data, RunError if it cannot be read.
        """
        counts = self._ask()
        if not any(self._shares):
            seq_len = self._manifest.seq_len
            ids = np.full(seq_len + 1, self._encoder.tokenizer.pad, dtype=np.int32)
            untrained, start = np.zeros(seq_len, dtype=np.bool_), np.zeros(1, dtype=np.int32)
            block = Block(ids, start, untrained, (), -1, counts, self.cursors)
        else:
            k = source_of(self.next_block, self._shares)
            packed = self._ready.pop(k, None) or next(self._packing(k))
            if self._can_end(k):
                packed.counts.update(self._advance(k))
            if packed.counts:
                counts[k] = dict(packed.counts)
            self.cursors = (*self.cursors[:k], packed.cursor, *self.cursors[k + 1 :])
            block = Block(*packed[:4], k, counts, self.cursors, packed.pairs)
        self.next_block += self._manifest.lanes
        return block

    def _ask(self) -> dict[int, Mapping[str, int]]:
        """Prepare the next block of each source that can end. Only the first call has work to do.

        Return the counts of sources that fill no block at all; only the lane's first block has
        them.
        """
        counts: dict[int, Mapping[str, int]] = {}
        for k in range(len(self._shares)):
            if self._can_end(k) and k not in self._packings:
                rest = self._advance(k)
                if rest and self.next_block == self._index and self.cursors[k] == START:
                    counts[k] = rest
        return counts

    def _can_end(self, k: int) -> bool:
        return self._manifest.sources[k].max_epochs is not None

    def _advance(self, k: int) -> Mapping[str, int]:
        """Make the next block of source k ready. If it has ended, return what is left over."""
        try:
            self._ready[k] = next(self._packing(k))
        except StopIteration as end:
            self._shares[k] = 0
            rest: Mapping[str, int] = end.value
            return rest
        return {}

    def _packing(self, k: int) -> Packing:
        """Return the blocks of source k from its cursor on, packed as the manifest says."""
        manifest, cursor = self._manifest, self.cursors[k]
        if k in self._packings:
            return self._packings[k]
        if manifest.sources[k].cached and manifest.packing == "concat":
            blocks = token_cache.blocks(manifest, k, self._index, cursor)
        else:
            order, pad = (manifest.seed, 4, k, self._index), self._encoder.tokenizer.pad
            how = (manifest.packing, partial(self.walk, k), manifest.seq_len)
            blocks = open_packing(*how, cursor, pad=pad, order=order)
        self._packings[k] = blocks
        return blocks

    def walk(self, k: int, cursor: Cursor, again: bool) -> Iterator[Document]:
        """Yield the training documents of source k from `cursor` on, tokenized a few at a time.

        Without `max_epochs` they never end; otherwise the last one has no ids (see `Document`). One
        document is tokenized first, then two, four and so on: a lane is opened quickly, and later
        documents are tokenized in large batches. Those of a token cache are read one by one.

        again: blocks have already been made of all these documents, so no unit may be left out that
            was not left out then; a unit is read only when its first document is asked for

        A row without anything to train on is no document; its counts come with the next one.
        """
        documents = self._untokenized(k, cursor, again)
        cached = self._manifest.sources[k].cached
        ahead, last_epoch = 1, cursor.epoch
        counts: Counter[str] = Counter()
        end: Untokenized | None = None
        while end is None:
            batch: list[Untokenized] = []
            characters = 0
            while len(batch) < ahead and characters < MAX_AHEAD_CHARACTERS:
                one = next(documents)
                if one.content is None:
                    end = one
                    break
                batch.append(one)
                characters += len(one.content)
            for one, encoded in zip(batch, self._encode(k, batch), strict=True):
                if one.counts or encoded.counts:
                    counts.update(one.counts)
                    # All else of a conversation is for `data inspect`.
                    row_counts = encoded.counts
                    counts.update({name: row_counts[name] for name in NOTED if name in row_counts})
                if not len(encoded.ids):
                    self._refuse_without_documents(k, one.epoch - last_epoch)
                    continue
                last_epoch = one.epoch
                yield document(one[:3], encoded, counts or NOTHING)
                if counts:  # each gets a counter of its own
                    counts = Counter()
            ahead = 1 if again or cached else min(2 * ahead, MAX_AHEAD)
        yield Document(*end[:3], NO_IDS, counts + end.counts)

    def _encode(self, k: int, batch: Sequence[Untokenized]) -> list[Encoded]:
        """Encode some documents. Raises UserError for a bad row, unless such rows are skipped."""
        source, contents = self._manifest.sources[k], [one.content for one in batch]
        if source.cached:
            return [Encoded(ids) for ids in contents]
        encoded = self._encoder.documents(source, contents)
        for one, result in zip(batch, encoded, strict=True):
            if result.bad is not None and not self._reader.reading.skip_bad_rows:
                # Name its file and line.
                u = unit_at(self._manifest, k, one.epoch, self._index, one.unit)
                rows = self._reader.documents(source, source.units[u], one.epoch, needed=True)
                row = int(row_order(self._manifest, k, u, one.epoch, len(rows))[one.row])
                raise UserError(bad_row(source, u, row, self._reader, result.bad))
        return encoded

    def _refuse_without_documents(self, k: int, epochs: int) -> None:
        """Raise UserError if a source had no training document in so many epochs."""
        if epochs > EMPTY_EPOCHS * self._manifest.lanes:
            key = f"source {self._manifest.sources[k].label}, lane {self._index}"
            expected = "a document that can be trained on (not empty, not held out)"
            raise UserError(Problem(key, "none in many epochs", expected))

    def _untokenized(self, k: int, cursor: Cursor, again: bool) -> Iterator[Untokenized]:
        manifest, source = self._manifest, self._manifest.sources[k]
        last_epoch = cursor.epoch
        counts: Counter[str] = Counter()
        for epoch, position, rows, heldout in self._units(k, cursor, again):
            self._refuse_without_documents(k, epoch - last_epoch)
            first = cursor.row if (epoch, position) == cursor[:2] else 0
            if rows.skipped and not first:  # else they were counted when the unit was begun
                counts["skipped"] += rows.skipped
            late = max(first, len(rows) * LATE // 4)
            for row in range(first, len(rows)):
                if row == late:
                    self._expect_next(k, epoch, position)
                content, replaced = _content(rows, row, manifest.tokenizer.length)
                if content is None:
                    counts["dropped"] += 1
                elif heldout and rows.hash(row, manifest.seed) < source.threshold:
                    counts["heldout"] += 1
                else:
                    if replaced:
                        counts["replaced"] += 1
                    last_epoch = epoch
                    # Each gets a counter of its own: several texts wait for their tokens at once.
                    yield Untokenized(epoch, position, row, content, counts or NOTHING)
                    if counts:
                        counts = Counter()
        yield Untokenized(source.max_epochs or 0, 0, 0, None, counts)

    def _units(
        self, k: int, cursor: Cursor, again: bool
    ) -> Iterator[tuple[int, int, Rows | token_cache.CachedRows, bool]]:
        """Yield (epoch, position in the list, shuffled rows, whether any may be held out)."""
        source = self._manifest.sources[k]
        heldout = frozenset(source.heldout_units)
        epoch, position = cursor.epoch, cursor.unit
        while source.max_epochs is None or epoch < source.max_epochs:
            units = units_of(self._manifest, k, epoch, self._index)
            for index in range(position, len(units)):
                u = int(units[index])
                needed = again or (cursor != START and (epoch, index) == cursor[:2])
                rows = self._reader.documents(source, source.units[u], epoch, needed=needed)
                order = row_order(self._manifest, k, u, epoch, len(rows))
                yield epoch, index, rows.take(order), u in heldout
            epoch, position = epoch + 1, 0

    def _expect_next(self, k: int, epoch: int, position: int) -> None:
        """Tell the reader which unit this lane reads next, so that a remote one arrives in time."""
        source = self._manifest.sources[k]
        if not source.remote:
            return
        for following, index in ((epoch, position + 1), (epoch + 1, 0)):
            units = units_of(self._manifest, k, following, self._index)
            goes_on = source.max_epochs is None or following < source.max_epochs
            if goes_on and index < len(units):
                self._reader.units.expect(source, source.units[int(units[index])])
                return


@dataclass(slots=True)
class Lanes:
    """The lanes of a process. Each is opened when its first block is asked for.

    cursors (L, sources, 4): the state of each lane when `next_block` is the next block of the run
    """

    manifest: DataManifest
    encoder: Encodes
    reader: Reader
    cursors: np.ndarray
    next_block: int
    opened: dict[int, Lane] = field(default_factory=dict)

    def take(self, g: int) -> Block:
        """Return block g. Within a lane, g must rise. Raises as `Lane.take`."""
        index = g % self.manifest.lanes
        if index not in self.opened:
            first = self.next_block + (index - self.next_block) % self.manifest.lanes
            cursors = [Cursor(*map(int, cursor)) for cursor in self.cursors[index]]
            parts = (self.manifest, self.encoder, self.reader)
            self.opened[index] = Lane(*parts, index, first, cursors)
        lane = self.opened[index]
        while lane.next_block < g:
            lane.take()  # another rank's block (W does not divide L), or an earlier one
        return lane.take()


def _content(
    rows: Rows | token_cache.CachedRows, row: int, vocabulary: int
) -> tuple[str | np.ndarray | None, bool]:
    """Return a document's text or ids, and whether invalid UTF-8 in it was replaced.

    The document is None if it is empty or blank.
    """
    if isinstance(rows, Rows):
        return rows.text(row)
    return rows.ids(row, vocabulary) if rows.usable(row) else None, False
