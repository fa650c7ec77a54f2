"""Which documents were in a step of a run: recomputed, and checked against what the run logged.

    metrics.jsonl   the start that made the step: its weights, blocks a step, digests
    cursors.jsonl   the last save before the step: where the lanes stood
    manifest.json, tokenizer/, the data      ─►  the step's blocks again  ─►  their documents

Nothing is written to the run. The trap: a resume continues from an older step, so steps are in the
record more than once, and cursors of what it has undone stay noted even where it has saved nothing
yet. As everywhere, the last start counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.config.binding import data_settings
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data import manifest as manifests
from llmtrain.data.audit.ledger import document_of, origins, replay, text_of
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, reading_of
from llmtrain.data.lanes import Block
from llmtrain.data.manifest import Manifest
from llmtrain.data.packing import Span
from llmtrain.data.state import DataState, carry_over
from llmtrain.data.survey import changed_files, differing_tokenizer
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.rundir import contents
from llmtrain.rundir import record as jsonl
from llmtrain.rundir.status import read_status
from llmtrain.tools.data.scratch import aside

MAX_BLOCKS_TO_CHECK = 16_384  # made beyond the step, to reach one whose digest was logged
_PLACE = re.compile(r"data\.sources(\.\d+\.path)?=")


@dataclass(frozen=True, slots=True)
class Found:
    """A document, or a part of one, in a block of the step.

    g: the block's number
    span: tokens [start, stop) of the block's ids
    tokens: [start, stop) of the document's
    file: relative to the source
    group: row group of a parquet file
    at: row of the group, or the byte at which the line begins
    text: if it was asked for
    """

    source: str
    id: str | None
    title: str | None
    url: str | None
    g: int
    span: tuple[int, int]
    tokens: tuple[int, int]
    file: str
    group: int | None
    at: int
    text: str | None


@dataclass(frozen=True, slots=True)
class StepDocuments:
    """The documents of a step in the order of its blocks.

    batch_digest: recomputed
    checked_at: the step whose logged digest agreed: this one, or if its own was not logged a later
        one that the replay reached; None = nothing to check with
    """

    step: int
    batch_digest: str
    checked_at: int | None
    blocks: int
    documents: tuple[Found, ...]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; `text` only where it was asked for."""
        values = asdict(self)
        for document in values["documents"]:
            if document["text"] is None:
                del document["text"]
        return values


@dataclass(frozen=True, slots=True)
class _Start:
    """What one start of the run wrote: it finished the steps after `first` up to `last`."""

    first: int
    last: int
    blocks_per_step: int
    weights: tuple[float, ...]
    digests: Mapping[int, str]


def which(
    run_dir: Path, step: int, *, overrides: Sequence[str] = (), text: bool = False
) -> StepDocuments:
    """The documents of a step. overrides: `data.sources.N.path=…`, where the data is now.

    Raises UserError for a step that the run has not made, data that is gone or changed, and where
    the recomputed digest is not the logged one.
    """
    _check_run(run_dir, overrides)
    config = load_config(run_dir / contents.CONFIG, overrides)
    start = _start_of(run_dir, step)
    manifest = _manifest(run_dir, config)
    state = _state_before(run_dir, step, manifest, start.blocks_per_step)
    pairs = zip(manifest.sources, start.weights, strict=True)
    weighted = tuple(replace(source, weight=weight) for source, weight in pairs)
    manifest = replace(manifest, sources=weighted)
    with aside(run_dir) as directory:
        tokenizer = open_tokenizer(directory / contents.TOKENIZER, manifest.tokenizer.backend)
        _check_data(manifest, tokenizer)
        reader = Reader(reading_of(data_settings(config), directory))
        digests, numbered = _replay(manifest, tokenizer, reader, state, start, step)
        checked_at = _check_digest(start, digests)
        documents = _documents(manifest, reader, numbered, tokenizer if text else None)
    return StepDocuments(step, f"{digests[step]:016x}", checked_at, len(numbered), documents)


