"""Looks into files: finds the parts that they have, and cuts units from them.

Row groups, ranges of lines and whole compressed files become units. Row groups are sliced until
there are four units per lane, so that every lane has work in every epoch.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from llmtrain import system
from llmtrain.data.chat.rows import columns_of_form, needed_columns, refused_columns
from llmtrain.data.documents import lines
from llmtrain.data.documents.reader import Reader
from llmtrain.data.documents.skipped import UnreadableError, readable
from llmtrain.data.documents.units import is_text
from llmtrain.data.manifest import ELEMENTS, Source, Unit
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.sources.local import FORMATS, TABLES, bounded, file_format, is_index
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, raise_any
from llmtrain.text import first_few, first_line, harmless

_log = logging.getLogger(__name__)

UNITS_PER_LANE = 4
SLICE_BYTES = 16 * lines.MIB
RANGE_BYTES = 4 * lines.MIB
MIN_RANGE_BYTES = {False: 16 * 1024, True: lines.MIB}  # by `Source.remote`: each request takes time
SMALL_SOURCE_BYTES = 1 << 30
RANGES = 256
PLAIN = {(kind, None) for kind in {*FORMATS.values()} - {*TABLES}}  # cut into ranges of lines
THREADS = 16
DOCUMENTS_PER_UNIT = 4096  # of a token cache
CHECKED_FILES = 16  # files of lines whose beginning is checked


class FilePart(NamedTuple):
    """A unit before slicing, and its decoded size."""

    unit: Unit
    nbytes: int


class FileLook(NamedTuple):
    """What was found in a file: its parts, and its columns (None: not looked at)."""

    parts: list[FilePart]
    columns: list[str] | None


def inspect(source: Source, key: str, reader: Reader) -> tuple[list[FilePart], list[list[str]]]:
    """Return units before slicing, and the columns of each file that was looked into.

    key: the source's key in the config, for messages

    Raises UserError with the problems of all files.
    """
    numbers = range(len(source.files))
    with ThreadPoolExecutor(THREADS if source.remote else 1) as threads:
        results = list(threads.map(lambda file: _look_into(source, file, key, reader), numbers))
    problems = [problem for problem in results if isinstance(problem, Problem)]
    raise_any(bounded(problems, key))
    looks = [look for look in results if isinstance(look, FileLook)]
    parts = [part for look in looks for part in look.parts]
    return parts, [look.columns for look in looks if look.columns is not None]


def first_columns(source: Source, key: str, reader: Reader) -> list[str]:
    """Return the columns of the first file in which some can be seen; [] = there are none.

    A damaged file is passed over and logged: `inspect` reports it with those of all files, or
    leaves it out. A disk that fails raises RunError (75), as a source whose columns nobody saw
    would be read as texts.
    """
    for file in range(min(CHECKED_FILES, len(source.files))):
        kind = source.format(file).kind
        try:
            if kind in TABLES:
                names: list[str] = _schema(source, file, key, reader).names
                return names
            keys = reader.keys_of_first_line(source, file) if kind != "text" else []
        except (UserError, ValueError) as error:
            _log.info("%s shows no columns: %s", source.where(file), first_line(error))
            continue
        if keys:
            return keys
    return []


def _look_into(source: Source, file: int, key: str, reader: Reader) -> FileLook | Problem:
    system.beat("looking into the files of the data", file + 1, len(source.files))
    (kind, compression), size = source.format(file), source.files[file].size
    decoded = size if source.whole_files else 0
    try:
        if source.cached:
            if not is_index(source.files[file].name):
                return FileLook([], None)  # the tokens, which the index beside them describes
            tokens = token_cache.open_tokens(Path(source.where(file)))
            token_cache.check_tokens(tokens)
            units = _in_steps(file, 0, tokens.documents, DOCUMENTS_PER_UNIT)
            return FileLook([FilePart(unit, 0) for unit in units], None)
        if reader.skips_file(source, file) or (size == 0 and kind not in TABLES):
            return FileLook([], None)
        if kind in TABLES:
            return _look_into_table(source, file, key, reader)
        if compression:
            with reader.units.open(source, file) as opened:
                decoded = max(decoded, lines.decoded_size(opened, compression, size))
        if decoded > lines.DECODED_LIMIT:  # it can only be read whole
            raise UnreadableError(lines.too_large(source.where(file)))
        if kind == "text":
            whole = compression or source.whole_files
            parts = (
                [FilePart(Unit(file, -1, 0, size), size)] if whole else _line_ranges(source, file)
            )
            if file < CHECKED_FILES:  # to check that it is UTF-8
                reader.rows(source, parts[0].unit)
            return FileLook(parts, [])
        return _look_into_rows(source, file, key, reader)
    except UnreadableError as error:
        skipped = reader.skips_file(source, file, error)
        return FileLook([], None) if skipped else error.problems[0]
    except UserError as error:
        return error.problems[0]


def _look_into_table(source: Source, file: int, key: str, reader: Reader) -> FileLook | Problem:
    where = source.where(file)
    schema = _schema(source, file, key, reader)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        expected = f"columns with names that differ, not {twice[0]} twice"
        return Problem(f"{key}.path", where, expected)
    if source.form is not None:
        if problem := _other_form(source, key, where, schema.names):
            return problem
    elif source.text_column not in schema.names:
        strings = [column.name for column in schema if is_text(column.type)]
        return _no_text(source, key, where, schema.names, strings)
    elif not is_text(column := schema.field(source.text_column).type):
        expected = f"a column of strings; in {where} it is {column}"
        return Problem(f"{key}.text_column", source.text_column, expected)
    groups = reader.units.groups(source, file)
    units = [
        FilePart(Unit(file, g, 0, rows), nbytes) for g, (rows, nbytes) in enumerate(groups) if rows
    ]
    return FileLook(units, schema.names)


def _schema(source: Source, file: int, key: str, reader: Reader) -> pa.Schema:
    """Return the schema of a table.

    Raises UnreadableError for a damaged file, and RunError (75) for an error of the disk.
    """
    where = source.where(file)
    try:
        return reader.units.schema(source, file)
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            remedy = "look at the disk, then start again"
            raise RunError(f"{where} cannot be read: {error}", RESTARTABLE, remedy) from error
        kind = source.format(file).kind
        expected = f"a complete {kind.replace('arrow', 'Arrow')} file ({first_line(error)})"
        remedy = "replace the file, or rename it by its format"
        raise UnreadableError(Problem(f"{key}.path", where, expected, remedy)) from error


def _no_text(
    source: Source, key: str, where: str, columns: Sequence[str], strings: Sequence[str]
) -> Problem:
    """Return the problem of a file with neither the text column nor the columns of a form.

    strings: the columns that can be the text
    """
    problem = missing_column(f"{key}.text_column", source.text_column, where, columns)
    named = f"{key}.text_column={harmless(strings[0])}" if len(strings) == 1 else ""
    if len(strings) > 1:
        named = f"{key}.text_column=… (columns of strings: {first_few([*map(harmless, strings)])})"
    forms = "messages, conversations, prompt and completion, or instruction and output"
    chat = f"for conversations ({forms}): {key}.columns={{prompt: …, completion: …}}"
    return replace(problem, remedy=f"{named}; {chat}" if named else chat)


def _other_form(source: Source, key: str, where: str, columns: Sequence[str]) -> Problem | None:
    """Return the problem of a file without the columns of the form, or with judgements."""
    assert source.form is not None
    named = {name: source.columns.get(name, name) for name in columns_of_form(source.form)}
    known = [name for name, theirs in named.items() if theirs in columns]
    needed = (named[name] for name in needed_columns(source.form, known))
    missing = next((name for name in needed if name not in columns), None)
    if missing:
        return missing_column(f"{key}.path", missing, where, columns)
    ours = set(columns) - set(source.columns.values())
    problem = refused_columns(source.form, ours, f"{key}.columns", source.columns)
    return problem and replace(problem, value=f"{problem.value} in {harmless(where)}")


def _look_into_rows(source: Source, file: int, key: str, reader: Reader) -> FileLook | Problem:
    """Look into JSON or CSV."""
    kind, compression = source.format(file)
    keys = reader.first_keys(source, file) if file < CHECKED_FILES else None
    if keys is not None:
        row = "header" if kind == "csv" else "first line"
        where = f"the {row} of {source.where(file)}"
        if source.form is not None and (problem := _other_form(source, key, where, keys)):
            return problem
        if source.form is None and source.text_column not in keys:
            return _no_text(source, key, where, keys, keys if kind == "csv" else [])
    size = source.files[file].size
    with readable(source.where(file)):
        group = ELEMENTS if reader.units.is_array(source, file) else -1
        if compression:
            return FileLook([FilePart(Unit(file, group, 0, size), size)], keys)
        if kind == "csv" or group == ELEMENTS:
            spans = lines.ranges(reader.units.rows_at(source, file), _range_bytes(source))
            return FileLook([FilePart(Unit(file, group, a, b), b - a) for a, b in spans], keys)
    return FileLook(_line_ranges(source, file), keys)


def _line_ranges(source: Source, file: int) -> list[FilePart]:
    """Cut a plain file of lines into ranges of bytes."""
    step = _range_bytes(source)
    return [FilePart(one, step) for one in _in_steps(file, -1, source.files[file].size, step)]


def _in_steps(file: int, group: int, stop: int, step: int) -> Iterator[Unit]:
    """Yield units of `step` bytes, or documents, up to `stop`."""
    return (Unit(file, group, a, min(a + step, stop)) for a in range(0, stop, step))


def _range_bytes(source: Source) -> int:
    """Return the length of the ranges that plain files of lines are cut into."""
    plain = sum(file.size for file in source.files if file_format(file.name) in PLAIN)
    if plain >= SMALL_SOURCE_BYTES:
        return RANGE_BYTES
    return max(MIN_RANGE_BYTES[source.remote], -(-plain // RANGES))


def cut(parts: Sequence[FilePart], lanes: int) -> Iterator[Unit]:
    """Cut row groups into nearly equal slices of rows, until there are four units per lane."""
    wanted = -(-UNITS_PER_LANE * lanes // max(1, len(parts)))
    for unit, nbytes in parts:
        rows = unit.stop - unit.start
        slices = 1 if unit.group < 0 else min(rows, max(wanted, -(-nbytes // SLICE_BYTES)))
        bounds = [unit.start + rows * i // slices for i in range(slices + 1)]
        for start, stop in pairwise(bounds):
            yield unit._replace(start=start, stop=stop)


def text_size(source: Source, unit: Unit, reader: Reader) -> float:
    """Return the size of a unit's text without reading it: bytes, or tokens of a cache."""
    if source.cached:
        return token_cache.num_tokens(source, unit)
    if unit.group < 0:
        return unit.stop - unit.start
    names = lines.columns_of(replace(source, id_column=None))
    if source.format(unit.file).kind == "arrow":
        batch = reader.units.batches(source, unit.file)[unit.group]
        part = batch.slice(unit.start, unit.stop - unit.start)
        return float(sum(part.column(name).nbytes for name in names if name in part.schema.names))
    group = reader.units.footer(source, unit.file).row_group(unit.group)
    columns = (group.column(index) for index in range(group.num_columns))
    read = (c for c in columns if any(lines.is_part_of(c.path_in_schema, name) for name in names))
    text = sum(column.total_uncompressed_size for column in read)
    return float(text * (unit.stop - unit.start) / group.num_rows)


def missing_column(key: str, name: str, where: str, columns: Sequence[str]) -> Problem:
    """Return the problem of a column that does not exist, with the columns that do."""
    listed = ", ".join(harmless(column) for column in columns) or "none"
    return Problem(key, name, f"a column of {harmless(where)}, which has: {listed}")
