"""From files to units: what rank 0 decides once, and what every later start checks.

    survey(config)  ─►  training_texts  ─►  (a tokenizer is trained)  ─►  freeze  ─►  manifest.json
                                                                                          │
    later starts:   manifest.load  ─►  check(manifest, config, tokenizer)  ◄──────────────┘

Row groups, ranges of lines and whole compressed files become units; groups are sliced until there
are four units a lane, so that every lane has work in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa

from llmtrain.config.meaning import changes, data_values, refused, way_out
from llmtrain.config.schema import Config, DataConfig, SourceConfig
from llmtrain.data import heldout
from llmtrain.data.lanes import default_lanes
from llmtrain.data.lines import DECODED_LIMIT, MIB, too_large
from llmtrain.data.manifest import Manifest, Packing, Source, TokenizerFacts, Unit, load
from llmtrain.data.readers import Reader, Reading, decoded_size, is_text, reading_of
from llmtrain.data.sources import bounded, edges_digest, file_format, labels, resolve
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.hashing import mix

__all__ = ["Manifest", "Survey", "check", "freeze", "load", "survey", "training_texts"]

UNITS_PER_LANE = 4
SLICE_BYTES = 16 * MIB
RANGE_BYTES = 4 * MIB
MIN_RANGE_BYTES = {False: 16 * 1024, True: MIB}  # a request has its price
SMALL_SOURCE_BYTES = 1 << 30
RANGES = 256
THREADS = 16
CHECKED_LINES = 16  # files whose first line is looked at


@dataclass(frozen=True, slots=True)
class Survey:
    """The sources with units and split, before there is a tokenizer."""

    sources: tuple[Source, ...]
    seq_len: int
    packing: Packing
    document_mask: bool
    own_evaluation: bool
    seed: int
    lanes: int
    made_with: Mapping[str, object]
    reading: Reading


class Part(NamedTuple):
    """A unit before slicing, and its decoded size."""

    unit: Unit
    nbytes: int


class Look(NamedTuple):
    """What a look into a file shows; columns None: not looked at."""

    parts: list[Part]
    columns: list[str] | None


T = TypeVar("T")


def survey(
    config: Config, processes: int, run_dir: Path | None = None, lanes: int | None = None
) -> Survey:
    """Find files, units, lanes and held-out documents.

    processes: ranks × data workers (at least 1 each) · run_dir: as in `Reading` · lanes: those of
    a run that exists. Raises UserError with the problems of all sources: nothing there, not
    readable, no text column, no training document left …
    """
    data, seed = config.data, config.run.seed
    reading = reading_of(config, run_dir)
    reader = Reader(reading)
    named = list(zip(data.sources, labels(data.sources), strict=True))
    drafts = _each(lambda i: _draft(*named[i], f"data.sources.{i}", reader), len(named))
    if lanes is None and data.lanes != "auto":
        lanes = data.lanes
    if lanes is None:
        lanes = default_lanes(processes, sum(len(parts) for _, parts in drafts))
    sources = [replace(source, units=tuple(cut(parts, lanes))) for source, parts in drafts]
    split = _each(lambda k: _split(sources[k], k, data.heldout, seed, reader), len(sources))
    packing, document_mask = packing_of(data)
    return Survey(
        sources=tuple(split),
        seq_len=data.seq_len,
        packing=packing,
        document_mask=document_mask,
        own_evaluation=bool(config.evaluation.sources),
        seed=seed,
        lanes=lanes,
        made_with=data_values(config),
        reading=reading,
    )


def training_texts(survey: Survey, limit_bytes: int) -> Iterator[str]:
    """Training documents for a tokenizer: whole units in an order of their own, sources in turn.

    Ends at the first document that reaches `limit_bytes` of UTF-8 text, or with the last unit.
    """
    reader = Reader(survey.reading)
    orders = [
        sorted(range(len(source.units)), key=partial(mix, survey.seed, 8, k))
        for k, source in enumerate(survey.sources)
    ]
    size = 0
    for turn in range(max(map(len, orders))):
        for source, order in zip(survey.sources, orders, strict=True):
            for u in order[turn : turn + 1]:
                for text in heldout.training_texts(source, u, survey.seed, reader):
                    yield text
                    size += len(text.encode())
                    if size >= limit_bytes:
                        return


def freeze(survey: Survey, tokenizer: Tokenizer) -> Manifest:
    """The manifest: from here on nothing about the data is decided again."""
    return Manifest(
        sources=survey.sources,
        tokenizer=_facts(tokenizer),
        seq_len=survey.seq_len,
        packing=survey.packing,
        document_mask=survey.document_mask,
        own_evaluation=survey.own_evaluation,
        seed=survey.seed,
        lanes=survey.lanes,
        made_with=survey.made_with,
    )


def check(manifest: Manifest, config: Config, tokenizer: Tokenizer) -> None:
    """At every later start: is this still the data and the tokenizer that the run began with?

    Raises UserError that lists all that differs. Local files are compared by size and by their
    first and last 64 KiB; files of the Hub when they are read, by their etag.
    """
    found = changes(manifest.made_with, data_values(config))
    problems = refused(found, config, "as when the run began")
    problems += [*differing_tokenizer(manifest, tokenizer), *changed_files(manifest)]
    if problems:
        raise UserError(*problems)


def changed_files(manifest: Manifest) -> list[Problem]:
    """Local files that are gone or not what they were, by their sources' `path` keys."""
    problems: list[Problem] = []
    for i, source in enumerate(manifest.sources):
        if not source.remote:
            key = f"data.sources.{i}.path"
            problems += bounded(_changed_files(source, key), key)
    return problems