def _check_run(run_dir: Path, overrides: Sequence[str]) -> None:
    problems = [
        Problem(f"override {one}", None, "data.sources.0.path=…: the run decides all but places")
        for one in overrides
        if not _PLACE.match(one)
    ]
    if not run_dir.is_dir():
        problems.append(Problem("RUN", str(run_dir), "a run directory that exists"))
    elif not (run_dir / contents.CONFIG).is_file():
        problems.append(Problem("RUN", str(run_dir), "a run directory: it has no config.yaml"))
    elif not (run_dir / contents.MANIFEST).is_file():
        expected = "a run with a manifest.json: this one ended before its data was prepared"
        problems.append(Problem("RUN", str(run_dir), expected))
    if problems:
        raise UserError(*problems)


def _start_of(run_dir: Path, step: int) -> _Start:
    """The start that made the step. One that resumed at an earlier step has undone later ones."""
    starts = _starts(jsonl.record(run_dir))
    last = starts[-1].last if starts else 0
    if starts:
        last = max(last, int(read_status(run_dir).get("step") or 0))
    if not 1 <= step <= last:
        made = f"that the run has made: 1 to {last}" if last else "of a run that has made one"
        raise UserError(Problem("--step", step, f"a step {made}"))
    return next(start for start in reversed(starts) if start.first < step)


def _starts(lines: Sequence[Mapping[str, Any]]) -> list[_Start]:
    starts: list[_Start] = []
    digests: dict[int, str] = {}
    for line in lines:
        if line["kind"] == "start":
            digests = {}
            blocks = line["world_size"] * line["micro_batch_size"] * line["accumulation"]
            first = line["step"]
            starts.append(_Start(first, first, blocks, tuple(line["weights"]), digests))
        elif starts:
            starts[-1] = replace(starts[-1], last=max(starts[-1].last, line["step"]))
            if line["kind"] == "train":
                digests[line["step"]] = line["batch_digest"]
    return starts


def _manifest(run_dir: Path, config: Config) -> Manifest:
    """The run's manifest, its sources where they lie now."""
    try:
        return manifests.load(run_dir / contents.MANIFEST, config.data.sources)
    except UserError as error:
        raise UserError(*(_with_way_out(problem) for problem in error.problems)) from error


def _with_way_out(problem: Problem) -> Problem:
    """A problem of a source's place, with the way to name another one."""
    if not problem.key.startswith("data.sources"):
        return problem
    value = "…" if problem.key.endswith(".path") else "[{path: …}, …]"
    return replace(problem, remedy=f"name the place of the data now: '{problem.key}={value}'")


def _state_before(run_dir: Path, step: int, manifest: Manifest, blocks_per_step: int) -> DataState:
    """The stream at the last save before the step; at the run's beginning if nothing was saved."""
    noted = _standing(jsonl.read(run_dir / contents.CURSORS), jsonl.record(run_dir))
    count = max((i for i, line in enumerate(noted, 1) if line["step"] < step), default=0)
    state, position = DataState.fresh(manifest), 0
    if count:
        state, position = DataState.from_json(noted[count - 1]), noted[count - 1]["step"]
    others = [i for i, line in enumerate(noted) if line["fingerprint"] != manifest.fingerprint]
    if others and others[-1] >= count:  # the step was saved with what is no more
        raise _changed_since(step, noted[others[-1]]["step"])
    if state.fingerprint != manifest.fingerprint:
        state = carry_over(state, manifest)
    return replace(state, next_block=position * blocks_per_step)


