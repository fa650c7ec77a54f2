"""Finds which documents were in which blocks, by walking the lanes again.

    state at a save  ─►  replay: the lanes' blocks again  ─►  origins: file, row, id, title, url

Nothing is stored for it: a block is a pure function of the manifest, the lanes' cursors at some
earlier block, and the weights in force. So only the lanes in question are walked, and only from
that block on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from llmtrain.data.documents.lines import BOM, decode_line, fields
from llmtrain.data.documents.reader import Reader
from llmtrain.data.lanes import BadConversationError, Block, Lanes, units_of
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.packing import Span
from llmtrain.data.sources.local import file_format
from llmtrain.data.state import DataState
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.encode import Encoder
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix, permutation

DESCRIBING = ("title", "url")


class Document(NamedTuple):
    """A document by its place in the order of a lane, as in `Span`.

    The documents of a token cache are numbered: row is the number, lane and unit are −1.
    """

    source: int
    lane: int
    epoch: int
    unit: int
    row: int


class Origin(NamedTuple):
    """Where a document was read, and the columns of its row that describe it.

    file: relative to its source
    group: the row group; None in files without row groups
    at: the row of that group, the byte of the file at which its line begins, or the document's
        number in a token cache
    id, title, url: None if the row has no such column; in a token cache the id is the document's
        number in the source
    """

    file: str
    group: int | None
    at: int
    id: str | None
    title: str | None
    url: str | None


class _Row(NamedTuple):
    at: int
    columns: Mapping[str, str | None]


def replay(
    manifest: Manifest,
    encoder: Encoder,
    reader: Reader,
    state: DataState,
    first: int,
    stop: int,
) -> Iterator[tuple[int, Block]]:
    """Yield blocks first … stop − 1 with their numbers. Raises as reading does.

    state: the stream's state at block `first` or before it
    """
    lanes = Lanes(manifest, encoder, reader, state.cursors, state.next_block)
    for g in range(first, stop):
        yield g, lanes.take(g)


def document_of(manifest: Manifest, g: int, block: Block, span: Span) -> Document:
    """Return the document to which a span of block g belongs."""
    k, lane = block.source, g % manifest.lanes
    source = manifest.sources[k]
    if not source.cached:
        return Document(k, lane, span.epoch, span.unit, span.row)
    if manifest.packing == "concat":
        return Document(k, -1, span.epoch, -1, span.row)
    u = _unit_at(manifest, k, lane, span.epoch, span.unit)  # walked in lanes, like text
    numbers = token_cache.rows_of(source, source.units[u]).numbers
    row = _row_at(manifest, k, u, span.epoch, span.row, len(numbers))
    return Document(k, -1, span.epoch, -1, int(numbers[row]))


def is_whole(
    manifest: Manifest, tokenizer: Tokenizer, document: Document, block: Block, span: Span
) -> bool:
    """Return whether a span that begins its document has all of the document.

    Sequences of a conversation are never cut. A text ends with the first end-of-text token, since
    nothing in it is encoded as one. Documents of a token cache may have any tokens, so their length
    decides.
    """
    source = manifest.sources[document.source]
    if source.form is not None:
        return True
    if not source.cached:
        return bool(block.ids[span.at + span.stop - span.start - 1] == tokenizer.eos)
    _, begin, end = token_cache.open_documents(source).span(document.row)
    return span.stop == end - begin


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of a document's ids, or of a part of them, without begin and end token."""
    return tokenizer.decode(token_cache.text_ids(ids, tokenizer))


def origins(
    manifest: Manifest, reader: Reader, documents: Collection[Document]
) -> dict[Document, Origin]:
    """Return where documents come from. Each unit that one of them is in is read again."""
    wanted: dict[tuple[int, int], list[Document]] = defaultdict(list)
    found: dict[Document, Origin] = {}
    for document in documents:
        k, lane, epoch, position, row = document
        if manifest.sources[k].cached:
            file, at = token_cache.place_of(manifest.sources[k], row)
            found[document] = Origin(file, None, at, str(row), None, None)
        else:
            wanted[k, _unit_at(manifest, k, lane, epoch, position)].append(document)
    for (k, u), asked in wanted.items():
        source, unit = manifest.sources[k], manifest.sources[k].units[u]
        rows = _rows(reader, source, unit)
        for document in asked:
            row = _row_at(manifest, k, u, document.epoch, document.row, len(rows))
            found[document] = _origin(source, unit, rows[row])
    return found


