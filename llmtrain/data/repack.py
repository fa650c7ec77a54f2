"""Rewrites one data file as parquet with small row groups, in bounded memory.

    source  ─►  small tables  ─►  groups of at most N bytes  ─►  NAME.parquet

The file appears as a whole, and its footer records what it was made of, so that the same command
knows which files are done.

Reads any data file as a stream of small tables, in bounded memory, for `data repack`.

    parquet, arrow       all columns as they are
    CSV                  all columns, as strings: the file has no types
    JSON lines           all keys; a first pass finds types; keys without one become JSON text
    text                 one column, with a row for each line

Invalid UTF-8 is replaced, as in reading for training. The trap: types must be known before the
first row is written, but a key may appear, or change its type, as late as in the last line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from llmtrain.data.documents.elements import HEAD_BYTES, array_elements, is_array
from llmtrain.data.documents.lines import (
    DECODED_LIMIT,
    MIB,
    decode_line,
    end_of_line,
    in_batches,
    to_bytes,
)
from llmtrain.data.documents.skipped import readable
from llmtrain.data.sources.local import FORMATS, PROSE, edges_digest, file_format
from llmtrain.data.token_cache.write import replacing
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError
from llmtrain.text import first_line

KINDS = {
    **{suffix: kind for suffix, kind in FORMATS.items() if suffix != PROSE},
    ".feather": "arrow",
}
CHUNK_BYTES = 1 << 18
BATCH_BYTES = 4 * MIB
BATCH_ROWS = 256
CSV_BLOCK_BYTES = 16 * MIB  # the longest row
_SURROGATE = re.compile(r"\\ud[89a-f]|[\ud800-\udfff]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a file, in order. `batches` can be read only once."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def read_tables(path: Path, text_column: str) -> Tables:
    """Open a file as tables. text_column: the name of the only column of a text file.

    Raises UserError for content that cannot be read and RunError if the disk fails, either now or
    while the tables are read.
    """
    with _readable(path):
        tables = _open(path, text_column)
    return Tables(tables.schema, _check_batches(path, tables.batches))


def _check_batches(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _readable(path):
        yield from batches


def _open(path: Path, text_column: str) -> Tables:
    kind, compression = file_format(path.name, KINDS) or ("", None)
    empty = path.stat().st_size == 0
    match kind:
        case "parquet":
            return _parquet(path)
        case "arrow":
            return _arrow(path)
        case "csv" if not empty:
            return _csv(path, compression)
        case "jsonl" if not empty:
            return _json_lines(path, compression)
    schema = pa.schema([(text_column, pa.string())])
    return Tables(schema, _text(path, compression, schema))


def _readable(path: Path) -> AbstractContextManager[None]:
    return readable(str(path), "a file that can be read as its suffix says", "repair or replace it")


def _parquet(path: Path) -> Tables:
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=MIB)
    return Tables(file.schema_arrow, file.iter_batches(BATCH_ROWS, use_threads=False))


def _arrow(path: Path) -> Tables:
    """Open an arrow file of either form: with a footer, or as a stream (as `datasets` writes)."""
    opened = pa.memory_map(str(path))
    try:
        file = pa.ipc.open_file(opened)
        found = (file.get_batch(index) for index in range(file.num_record_batches))
        return Tables(file.schema, found)
    except pa.ArrowInvalid:
        opened.seek(0)
        stream = pa.ipc.open_stream(opened)
        return Tables(stream.schema, iter(stream))


def _csv(path: Path, compression: str | None) -> Tables:
    def open_csv(types: dict[str, pa.DataType]) -> pacsv.CSVStreamingReader:
        return pacsv.open_csv(
            pa.input_stream(str(path), compression),
            pacsv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
            pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pacsv.ConvertOptions(column_types=types, check_utf8=False),
        )

    delimiter = "\t" if ".tsv" in path.suffixes else ","
    with open_csv({}) as first:
        names = first.schema.names
    schema = pa.schema([(name, pa.string()) for name in names])

    def batches() -> Iterator[pa.RecordBatch]:
        with open_csv(dict.fromkeys(names, pa.binary())) as reader:
            for batch in reader:
                columns = [_decode(column) for column in batch.columns]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return Tables(schema, batches())


def _decode(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        values = column.to_pylist()
        return pa.array([None if raw is None else raw.decode("utf-8", "replace") for raw in values])


def _text(path: Path, compression: str | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for lines in _batches(path, compression, "text"):
        texts = [line.decode("utf-8", "replace") for _, line in lines]
        yield pa.record_batch([pa.array(texts, pa.string())], schema=schema)


def _json_lines(path: Path, compression: str | None) -> Tables:
    types: dict[str, pa.DataType | None] = {}  # None: stored as JSON text
    for rows in _rows(path, compression):
        for name in {key: None for row in rows for key in row}:
            found = _type_of([row.get(name) for row in rows])
            types[name] = _unify(types[name], found) if name in types else found
    fields = [(name, _parquet_type(kind)) for name, kind in types.items()]
    texts = {name for name, kind in types.items() if kind is None}
    schema = pa.schema(fields)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows in _rows(path, compression):
            columns = [
                pa.array([_value(row.get(name), name in texts) for row in rows], kind)
                for name, kind in fields
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return Tables(schema, batches())


def _rows(path: Path, compression: str | None) -> Iterator[list[dict[str, Any]]]:
    for lines in _batches(path, compression, "jsonl"):
        rows = [_row(path, number, line) for number, line in lines if line.strip()]
        if rows:
            yield rows


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = decode_line(line)
    except ValueError as error:
        where = f"{path}, line {number}"
        expected = "a JSON object"
        raise UserError(Problem(where, str(error), expected, "repair or remove it")) from error
    odd = _SURROGATE.search(line.decode("utf-8", "surrogateescape"))
    return {str(k): v for k, v in _clean(row).items()} if odd else row


def _clean(value: Any) -> Any:
    """Replace what is not UTF-8, as reading for training does."""
    match value:
        case str():
            return to_bytes(value).decode("utf-8", "replace")
        case dict():
            return {_clean(key): _clean(inner) for key, inner in value.items()}
        case list():
            return [_clean(inner) for inner in value]
    return value


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    try:
        return pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return None


def _unify(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """Return a type for the values of both, or None if there is no such type."""
    if one is None or other is None or one == other:
        return one if one == other else None
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None


def _parquet_type(kind: pa.DataType | None) -> pa.DataType:
    """Return the type to store: strings for JSON text, and for nulls, for `datasets` to read."""
    return pa.string() if kind is None or pa.types.is_null(kind) else kind


def _value(value: Any, as_text: bool) -> Any:
    if not as_text or value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _batches(path: Path, compression: str | None, kind: str) -> Iterator[list[tuple[int, bytes]]]:
    lines = _lines(path, compression, kind)
    return in_batches(lines, lambda one: len(one[1]), BATCH_BYTES, 16 * BATCH_ROWS)


def _lines(path: Path, compression: str | None, kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end)."""
    end = end_of_line(kind)
    number, rest = 1, b""
    stream = pa.input_stream(str(path), compression)
    if kind == "jsonl" and is_array(pa.input_stream(str(path), compression).read(HEAD_BYTES)):
        elements = array_elements(lambda size: bytes(stream.read(size)), str(path))
        yield from enumerate((element for _, element in elements), 1)
        return
    while chunk := stream.read(CHUNK_BYTES):
        data, position = rest + chunk, 0
        for found in end.finditer(data, max(0, len(rest) - 1)):
            if found.end() == len(data) and data.endswith(b"\r"):
                break  # it may be one half of `\r\n`
            yield number, data[position : found.start()]
            number, position = number + 1, found.end()
        rest = data[position:]
        if len(rest) > DECODED_LIMIT:
            expected = f"lines of at most {DECODED_LIMIT // MIB} MiB"
            raise UserError(Problem(f"{path}, line {number}", "a longer line", expected))
    if rest:
        yield number, rest.removesuffix(b"\r") if kind == "text" else rest


