"""Decodes the rows of a unit: parquet, Arrow, JSON, CSV, text; plain or compressed.

Texts and ids are kept as bytes. A text is decoded, and checked, when its row is asked for; whether
the unit is UTF-8 at all is checked at once.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from llmtrain.data.chat.rows import as_text
from llmtrain.data.documents import lines
from llmtrain.data.documents.skipped import UnreadableError, readable
from llmtrain.data.manifest import ELEMENTS, Source, Unit
from llmtrain.data.sources.cache import Cache, Range, Ranges, cache_root, load_footer
from llmtrain.data.sources.fetch import PIECE_BYTES, RangeFile, Remote, Stopping
from llmtrain.errors import Problem, UserError

REPLACED_SHARE = 100  # a unit is not UTF-8 if more than 1 / 100 of its characters are wrong …
MIN_REPLACED = 8  # … and at least this many: a damaged word in a unit of a line or two is accepted
GROUP_LIMIT = 64 * lines.MIB  # the largest row group that is decoded at once
CACHED_GROUPS = 4
CACHED_BYTES = 64 * lines.MIB
OPEN_FOOTERS = 64
HELD_BYTES = 128 * lines.MIB  # of a group on the Hub that is read at once, still compressed


@dataclass(frozen=True, slots=True)
class Rows:
    """The decoded rows of one unit: texts and ids as bytes, null if a row has no value.

    skipped: how many parts of the file were left out, the unit itself or lines
    bad: lines without a document, as (first byte, reason); "" = it is already recorded as left out
    """

    texts: pa.Array
    ids: pa.Array | None
    skipped: int = 0
    bad: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the texts and ids."""
        return int(self.texts.nbytes) + (0 if self.ids is None else int(self.ids.nbytes))

    def text(self, row: int) -> tuple[str | None, bool]:
        """Return the document, and whether invalid UTF-8 in it was replaced.

        The document is None if the text is null, empty or blank.
        """
        raw = self.texts[row].as_py()
        if raw is None:
            return None, False
        try:
            text, replaced = raw.decode("utf-8"), False
        except UnicodeDecodeError:
            text, replaced = raw.decode("utf-8", "replace"), True
        return (None, False) if not text or text.isspace() else (text, replaced)

    def usable(self, row: int) -> bool:
        """Return whether a row has a document."""
        return self.text(row)[0] is not None

    def hash(self, row: int, seed: int) -> int:
        """Return xxh3_64 of the document's id, or of its text where it has no id."""
        name = None if self.ids is None else self.ids[row].as_py()
        if name is None:
            name = self.texts[row].as_py() or b""
        return xxhash.xxh3_64_intdigest(name, seed=seed & ((1 << 64) - 1))

    def slice(self, start: int, stop: int) -> Rows:
        """Return a range of the rows, without a copy."""
        ids = None if self.ids is None else self.ids.slice(start, stop - start)
        return Rows(self.texts.slice(start, stop - start), ids, self.skipped)

    def take(self, order: np.ndarray) -> Rows:
        """Return a copy of some rows in this order; the unit's other memory can then be freed."""
        # Without pandas, as `as_array`.
        places = np.ascontiguousarray(order, np.int64)
        rows = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])
        ids = None if self.ids is None else self.ids.take(rows)
        return Rows(self.texts.take(rows), ids, self.skipped)


def as_array(values: Iterable[bytes | None]) -> pa.Array:
    """Return an array of large_binary, null where a value is None.

    `pa.array` would import pandas, which takes a quarter of a second.
    """
    entries = list(values)
    offsets = np.zeros(len(entries) + 1, np.int64)
    np.cumsum([len(value or b"") for value in entries], dtype=np.int64, out=offsets[1:])
    known = np.array([value is not None for value in entries], np.bool_)
    validity = np.packbits(known, bitorder="little")
    parts = validity.tobytes(), offsets, b"".join(value or b"" for value in entries)
    return pa.Array.from_buffers(pa.large_binary(), len(entries), [*map(pa.py_buffer, parts)])


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be the text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _as_bytes(column: pa.ChunkedArray) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not is_text(kind):  # numbers and other ids: as Python writes them
        return as_array(None if v is None else str(v).encode() for v in column.to_pylist())
    chunks = column.cast(pa.large_string()).cast(pa.large_binary()).chunks
    return pa.concat_arrays(chunks) if len(chunks) != 1 else chunks[0]


