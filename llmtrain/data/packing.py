"""From documents to blocks. `concat`: one endless stream of tokens, cut.

A block holds `seq_len` + 1 ids and the next one begins with its last id, so every token is a target
once (seq_len = 4):

    tokens   a b c d e f g h i j …
    block 0  a b c d e
    block 1          e f g h i         its cursor names the document and token of e
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from llmtrain.types import Cursor


class Document(NamedTuple):
    """A document's tokens, separators included.

    epoch, unit, row: its place in the lane's order · counts: what was met since the one before.
    """

    epoch: int
    unit: int
    row: int
    ids: np.ndarray
    counts: Counter[str]


class Span(NamedTuple):
    """Tokens [start, stop) of a document, which stand in a block from position `at` on.

    epoch, unit, row: the document's place in the lane's order.
    """

    epoch: int
    unit: int
    row: int
    start: int
    stop: int
    at: int


class Packed(NamedTuple):
    """One block without its number.

    ids (S + 1,) int32 · starts (n,) int32: where documents begin, the first is 0, padding is a
    document of its own · trained (S,) bool, of ids[1:]; None = all · spans: which documents, in
    order of `at` · cursor: where the next block begins · counts: of this block.
    """

    ids: np.ndarray
    starts: np.ndarray
    trained: np.ndarray | None
    spans: tuple[Span, ...]
    cursor: Cursor
    counts: Counter[str]


def concat(documents: Iterator[Document], seq_len: int, offset: int) -> Iterator[Packed]:
    """Cut an endless stream of documents, beginning at token `offset` of the first."""
    size = seq_len + 1
    document = next(documents)
    counts = Counter(document.counts)
    while True:
        ids = np.empty(size, dtype=np.int32)
        filled = 0
        spans: list[Span] = []
        while filled < size:
            if offset == len(document.ids):
                document, offset = next(documents), 0
                counts.update(document.counts)
            part = document.ids[offset : offset + size - filled]
            ids[filled : filled + len(part)] = part
            spans.append(Span(*document[:3], offset, offset + len(part), filled))
            filled, offset = filled + len(part), offset + len(part)
        offset -= 1  # the last id is the first of the next block
        starts = np.array([span.at for span in spans if span.at < seq_len], dtype=np.int32)
        cursor = Cursor(document.epoch, document.unit, document.row, offset)
        yield Packed(ids, starts, None, tuple(spans), cursor, counts)
        counts = Counter()
