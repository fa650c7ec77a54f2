"""Counts the documents of a source, all of them or a sample, for `data inspect` and for epochs.

    size of a unit     known without reading it: its share of the text column, or of the file
    sampled units      ─►  documents, bytes of text
    some of their text ─►  tokens per byte of text

A sample represents all units of the same format only, since rows of parquet, bytes of lines and
bytes of compressed files cannot be compared. Units are drawn at random, because neighbours are
alike (a dump's oldest pages are its longest). The trap: a few long documents can be half of the
text, so text is scaled by its known size, not by rows.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from llmtrain.data.audit.ledger import text_of
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.reader import Reader
from llmtrain.data.documents.rows import Rows
from llmtrain.data.documents.units import GROUP_LIMIT
from llmtrain.data.file_parts import text_size
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.sources.local import file_format
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.encode import Encoder
from llmtrain.hashing import mix, permutation

SAMPLED_UNITS = 64  # of each format of a source
SAMPLED_BYTES = MIB // 4  # tokenized from each of these units, unless a number of rows is asked for
BATCH = 64  # documents tokenized at once
_WHOLE = 1 << 64


class Amount(NamedTuple):
    """Usable documents, the UTF-8 bytes of their text, and their tokens with separators."""

    documents: float
    bytes: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Census:
    """The numbers of a source.

    exact: every row was looked at; if not, all but `looked_at`, `duplicates` and `lengths` are
        estimates
    all: of all documents
    training: of documents that are not held out
    dropped: rows that are null, empty or blank
    replaced: documents with invalid UTF-8
    looked_at: rows
    duplicates: texts that were seen before
    lengths: tokens of a document → how many of the documents that were looked at
    chat: what happened to the conversations that were looked at, as in `chat.Encoded`
    """

    exact: bool
    all: Amount
    training: Amount
    dropped: float
    replaced: float
    looked_at: int
    duplicates: int
    lengths: Counter[int]
    chat: Counter[str]


class _Document(NamedTuple):
    """A usable document.

    text: None in a token cache
    size: bytes of the text, or number of ids in a token cache
    held: whether it is held out
    """

    rows: Rows | token_cache.Rows
    row: int
    text: str | None
    size: int
    held: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Units that are decoded together, and therefore sampled as one.

    units: indices in their source
    size: of their text as the file stores it, in bytes; in a token cache, in tokens
    rows: 0 = unknown
    trained: share of the documents that is not held out
    """

    units: tuple[int, ...]
    size: float
    rows: int
    trained: float