def refuse_other_encoding(texts: pa.Array, where: str) -> None:
    """Raise UnreadableError if over 1 % of a unit's characters would be replaced, or are NUL.

    Latin-1 has bytes that are not UTF-8; UTF-16 without a byte order mark has a NUL beside each
    Latin letter. Units are checked, since a file is never read as a whole. Valid text costs only
    one check of its bytes.
    """
    try:
        valid = texts.cast(pa.large_string())
        data = valid.buffers()[2]
        if data is None or np.frombuffer(data, np.uint8).all():
            return
    except pa.ArrowInvalid:
        pass  # counted below
    characters = wrong = 0
    for raw in texts.to_pylist():
        text = (raw or b"").decode("utf-8", "replace")
        meant = (raw or b"").count(b"\xef\xbf\xbd")
        wrong += text.count("\ufffd") - meant + text.count("\0")
        characters += len(text)
    if wrong >= MIN_REPLACED and wrong * REPLACED_SHARE > characters:
        reason = f"{wrong} of {characters} characters are none"
        raise UnreadableError(lines.not_utf_8(where, reason))


class Units:
    """Decodes units in one process. It keeps the last few, so that slices of a group cost little.

    timeout_seconds, run_dir, cache_bytes, stop: as in `Reading`
    asked: called with the name of each unit before it is read
    reads: units decoded so far, without those that were still in memory
    """

    def __init__(
        self,
        timeout_seconds: float,
        run_dir: Path | None,
        cache_bytes: int,
        stop: Stopping | None,
        asked: Callable[[str], None] | None,
    ) -> None:
        self.reads = 0
        cache = Cache(cache_root(), cache_bytes) if cache_bytes else None
        self._ranges = Ranges(Remote(timeout_seconds, stop), cache, stop)
        self._run_dir = run_dir
        self._asked = asked
        self._expected: dict[tuple[str, Unit], list[Range]] = {}
        self._decoded: OrderedDict[tuple[object, ...], Rows] = OrderedDict()
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._mapped: OrderedDict[str, list[pa.RecordBatch]] = OrderedDict()  # of Arrow files
        self._headers: dict[str, list[str]] = {}  # of CSV files

    def rows(self, source: Source, unit: Unit, left_out: Collection[int] = ()) -> Rows:
        """Return the rows of a unit, in file order.

        left_out: first bytes of lines that are not read

        Raises UserError for bad content, RunError if the machine fails.
        """
        self._expected.pop((source.where(unit.file), unit), None)
        if self._asked is not None:
            self._asked(place_of(source, unit))
        with readable(place_of(source, unit)):
            if unit.group < 0:
                return self._rows_kept(source, unit, left_out)
            if source.format(unit.file).kind == "arrow":
                batches = self.batches(source, unit.file)
                if unit.group >= len(batches) or unit.stop > len(batches[unit.group]):
                    raise UserError(_fewer_rows(source, unit))
                self.reads += 1
                batch = batches[unit.group].slice(unit.start, unit.stop - unit.start)
                names = [name for name in batch.schema.names if name in lines.columns_of(source)]
                rows = _rows_of(pa.Table.from_batches([batch.select(names)]), source)
                refuse_other_encoding(rows.texts, place_of(source, unit))
                return rows
            footer = self.footer(source, unit.file)
            group = footer.row_group(unit.group) if unit.group < footer.num_row_groups else None
            if group is None or unit.stop > group.num_rows:
                raise UserError(_fewer_rows(source, unit))
            if group.total_byte_size > GROUP_LIMIT:
                self.reads += 1
                return self._slice_of_large(source, unit)
            return self._rows_kept(source, unit, left_out).slice(unit.start, unit.stop)

    def footer(self, source: Source, file: int) -> pq.FileMetaData:
        """Return the footer of a parquet file."""
        where = source.where(file)
        footer = self._footers.get(where)
        if footer is None:
            if source.remote:
                etag = source.files[file].etag
                footer = load_footer(
                    self._run_dir, etag, lambda: pq.read_metadata(self.open(source, file))
                )
            else:
                footer = pq.read_metadata(where)
            self._footers[where] = footer
            if len(self._footers) > OPEN_FOOTERS:
                self._footers.popitem(last=False)
        return footer

    def schema(self, source: Source, file: int) -> pa.Schema:
        """Return the columns of a table, and their types."""
        if source.format(file).kind == "arrow":
            return self.batches(source, file)[0].schema
        return self.footer(source, file).schema.to_arrow_schema()

    def groups(self, source: Source, file: int) -> list[tuple[int, int]]:
        """Return rows and decoded bytes of each group of rows of a table."""
        if source.format(file).kind == "arrow":
            return [(len(one), one.nbytes) for one in self.batches(source, file)]
        footer = self.footer(source, file)
        groups = (footer.row_group(group) for group in range(footer.num_row_groups))
        return [(one.num_rows, one.total_byte_size) for one in groups]

    def batches(self, source: Source, file: int) -> list[pa.RecordBatch]:
        """Return the record batches of an Arrow file; of one without rows an empty one."""
        where = source.where(file)
        batches = self._mapped.get(where)
        if batches is None:
            schema, mapped = map_arrow(where)
            batches = [*mapped] or [pa.RecordBatch.from_pylist([], schema=schema)]
            self._mapped[where] = batches
            if len(self._mapped) > OPEN_FOOTERS:
                self._mapped.popitem(last=False)
        return batches

    def expect(self, source: Source, unit: Unit) -> None:
        """Begin to read a remote unit that will be asked for soon."""
        if not source.remote or self._key(source, unit) in self._decoded:
            return
        try:
            with readable(place_of(source, unit)):
                spans = self._spans(source, unit)
        except UnreadableError:  # it is reported, or left out, when it is read
            return
        file = lines.hub_file(source, unit.file)
        self._expected[source.where(unit.file), unit] = [Range(file, *span) for span in spans]
        for span in spans:
            self._ranges.expect(Range(file, *span))

    def forget(self, source: Source, unit: Unit) -> None:
        """Drop what `expect` began: the unit is not read after all."""
        for span in self._expected.pop((source.where(unit.file), unit), []):
            self._ranges.forget(span)

    def _spans(self, source: Source, unit: Unit) -> list[tuple[int, int]]:
        footer = self.footer(source, unit.file) if unit.group >= 0 else None
        if footer is not None and unit.group >= footer.num_row_groups:
            raise UserError(_fewer_rows(source, unit))
        return lines.unit_spans(source, unit, footer)

    def open(self, source: Source, file: int) -> io.RawIOBase | io.BufferedReader:
        """Open a file of a source, here or on the Hub, for reading at any position."""
        if not source.remote:
            return Path(source.where(file)).open("rb")
        return self._ranges.open(lines.hub_file(source, file))

    def lines(self, source: Source, unit: Unit) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a range or compressed file as (position of the first byte, line).

        An element of a JSON array and a row of CSV, as a JSON object, are such a line, and so is a
        file that is one document.
        """
        known, where = source.files[unit.file], source.where(unit.file)
        kind, compression = source.format(unit.file)
        with self.open(source, unit.file) as file:
            if isinstance(file, RangeFile):
                file.hold(self._spans(source, unit))
            if compression:
                data, start = lines.decompress(file, compression, where), 0
            elif lines.has_whole_rows(source, unit):
                file.seek(unit.start)
                data, start = lines.read_exactly(file, unit.stop - unit.start), unit.start
            else:
                data, start = lines.read_owned(file, unit, known.size, kind, where)
        if start == 0:
            lines.refuse_utf_16(data, where)
        if source.whole_files:
            yield start, data.removeprefix(lines.BOM)
            return
        if unit.group == ELEMENTS:
            if compression:
                yield from lines.array_elements(io.BytesIO(data).read, where)
            else:
                yield from lines.elements_of(data, start, where)
            return
        if kind == "csv":
            header = self.header(source, unit.file)
            rows = lines.csv_rows(io.BytesIO(data), known.name, where, start, len(header))
            yield from lines.csv_objects(islice(rows, 1 if start == 0 else 0, None), header)
            return
        position = 0
        for end in lines.end_of_line(kind).finditer(data):
            yield start + position, data[position : end.start()]
            position = end.end()
        if position < len(data):
            yield start + position, data[position:]

    def header(self, source: Source, file: int) -> list[str]:
        """Return the names of the columns of a CSV file."""
        where, name = source.where(file), source.files[file].name
        if where not in self._headers:
            compression = source.format(file).compression
            with self.open(source, file) as opened:
                content = _by_line(opened)
                if compression:
                    content = io.BytesIO(lines.decompress(opened, compression, where))
                self._headers[where] = lines.csv_header(content, name, where)
        return self._headers[where]

    def is_array(self, source: Source, file: int) -> bool:
        """Return whether a JSON file is one array, not an object on each line."""
        name, size = source.files[file].name, source.files[file].size
        kind, compression = source.format(file)
        if kind != "jsonl" or (source.remote and ".jsonl" in name.lower()):  # it costs a request
            return False
        with self.open(source, file) as opened:
            if not compression:
                return lines.is_array(lines.read_exactly(opened, min(lines.HEAD_BYTES, size)))
            head = pa.input_stream(opened, compression).read(lines.HEAD_BYTES)
            return lines.is_array(bytes(head))

    def first_element(self, source: Source, file: int) -> list[tuple[int, bytes]]:
        """Return the first element of a JSON array as (position, element); [] if it has none."""
        where, compression = source.where(file), source.format(file).compression
        with self.open(source, file) as opened:
            content = pa.input_stream(opened, compression) if compression else opened
            return list(islice(lines.array_elements(content.read, where), 1))

    def rows_at(self, source: Source, file: int) -> Iterator[tuple[int, int]]:
        """Yield where each row of a plain JSON array or CSV file begins and ends, in bytes.

        The first row of CSV is its header.
        """
        where, name = source.where(file), source.files[file].name
        with self.open(source, file) as opened:
            if source.format(file).kind != "csv":
                for position, element in lines.array_elements(opened.read, where):
                    yield position, position + len(element)
                return
            width = len(self.header(source, file))
            rows = lines.csv_rows(_by_line(opened), name, where, width=width)
            starts = (position for position, _ in rows)
            yield from pairwise(chain(starts, [source.files[file].size]))

    def _key(self, source: Source, unit: Unit) -> tuple[object, ...]:
        begin = 0 if unit.group >= 0 else unit.start
        # The columns are part of it: two sources may read other columns of the same file.
        return (source.where(unit.file), unit.group, begin, *lines.columns_of(source))

    def _rows_kept(self, source: Source, unit: Unit, left_out: Collection[int]) -> Rows:
        key = self._key(source, unit)
        rows = self._decoded.pop(key, None)
        if rows is None:
            self.reads += 1
            if unit.group >= 0:
                rows = self._group(source, unit)
            else:
                rows = self._range(source, unit, left_out)
            refuse_other_encoding(rows.texts, place_of(source, unit))
        self._decoded[key] = rows
        while len(self._decoded) > 1 and (
            len(self._decoded) > CACHED_GROUPS
            or sum(decoded.nbytes for decoded in self._decoded.values()) > CACHED_BYTES
        ):
            self._decoded.popitem(last=False)
        return rows

    def _group(self, source: Source, unit: Unit) -> Rows:
        with self._parquet(source, unit) as file:
            table = file.read_row_group(
                unit.group, columns=lines.columns_of(source), use_threads=False
            )
        return _rows_of(table, source)

    def _slice_of_large(self, source: Source, unit: Unit) -> Rows:
        """Read rows [start, stop) of a group without having all of the group in memory."""
        with self._parquet(source, unit, buffer_size=lines.MIB) as file:
            tables, position = [], 0
            batches = file.iter_batches(
                1000, row_groups=[unit.group], columns=lines.columns_of(source), use_threads=False
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
        rows = _rows_of(table, source)
        refuse_other_encoding(rows.texts, place_of(source, unit))
        return rows

    def _parquet(self, source: Source, unit: Unit, buffer_size: int = 0) -> pq.ParquetFile:
        """Open a parquet file. On the Hub, the columns of the unit's group are read at once."""
        footer = self.footer(source, unit.file)
        opened: str | pa.PythonFile = source.where(unit.file)
        if source.remote:
            sliced = unit.stop - unit.start < footer.row_group(unit.group).num_rows
            ranged = self._ranges.open(lines.hub_file(source, unit.file), again=sliced)
            spans = self._spans(source, unit)
            if sum(end - start for start, end in spans) <= HELD_BYTES:
                ranged.hold(spans)
            else:
                buffer_size = PIECE_BYTES
            opened = pa.PythonFile(ranged, "r")
        return pq.ParquetFile(opened, metadata=footer, pre_buffer=False, buffer_size=buffer_size)

    def _range(self, source: Source, unit: Unit, left_out: Collection[int]) -> Rows:
        numbered = self.lines(source, unit)
        if source.format(unit.file).kind == "text":
            return Rows(as_array(line for _, line in numbered), None)
        rows: list[tuple[bytes | None, bytes | None]] = []
        bad: list[tuple[int, str]] = []
        for position, line in numbered:
            if not line.strip():
                continue
            if position in left_out:
                bad.append((position, ""))
                continue
            try:
                rows.append(_fields(line, source))
            except ValueError as error:
                bad.append((position, str(error)))
        texts, ids = (as_array(row[column] for row in rows) for column in (0, 1))
        return Rows(texts, ids, len(bad), tuple(bad))


