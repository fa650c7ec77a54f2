"""Rewrites one data file as parquet with small row groups, in bounded memory.

    source  ─►  small tables  ─►  groups of at most N bytes  ─►  NAME.parquet

    parquet, arrow       all columns as they are
    CSV                  all columns, as strings: the file has no types
    JSON lines           all keys; a first pass finds their types, of which each key has one
    text                 one column, with a row for each line

Invalid UTF-8 is replaced, as in reading for training. The file appears as a whole, and its footer
records what it was made of, so that the same command knows which files are done.

The trap: types must be known before the first row is written, but a key may appear, or change its
type, as late as in the last line. Readers that guess types from the first megabytes end there.
"""

import io
import json
import re
from bisect import bisect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from llmtrain.data.documents.lines import (
    DECODED_LIMIT,
    HEAD_BYTES,
    MIB,
    array_elements,
    decode_line,
    in_batches,
    is_array,
    to_bytes,
)
from llmtrain.data.documents.reader import decoded
from llmtrain.data.documents.skipped import readable
from llmtrain.data.documents.units import map_arrow
from llmtrain.data.sources.local import FORMATS, PROSE, edges_digest, file_format
from llmtrain.data.token_writer import replacing
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError
from llmtrain.text import clip, first_line
from llmtrain.types import JsonObject