class _Format:
    """The units of one format of a source, and what was found in them so far."""

    def __init__(self, source: Source, k: int, seed: int, encoder: Encoder, reader: Reader) -> None:
        self.source = source
        self.k = k
        self.seed = seed
        self.encoder = encoder
        self.reader = reader
        # The ids of a token cache already include separators; conversations have none.
        self.separators = 1 if encoder.tokenizer.bos is None else 2
        if source.cached or source.form is not None:
            self.separators = 0
        self.met: Counter[str] = Counter()  # documents, dropped, replaced: of all rows read
        self.bytes = self.tokens = 0.0  # of all documents read, without separators
        self.held = Amount(0, 0, 0)  # of held-out documents that were tokenized, without separators
        self.hashes: array[int] = array("Q")
        self.lengths: Counter[int] = Counter()
        self.chat: Counter[str] = Counter()

    def look(self, piece: _Piece, limit: int | None) -> bool:
        """Read a piece and tokenize some of its documents; return whether it was all of them.

        limit: how many documents; 0 = all, None = about `SAMPLED_BYTES` of them.
        """
        documents = [document for u in piece.units for document in self._documents(u)]
        some = _some(documents, mix(self.seed, 10, self.k, piece.units[0]), limit)
        size = sum(document.size for document in documents)
        nbytes = tokens = 0
        for start in range(0, len(some), BATCH):
            for document, text, ids in self._encode(some[start : start + BATCH]):
                encoded = text.encode()
                own = len(ids) - self.separators
                nbytes, tokens = nbytes + len(encoded), tokens + own
                if document.held:
                    self.held = _sum([self.held, Amount(1, len(encoded), own)])
                self.hashes.append(xxhash.xxh3_64_intdigest(encoded))
                if len(ids):  # else `chat` counts why a conversation has none
                    self.lengths[len(ids)] += 1
        cached = self.source.cached
        self.bytes += size * nbytes / max(1, tokens) if cached else size
        self.tokens += size if cached else size * tokens / max(1, nbytes)
        return len(some) == len(documents)

    def _documents(self, u: int) -> Iterator[_Document]:
        """Yield the usable documents of a unit."""
        source = self.source
        rows = self.reader.documents(source, source.units[u])
        chosen = u in source.heldout_units
        for row in range(len(rows)):
            text: str | None = None
            if isinstance(rows, token_cache.Rows):
                size = rows.size(row)
            else:
                text, replaced = rows.text(row)
                size = len((text or "").encode())
                self.met["replaced"] += replaced
            if size:
                self.met["documents"] += 1
                held = chosen and rows.hash(row, self.seed) < source.threshold
                yield _Document(rows, row, text, size, held)
            else:
                self.met["dropped"] += 1

    def _encode(
        self, documents: Sequence[_Document]
    ) -> Iterator[tuple[_Document, str, np.ndarray]]:
        """Yield each document with its text and its ids."""
        texts = [one.text for one in documents if one.text is not None]
        tokenizer = self.encoder.tokenizer
        encoded = iter(self.encoder.documents(self.source, texts) if texts else ())
        for document in documents:
            if isinstance(document.rows, token_cache.Rows):
                ids = document.rows.ids(document.row, tokenizer.length)
                yield document, text_of(tokenizer, ids), ids
            else:
                found = next(encoded)
                self.chat.update(found.counts)
                yield document, document.text or "", found.ids

    def amount(self, by_rows: float, by_size: float) -> Amount:
        """Estimate the whole from this part of it.

        by_rows: factor for the number of documents
        by_size: factor for tokens and bytes
        """
        documents, tokens = self.met["documents"] * by_rows, self.tokens * by_size
        return Amount(documents, self.bytes * by_size, tokens + self.separators * documents)


class _Part(NamedTuple):
    """The numbers of all units of one format. exact: every row was looked at."""

    exact: bool
    all: Amount
    training: Amount
    dropped: float
    replaced: float


