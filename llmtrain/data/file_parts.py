"""Looks into files: finds the parts that they have, and cuts units from them.

Row groups, ranges of lines and whole compressed files become units. Row groups are sliced until
there are four units per lane, so that every lane has work in every epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain import heartbeat
from llmtrain.data.chat.rows import judged, needed_columns
from llmtrain.data.documents.lines import DECODED_LIMIT, MIB, decoded_size, too_large
from llmtrain.data.documents.reader import Reader
from llmtrain.data.documents.rows import is_text
from llmtrain.data.documents.skipped import UnreadableError
from llmtrain.data.manifest import Source, Unit
from llmtrain.data.sources.local import bounded, file_format, is_index
from llmtrain.data.token_cache.file import check_tokens, open_tokens
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, first_line, harmless

_log = logging.getLogger(__name__)

UNITS_PER_LANE = 4
SLICE_BYTES = 16 * MIB
RANGE_BYTES = 4 * MIB
MIN_RANGE_BYTES = {False: 16 * 1024, True: MIB}  # by `Source.remote`: each request takes time
SMALL_SOURCE_BYTES = 1 << 30
RANGES = 256
PLAIN = (("jsonl", None), ("text", None))  # formats of lines that are cut into ranges
THREADS = 16
DOCUMENTS_PER_UNIT = 4096  # of a token cache
CHECKED_FILES = 16  # files of lines whose beginning is checked


class Part(NamedTuple):
    """A unit before slicing, and its decoded size."""

    unit: Unit
    nbytes: int


class Look(NamedTuple):
    """What was found in a file: its parts, and its columns (None: not looked at)."""

    parts: list[Part]
    columns: list[str] | None


def inspect(source: Source, key: str, reader: Reader) -> tuple[list[Part], list[list[str]]]:
    """Return units before slicing, and the columns of each file that was looked into.

    key: the source's key in the config, for messages

    Raises UserError with the problems of all files.
    """
    numbers = range(len(source.files))
    with ThreadPoolExecutor(THREADS if source.remote else 1) as threads:
        found = list(threads.map(lambda file: _look_into(source, file, key, reader), numbers))
    problems = [problem for problem in found if isinstance(problem, Problem)]
    if problems:
        raise UserError(*bounded(problems, key))
    looks = [look for look in found if isinstance(look, Look)]
    parts = [part for look in looks for part in look.parts]
    return parts, [look.columns for look in looks if look.columns is not None]


def first_columns(source: Source, key: str, reader: Reader) -> list[str]:
    """Return the columns of the first file in which some can be seen; [] = there are none.

    A damaged file is passed over and logged: `inspect` reports it with those of all files, or
    leaves it out. A disk that fails raises RunError (75), as a source whose columns nobody saw
    would be read as texts.
    """
    for file, known in enumerate(source.files[:CHECKED_FILES]):
        kind = (file_format(known.name) or ("",))[0]
        try:
            if kind == "parquet":
                names: list[str] = _footer(source, file, key, reader)[1].names
                return names
            found = reader.keys_of_first_line(source, file) if kind == "jsonl" else []
        except (UserError, ValueError) as error:
            _log.info("%s shows no columns: %s", source.where(file), first_line(error))
            continue
        if found:
            return found
    return []


def _look_into(source: Source, file: int, key: str, reader: Reader) -> Look | Problem:
    heartbeat.beat("looking into the files of the data", file + 1, len(source.files))
    kind, compression = file_format(source.files[file].name) or ("", None)
    try:
        if source.cached:
            return _look_into_tokens(source, file)
        if reader.skips_file(source, file) or (source.files[file].size == 0 and kind != "parquet"):
            return Look([], None)
        if kind == "parquet":
            return _look_into_parquet(source, file, key, reader)
        if compression:
            _refuse_large(source, file, compression, reader)
        if kind == "text":
            return _look_into_text(source, file, bool(compression), reader)
        return _look_into_json(source, file, bool(compression), key, reader)
    except UnreadableError as error:
        skipped = reader.skips_file(source, file, error)
        return Look([], None) if skipped else error.problems[0]
    except UserError as error:
        return error.problems[0]


def _refuse_large(source: Source, file: int, compression: str, reader: Reader) -> None:
    """Raise UnreadableError for a compressed file that is too large: it can only be read whole."""
    with reader.units.open(source, file) as opened:
        if decoded_size(opened, compression, source.files[file].size) > DECODED_LIMIT:
            raise UnreadableError(too_large(source.where(file)))


def _look_into_parquet(source: Source, file: int, key: str, reader: Reader) -> Look | Problem:
    where = source.where(file)
    footer, schema = _footer(source, file, key, reader)
    if source.form is not None:
        return _other_form(source, key, where, schema.names) or _groups(file, footer, schema.names)
    if source.text_column not in schema.names:
        return _no_text(source, key, where, schema.names)
    column = schema.field(source.text_column).type
    if not is_text(column):
        expected = f"a column of strings; in {where} it is {column}"
        return Problem(f"{key}.text_column", source.text_column, expected)
    return _groups(file, footer, schema.names)


def _footer(
    source: Source, file: int, key: str, reader: Reader
) -> tuple[pq.FileMetaData, pa.Schema]:
    """Return the footer of a parquet file and its schema.

    Raises UnreadableError for a damaged file, and RunError (75) for an error of the disk.
    """
    where = source.where(file)
    try:
        footer = reader.units.footer(source, file)
        return footer, footer.schema.to_arrow_schema()
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            remedy = "look at the disk, then start again"
            raise RunError(f"{where} cannot be read: {error}", RESTARTABLE, remedy) from error
        expected = f"a complete parquet file ({first_line(error)})"
        remedy = "replace the file, or rename it by its format"
        raise UnreadableError(Problem(f"{key}.path", where, expected, remedy)) from error


def _groups(file: int, footer: pq.FileMetaData, names: list[str]) -> Look:
    groups = [footer.row_group(g) for g in range(footer.num_row_groups)]
    units = [
        Part(Unit(file, g, 0, group.num_rows), group.total_byte_size)
        for g, group in enumerate(groups)
        if group.num_rows
    ]
    return Look(units, names)


def _no_text(source: Source, key: str, where: str, there: Sequence[str]) -> Problem:
    """Return the problem of a file with neither the text column nor the columns of a form."""
    problem = missing_column(f"{key}.text_column", source.text_column, where, there)
    forms = "messages, conversations, prompt and completion, or instruction and output"
    remedy = f"for conversations ({forms}): {key}.columns={{prompt: …, completion: …}}"
    return replace(problem, remedy=remedy)


def _other_form(source: Source, key: str, where: str, there: Sequence[str]) -> Problem | None:
    """Return the problem of a file without the columns of the form, or with judgements."""
    assert source.form is not None
    names = (source.columns.get(name, name) for name in needed_columns(source.form))
    missing = next((name for name in names if name not in there), None)
    if missing:
        return missing_column(f"{key}.path", missing, where, there)
    ours = set(there) - set(source.columns.values())
    problem = judged(source.form, ours, f"{key}.columns", source.columns)
    return problem and replace(problem, value=f"{problem.value} in {harmless(where)}")


def _look_into_tokens(source: Source, file: int) -> Look:
    if not is_index(source.files[file].name):
        return Look([], None)  # the tokens, which the index beside them describes
    tokens = open_tokens(Path(source.where(file)))
    check_tokens(tokens)
    starts = range(0, tokens.documents, DOCUMENTS_PER_UNIT)
    units = [
        Unit(file, 0, start, min(start + DOCUMENTS_PER_UNIT, tokens.documents)) for start in starts
    ]
    return Look([Part(unit, 0) for unit in units], None)


def _look_into_text(source: Source, file: int, compressed: bool, reader: Reader) -> Look:
    parts = _ranges(source, file, compressed)
    if file < CHECKED_FILES:  # to check that it is UTF-8
        reader.rows(source, parts[0].unit)
    return Look(parts, [])


def _look_into_json(
    source: Source, file: int, compressed: bool, key: str, reader: Reader
) -> Look | Problem:
    keys = reader.first_keys(source, file) if file < CHECKED_FILES else None
    if keys is not None:
        where = f"the first line of {source.where(file)}"
        if source.form is not None and (problem := _other_form(source, key, where, keys)):
            return problem
        if source.form is None and source.text_column not in keys:
            return _no_text(source, key, where, keys)
    return Look(_ranges(source, file, compressed), keys)


def _ranges(source: Source, file: int, compressed: bool) -> list[Part]:
    """Cut a file of lines into ranges of bytes; a compressed file is one range."""
    size = source.files[file].size
    if compressed:
        return [Part(Unit(file, -1, 0, size), size)]
    step = _range_bytes(source)
    starts = range(0, size, step)
    return [Part(Unit(file, -1, a, min(a + step, size)), step) for a in starts]


def _range_bytes(source: Source) -> int:
    """Return the length of the ranges that plain files of lines are cut into."""
    plain = sum(file.size for file in source.files if file_format(file.name) in PLAIN)
    if plain >= SMALL_SOURCE_BYTES:
        return RANGE_BYTES
    return max(MIN_RANGE_BYTES[source.remote], -(-plain // RANGES))


def cut(parts: Sequence[Part], lanes: int) -> Iterator[Unit]:
    """Cut row groups into nearly equal slices of rows, until there are four units per lane."""
    wanted = -(-UNITS_PER_LANE * lanes // max(1, len(parts)))
    for unit, nbytes in parts:
        rows = unit.stop - unit.start
        slices = 1 if unit.group < 0 else min(rows, max(wanted, -(-nbytes // SLICE_BYTES)))
        bounds = [unit.start + rows * i // slices for i in range(slices + 1)]
        for start, stop in pairwise(bounds):
            yield unit._replace(start=start, stop=stop)


def missing_column(key: str, name: str, where: str, columns: Sequence[str]) -> Problem:
    """Return the problem of a column that does not exist, with the columns that do."""
    there = ", ".join(harmless(column) for column in columns) or "none"
    return Problem(key, name, f"a column of {harmless(where)}, which has: {there}")
