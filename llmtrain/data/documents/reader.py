"""Reads units for training, finds rows, and decides which bad units are left out or end the run.

A row has a place in the order of a lane, and one in its file:

    lane, epoch, position in its list    ─►  unit_at     the unit
    row as the lane reads them           ─►  row_order   the row in file order
    row in file order                    ─►  rows_of     the line's first byte, or the row's number

`data which` names documents by the second, and messages name rows that cannot be used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from llmtrain import system
from llmtrain.config.binding import DataSettings
from llmtrain.config.schema import Answers
from llmtrain.data.chat.rows import BadRowError, answers_of
from llmtrain.data.documents import skipped
from llmtrain.data.documents.lines import A_LIST, BOM, decode_line, fields, line_number
from llmtrain.data.documents.units import Rows, Units, as_array, place_of
from llmtrain.data.manifest import DataManifest, Source, Unit
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.sources.fetch import Stopping
from llmtrain.data.sources.local import TABLES
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix, permutation


@dataclass(frozen=True, slots=True)
class Reading:
    """How units are read.

    timeout_seconds: time after which peers give up on a process that waits for the network
    run_dir: where the run keeps footers and the record of skipped parts; None = nowhere
    cache_bytes: disk space for what comes from the Hub
    skip_bad_units: a unit or line that cannot be decoded is left out and recorded; those that are
        recorded already are always left out
    stop: set when this process must stop waiting for the network
    skip_bad_rows: rows of conversations that cannot be used are left out and counted
    """

    timeout_seconds: float
    run_dir: Path | None = None
    cache_bytes: int = 0
    skip_bad_units: bool = False
    stop: Stopping | None = None
    skip_bad_rows: bool = False


def reading_of(
    settings: DataSettings, run_dir: Path | None, stop: Stopping | None = None
) -> Reading:
    """Return how a run with these settings reads its units. stop: as in `Reading`."""
    cache_bytes = int(settings.data.cache_gb * 2**30)
    skip = settings.data.on_bad_unit == "skip"
    rows = settings.chat.bad_rows == "skip"
    return Reading(60 * settings.timeout_minutes, run_dir, cache_bytes, skip, stop, rows)


class Reader:
    """Reads units in one process, and leaves out what `on_bad_unit` lets it skip.

    reading: how units are read
    stop: set when the process must end; replaces that of `reading`
    asked: called with the name of each unit before it is read
    """

    def __init__(
        self,
        reading: Reading,
        stop: Stopping | None = None,
        asked: Callable[[str], None] | None = None,
    ) -> None:
        self.reading = reading
        run_dir, stop = reading.run_dir, stop or reading.stop
        self.units = Units(reading.timeout_seconds, run_dir, reading.cache_bytes, stop, asked)
        self._skipped = skipped.Skipped(run_dir and run_dir / skipped.FILE_NAME)
        self._in_a_row: dict[str, list[tuple[object, ...]]] = {}  # bad units since a good one
        self._begun = 0  # units

    def documents(
        self, source: Source, unit: Unit, epoch: int | None = None, *, needed: bool = False
    ) -> Rows | token_cache.CachedRows:
        """Return what `rows` returns, or the documents of a token cache, of which none is bad."""
        if source.cached:
            return token_cache.rows_of(source, unit)
        return self.rows(source, unit, epoch, needed=needed)

    def rows(
        self, source: Source, unit: Unit, epoch: int | None = None, *, needed: bool = False
    ) -> Rows:
        """Return the rows of a unit, in file order. A unit that is left out gives no rows.

        epoch: the epoch that needs the unit; None = before the first step
        needed: blocks were already made of it, so it may not be left out now

        Raises UserError for a bad file or line unless these are skipped, RunError if the machine
        fails.
        """
        self._begun += 1
        system.beat("reading a unit of the data", self._begun)
        if needed:
            return self._rows(source, unit)
        kind: Literal["rows", "bytes"] = "rows" if unit.group >= 0 else "bytes"
        part = skipped.LeftOut(source.label, source.files[unit.file].name, kind, *unit[1:], epoch)
        error: skipped.UnreadableError | None = None
        if not self._skipped.holds(part):
            try:
                rows = self._rows(source, unit)
            except skipped.UnreadableError as caught:
                if not self.reading.skip_bad_units:
                    raise
                error = caught
                self._skipped.add([(part, _reason(error))])
            else:
                self._in_a_row.pop(source.label, None)
                return rows
        self.units.forget(source, unit)
        # Bad units in a row; slices of a group count once, so that it alone ends no run.
        place = (unit.file, unit.group if unit.group >= 0 else unit.start, epoch)
        in_a_row = self._in_a_row.setdefault(source.label, [])
        if in_a_row[-1:] != [place]:
            in_a_row.append(place)
        if len(in_a_row) >= skipped.MANY_IN_A_ROW:
            raise skipped.too_many(source.label, error)
        return Rows(as_array([]), None, skipped=1)

    def _rows(self, source: Source, unit: Unit) -> Rows:
        """Return the rows of a unit. Bad lines are left out, or raise UserError."""
        name = source.files[unit.file].name
        left_out = self._skipped.lines(source.label, name) if unit.group < 0 else ()
        rows = self.units.rows(source, unit, left_out)
        new = [(position, reason) for position, reason in rows.bad if reason]
        if new and not self.reading.skip_bad_units:
            raise self._bad_line(source, unit.file, *new[0])
        if rows.bad and not len(rows):  # one record instead of thousands
            reason = f"no line can be used; the first: {rows.bad[0][1]}"
            raise skipped.UnreadableError(Problem(place_of(source, unit), reason, "JSON lines"))
        if new:
            lines = [
                (skipped.LeftOut(source.label, name, "line", -1, at, at, None), why)
                for at, why in new
            ]
            self._skipped.add(lines)
        return rows

    def skips_file(
        self, source: Source, file: int, error: skipped.UnreadableError | None = None
    ) -> bool:
        """Return whether a file is left out as a whole.

        error: why it cannot be read; if bad units are skipped, the file is left out from now on
        """
        known = source.files[file]
        part = skipped.LeftOut(source.label, known.name, "file", -1, 0, known.size, None)
        if error is not None and self.reading.skip_bad_units:
            self._skipped.add([(part, _reason(error))])
        return self._skipped.holds(part)

    def _first_lines(self, source: Source, file: int) -> list[tuple[int, bytes]]:
        """Return the first lines of a file of rows, of CSV its header with empty cells."""
        unit = Unit(file, -1, 0, min(1, source.files[file].size))
        with skipped.readable(place_of(source, unit)):
            if source.format(file).kind == "csv":
                names = self.units.header(source, file)
                return [(0, json.dumps(dict.fromkeys(names)).encode())] if names else []
            if self.units.is_array(source, file):
                return self.units.first_element(source, file)
            return list(self.units.lines(source, unit))

    def keys_of_first_line(self, source: Source, file: int) -> list[str]:
        """Return the keys of a file's first JSON line; [] if it has no line.

        Raises ValueError for a line that is no object, and UserError as reading does.
        """
        lines = self._first_lines(source, file)
        return next((list(decode_line(line)) for _, line in lines if line.strip()), [])

    def first_keys(self, source: Source, file: int) -> list[str] | None:
        """Return the keys of a file's first JSON line, or None if it has no line.

        If bad lines are skipped, a bad first line, or one without the text column, gives None.
        Otherwise a bad line raises UserError, and one without the text column is returned. Of
        conversations only the columns are looked at here.
        """
        for position, line in self._first_lines(source, file):
            if line.strip():
                try:
                    row = decode_line(line)
                    skip = self.reading.skip_bad_units
                    if source.form is None and (source.text_column in row or skip):
                        fields(row, source.text_column, None)
                except ValueError as error:
                    if self.reading.skip_bad_units:
                        return None  # it is left out when it is read
                    raise self._bad_line(source, file, position, str(error)) from error
                return list(row)
        return None

    def _bad_line(self, source: Source, file: int, position: int, reason: str) -> UserError:
        where = f"{source.where(file)}, {self.line_at(source, file, position)}"
        expected = f"a JSON object with the key {source.text_column!r} (a string or null)"
        remedy = "repair or remove the line, or correct the source's text_column"
        if reason == A_LIST:
            remedy = "write one object a line, or all objects as one JSON array"
        return UserError(Problem(where, reason, expected, remedy))

    def line_at(self, source: Source, file: int, position: int) -> str:
        """Return which line it is, for messages: its number, on the Hub its first byte."""
        if source.remote:
            return f"byte {position}"
        where = source.where(file)
        compression = source.format(file).compression
        with self.units.open(source, file) as opened:
            return f"line {line_number(opened, compression, where, position)}"


def _reason(error: skipped.UnreadableError) -> str:
    return f"{error.problems[0].value}; expected: {error.problems[0].expected}"


_WANTED: Mapping[Answers | None, str] = {
    None: "a conversation that can be trained on",
    "pairs": "a pair of answers that can be trained on",
    "feedback": "a judged answer that can be trained on",
}
OF_THE_SOURCE = ("judgement", "mask")  # bad rows that say what the whole source is
DESCRIBING = ("title", "url")


class RowPlace(NamedTuple):
    """A row of a unit.

    at: the row of its row group, or the byte of the file at which its line begins
    columns: those that describe it, `id` among them; None where it has no value
    """

    at: int
    columns: Mapping[str, str | None]


def units_of(manifest: DataManifest, k: int, epoch: int, lane: int) -> np.ndarray:
    """Return the units of source k that a lane walks in an epoch, in order: indices (n,).

    If the units cannot be dealt evenly, some lanes get one more. A rotation changes which lanes
    these are from epoch to epoch.
    """
    seed, lanes = manifest.seed, manifest.lanes
    order = _order(len(manifest.sources[k].units), mix(seed, 1, k, epoch))
    return order[(lane + mix(seed, 6, k, epoch)) % lanes :: lanes]


_order = lru_cache(maxsize=8)(permutation)


def unit_at(manifest: DataManifest, k: int, epoch: int, lane: int, position: int) -> int:
    """Return the unit of source k at a position of a lane's list."""
    return int(units_of(manifest, k, epoch, lane)[position])