def census(
    manifest: Manifest, k: int, encoder: Encoder, reader: Reader, limit: int | None
) -> Census:
    """Count the documents of source k, or estimate their number from a sample.

    The same seed gives the same sample.

    limit: about how many documents to look at; 0 = all, None = `SAMPLED_BYTES` of each of at most
        `SAMPLED_UNITS` units of each format

    Raises as reading does.
    """
    source = manifest.sources[k]
    groups = _formats(source)
    each = limit and -(-limit // len(groups))
    formats = [_Format(source, k, manifest.seed, encoder, reader) for _ in groups]
    parts = [
        _part(one, list(_pieces(source, units, reader)), each)
        for one, units in zip(formats, groups, strict=True)
    ]
    exact = all(part.exact for part in parts)
    dropped = sum(part.dropped for part in parts)
    hashes = np.concatenate([np.frombuffer(one.hashes, np.uint64) for one in formats])
    lengths: Counter[int] = Counter()
    chat: Counter[str] = Counter()
    for one in formats:
        lengths.update(one.lengths)
        chat.update(one.chat)
    return Census(
        exact=exact,
        all=_sum([part.all for part in parts]),
        training=_sum([part.training for part in parts]),
        dropped=dropped,
        replaced=sum(part.replaced for part in parts),
        looked_at=len(hashes) + (round(dropped) if exact else 0),
        duplicates=len(hashes) - len(np.unique(hashes)),
        lengths=lengths,
        chat=chat,
    )


def _formats(source: Source) -> list[list[int]]:
    """Group the units by the format of their files."""
    found: dict[object, list[int]] = {}
    for u, unit in enumerate(source.units):
        found.setdefault(file_format(source.files[unit.file].name), []).append(u)
    return list(found.values())


def _part(one: _Format, pieces: Sequence[_Piece], limit: int | None) -> _Part:
    """Look at some of the pieces, in random order, and scale the result to all of them."""
    order = sorted(pieces, key=lambda piece: mix(one.seed, 9, one.k, piece.units[0]))
    spread = min(SAMPLED_UNITS, len(pieces))
    chosen: list[_Piece] = []
    exact = True
    for piece in order if limit is not None else order[:spread]:
        quota = limit
        if limit:
            left = limit - len(one.hashes)
            if left <= 0:
                break
            quota = -(-left // max(1, spread - len(chosen)))
        exact = one.look(piece, quota) and exact
        chosen.append(piece)
    if exact and len(chosen) == len(pieces):
        found, held = one.amount(1, 1), one.held
        tokens = held.tokens + one.separators * held.documents
        training = Amount(
            found.documents - held.documents, found.bytes - held.bytes, found.tokens - tokens
        )
        return _Part(True, found, training, one.met["dropped"], one.met["replaced"])
    by_rows, by_size = _factors(chosen, [(piece, 1.0) for piece in pieces])
    training = one.amount(*_factors(chosen, [(piece, piece.trained) for piece in pieces]))
    dropped, replaced = (one.met[name] * by_rows for name in ("dropped", "replaced"))
    return _Part(False, one.amount(by_rows, by_size), training, dropped, replaced)


def _factors(
    chosen: Sequence[_Piece], shares: Sequence[tuple[_Piece, float]]
) -> tuple[float, float]:
    """Return the ratio of `shares` to the chosen pieces, by rows and by size.

    shares: pieces, with the share of each that counts

    The number of rows is known for parquet only; for other formats both factors are by size.
    """
    by_size = sum(p.size * share for p, share in shares) / max(1, sum(p.size for p in chosen))
    rows = sum(piece.rows for piece in chosen)
    return sum(p.rows * share for p, share in shares) / rows if rows else by_size, by_size


def _pieces(source: Source, units: Sequence[int], reader: Reader) -> Iterator[_Piece]:
    """Yield the pieces of these units.

    Slices of a row group are one piece: only the size of the group is known. If the group is too
    large to be decoded at once, each slice is a piece.
    """
    held = source.threshold / _WHOLE
    evaluated = frozenset(source.heldout_units)
    together: dict[tuple[int, ...], list[int]] = {}
    for u in units:
        unit = source.units[u]
        alone = unit.group < 0 or source.cached
        if not alone and not _is_arrow(source, unit):  # slices of Arrow are free
            groups = reader.units.groups(source, unit.file)
            alone = groups[unit.group][1] > GROUP_LIMIT
        together.setdefault((*unit[:2], unit.start if alone else -1), []).append(u)
    for members in together.values():
        size = sum(text_size(source, source.units[u], reader) for u in members)
        known = [source.units[u] for u in members if source.units[u].group >= 0]
        rows = sum(unit.stop - unit.start for unit in known)
        trained = 1 - held * sum(u in evaluated for u in members) / len(members)
        yield _Piece(tuple(members), size, rows, trained)


def _is_arrow(source: Source, unit: Unit) -> bool:
    return (file_format(source.files[unit.file].name) or ("",))[0] == "arrow"


def _some(documents: Sequence[_Document], key: int, limit: int | None) -> list[_Document]:
    """Choose documents at random.

    limit: how many; 0 = all, None = as many as have `SAMPLED_BYTES`
    """
    order = permutation(len(documents), key)
    if limit is not None:
        return [documents[index] for index in order[: limit or None]]
    some: list[_Document] = []
    size = 0
    for index in order:
        if size >= SAMPLED_BYTES:
            break
        some.append(documents[index])
        size += documents[index].size
    return some


def _sum(amounts: Sequence[Amount]) -> Amount:
    return Amount(*map(sum, zip(*amounts, strict=True)))
