"""Rewrites one data file as parquet with small row groups, in bounded memory.

    source  ─►  small tables  ─►  groups of at most N bytes  ─►  NAME.parquet

The file appears as a whole, and its footer records what it was made of, so that the same command
knows which files are done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain.data.repack.tables import read_tables
from llmtrain.data.sources.local import edges_digest
from llmtrain.data.token_cache.write import replacing
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, first_line

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
