"""Finds where a row is: from its place in the order of a lane to its line in a file.

    lane, epoch, position in its list    ─►  unit_at     the unit
    row as the lane reads them           ─►  row_order   the row in file order
    row in file order                    ─►  rows_of     the line's first byte, or the row's number

`data which` names documents with it, and messages name rows that cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.documents.lines import BOM, decode_line, fields
from llmtrain.data.documents.reader import Reader
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.sources.local import TABLES, file_format
from llmtrain.errors import Problem
from llmtrain.hashing import mix, permutation

OF_THE_SOURCE = ("judgement", "mask")  # bad rows that say what the whole source is
DESCRIBING = ("title", "url")


class Row(NamedTuple):
    """A row of a unit.

    at: the row of its row group, or the byte of the file at which its line begins
    columns: those that describe it, `id` among them; None where it has no value
    """

    at: int
    columns: Mapping[str, str | None]


def units_of(manifest: Manifest, k: int, epoch: int, lane: int) -> np.ndarray:
    """Return the units of source k that a lane walks in an epoch, in order: indices (n,).

    If the units cannot be dealt evenly, some lanes get one more. A rotation changes which lanes
    these are from epoch to epoch.
    """
    seed, lanes = manifest.seed, manifest.lanes
    order = _order(len(manifest.sources[k].units), mix(seed, 1, k, epoch))
    return order[(lane + mix(seed, 6, k, epoch)) % lanes :: lanes]


@lru_cache(maxsize=8)
def _order(n: int, key: int) -> np.ndarray:
    return permutation(n, key)


def unit_at(manifest: Manifest, k: int, epoch: int, lane: int, position: int) -> int:
    """Return the unit of source k at a position of a lane's list."""
    return int(units_of(manifest, k, epoch, lane)[position])


def row_order(manifest: Manifest, k: int, u: int, epoch: int, rows: int) -> np.ndarray:
    """Return the order in which a unit's rows are read in an epoch: rows in file order (n,)."""
    return permutation(rows, mix(manifest.seed, 2, k, epoch, u))


def bad_row(source: Source, u: int, row: int, reader: Reader, why: BadRowError) -> Problem:
    """Return the problem of a row of unit u that cannot be used. row: in file order"""
    where = source.where(source.units[u].file)
    expected = f"a conversation that can be trained on: {why}"
    remedy = "repair or remove the row, or chat.bad_rows=skip"
    if why.key in OF_THE_SOURCE:
        remedy = "repair the rows, they are not of the kind that is trained on"
    return Problem(f"{where}, {place_of_row(source, u, row, reader)}", None, expected, remedy)


def place_of_row(source: Source, u: int, row: int, reader: Reader) -> str:
    """Return where a row of unit u is in its file, for messages. row: in file order"""
    unit = source.units[u]
    at = rows_of(reader, source, unit)[row].at
    if unit.group >= 0:
        return f"row {at} of row group {unit.group}"
    return reader.line_at(source, unit.file, at)


def rows_of(reader: Reader, source: Source, unit: Unit) -> Sequence[Row]:
    """Return the rows of a unit in file order, with the columns that describe a document."""
    kind = (file_format(source.files[unit.file].name) or ("",))[0]
    if kind in TABLES:
        return _rows_of_group(reader, source, unit)
    if kind == "text":
        return [Row(at, {}) for at, _ in reader.units.lines(source, unit)]
    found = ((at, _columns_of_line(line, source)) for at, line in reader.units.lines(source, unit))
    return [Row(at, columns) for at, columns in found if columns is not None]


def _columns_of_line(line: bytes, source: Source) -> Mapping[str, str | None] | None:
    """Return the columns of a line; None for a blank line, or one that cannot be read."""
    if not line.strip():
        return None
    try:
        decoded = decode_line(line)
        if source.form is None:
            fields(decoded, source.text_column, None)
    except ValueError as error:
        deep = source.form is not None and isinstance(error.__cause__, RecursionError)
        return dict.fromkeys(_columns(source)) if deep else None
    row = json.loads(line.removeprefix(BOM).decode("utf-8", "replace"))
    return {name: None if row.get(name) is None else str(row[name]) for name in _columns(source)}


def _rows_of_group(reader: Reader, source: Source, unit: Unit) -> Sequence[Row]:
    there = reader.units.schema(source, unit.file).names
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
        Row(unit.start + i, {name: values[i] for name, values in columns.items()})
        for i in range(unit.stop - unit.start)
    ]


def _columns(source: Source) -> list[str]:
    return [source.id_column or "id", *DESCRIBING]


def _decode(values: pa.Array) -> list[str | None]:
    return [None if raw is None else raw.decode("utf-8", "replace") for raw in values.to_pylist()]