def bad_conversation(manifest: Manifest, reader: Reader, error: BadConversationError) -> UserError:
    """Return the message for a row that a lane cannot use, with its file and line."""
    k, lane, epoch, position, row = error.place
    u = _unit_at(manifest, k, lane, epoch, position)
    rows = reader.documents(manifest.sources[k], manifest.sources[k].units[u], epoch, needed=True)
    at = _row_at(manifest, k, u, epoch, row, len(rows))
    return UserError(bad_row(manifest.sources[k], u, at, reader, error.why))


def bad_row(source: Source, u: int, row: int, reader: Reader, why: str) -> Problem:
    """Return the problem of a row of unit u that cannot be used. row: in file order"""
    where = source.where(source.units[u].file)
    expected = f"a conversation that can be trained on: {why}"
    remedy = "repair or remove the row, or chat.bad_rows=skip"
    return Problem(f"{where}, {place_of_row(source, u, row, reader)}", None, expected, remedy)


def place_of_row(source: Source, u: int, row: int, reader: Reader) -> str:
    """Return where a row of unit u is in its file, for messages. row: in file order"""
    unit = source.units[u]
    at = _rows(reader, source, unit)[row].at
    if unit.group >= 0:
        return f"row {at} of row group {unit.group}"
    return reader.line_at(source, unit.file, at)


def _unit_at(manifest: Manifest, k: int, lane: int, epoch: int, position: int) -> int:
    """Return the unit at a position of a lane's list."""
    return int(units_of(manifest, k, epoch, lane)[position])


def _row_at(manifest: Manifest, k: int, u: int, epoch: int, row: int, rows: int) -> int:
    """Return the place in its file of the row that a lane reads as number `row` of the unit."""
    return int(permutation(rows, mix(manifest.seed, 2, k, epoch, u))[row])


def _origin(source: Source, unit: Unit, row: _Row) -> Origin:
    group = unit.group if unit.group >= 0 else None
    columns = row.columns
    name = columns.get(source.id_column or "id")
    title, url = (columns.get(column) for column in DESCRIBING)
    return Origin(source.files[unit.file].name, group, row.at, name, title, url)


def _rows(reader: Reader, source: Source, unit: Unit) -> Sequence[_Row]:
    """Return the rows of a unit in file order, with the columns that describe a document."""
    kind = (file_format(source.files[unit.file].name) or ("",))[0]
    if kind == "parquet":
        return _rows_of_group(reader, source, unit)
    if kind == "text":
        return [_Row(at, {}) for at, _ in reader.units.lines(source, unit)]
    found = ((at, _columns_of_line(line, source)) for at, line in reader.units.lines(source, unit))
    return [_Row(at, columns) for at, columns in found if columns is not None]


def _columns_of_line(line: bytes, source: Source) -> Mapping[str, str | None] | None:
    """Return the columns of a line; None for a blank line, or one that cannot be read."""
    if not line.strip():
        return None
    try:
        decoded = decode_line(line)
        if source.form is None:
            fields(decoded, source.text_column, None)
    except ValueError:
        return None
    row = json.loads(line.removeprefix(BOM).decode("utf-8", "replace"))
    return {name: None if row.get(name) is None else str(row[name]) for name in _columns(source)}


def _rows_of_group(reader: Reader, source: Source, unit: Unit) -> Sequence[_Row]:
    there = reader.units.footer(source, unit.file).schema.to_arrow_schema().names
    names = [name for name in _columns(source) if name in there]
    columns: dict[str, list[str | None]] = {}
    for first, second in zip_longest(names[::2], names[1::2]):
        # Named as text and id of a source, they are read as these are, also from the Hub.
        described = replace(source, text_column=first, id_column=second, form=None)
        rows = reader.rows(described, unit, needed=True)
        columns[first] = _decode(rows.texts)
        if rows.ids is not None:
            columns[second] = _decode(rows.ids)
    return [
        _Row(unit.start + i, {name: values[i] for name, values in columns.items()})
        for i in range(unit.stop - unit.start)
    ]


def _columns(source: Source) -> list[str]:
    return [source.id_column or "id", *DESCRIBING]


def _decode(values: pa.Array) -> list[str | None]:
    return [None if raw is None else raw.decode("utf-8", "replace") for raw in values.to_pylist()]