def _by_line(file: io.RawIOBase | io.BufferedIOBase) -> io.BufferedIOBase:
    """Return a file whose lines are not read byte by byte."""
    return io.BufferedReader(file, lines.MIB) if isinstance(file, io.RawIOBase) else file


def map_arrow(where: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the record batches of an Arrow file: with a footer, or a stream as of `datasets`.

    They are mapped, and take no memory unless the file is compressed.
    """
    mapped = pa.memory_map(where)
    try:
        file = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        stream = pa.ipc.open_stream(mapped)
        return stream.schema, iter(stream)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def _fields(line: bytes, source: Source) -> tuple[bytes | None, bytes | None]:
    """Return text and id of a JSON line; the text of a conversation is its line."""
    try:
        row = lines.decode_line(line)
    except ValueError as error:
        if source.form is None or not isinstance(error.__cause__, RecursionError):
            raise
        return line.removeprefix(lines.BOM), None  # a bad row of conversations, found as such
    if source.form is None:
        return lines.fields(row, source.text_column, source.id_column)
    name = row.get(source.id_column) if source.id_column else None
    return line.removeprefix(lines.BOM), None if name is None else lines.to_bytes(str(name))


def _rows_of(table: pa.Table, source: Source) -> Rows:
    """Return the rows of a table; the text of a conversation is a JSON object of its columns."""
    name = source.id_column
    ids = _as_bytes(table.column(name)) if name else None
    if source.form is None:
        return Rows(_as_bytes(table.column(source.text_column)), ids)
    texts = table.drop_columns([name]) if name in table.column_names else table
    return Rows(as_array(as_text(row).encode() for row in texts.to_pylist()), ids)


def place_of(source: Source, unit: Unit) -> str:
    """Return the name of a unit in messages."""
    part = f", row group {unit.group}" if unit.group >= 0 else f", byte {unit.start}"
    return source.where(unit.file) + part


def _fewer_rows(source: Source, unit: Unit) -> Problem:
    expected = f"rows {unit.start} to {unit.stop}, as when the run began"
    return Problem(place_of(source, unit), "fewer rows", expected, "bring the file back")