MADE_OF = b"llmtrain.repack"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One file to rewrite.

    group_bytes: limit of the decoded data in a row group; a group of one row may have more
    text_column: name of the column of a text file
    """

    source: Path
    target: Path
    group_bytes: int
    text_column: str


def rewrite(task: Rewrite) -> int:
    """Write the target and return its number of rows.

    Raises UserError for a source that cannot be read, RunError if the disk fails.
    """
    made = origin(task)
    task.target.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    tables = read_tables(task.source, task.text_column)
    with (
        replacing(task.target) as file,
        _representable(task.source),
        pq.ParquetWriter(file, tables.schema, compression="zstd") as writer,
    ):
        for group in group_batches(tables.batches, task.group_bytes):
            writer.write_table(group, row_group_size=len(group))
            rows += len(group)
        writer.add_key_value_metadata({MADE_OF: json.dumps(made | {"rows": rows})})
    if finished_rows(task) != rows:
        task.target.unlink()
        message = f"{task.target} has not the {rows} rows that were written"
        raise RunError(message, DISK_FAILED, "look at the disk, then give the same command again")
    return rows


@contextmanager
def _representable(source: Path) -> Iterator[None]:
    """Raise UserError for types that parquet lacks. An OSError passes: the target's disk failed."""
    try:
        yield
    except pa.ArrowException as error:
        reason = first_line(error)
        expected = "columns of types that parquet has"
        raise UserError(Problem(str(source), reason, expected, "leave the column out")) from error


def finished_rows(task: Rewrite) -> int | None:
    """Return the number of rows of a target that is complete and made of this source, else None."""
    known = made_of(task.target)
    if known is None:
        return None
    rows = known.pop("rows", None)
    same = known == origin(task) and rows == pq.read_metadata(task.target).num_rows
    return rows if same else None


def made_of(target: Path) -> dict[str, Any] | None:
    """Return what the footer of a repacked file records of its source; None for another file."""
    try:
        found = (pq.read_metadata(target).metadata or {}).get(MADE_OF)
    except (pa.ArrowException, OSError):
        return None
    return None if found is None else dict(json.loads(found))


def origin(task: Rewrite) -> dict[str, Any]:
    """Return everything that decides the content of a target."""
    return {
        "version": VERSION,
        "name": task.source.name,
        "size": task.source.stat().st_size,
        "edges": edges_digest(task.source),
        "group_bytes": task.group_bytes,
        "text_column": task.text_column,
    }


def group_batches(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[pa.Table]:
    """Yield tables of at most `limit` bytes; a table of one row may have more."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for piece in _pieces(batch, limit):
            if pending and size + piece.nbytes > limit:
                yield pa.Table.from_batches(pending)
                pending, size = [], 0
            pending.append(piece)
            size += piece.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


def _pieces(batch: pa.RecordBatch, limit: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until its pieces have at most `limit` bytes or one row, and yield these."""
    if len(batch) <= 1 or batch.nbytes <= limit:
        if len(batch):
            yield batch
        return
    middle = len(batch) // 2
    yield from _pieces(batch.slice(0, middle), limit)
    yield from _pieces(batch.slice(middle), limit)
