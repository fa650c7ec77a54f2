"""How many blocks one pass over the training documents makes: counted, or estimated from a sample.

    size of a unit     known without reading it: its share of the text column, or of the file
    sampled units      ─►  text bytes, documents of a byte of size
    some of their text ─►  tokens of a byte of text

A source of little text is counted. The trap: what a size says differs by format (a compressed file,
a column with a dictionary), so the units of each format are sampled on their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import pyarrow.parquet as pq

from llmtrain.data import heldout
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.reader import GROUP_LIMIT, Reader, Reading
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.packing import START, Document, bestfit, window_tokens
from llmtrain.data.sources.local import file_format
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.hashing import mix, permutation

COUNTED_BYTES = 16 * MIB  # a source of at most so much text is counted
SAMPLED_UNITS = 64  # of each format of a source
SAMPLED_BYTES = MIB // 4  # of each of them that are tokenized
BATCH = 64
PACKED_WINDOWS = 4
NO_IDS = np.zeros(0, np.int32)
_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the training documents of all sources.

    tokens: with those that separate documents · blocks: of `seq_len` trained positions · exact:
    counted, not estimated from a sample.
    """

    documents: int
    tokens: int
    blocks: int
    exact: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is sampled as one: units that are decoded together.

    units: indices in their source · size: of their text, in bytes of the file · rows: 0 = unknown ·
    trained: share of its documents that is not held out.
    """

    units: tuple[int, ...]
    size: float
    rows: int
    trained: float


@dataclass(frozen=True, slots=True)
class _Total:
    """Text bytes, documents and tokens (without separators) of what is trained on."""

    bytes: float
    documents: float
    tokens: float


def epoch(manifest: Manifest, tokenizer: Tokenizer, reading: Reading) -> Epoch:
    """Count, or estimate, one epoch. Raises UserError or RunError as reading does.

    Estimates read at most 64 units of each source and format, the same ones for the same seed.
    """
    reader = Reader(reading)
    documents = tokens = blocks = 0.0
    exact = True
    for k in range(len(manifest.sources)):
        found, counted = _source(manifest, k, tokenizer, reader)
        exact = exact and counted
        documents, tokens = documents + found.documents, tokens + found.tokens
        blocks += found.tokens * _blocks_a_token(manifest, k, tokenizer, reader)
    whole = math.ceil(round(blocks, 6))  # 700 · (1 / 100) is a little more than 7
    return Epoch(round(documents), round(tokens), max(1, whole), exact)


def _source(
    manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader
) -> tuple[_Total, bool]:
    """Documents and tokens of one source, and whether they are counted."""
    source = manifest.sources[k]
    if source.cached:
        stream = token_cache.training_stream(source, manifest.seed)
        return _Total(0, stream.num_documents, stream.tokens), True
    samples = [_sample(manifest, k, units, tokenizer, reader) for units in _formats(source)]
    if sum(sample.bytes for sample in samples) <= COUNTED_BYTES:
        return _Total(0, *count(source, manifest.seed, tokenizer, reader)), True
    return _with_separators(samples, 1 if tokenizer.bos is None else 2), False


def _with_separators(samples: Sequence[_Total], separators: int) -> _Total:
    documents = sum(sample.documents for sample in samples)
    tokens = sum(sample.tokens for sample in samples) + separators * documents
    return _Total(sum(sample.bytes for sample in samples), documents, tokens)


def _blocks_a_token(manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader) -> float:
    """With best fit, padding and overlaps take their part: measured on a few windows."""
    seq_len = manifest.seq_len
    if manifest.packing == "concat":
        return 1 / seq_len
    wanted = PACKED_WINDOWS * window_tokens(seq_len)
    packed: list[Document] = []
    tokens = 0
    for ids in _again_and_again(manifest, k, tokenizer, reader):
        packed.append(Document(0, 0, len(packed), ids, Counter()))
        tokens += len(ids)
        if tokens >= wanted:
            break
    end = Document(0, 0, len(packed), NO_IDS, Counter())
    order = (manifest.seed, 4, k, 0)
    found = bestfit(
        lambda *_: chain(packed, repeat(end)), seq_len, START, pad=tokenizer.pad, order=order
    )
    return sum(1 for _ in found) / tokens


def _again_and_again(
    manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader
) -> Iterator[np.ndarray]:
    """Training documents of the source as tokens, for ever: small sources fill no window."""
    source, seed = manifest.sources[k], manifest.seed
    order = sorted(range(len(source.units)), key=lambda u: mix(seed, 9, k, u))
    while True:
        for u in order:
            if source.cached:  # held-out ones are as long as others
                rows = token_cache.rows_of(source, source.units[u])
                usable = filter(rows.usable, range(len(rows)))
                yield from (rows.ids(row, tokenizer.length) for row in usable)
                continue
            for texts in _batches(heldout.training_texts(source, u, seed, reader)):
                yield from tokenizer.documents(texts)


def count(source: Source, seed: int, tokenizer: Tokenizer, reader: Reader) -> tuple[int, int]:
    """Documents that are trained on and their tokens, separators included."""
    documents = tokens = 0
    for u in range(len(source.units)):
        for texts in _batches(heldout.training_texts(source, u, seed, reader)):
            documents += len(texts)
            tokens += sum(len(ids) for ids in tokenizer.documents(texts))
    return documents, tokens


def _formats(source: Source) -> list[list[int]]:
    """Units by how their files are stored."""
    found: dict[object, list[int]] = {}
    for u, unit in enumerate(source.units):
        found.setdefault(file_format(source.files[unit.file].name), []).append(u)
    return list(found.values())


def _sample(
    manifest: Manifest, k: int, units: Sequence[int], tokenizer: Tokenizer, reader: Reader
) -> _Total:
    """Of all these units, from what was read of some.

    Rows of parquet are known; the bytes of a text are so many of its size. What is read counts by
    the bytes that it stands for, however few of them were tokenized.
    """
    source, seed = manifest.sources[k], manifest.seed
    pieces = list(_pieces(source, units, reader))
    chosen = sorted(pieces, key=lambda piece: mix(seed, 9, k, piece.units[0]))[:SAMPLED_UNITS]
    nbytes = documents = 0
    tokens = 0.0
    for piece in chosen:
        texts = list(_texts(source, piece, reader))
        size = sum(len(text.encode()) for text in texts)
        nbytes, documents = nbytes + size, documents + len(texts)
        some = list(_some(texts, mix(seed, 10, k, piece.units[0])))
        encoded = sum(len(ids) for part in _batches(some) for ids in tokenizer.encode_batch(part))
        tokens += size * encoded / max(1, sum(len(text.encode()) for text in some))
    by_size = sum(p.size * p.trained for p in pieces) / max(1, sum(p.size for p in chosen))
    rows = sum(piece.rows for piece in chosen)
    by_rows = sum(p.rows * p.trained for p in pieces) / rows if rows else by_size
    return _Total(nbytes * by_size, documents * by_rows, tokens * by_size)


def _texts(source: Source, piece: _Piece, reader: Reader) -> Iterator[str]:
    for u in piece.units:
        rows = reader.rows(source, source.units[u])
        for row in range(len(rows)):
            text, _ = rows.text(row)
            if text is not None:
                yield text


def _pieces(source: Source, units: Sequence[int], reader: Reader) -> Iterator[_Piece]:
    """Slices of a row group go together: its size is known, that of a slice is not."""
    held = source.threshold / _WHOLE
    evaluated = frozenset(source.heldout_units)
    together: dict[tuple[int, ...], list[int]] = {}
    for u in units:
        unit = source.units[u]
        alone = unit.group < 0 or _group(source, unit, reader).total_byte_size > GROUP_LIMIT
        together.setdefault((*unit[:2], unit.start if alone else -1), []).append(u)
    for members in together.values():
        size = sum(text_size(source, source.units[u], reader) for u in members)
        known = [source.units[u] for u in members if source.units[u].group >= 0]
        rows = sum(unit.stop - unit.start for unit in known)
        trained = 1 - held * sum(u in evaluated for u in members) / len(members)
        yield _Piece(tuple(members), size, rows, trained)


def _some(texts: Sequence[str], key: int) -> Iterator[str]:
    """Texts in an order of their own, until there are enough bytes."""
    size = 0
    for index in permutation(len(texts), key):
        if size >= SAMPLED_BYTES:
            return
        size += len(texts[index].encode())
        yield texts[index]


def text_size(source: Source, unit: Unit, reader: Reader) -> float:
    """A measure of a unit's text that takes no reading of it, in bytes."""
    if unit.group < 0:
        return unit.stop - unit.start
    group = _group(source, unit, reader)
    columns = (group.column(index) for index in range(group.num_columns))
    text = sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema == source.text_column
    )
    return float(text * (unit.stop - unit.start) / group.num_rows)


def _group(source: Source, unit: Unit, reader: Reader) -> pq.RowGroupMetaData:
    return reader.footer(source, unit.file).row_group(unit.group)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
