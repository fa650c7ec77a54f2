"""From files to units: what rank 0 decides once, and what every later start checks.

    survey(config)  ─►  training_texts  ─►  (a tokenizer is trained)  ─►  freeze  ─►  manifest.json
                                                                                          │
    later starts:   manifest.load  ─►  check(manifest, config, tokenizer)  ◄──────────────┘

How files become parts, and parts units, stands in `parts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmtrain.config.meaning import changes, data_values, refused, way_out
from llmtrain.config.schema import Config, DataConfig, SourceConfig
from llmtrain.data import heldout
from llmtrain.data.hub import resolve
from llmtrain.data.lanes import default_lanes
from llmtrain.data.manifest import Manifest, Packing, Source, TokenizerFacts, load
from llmtrain.data.parts import Part, cut, inspect, missing_column
from llmtrain.data.readers import Reader, Reading, reading_of
from llmtrain.data.sources import bounded, edges_digest, labels
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix

T = TypeVar("T")

__all__ = ["Manifest", "Survey", "check", "freeze", "load", "survey", "training_texts"]


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
    resolved = resolve(configured, f"{key}.path", reader.reading.cache_bytes > 0)
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
    parts, columns = inspect(source, key, reader)
    if not parts:
        files = range(len(source.files))
        why = "are left out" if any(reader.skips_file(source, i) for i in files) else "are empty"
        expected = f"files with documents; all {why}"
        raise UserError(Problem(f"{key}.path", configured.path, expected))
    name = configured.id_column
    present = all(name in found for found in columns)
    if not present and "id_column" in configured.model_fields_set:
        raise UserError(missing_column(f"{key}.id_column", name, configured.path, columns[0]))
    return replace(source, id_column=name if present else None), parts


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
    used = {unit.file for unit in source.units}  # not the empty ones, nor those left out
    for index, file in enumerate(source.files):
        path = Path(source.where(index))
        if index not in used:
            continue
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
