"""From a unit to its documents: parquet, JSON lines, text; plain or compressed.

A `Reader` keeps the last few decoded units, since lanes of one process often read slices of the
same row group. What is kept is bytes; a text is decoded, and judged, when its row is asked for.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain import heartbeat
from llmtrain.config.binding import DataSettings
from llmtrain.data.documents.byte_ranges import hub_file, unit_spans, wanted
from llmtrain.data.documents.lines import (
    A_LIST,
    MIB,
    decoded,
    decompress,
    end_of_line,
    fields,
    line_number,
    owned,
    parse,
    refuse_utf_16,
)
from llmtrain.data.documents.rows import Rows, of_table, refuse_other_encoding
from llmtrain.data.documents.skipped import (
    FILE_NAME,
    MANY_IN_A_ROW,
    LeftOut,
    Skipped,
    UnreadableError,
    readable,
    too_many,
)
from llmtrain.data.manifest import Source, Unit
from llmtrain.data.remote.cache import Cache, cache_root
from llmtrain.data.remote.footers import stored
from llmtrain.data.remote.prefetch import Range, Ranges
from llmtrain.data.remote.request import Stopping
from llmtrain.data.remote.retry import PIECE_BYTES, RangeFile, Remote
from llmtrain.data.sources.local import file_format
from llmtrain.errors import Problem, UserError

GROUP_LIMIT = 64 * MIB  # a row group that is decoded at once
CACHED_GROUPS = 4
CACHED_BYTES = 64 * MIB
OPEN_FOOTERS = 64
HELD_BYTES = 128 * MIB  # of a group on the Hub that are read at once, still compressed


@dataclass(frozen=True, slots=True)
class Reading:
    """How units are read.

    timeout_seconds: after which peers give up on a process that waits for the network · run_dir:
    where the run keeps what reading finds out; None = nowhere · cache_bytes: of the disk for what
    comes from the Hub · skip_bad_units: a unit or line that cannot be decoded is left out and
    written down; those that were, are left out in any case · stop: set when the waiting for the
    network shall end, of this process alone.
    """

    timeout_seconds: float
    run_dir: Path | None = None
    cache_bytes: int = 0
    skip_bad_units: bool = False
    stop: Stopping | None = None


def reading_of(
    settings: DataSettings, run_dir: Path | None, stop: Stopping | None = None
) -> Reading:
    """How a run with these settings reads. stop: as in `Reading`."""
    cache_bytes = int(settings.data.cache_gb * 2**30)
    skip = settings.data.on_bad_unit == "skip"
    return Reading(60 * settings.timeout_minutes, run_dir, cache_bytes, skip, stop)


class Reader:
    """Decodes units, in one process. Keeps the last few, so that slices of a group cost little.

    reading: how · stop: set when the process shall end, in place of the reading's own · asked:
    told the name of each unit before it is read · reads: units decoded so far, those that were
    still in memory not counted.
    """

    def __init__(
        self,
        reading: Reading,
        stop: Stopping | None = None,
        asked: Callable[[str], None] | None = None,
    ) -> None:
        self.reads = 0
        self.reading = reading
        stop = stop or reading.stop
        cache = Cache(cache_root(), reading.cache_bytes) if reading.cache_bytes else None
        self._ranges = Ranges(Remote(reading.timeout_seconds, stop), cache, stop)
        self._asked = asked
        self._expected: dict[tuple[str, Unit], list[Range]] = {}
        self._decoded: OrderedDict[tuple[object, ...], Rows] = OrderedDict()
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._skipped = Skipped(reading.run_dir and reading.run_dir / FILE_NAME)
        self._in_a_row: dict[str, list[tuple[object, ...]]] = {}  # bad units since a good one

    def rows(
        self, source: Source, unit: Unit, epoch: int | None = None, *, needed: bool = False
    ) -> Rows:
        """The rows of a unit, in file order; none of one that is left out.

        epoch: which the unit is wanted for; None = before the first step · needed: blocks were made
        of it, so it is not left out now. Raises UserError for a bad file or line unless they are
        skipped, RunError for what the machine did.
        """
        heartbeat.beat("reading a unit of the data")
        expected = self._expected.pop((source.where(unit.file), unit), [])
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
        for span in expected:
            self._ranges.forget(span)
        self._count(source, unit, epoch, error)
        return Rows(pa.array([], pa.large_binary()), None, skipped=1)

    def skips_file(self, source: Source, file: int, error: UnreadableError | None = None) -> bool:
        """Is this file left out as a whole? With what is wrong with it, it may be from now on."""
        known = source.files[file]
        part = LeftOut(source.label, known.name, "file", -1, 0, known.size, None)
        if error is not None and self.reading.skip_bad_units:
            self._skipped.add([(part, _reason(error))])
        return self._skipped.holds(part)

    def _count(
        self, source: Source, unit: Unit, epoch: int | None, error: UnreadableError | None
    ) -> None:
        """Slices of one group are one thing, so that it alone can not end a run."""
        place = (unit.file, unit.group if unit.group >= 0 else unit.start, epoch)
        row = self._in_a_row.setdefault(source.label, [])
        if row[-1:] != [place]:
            row.append(place)
        if len(row) >= MANY_IN_A_ROW:
            raise too_many(source.label, error)

    def _rows(self, source: Source, unit: Unit) -> Rows:
        if self._asked is not None:
            self._asked(_place(source, unit))
        with readable(_place(source, unit)):
            if unit.group < 0:
                return self._kept(source, unit)
            footer = self.footer(source, unit.file)
            if unit.group >= footer.num_row_groups:
                raise UserError(_changed(source, unit))
            group = footer.row_group(unit.group)
            if unit.stop > group.num_rows:
                raise UserError(_changed(source, unit))
            if group.total_byte_size > GROUP_LIMIT:
                self.reads += 1
                return self._slice_of_large(source, unit)
            return self._kept(source, unit).slice(unit.start, unit.stop)

    def footer(self, source: Source, file: int) -> pq.FileMetaData:
        """The footer of a parquet file."""
        where = source.where(file)
        footer = self._footers.get(where)
        if footer is None:
            footer = self._footers[where] = self._read_footer(source, file)
            if len(self._footers) > OPEN_FOOTERS:
                self._footers.popitem(last=False)
        return footer

    def _read_footer(self, source: Source, file: int) -> pq.FileMetaData:
        if not source.remote:
            return pq.read_metadata(source.where(file))
        run_dir, etag = self.reading.run_dir, source.files[file].etag
        return stored(run_dir, etag, lambda: pq.read_metadata(self._ranged(source, file)))

    def expect(self, source: Source, unit: Unit) -> None:
        """This unit will be asked for soon: begin to read it, if it is far away."""
        if not source.remote or self._key(source, unit) in self._decoded:
            return
        try:
            with readable(_place(source, unit)):
                spans = self._spans(source, unit)
        except UnreadableError:  # said, or left out, when its turn comes
            return
        file = hub_file(source, unit.file)
        self._expected[source.where(unit.file), unit] = [Range(file, *span) for span in spans]
        for span in spans:
            self._ranges.expect(Range(file, *span))

    def _spans(self, source: Source, unit: Unit) -> list[tuple[int, int]]:
        footer = self.footer(source, unit.file) if unit.group >= 0 else None
        if footer is not None and unit.group >= footer.num_row_groups:
            raise UserError(_changed(source, unit))
        return unit_spans(source, unit, footer)

    def open(self, source: Source, file: int) -> io.RawIOBase | io.BufferedReader:
        """A file of a source, here or on the Hub, for reading at any position."""
        if not source.remote:
            return Path(source.where(file)).open("rb")
        return self._ranged(source, file)

    def _ranged(self, source: Source, file: int, *, again: bool = False) -> RangeFile:
        return self._ranges.open(hub_file(source, file), again=again)

    def lines(self, source: Source, unit: Unit) -> Iterator[tuple[int, bytes]]:
        """The lines of a byte range or compressed file: (position of the first byte, line)."""
        known, where = source.files[unit.file], source.where(unit.file)
        kind, compression = file_format(known.name) or ("", None)
        with self.open(source, unit.file) as file:
            if isinstance(file, RangeFile):
                file.hold(self._spans(source, unit))
            if compression:
                data, start = decompress(file, compression, where), 0
            else:
                data, start = owned(file, unit, known.size, kind, where)
        if start == 0:
            refuse_utf_16(data, where)
        position = 0
        for end in end_of_line(kind).finditer(data):
            yield start + position, data[position : end.start()]
            position = end.end()
        if position < len(data):
            yield start + position, data[position:]

    def first_keys(self, source: Source, file: int) -> list[str] | None:
        """The keys of a file's first JSON line; None: it has no line. Raises UserError if bad.

        Without the text column they are told all the same, unless reading leaves such lines out.
        """
        unit = Unit(file, -1, 0, min(1, source.files[file].size))
        with readable(_place(source, unit)):
            lines = list(self.lines(source, unit))
        for position, line in lines:
            if line.strip():
                try:
                    row = decoded(line)
                    if source.text_column in row or self.reading.skip_bad_units:
                        fields(row, source.text_column, None)
                except ValueError as error:
                    if self.reading.skip_bad_units:
                        return None  # reading leaves it out
                    raise self._bad_line(source, unit, position, error) from error
                return list(row)
        return None

    def _key(self, source: Source, unit: Unit) -> tuple[object, ...]:
        begin = 0 if unit.group >= 0 else unit.start
        # With the columns: two sources may take other columns of the same file.
        return (source.where(unit.file), unit.group, begin, *wanted(source))

    def _kept(self, source: Source, unit: Unit) -> Rows:
        key = self._key(source, unit)
        rows = self._decoded.pop(key, None)
        if rows is None:
            self.reads += 1
            rows = self._group(source, unit) if unit.group >= 0 else self._range(source, unit)
            refuse_other_encoding(rows.texts, _place(source, unit))
        self._decoded[key] = rows
        while len(self._decoded) > 1 and (
            len(self._decoded) > CACHED_GROUPS
            or sum(kept.nbytes for kept in self._decoded.values()) > CACHED_BYTES
        ):
            self._decoded.popitem(last=False)
        return rows

    def _group(self, source: Source, unit: Unit) -> Rows:
        with self._parquet(source, unit) as file:
            table = file.read_row_group(unit.group, columns=wanted(source), use_threads=False)
        return of_table(table, source.text_column, source.id_column)

    def _slice_of_large(self, source: Source, unit: Unit) -> Rows:
        """Rows [start, stop) of a group, without ever holding all of it."""
        with self._parquet(source, unit, buffer_size=MIB) as file:
            tables, position = [], 0
            batches = file.iter_batches(
                1000, row_groups=[unit.group], columns=wanted(source), use_threads=False
            )
            for batch in batches:
                first, last = unit.start - position, unit.stop - position
                position += len(batch)
                if first < len(batch) and last > 0:
                    part = batch.slice(max(first, 0), last - max(first, 0))
                    tables.append(pa.Table.from_batches([part]))
                if position >= unit.stop:
                    break
        table = pa.concat_tables(tables)
        rows = of_table(table, source.text_column, source.id_column)
        refuse_other_encoding(rows.texts, _place(source, unit))
        return rows

    def _parquet(self, source: Source, unit: Unit, buffer_size: int = 0) -> pq.ParquetFile:
        """A parquet file; on the Hub with the columns of the unit's group read at once."""
        footer = self.footer(source, unit.file)
        opened: str | pa.PythonFile = source.where(unit.file)
        if source.remote:
            sliced = unit.stop - unit.start < footer.row_group(unit.group).num_rows
            ranged = self._ranged(source, unit.file, again=sliced)
            spans = self._spans(source, unit)
            if sum(end - start for start, end in spans) <= HELD_BYTES:
                ranged.hold(spans)
            else:
                buffer_size = PIECE_BYTES
            opened = pa.PythonFile(ranged, "r")
        return pq.ParquetFile(opened, metadata=footer, pre_buffer=False, buffer_size=buffer_size)

    def _range(self, source: Source, unit: Unit) -> Rows:
        name = source.files[unit.file].name
        lines = self.lines(source, unit)
        if (file_format(name) or ("",))[0] == "text":
            return Rows(pa.array([line for _, line in lines], pa.large_binary()), None)
        texts: list[bytes | None] = []
        ids: list[bytes | None] = []
        bad: list[tuple[LeftOut, str]] = []
        left_out = self._skipped.lines(source.label, name)
        for position, line in lines:
            if not line.strip():
                continue
            part = LeftOut(source.label, name, "line", -1, position, position, None)
            if position in left_out:
                bad.append((part, ""))
                continue
            try:
                text, id_ = parse(line, source.text_column, source.id_column)
            except ValueError as error:
                if not self.reading.skip_bad_units:
                    raise self._bad_line(source, unit, position, error) from error
                bad.append((part, str(error)))
            else:
                texts.append(text)
                ids.append(id_)
        if bad and not texts:  # one record instead of thousands
            reason = f"no line can be used; the first: {bad[0][1]}"
            raise UnreadableError(Problem(_place(source, unit), reason, "JSON lines"))
        self._skipped.add(bad)
        return Rows(pa.array(texts, pa.large_binary()), pa.array(ids, pa.large_binary()), len(bad))

    def _bad_line(self, source: Source, unit: Unit, position: int, error: ValueError) -> UserError:
        where = f"{source.where(unit.file)}, byte {position}"
        if not source.remote:
            compression = (file_format(source.files[unit.file].name) or ("", None))[1]
            with self.open(source, unit.file) as file:
                number = line_number(file, compression, source.where(unit.file), position)
            where = f"{source.where(unit.file)}, line {number}"
        expected = f"a JSON object with the key {source.text_column!r} (a string or null)"
        remedy = "repair or remove the line, or correct the source's text_column"
        if str(error) == A_LIST:
            remedy = "write one object a line; `llmtrain data repack` then makes parquet of it"
        return UserError(Problem(where, str(error), expected, remedy))


def _place(source: Source, unit: Unit) -> str:
    part = f", row group {unit.group}" if unit.group >= 0 else f", byte {unit.start}"
    return source.where(unit.file) + part


def _reason(error: UnreadableError) -> str:
    return f"{error.problems[0].value}; expected: {error.problems[0].expected}"


def _changed(source: Source, unit: Unit) -> Problem:
    expected = f"rows {unit.start} to {unit.stop}, as when the run began"
    return Problem(_place(source, unit), "fewer rows", expected, "bring the file back")
