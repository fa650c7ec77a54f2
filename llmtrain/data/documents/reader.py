"""Reads units for training, and decides which bad ones are left out and which end the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain import heartbeat
from llmtrain.config.binding import DataSettings
from llmtrain.data.documents.lines import A_LIST, decode_line, fields, line_number
from llmtrain.data.documents.rows import Rows, as_array
from llmtrain.data.documents.skipped import (
    FILE_NAME,
    MANY_IN_A_ROW,
    LeftOut,
    Skipped,
    UnreadableError,
    readable,
    too_many,
)
from llmtrain.data.documents.units import Units, place_of
from llmtrain.data.manifest import Source, Unit
from llmtrain.data.remote.request import Stopping
from llmtrain.data.sources.local import file_format
from llmtrain.data.token_cache import source as token_cache
from llmtrain.errors import Problem, UserError


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
        self._skipped = Skipped(run_dir and run_dir / FILE_NAME)
        self._in_a_row: dict[str, list[tuple[object, ...]]] = {}  # bad units since a good one
        self._begun = 0  # units

    def documents(
        self, source: Source, unit: Unit, epoch: int | None = None, *, needed: bool = False
    ) -> Rows | token_cache.Rows:
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
        heartbeat.beat("reading a unit of the data", self._begun)
        if needed:
            return self._rows(source, unit)
        kind: Literal["rows", "bytes"] = "rows" if unit.group >= 0 else "bytes"
        part = LeftOut(source.label, source.files[unit.file].name, kind, *unit[1:], epoch)
        error: UnreadableError | None = None
        if not self._skipped.holds(part):
            try:
                rows = self._rows(source, unit)
            except UnreadableError as caught:
                if not self.reading.skip_bad_units:
                    raise
                error = caught
                self._skipped.add([(part, _reason(error))])
            else:
                self._in_a_row.pop(source.label, None)
                return rows
        self.units.forget(source, unit)
        self._count(source, unit, epoch, error)
        return Rows(as_array([]), None, skipped=1)

    def _rows(self, source: Source, unit: Unit) -> Rows:
        """Return the rows of a unit. Bad lines are left out, or raise UserError."""
        name = source.files[unit.file].name
        left_out = self._skipped.lines(source.label, name) if unit.group < 0 else ()
        rows = self.units.rows(source, unit, left_out)
        new = [(position, reason) for position, reason in rows.bad if reason]
        if new and not self.reading.skip_bad_units:
            raise self._bad_line(source, unit, *new[0])
        if rows.bad and not len(rows):  # one record instead of thousands
            reason = f"no line can be used; the first: {rows.bad[0][1]}"
            raise UnreadableError(Problem(place_of(source, unit), reason, "JSON lines"))
        if new:
            lines = [
                (LeftOut(source.label, name, "line", -1, at, at, None), why) for at, why in new
            ]
            self._skipped.add(lines)
        return rows

    def skips_file(self, source: Source, file: int, error: UnreadableError | None = None) -> bool:
        """Return whether a file is left out as a whole.

        error: why it cannot be read; if bad units are skipped, the file is left out from now on
        """
        known = source.files[file]
        part = LeftOut(source.label, known.name, "file", -1, 0, known.size, None)
        if error is not None and self.reading.skip_bad_units:
            self._skipped.add([(part, _reason(error))])
        return self._skipped.holds(part)

    def _count(
        self, source: Source, unit: Unit, epoch: int | None, error: UnreadableError | None
    ) -> None:
        """Count bad units in a row. Slices of a group count once, so that it alone ends no run."""
        place = (unit.file, unit.group if unit.group >= 0 else unit.start, epoch)
        row = self._in_a_row.setdefault(source.label, [])
        if row[-1:] != [place]:
            row.append(place)
        if len(row) >= MANY_IN_A_ROW:
            raise too_many(source.label, error)

    def _first_lines(self, source: Source, file: int) -> list[tuple[int, bytes]]:
        """Return the first lines of a file of rows, of CSV its header with empty cells."""
        unit = Unit(file, -1, 0, min(1, source.files[file].size))
        with readable(place_of(source, unit)):
            if (file_format(source.files[file].name) or ("",))[0] == "csv":
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
        unit = Unit(file, -1, 0, min(1, source.files[file].size))
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
                    raise self._bad_line(source, unit, position, str(error)) from error
                return list(row)
        return None

    def _bad_line(self, source: Source, unit: Unit, position: int, reason: str) -> UserError:
        where = f"{source.where(unit.file)}, {self.line_at(source, unit.file, position)}"
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
        compression = (file_format(source.files[file].name) or ("", None))[1]
        with self.units.open(source, file) as opened:
            return f"line {line_number(opened, compression, where, position)}"


def _reason(error: UnreadableError) -> str:
    return f"{error.problems[0].value}; expected: {error.problems[0].expected}"
