"""Which documents were in which blocks: the lanes walked again, and their places looked up.

    state at a save  ─►  replay: the lanes' blocks again  ─►  origins: file, row, id, title, url

Nothing is stored for it: a block is a pure function of the manifest, the lanes' cursors at some
block before it, and the weights in force. So only the lanes that are asked for are walked, and only
from that block on.
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

from llmtrain.data import token_cache
from llmtrain.data.lanes import Block, Lane, units_of
from llmtrain.data.lines import BOM, parse
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.packing import Span
from llmtrain.data.readers import Reader
from llmtrain.data.sources import file_format
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

DESCRIBING = ("title", "url")


class Document(NamedTuple):
    """A document by its place in the order of a lane, as `Span` has it."""

    source: int
    lane: int
    epoch: int
    unit: int
    row: int


class Origin(NamedTuple):
    """Where a document was read, and what its row says of it.

    file: relative to its source · group: the row group, None in a file of lines · at: the row of
    that group, or the byte of the file at which its line begins; in a token cache the number of the
    document in its file · id, title, url: None where the row has none; id in a token cache is the
    number of the document in its source.
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
    tokenizer: Tokenizer,
    reader: Reader,
    *,
    cursors: np.ndarray,
    next_block: int,
    first: int,
    stop: int,
) -> Iterator[tuple[int, Block]]:
    """Blocks first … stop − 1 with their numbers, from the state at `next_block`.

    cursors (L, sources, 4): of the block at which each lane stands at `next_block` ≤ first. Raises
    as reading does.
    """
    count = manifest.lanes
    lanes: dict[int, Lane] = {}
    for g in range(first, stop):
        index = g % count
        if index not in lanes:
            at = next_block + (index - next_block) % count
            start = [Cursor(*map(int, cursor)) for cursor in cursors[index]]
            lanes[index] = Lane(manifest, tokenizer, reader, index, at, start)
        while lanes[index].next_block < g:
            lanes[index].take()
        yield g, lanes[index].take()


def document_of(manifest: Manifest, g: int, block: Block, span: Span) -> Document:
    """Whose tokens a span of block g holds."""
    return Document(block.source, g % manifest.lanes, span.epoch, span.unit, span.row)


def origins(
    manifest: Manifest, reader: Reader, documents: Collection[Document]
) -> dict[Document, Origin]:
    """Where documents come from. Reads each unit that one of them lies in, once more."""
    wanted: dict[tuple[int, int], list[tuple[Document, int]]] = defaultdict(list)
    found: dict[Document, Origin] = {}
    for document in documents:
        source, seed = manifest.sources[document.source], manifest.seed
        k, lane, epoch = document[:3]
        if source.cached:
            found[document] = _of_cache(manifest, document)
            continue
        units = units_of(len(source.units), seed, k, epoch, lane, manifest.lanes)
        wanted[k, int(units[document.unit])].append((document, epoch))
    for (k, u), asked in wanted.items():
        source, unit = manifest.sources[k], manifest.sources[k].units[u]
        rows = _rows(reader, source, unit)
        for document, epoch in asked:
            order = permutation(len(rows), mix(manifest.seed, 2, k, epoch, u))
            found[document] = _origin(source, unit, rows[int(order[document.row])])
    return found


def _of_cache(manifest: Manifest, document: Document) -> Origin:
    """A document of a token cache has nothing but its number."""
    k, lane, epoch, position, number = document
    source, seed = manifest.sources[k], manifest.seed
    if manifest.packing == "bestfit":  # walked by units, as text is
        units = units_of(len(source.units), seed, k, epoch, lane, manifest.lanes)
        rows = token_cache.rows_of(source, source.units[int(units[position])])
        order = permutation(len(rows), mix(seed, 2, k, epoch, int(units[position])))
        number = int(rows.numbers[int(order[number])])
    name, at = token_cache.place_of(source, number)
    return Origin(name, None, at, str(number), None, None)


def _origin(source: Source, unit: Unit, row: _Row) -> Origin:
    group = unit.group if unit.group >= 0 else None
    columns = row.columns
    name = columns.get(source.id_column or "id")
    title, url = (columns.get(column) for column in DESCRIBING)
    return Origin(source.files[unit.file].name, group, row.at, name, title, url)


def _rows(reader: Reader, source: Source, unit: Unit) -> Sequence[_Row]:
    """The rows of a unit in file order, with the columns that tell one document from another."""
    kind = (file_format(source.files[unit.file].name) or ("",))[0]
    if kind == "parquet":
        return _rows_of_group(reader, source, unit)
    if kind == "text":
        return [_Row(at, {}) for at, _ in reader.lines(source, unit)]
    found = ((at, _columns_of_line(line, source)) for at, line in reader.lines(source, unit))
    return [_Row(at, columns) for at, columns in found if columns is not None]


def _columns_of_line(line: bytes, source: Source) -> Mapping[str, str | None] | None:
    """None: a line without a document, blank or left out as `on_bad_unit: skip` does."""
    if not line.strip():
        return None
    try:
        parse(line, source.text_column, None)
    except ValueError:
        return None
    row = json.loads(line.removeprefix(BOM).decode("utf-8", "replace"))
    return {name: None if row.get(name) is None else str(row[name]) for name in _wanted(source)}


def _rows_of_group(reader: Reader, source: Source, unit: Unit) -> Sequence[_Row]:
    there = reader.footer(source, unit.file).schema.to_arrow_schema().names
    names = [name for name in _wanted(source) if name in there]
    columns: dict[str, list[str | None]] = {}
    for first, second in zip_longest(names[::2], names[1::2]):
        # As if they were text and id of a source: so they are read as these are, the Hub included.
        rows = reader.rows(replace(source, text_column=first, id_column=second), unit)
        columns[first] = _decoded(rows.texts)
        if rows.ids is not None:
            columns[second] = _decoded(rows.ids)
    return [
        _Row(unit.start + i, {name: values[i] for name, values in columns.items()})
        for i in range(unit.stop - unit.start)
    ]


def _wanted(source: Source) -> list[str]:
    return [source.id_column or "id", *DESCRIBING]


def _decoded(values: pa.Array) -> list[str | None]:
    return [None if raw is None else raw.decode("utf-8", "replace") for raw in values.to_pylist()]