def _standing(
    noted: Sequence[dict[str, Any]], record: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The noted lines that no later start has undone: none resumed before their step.

    A line is written behind the record's line of its checkpoint, which tells when. Where some were
    not noted it may be taken for an older one: then the replay begins earlier, and is as right.
    """
    undone_from = [sys.maxsize]  # by the starts from a line of the record on
    for line in reversed(record):
        first = line["step"] if line["kind"] == "start" else sys.maxsize
        undone_from.append(min(first, undone_from[-1]))
    undone_from.reverse()
    saves = [(i, line["step"]) for i, line in enumerate(record) if line["kind"] == "checkpoint"]
    standing, at = [], 0
    for line in noted:
        place = next((i for i, step in saves if i >= at and step == line["step"]), None)
        if place is not None:
            at = place + 1
            standing += [line] if line["step"] <= undone_from[at] else []
    return standing


def _changed_since(step: int, last: int) -> UserError:
    expected = (
        f"a step after {last}: up to there the run had other data or settings, which "
        "checkpoint.accept_changes let it replace, and its manifest.json knows the new ones"
    )
    return UserError(Problem("--step", step, expected))


def _check_data(manifest: Manifest, tokenizer: Tokenizer) -> None:
    problems = [
        *differing_tokenizer(manifest, tokenizer),
        *map(_with_way_out, changed_files(manifest)),
    ]
    if problems:
        raise UserError(*problems)


def _replay(
    manifest: Manifest,
    tokenizer: Tokenizer,
    reader: Reader,
    state: DataState,
    start: _Start,
    step: int,
) -> tuple[dict[int, int], list[tuple[int, Block]]]:
    """Digests of the step and of the one that checks it, and the step's blocks with their numbers.

    The digests are in order of steps; one step if there is no other to check with.
    """
    size = start.blocks_per_step
    digests: dict[int, int] = {}
    kept: list[tuple[int, Block]] = []
    wanted = {step, _checking(start, step)}
    blocks = replay(
        manifest,
        tokenizer,
        reader,
        cursors=state.cursors,
        next_block=state.next_block,
        first=(step - 1) * size,
        stop=max(wanted) * size,
    )
    for number in range(step, max(wanted) + 1):
        numbered = [next(blocks) for _ in range(size)]
        if number in wanted:
            first = (number - 1) * size
            batch = batch_of(numbered, manifest, first_block=first, wait_seconds=0.0, ended=False)
            digests[number] = batch.digest
        if number == step:
            kept = numbered
    return digests, kept


def _checking(start: _Start, step: int) -> int:
    """The first step from this one on whose digest was logged, unless it is far; else this one."""
    later = min((number for number in start.digests if number >= step), default=step)
    return later if (later - step) * start.blocks_per_step <= MAX_BLOCKS_TO_CHECK else step


def _check_digest(start: _Start, digests: Mapping[int, int]) -> int | None:
    """The step whose logged digest is the recomputed one. Raises UserError if it is another."""
    step, found = max(digests.items())
    logged = start.digests.get(step)
    if logged is None:
        return None
    if logged != f"{found:016x}":
        expected = f"{logged}, which the run logged: these are not the blocks it was trained on"
        remedy = (
            "bring back the data as it was: names, sizes and ends of the files are the same, so a "
            "file was changed inside, or manifest.json, tokenizer/, cursors.jsonl or "
            "skipped-units.jsonl of the run were"
        )
        raise UserError(Problem(f"batch_digest of step {step}", f"{found:016x}", expected, remedy))
    return step


def _documents(
    manifest: Manifest,
    reader: Reader,
    numbered: Sequence[tuple[int, Block]],
    tokenizer: Tokenizer | None,
) -> tuple[Found, ...]:
    """The documents in these blocks; with their text if there is a tokenizer."""
    placed = [
        (g, block, span, document_of(manifest, g, block, span))
        for g, block in numbered
        for span in block.spans
    ]
    known = origins(manifest, reader, {document for *_, document in placed})
    return tuple(
        Found(
            source=manifest.labels[block.source],
            g=g,
            span=(span.at, span.at + span.stop - span.start),
            tokens=(span.start, span.stop),
            text=_text(block, span, tokenizer),
            **known[document]._asdict(),
        )
        for g, block, span, document in placed
    )


def _text(block: Block, span: Span, tokenizer: Tokenizer | None) -> str | None:
    """The document's own tokens in the block as text."""
    if tokenizer is None:
        return None
    return text_of(tokenizer, block.ids[span.at : span.at + span.stop - span.start])