def row_order(manifest: DataManifest, k: int, u: int, epoch: int, rows: int) -> np.ndarray:
    """Return the order in which a unit's rows are read in an epoch: rows in file order (n,)."""
    return permutation(rows, mix(manifest.seed, 2, k, epoch, u))


def bad_row(source: Source, u: int, row: int, reader: Reader, why: BadRowError) -> Problem:
    """Return the problem of a row of unit u that cannot be used. row: in file order"""
    where = source.where(source.units[u].file)
    expected = f"{_WANTED[answers_of(source.form)]}: {why}"
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


def rows_of(reader: Reader, source: Source, unit: Unit) -> Sequence[RowPlace]:
    """Return the rows of a unit in file order, with the columns that describe a document."""
    kind = source.format(unit.file).kind
    if kind in TABLES:
        return _rows_of_group(reader, source, unit)
    if kind == "text":
        return [RowPlace(at, {}) for at, _ in reader.units.lines(source, unit)]
    rows = ((at, _columns_of_line(line, source)) for at, line in reader.units.lines(source, unit))
    return [RowPlace(at, columns) for at, columns in rows if columns is not None]


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


def _rows_of_group(reader: Reader, source: Source, unit: Unit) -> Sequence[RowPlace]:
    existing = reader.units.schema(source, unit.file).names
    names = [name for name in _columns(source) if name in existing]
    columns: dict[str, list[str | None]] = {}
    for first, second in zip_longest(names[::2], names[1::2]):
        # Named as text and id of a source, they are read as these are, also from the Hub.
        described = replace(source, text_column=first, id_column=second, form=None)
        rows = reader.rows(described, unit, needed=True)
        columns[first] = decoded(rows.texts)
        if rows.ids is not None:
            columns[second] = decoded(rows.ids)
    return [
        RowPlace(unit.start + i, {name: values[i] for name, values in columns.items()})
        for i in range(unit.stop - unit.start)
    ]


def _columns(source: Source) -> list[str]:
    return [source.id_column or "id", *DESCRIBING]


def decoded(values: pa.Array) -> list[str | None]:
    """Return bytes as text; what is not UTF-8 in them is replaced."""
    return [None if raw is None else raw.decode("utf-8", "replace") for raw in values.to_pylist()]
