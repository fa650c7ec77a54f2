"""Packs documents into blocks of `seq_len` + 1 ids, of which every token is a target once.

`concat` cuts an endless stream of tokens; a block begins with the last id of the one before
(seq_len = 4):

    tokens   a b c d e f g h i j …
    block 0  a b c d e
    block 1          e f g h i         its cursor names the document and token of e

`bestfit` takes a window of documents and puts each, whole, into the block that it fills best; only
documents longer than a block are cut. Of a conversation each sequence is placed by itself. Its
cursor names the window's start and counts the blocks of the window that were yielded:

    window   aaaaaaa bbb cc ddd        the next window starts after ddd
    blocks   aaaaa · ··a aa(bb b)…     full blocks of long documents, tails and whole documents

`single` does the same, but gives each of them a block of its own, which is filled up with padding.

A pair of answers is one document in two halves, which do not see each other. Both are in one block,
with `single` each in half of it. A judged answer becomes such a pair in its window:

    window   x y · u v · r s          prompts x u r, answers y v s
    pairs    x y, x v · u v, u s · r s, r y

Documents may end: then the last one has no ids, and counts what was found after the one before. The
trap: the blocks depend on the cursor and the documents alone, so that a resume in the middle of a
document or window gives the same blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, assert_never

import numpy as np

from llmtrain.config.schema import PackingName
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

START = Cursor(0, 0, 0, 0)
WINDOW_BLOCKS, LEAST_BLOCKS = 32, 8
WINDOW_TOKENS = 1 << 16
LEFT_OVER = "left_over_tokens"
_ROOM = 32  # bits of a bin's number in a key that sorts bins by room


class Document(NamedTuple):
    """A document's tokens, separators included. Without tokens: there are no more documents.

    epoch, unit, row: its place in the lane's order
    counts: what was found since the document before
    cuts: where its sequences begin and end in ids, none of them longer than a block; () = it is cut
        where a block ends
    trained (n,) bool: which ids are trained; None = all
    second: where the second half of a pair begins in ids; 0 = it is no pair
    answer: where a judged answer begins in ids; it gets a second half in its window
    desirable: whether that answer is a good one
    """

    epoch: int
    unit: int
    row: int
    ids: np.ndarray
    counts: Counter[str]
    cuts: Sequence[int] = ()
    trained: np.ndarray | None = None
    second: int = 0
    answer: int = 0
    desirable: bool = True


class Span(NamedTuple):
    """Tokens [start, stop) of a document, which are in a block from position `at` on.

    A pair is one span; with `single` its second half begins in the middle of the block.

    epoch, unit, row: the document's place in the lane's order
    """

    epoch: int
    unit: int
    row: int
    start: int
    stop: int
    at: int


class PlacedPair(NamedTuple):
    """Where both halves of a pair are in some ids: [begin, end) and [second, stop).

    desirable: of a judged answer, whether it is a good one
    """

    begin: int
    end: int
    second: int
    stop: int
    desirable: bool = True

    def shifted(self, by: int) -> PlacedPair:
        """Return the place in ids that begin `by` earlier."""
        begin, end, second, stop, desirable = self
        return PlacedPair(begin + by, end + by, second + by, stop + by, desirable)


class Packed(NamedTuple):
    """One block, without its number.

    ids (S + 1,) int32
    starts (n,) int32: where documents begin in ids; the first is 0, padding counts as a document
    trained (S,) bool: of ids[1:], false for padding and for what a conversation does not train;
        None = all are trained
    spans: the documents in it, in order of `at`
    cursor: where the next block begins
    counts: what was found while it was filled
    pairs: those among the documents, in order
    """

    ids: np.ndarray
    starts: np.ndarray
    trained: np.ndarray | None
    spans: tuple[Span, ...]
    cursor: Cursor
    counts: Counter[str]
    pairs: tuple[PlacedPair, ...] = ()


Walk = Callable[[Cursor, bool], Iterator[Document]]

# Yields blocks. When documents end, it returns what was counted since the last block.
Packing = Generator[Packed, None, Counter[str]]


def open_packing(
    packing: PackingName,
    walk: Walk,
    seq_len: int,
    cursor: Cursor,
    *,
    pad: int,
    order: Sequence[int],
) -> Packing:
    """Return the blocks of `walk` from `cursor` on, made by the packing of that name."""
    match packing:
        case "concat":
            return concat(walk(cursor, False), seq_len, cursor)
        case "bestfit" | "single":
            alone = packing == "single"
            return in_windows(walk, seq_len, cursor, pad=pad, order=order, alone=alone)
        case _:
            assert_never(packing)


def concat(documents: Iterator[Document], seq_len: int, cursor: Cursor) -> Packing:
    """Cut a stream of documents into blocks. The first document is the one that `cursor` names.

    When documents end, targets that fill no block are counted as `left_over_tokens`. Raises
    UserError if the first document is not what it was when the cursor was saved.
    """
    size, offset = seq_len + 1, cursor.offset
    document = next(documents)
    counts = Counter(document.counts if cursor == START else ())  # else it was counted before
    if offset and (document[:3] != cursor[:3] or offset >= len(document.ids)):
        raise _changed_data(cursor, f"a document of more than {offset} tokens")
    while True:
        ids = np.empty(size, dtype=np.int32)
        filled = 0
        spans: list[Span] = []
        while filled < size:
            if offset == len(document.ids):
                if len(document.ids):
                    document, offset = next(documents), 0
                    if document.counts:
                        counts.update(document.counts)
                if not len(document.ids):
                    counts[LEFT_OVER] += max(0, filled - 1)
                    return +counts
            part = document.ids[offset : offset + size - filled]
            ids[filled : filled + len(part)] = part
            spans.append(Span(*document[:3], offset, offset + len(part), filled))
            filled, offset = filled + len(part), offset + len(part)
        offset -= 1  # the last id is the first of the next block
        starts = np.array([span.at for span in spans], dtype=np.int32)
        behind = Cursor(document.epoch, document.unit, document.row, offset)
        yield Packed(ids, starts, None, tuple(spans), behind, counts)
        counts = Counter()


def in_windows(
    walk: Walk, seq_len: int, cursor: Cursor, *, pad: int, order: Sequence[int], alone: bool = False
) -> Packing:
    """Pack windows of at least `window_tokens` tokens. The first window starts at `cursor`.

    Documents, and tails of those longer than a block, are placed largest first into the fullest
    block that has room. Of equal documents the first to arrive is placed first, of equal blocks the
    oldest is filled. The blocks are yielded in a permutation by (order, place of the window's
    start). When documents end, the last window is smaller: each document is trained on, and the
    blocks are filled up with `pad`.

    walk: yields the documents from a cursor on; its second argument is True if some blocks of the
        window were already yielded, so that none of its documents may be left out now
    alone: whether each document, or part of one, has a block of its own (single), else bestfit

    Raises UserError if the window is not what it was when the cursor was saved.
    """
    size, skip = seq_len + 1, cursor.offset
    start = cursor._replace(offset=0)
    documents = walk(cursor, skip > 0)
    while True:
        window, counts, ended = _window(documents, window_tokens(seq_len))
        if not window and not skip:
            return counts
        window = with_others(window, seq_len, apart=alone)
        blocks = _cut(window, size, alone=alone)
        if skip and skip >= len(blocks):
            raise _changed_data(cursor, f"a window of more than {skip} blocks")
        counts = Counter() if skip else counts  # else it was counted before
        last = window[-1]
        behind = Cursor(last.epoch, last.unit, last.row + 1, 0)
        leaving = permutation(len(blocks), mix(*order, *start[:3])).tolist()
        for position in range(skip, len(blocks)):
            more = position + 1 < len(blocks)
            after = start._replace(offset=position + 1) if more else behind
            middle = seq_len // 2 if alone else 0
            yield _fill(window, blocks[leaving[position]], size, middle, pad, after, counts)
            counts = Counter()
        if ended:  # what was found after the last document was counted with the window
            return Counter()
        documents = walk(behind, False) if skip else documents
        start, skip = behind, 0


def window_tokens(seq_len: int) -> int:
    """Return the least number of tokens in a window of `bestfit` or `single`.

    That is 32 blocks, but no more than 64 Ki tokens, and never less than 8 blocks. Fewer blocks
    leave more padding; with more, a resume takes longer, since it tokenizes each lane's window
    again.
    """
    return max(min(WINDOW_BLOCKS * seq_len, WINDOW_TOKENS), LEAST_BLOCKS * seq_len)


# A part of a window's document: (number of the document, first token, end).
_Piece = tuple[int, int, int]


def _window(
    documents: Iterator[Document], tokens: int
) -> tuple[list[Document], Counter[str], bool]:
    """Return the next documents of at least `tokens` tokens, their counts, and whether they end."""
    window: list[Document] = []
    counts: Counter[str] = Counter()
    total = 0
    while total < tokens:
        document = next(documents, None)
        if document is None:  # they ended with the window before
            break
        if document.counts:
            counts.update(document.counts)
        if not len(document.ids):
            return window, counts, True
        window.append(document)
        total += len(document.ids)
    return window, counts, False


def _cut(window: Sequence[Document], size: int, *, alone: bool) -> list[list[_Piece]]:
    """Cut a window into blocks: first full blocks of long documents, then bins in order of opening.

    A long document gives full blocks; its tail begins with the last id of the last of them. A tail
    of that id alone has no target and is left out.
    """
    full: list[list[_Piece]] = []
    pieces: list[_Piece] = []
    for number, document in enumerate(window):
        if document.cuts:
            pieces += [(number, first, stop) for first, stop in pairwise(document.cuts)]
            continue
        length, first = len(document.ids), 0
        if length > size:
            while length - first >= size:
                full.append([(number, first, first + size)])
                first += size - 1
        if first == 0 or length - first > 1:
            pieces.append((number, first, length))
    if alone:
        return full + [[piece] for piece in pieces]
    # Each token of a text but the first is a target; of a pair, each is an input, too.
    room = size - 1 if window and window[0].second else size
    bins = fit([stop - first for _, first, stop in pieces], room)
    return full + [[pieces[index] for index in members] for members in bins]


def with_others(window: list[Document], seq_len: int, *, apart: bool) -> list[Document]:
    """Return a window in which each judged answer is the first half of a pair.

    The second half is its prompt with the next answer of the window that differs, in a circle; that
    is cut at its end to fit. If there is none, it is the prompt alone, of which nothing is trained.

    apart: whether a half may have half of a block at most
    """
    keys = [one.ids[one.answer :].tobytes() for one in window if one.answer]
    if not keys:
        return window
    assert len(keys) == len(window), "a source has rows of one form"
    # The next one that differs is the neighbour, or the one that is next to an equal neighbour.
    others: list[Document | None] = [None] * len(window)
    for behind in range(2 * len(window) - 1, 0, -1):  # twice around the circle
        number, after = (behind - 1) % len(window), behind % len(window)
        others[number] = window[after] if keys[number] != keys[after] else others[after]
    paired = []
    for one, other in zip(window, others, strict=True):
        most = seq_len // 2 if apart else seq_len - len(one.ids)
        part = slice(0, 0)
        if other is not None:
            part = slice(other.answer, other.answer + most - one.answer)
        source = one if other is None else other
        ids = np.concatenate([one.ids, one.ids[: one.answer], source.ids[part]])
        trained = None
        if one.trained is not None and source.trained is not None:
            untrained = np.zeros(one.answer, dtype=np.bool_)
            trained = np.concatenate([one.trained, untrained, source.trained[part]])
        second = len(one.ids)
        paired.append(one._replace(ids=ids, cuts=(0, len(ids)), trained=trained, second=second))
    return paired


def fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Fill bins by best-fit decreasing; return each bin's indices in the order placed."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # of bins that are not full, sorted: room << _ROOM | bin
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # stable
        length = lengths[index]
        at = bisect_left(rooms, length << _ROOM)
        if at < len(rooms):
            room = rooms.pop(at) - (length << _ROOM)
            bins[room & ((1 << _ROOM) - 1)].append(index)
        else:
            room = (size - length) << _ROOM | len(bins)
            bins.append([index])
        if room >> _ROOM:
            insort(rooms, room)
    return bins


def _fill(
    window: Sequence[Document],
    block: Sequence[_Piece],
    size: int,
    middle: int,
    pad: int,
    cursor: Cursor,
    counts: Counter[str],
) -> Packed:
    """Fill a block with pieces. middle: where the second half of a pair begins; 0 = behind it."""
    ids = np.full(size, pad, dtype=np.int32)
    trained = np.zeros(size, dtype=np.bool_)
    spans: list[Span] = []
    pairs: list[PlacedPair] = []
    starts: list[int] = []
    filled = 0
    for number, first, stop in block:
        document = window[number]
        spans.append(Span(*document[:3], first, stop, filled))
        edges = [first, document.second, stop] if document.second else [first, stop]
        places: list[int] = []
        for begin, end in pairwise(edges):
            if places and middle > filled:
                starts.append(filled)  # of the padding between both halves
                filled = middle
            part = slice(filled, filled + end - begin)
            ids[part] = document.ids[begin:end]
            trained[part] = True if document.trained is None else document.trained[begin:end]
            starts.append(filled)
            places += [filled, part.stop]
            filled = part.stop
        if document.second:
            begin, end, second, last = places
            pairs.append(PlacedPair(begin, end, second, last, document.desirable))
    if filled < size:
        starts.append(filled)
    whole = filled == size and all(window[number].trained is None for number, _, _ in block)
    mask = None if whole else trained[1:]
    begins = np.array(starts, dtype=np.int32)
    return Packed(ids, begins, mask, tuple(spans), cursor, counts, tuple(pairs))


def _changed_data(cursor: Cursor, what: str) -> UserError:
    expected = f"{what}, as when the cursor was saved"
    return UserError(
        Problem(f"document at {tuple(cursor)}", "something else", expected, "restore the data")
    )