KINDS = {
    **{suffix: kind for suffix, kind in FORMATS.items() if suffix != PROSE},
    ".feather": "arrow",
}
BATCH_BYTES = 4 * MIB
BATCH_ROWS = 256
CSV_BLOCK_BYTES = 16 * MIB  # the longest row
MADE_OF = b"llmtrain.repack"
VERSION = 1
_SURROGATE = re.compile(r"\\ud[89a-f]|[\ud800-\udfff]", re.IGNORECASE)
Tables: TypeAlias = tuple[pa.Schema, Iterator[pa.RecordBatch]]  # the rows of a file, in order


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
    with _readable(task.source):
        schema, batches = _open(task.source, task.text_column)
    try:
        with (
            replacing(task.target) as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for group in group_batches(_checked(task.source, batches), task.group_bytes):
                writer.write_table(group, row_group_size=len(group))
                rows += len(group)
            writer.add_key_value_metadata({MADE_OF: json.dumps(made | {"rows": rows})})
    except pa.ArrowException as error:  # an OSError passes: the target's disk failed
        expected, remedy = "columns of types that parquet has", "leave the column out"
        problem = Problem(str(task.source), first_line(error), expected, remedy)
        raise UserError(problem) from error
    if finished_rows(task) != rows:
        task.target.unlink()
        message = f"{task.target} has not the {rows} rows that were written"
        raise RunError(message, DISK_FAILED, "look at the disk, then give the same command again")
    return rows


def _readable(path: Path) -> AbstractContextManager[None]:
    return readable(str(path), "a file that can be read as its suffix says", "repair or replace it")


def _checked(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _readable(path):  # while they are read, not while they are written
        yield from batches


def finished_rows(task: Rewrite) -> int | None:
    """Return the number of rows of a target that is complete and made of this source, else None."""
    known = made_of(task.target)
    if known is None:
        return None
    rows = known.pop("rows", None)
    same = known == origin(task) and rows == pq.read_metadata(task.target).num_rows
    return rows if same else None


def made_of(target: Path) -> JsonObject | None:
    """Return what the footer of a repacked file records of its source; None for another file."""
    try:
        recorded = (pq.read_metadata(target).metadata or {}).get(MADE_OF)
    except (pa.ArrowException, OSError):
        return None
    return None if recorded is None else dict(json.loads(recorded))


def origin(task: Rewrite) -> JsonObject:
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
        pieces = [batch] if len(batch) else []
        while pieces:
            piece = pieces.pop()
            if piece.nbytes > limit and len(piece) > 1:
                middle = len(piece) // 2
                pieces += [piece.slice(middle), piece.slice(0, middle)]
                continue
            if pending and size + piece.nbytes > limit:
                yield pa.Table.from_batches(pending)
                pending, size = [], 0
            pending.append(piece)
            size += piece.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


def _open(path: Path, text_column: str) -> Tables:
    kind, compression = file_format(path.name, KINDS) or ("", None)
    empty = path.stat().st_size == 0
    match kind:
        case "parquet":
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=MIB)
            return file.schema_arrow, file.iter_batches(BATCH_ROWS, use_threads=False)
        case "arrow":
            return map_arrow(str(path))
        case "csv" if not empty:
            return _csv(path, compression)
        case "jsonl" if not empty:
            return _json_lines(path, compression)
    schema = pa.schema([(text_column, pa.string())])
    text = io.TextIOWrapper(_stream(path, compression), "utf-8", "replace")  # \r is an end, too
    batches = _batches(_lines(path, text))
    return schema, (
        pa.record_batch([pa.array(line.removesuffix("\n") for _, line in lines)], schema=schema)
        for lines in batches
    )


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

    return schema, batches()


def _decode(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(decoded(column))


def _json_lines(path: Path, compression: str | None) -> Tables:
    types: dict[str, pa.DataType] = {}
    for rows in _rows(path, compression):
        for name in {key: None for _, row in rows for key in row}:
            # A type for the values of a key that also has those of the type `known`.
            known = types.get(name, pa.null())
            values = [row.get(name) for _, row in rows]
            both = _unify(known, values)
            if both is None:
                n = bisect(
                    range(len(values)), 0, key=lambda n: _unify(known, values[: n + 1]) is None
                )
                before = _unify(known, values[:n])
                expected = "a value that a column of parquet can hold"
                if before is not None and not pa.types.is_null(before):
                    expected += f" beside the {before} of the lines before"
                where = f"{path}, line {rows[n][0]}, key {name}"
                remedy = "give the key values of one type, strings for example, or leave it out"
                raise UserError(Problem(where, clip(json.dumps(values[n]), 60), expected, remedy))
            types[name] = both
    nulls = {name: pa.string() for name, kind in types.items() if pa.types.is_null(kind)}
    schema = pa.schema(types | nulls)  # `datasets` cannot read a column of type null
    return schema, (
        pa.RecordBatch.from_pylist([row for _, row in rows], schema=schema)
        for rows in _rows(path, compression)
    )


def _unify(known: pa.DataType, values: list[object]) -> pa.DataType | None:
    try:
        schemas = [pa.schema([("", kind)]) for kind in (known, pa.array(values).type)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, OverflowError):
        return None


def _rows(path: Path, compression: str | None) -> Iterator[list[tuple[int, JsonObject]]]:
    """Yield batches of (line number from 1, row)."""
    stream = _stream(path, compression)
    if is_array(_stream(path, compression).read(HEAD_BYTES)):
        elements = array_elements(stream.read, str(path))
        lines: Iterator[tuple[int, Any]] = enumerate((element for _, element in elements), 1)
    else:
        lines = _lines(path, stream)
    for batch in _batches(one for one in lines if one[1].strip()):
        yield [(number, _row(path, number, line)) for number, line in batch]


def _row(path: Path, number: int, line: bytes) -> JsonObject:
    try:
        row = decode_line(line)
    except ValueError as error:
        where = f"{path}, line {number}"
        expected = "a JSON object"
        raise UserError(Problem(where, str(error), expected, "repair or remove it")) from error
    odd = _SURROGATE.search(line.decode("utf-8", "surrogateescape"))
    return {str(k): v for k, v in _clean(row).items()} if odd else row


def _clean(value: object) -> Any:
    """Replace what is not UTF-8, as reading for training does."""
    match value:
        case str():
            return to_bytes(value).decode("utf-8", "replace")
        case dict():
            return {_clean(key): _clean(inner) for key, inner in value.items()}
        case list():
            return [_clean(inner) for inner in value]
    return value


def _stream(path: Path, compression: str | None) -> io.BufferedReader:
    return io.BufferedReader(pa.input_stream(str(path), compression))


def _lines(path: Path, file: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, line with its end)."""
    lines = iter(lambda: file.readline(DECODED_LIMIT + 1), file.read(0))
    for number, line in enumerate(lines, 1):
        if len(line) > DECODED_LIMIT:
            expected = f"lines of at most {DECODED_LIMIT // MIB} MiB"
            raise UserError(Problem(f"{path}, line {number}", "a longer line", expected))
        yield number, line


def _batches(lines: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    return in_batches(lines, lambda one: len(one[1]), BATCH_BYTES, 16 * BATCH_ROWS)