def differing_tokenizer(manifest: Manifest, tokenizer: Tokenizer) -> list[Problem]:
    """What of the tokenizer is not as the manifest says (asked by every process that encodes)."""
    now, then = _facts(tokenizer), manifest.tokenizer
    remedy = "restore the run's tokenizer/ and the library versions it began with"
    return [
        Problem(f"tokenizer {name}", getattr(now, name), f"{getattr(then, name)}", remedy)
        for name in ("digest", "backend", "probe", "length")
        if getattr(now, name) != getattr(then, name)
    ]


def packing_of(data: DataConfig) -> tuple[Packing, bool]:
    """What `auto` means for packing and document mask."""
    packing: Packing = "concat" if data.packing == "auto" else data.packing
    asked = data.document_mask
    return packing, packing == "bestfit" if asked == "auto" else asked


def cut(parts: Sequence[Part], lanes: int) -> Iterator[Unit]:
    """Row groups in near-equal slices of rows, until there are four units a lane."""
    wanted = -(-UNITS_PER_LANE * lanes // max(1, len(parts)))
    for unit, nbytes in parts:
        rows = unit.stop - unit.start
        slices = 1 if unit.group < 0 else min(rows, max(wanted, -(-nbytes // SLICE_BYTES)))
        bounds = [unit.start + rows * i // slices for i in range(slices + 1)]
        for start, stop in pairwise(bounds):
            yield unit._replace(start=start, stop=stop)


def _each(function: Callable[[int], T], count: int) -> list[T]:
    """The results for 0 … count − 1; if some raise UserError, one with all their problems."""
    results: list[T] = []
    problems: list[Problem] = []
    for i in range(count):
        try:
            results.append(function(i))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return results


def _draft(
    configured: SourceConfig, label: str, key: str, reader: Reader
) -> tuple[Source, list[Part]]:
    """A source without its units, and what they are cut from."""
    resolved = resolve(configured, f"{key}.path")
    source = Source(
        label=label,
        path=configured.path,
        root=resolved.root,
        remote=resolved.remote,
        revision=resolved.revision,
        files=resolved.files,
        text_column=configured.text_column,
        id_column=None,
        weight=configured.weight,
        max_epochs=configured.max_epochs,
        units=(),
    )
    parts, columns = _inspect(source, key, reader)
    if not parts:
        raise UserError(
            Problem(f"{key}.path", configured.path, "files with documents; all are empty")
        )
    name = configured.id_column
    present = all(name in found for found in columns)
    if not present and "id_column" in configured.model_fields_set:
        raise UserError(_missing_column(f"{key}.id_column", name, configured.path, columns[0]))
    return replace(source, id_column=name if present else None), parts


def _inspect(source: Source, key: str, reader: Reader) -> tuple[list[Part], list[list[str]]]:
    """Units before slicing, and the columns of each file that was looked into."""
    numbers = range(len(source.files))
    with ThreadPoolExecutor(THREADS if source.remote else 1) as threads:
        found = list(threads.map(lambda file: _look_into(source, file, key, reader), numbers))
    problems = [problem for problem in found if isinstance(problem, Problem)]
    if problems:
        raise UserError(*bounded(problems, key))
    looks = [look for look in found if isinstance(look, Look)]
    parts = [part for look in looks for part in look.parts]
    return parts, [look.columns for look in looks if look.columns is not None]


def _look_into(source: Source, file: int, key: str, reader: Reader) -> Look | Problem:
    kind, compression = file_format(source.files[file].name) or ("", None)
    try:
        if source.files[file].size == 0 and kind != "parquet":
            return Look([], None)
        if kind == "parquet":
            return _look_into_parquet(source, file, key, reader)
        if compression and decoded_size(reader, source, file) > DECODED_LIMIT:
            return too_large(source.where(file))
        return _look_into_lines(source, file, kind, bool(compression), reader)
    except UserError as error:
        return error.problems[0]


def _look_into_parquet(source: Source, file: int, key: str, reader: Reader) -> Look | Problem:
    where = source.where(file)
    try:
        footer = reader.footer(source, file)
        schema = footer.schema.to_arrow_schema()
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise RunError(
                f"{where} cannot be read: {error}",
                RESTARTABLE,
                "look at the disk, then start again",
            ) from error
        reason = str(error).splitlines()[0]
        expected = f"a complete parquet file ({reason})"
        return Problem(
            f"{key}.path", where, expected, "replace the file, or rename it by its format"
        )
    if source.text_column not in schema.names:
        return _missing_column(f"{key}.text_column", source.text_column, where, schema.names)
    column = schema.field(source.text_column).type
    if not is_text(column):
        expected = f"a column of strings; in {where} it is {column}"
        return Problem(f"{key}.text_column", source.text_column, expected)
    groups = [footer.row_group(g) for g in range(footer.num_row_groups)]
    units = [
        Part(Unit(file, g, 0, group.num_rows), group.total_byte_size)
        for g, group in enumerate(groups)
        if group.num_rows
    ]
    return Look(units, schema.names)


def _look_into_lines(
    source: Source, file: int, kind: str, compressed: bool, reader: Reader
) -> Look | Problem:
    size = source.files[file].size
    if compressed:
        parts = [Part(Unit(file, -1, 0, size), size)]
    else:
        step = _range_bytes(source)
        starts = range(0, size, step)
        parts = [Part(Unit(file, -1, a, min(a + step, size)), step) for a in starts]
    if kind == "text" or file >= CHECKED_LINES:
        return Look(parts, [] if kind == "text" else None)
    return Look(parts, reader.first_keys(source, file))


def _range_bytes(source: Source) -> int:
    """Length of the ranges that plain files of lines are cut into."""
    plain = [file.size for file in source.files if _is_plain(file.name)]
    if sum(plain) >= SMALL_SOURCE_BYTES:
        return RANGE_BYTES
    return max(MIN_RANGE_BYTES[source.remote], -(-sum(plain) // RANGES))


def _is_plain(name: str) -> bool:
    found = file_format(name)
    return found is not None and found.kind != "parquet" and not found.compression


def _split(source: Source, k: int, fraction: float, seed: int, reader: Reader) -> Source:
    found = heldout.split(source, k, fraction, seed, reader)
    if not heldout.has_training_document(found, seed, reader):
        expected = "at least one document that is not empty and not held out"
        problem = Problem(
            f"data.sources.{k}.path",
            source.path,
            f"{expected}: no training document is left after the held-out split",
            "add documents, or lower data.heldout",
        )
        raise UserError(problem)
    return found


def _facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(tokenizer.digest, tokenizer.backend, tokenizer.probe, tokenizer.length)


def _changed_files(source: Source, key: str) -> list[Problem]:
    problems = []
    remedy = f"bring the old data back, or {way_out(key)}"
    for index, file in enumerate(source.files):
        path = Path(source.where(index))
        if not path.is_file():
            expected = "a file of this name, as when the run began"
            problems.append(Problem(key, str(path), expected, remedy))
        elif path.stat().st_size != file.size:
            expected = f"{file.size} bytes, as when the run began; it has {path.stat().st_size}"
            problems.append(Problem(key, str(path), expected, remedy))
        elif edges_digest(path) != file.etag:
            expected = "the content that the run began with; it has changed"
            problems.append(Problem(key, str(path), expected, remedy))
    return problems


def _missing_column(key: str, name: str, where: str, columns: Sequence[str]) -> Problem:
    there = ", ".join(columns) or "none"
    return Problem(key, name, f"a column of {where}, which has: {there}")
