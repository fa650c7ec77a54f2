"""Find the documents of a step of a run: recomputed, and checked against the logged digest.

    metrics.jsonl   the start that made the step: its weights, blocks a step, digests
    cursors.jsonl   the last save before the step: the positions of the lanes
    manifest.json, tokenizer/, the data      ─►  the step's blocks again  ─►  their documents

Nothing is written to the run. The trap: a resume continues from an older step. So a step may be in
the record more than once, and cursors of steps that the resume has undone stay in the file, even if
it has saved nothing yet. As everywhere, the last start counts.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmtrain.batch_size import BatchSize
from llmtrain.config.binding import data_settings
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data import manifest as manifests
from llmtrain.data.audit.ledger import document_of, origins, replay, text_of
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, reading_of
from llmtrain.data.lanes import Block
from llmtrain.data.manifest import DataManifest
from llmtrain.data.packing import Span
from llmtrain.data.state import DataState, carry_over
from llmtrain.data.survey import changed_files, differing_tokenizer
from llmtrain.data.tokens.encode import DocumentEncoder, open_encoder
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.rundir import contents, record as jsonl
from llmtrain.rundir.status import read_status
from llmtrain.tools.data.scratch import scratch_copy
from llmtrain.types import JsonMapping, JsonObject, cut_of

MAX_BLOCKS_TO_CHECK = 16_384  # replayed after the step, to reach one whose digest was logged
_PLACE = re.compile(r"data\.sources(\.\d+\.path)?=")


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A document, or a part of one, in a block of the step. A pair of answers is one document.

    g: the block's number
    span: [start, stop) among the tokens of the block
    tokens: [start, stop) among the tokens of the document
    file: relative to the source
    group: row group of a parquet file, else None
    at: row of the group, or the byte at which the line begins
    text: of these tokens, if it was asked for; of a pair that of its first half
    second: [start, stop) of the second half of a pair among the tokens of the block; the answer in
        it is of another row where the first one was judged
    second_text: of these tokens, if it was asked for
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
    second: tuple[int, int] | None = None
    second_text: str | None = None


@dataclass(frozen=True, slots=True)
class StepDocuments:
    """The documents of a step, in the order of its blocks.

    batch_digest: recomputed
    checked_at: the step whose logged digest agreed: this step, or a later one if the digest of
        this one was not logged; None if no digest was logged at this step or soon after it
    blocks: their number
    """

    step: int
    batch_digest: str
    checked_at: int | None
    blocks: int
    documents: tuple[DocumentSpan, ...]

    def to_json(self) -> JsonObject:
        """Return the object that `--json` prints, without what a document does not have.

        Texts are there only if they were asked for, and a second half only of pairs.
        """
        values = asdict(self)
        for document in values["documents"]:
            for name in ("text", "second", "second_text"):
                if document[name] is None:
                    del document[name]
        return values


@dataclass(frozen=True, slots=True)
class _Start:
    """What one start of the run logged.

    first: the step that it began from
    last: the last step that it finished
    batch: how many blocks its steps have
    weights: of the sources
    digests: step → digest of its batch, where it was logged
    """

    first: int
    last: int
    batch: BatchSize
    weights: tuple[float, ...]
    digests: Mapping[int, str]


def which(
    run_dir: Path, step: int, *, overrides: Sequence[str] = (), text: bool = False
) -> StepDocuments:
    """Return the documents of a step.

    overrides: `data.sources.N.path=…`, where the data is now
    text: whether to decode the documents' tokens too

    Raises UserError for a step that the run has not made, for data that is missing or changed, and
    if the recomputed digest is not the logged one.
    """
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
    raise_any(problems)
    config = load_config(run_dir / contents.CONFIG, overrides)
    start = _start_of(run_dir, step)
    manifest = _manifest(run_dir, config)
    state = _state_before(run_dir, step, manifest, start.batch)
    pairs = zip(manifest.sources, start.weights, strict=True)
    weighted = tuple(replace(source, weight=weight) for source, weight in pairs)
    manifest = replace(manifest, sources=weighted)
    with scratch_copy(run_dir) as directory:
        encoder = open_encoder(directory / contents.TOKENIZER, manifest)
        changed = map(_with_way_out, changed_files(manifest))
        raise_any([*differing_tokenizer(manifest, encoder), *changed])
        reader = Reader(reading_of(data_settings(config), directory))
        digests, numbered = _replay(manifest, encoder, reader, state, start, step)
        checked_at = _check_digest(start, digests)
        documents = _documents(manifest, reader, numbered, encoder.tokenizer if text else None)
    return StepDocuments(step, f"{digests[step]:016x}", checked_at, len(numbered), documents)


def _start_of(run_dir: Path, step: int) -> _Start:
    """Return the last start that made the step: a resume undoes the steps after its first."""
    starts = _starts(jsonl.record(run_dir))
    last = starts[-1].last if starts else 0
    if starts:
        last = max(last, int(read_status(run_dir).get("step") or 0))
    if not 1 <= step <= last:
        made = f"that the run has made: 1 to {last}" if last else "of a run that has made one"
        raise UserError(Problem("--step", step, f"a step {made}"))
    return next(start for start in reversed(starts) if start.first < step)


def _starts(lines: Sequence[JsonMapping]) -> list[_Start]:
    starts: list[_Start] = []
    digests: dict[int, str] = {}
    for line in lines:
        if line["kind"] == "start":
            digests = {}
            groups = line["world_size"] // cut_of(line).processes
            blocks = groups * line["micro_batch_size"] * line["accumulation"]
            grows = line.get("batch_sizes")
            batch = BatchSize(tuple((at, size) for at, size in grows or [(1, blocks)]))
            first = line["step"]
            starts.append(_Start(first, first, batch, tuple(line["weights"]), digests))
        elif starts:
            starts[-1] = replace(starts[-1], last=max(starts[-1].last, line["step"]))
            if line["kind"] == "train":
                digests[line["step"]] = line["batch_digest"]
    return starts


def _manifest(run_dir: Path, config: Config) -> DataManifest:
    """Return the run's manifest, with the places where its sources are now."""
    try:
        return manifests.load(run_dir / contents.MANIFEST, config.data.sources)
    except UserError as error:
        raise UserError(*(_with_way_out(problem) for problem in error.problems)) from error


def _with_way_out(problem: Problem) -> Problem:
    """Add to a problem with a source how to name the place where its data is now."""
    if not problem.key.startswith("data.sources"):
        return problem
    value = "…" if problem.key.endswith(".path") else "[{path: …}, …]"
    return replace(problem, remedy=f"name the place of the data now: '{problem.key}={value}'")


def _state_before(run_dir: Path, step: int, manifest: DataManifest, batch: BatchSize) -> DataState:
    """Return the stream's state at the last save before the step, or else at the run's start."""
    noted = _standing(jsonl.read(run_dir / contents.CURSORS), jsonl.record(run_dir))
    count = max((i for i, line in enumerate(noted, 1) if line["step"] < step), default=0)
    state, position = DataState.fresh(manifest), 0
    if count:
        state, position = DataState.from_json(noted[count - 1]), noted[count - 1]["step"]
    others = [i for i, line in enumerate(noted) if line["fingerprint"] != manifest.fingerprint]
    # The step was saved with data or settings that were replaced later.
    if others and others[-1] >= count:
        expected = (
            f"a step after {noted[others[-1]]['step']}: up to there the run had other data or "
            "settings, which checkpoint.accept_changes let it replace, and its manifest.json knows "
            "the new ones"
        )
        raise UserError(Problem("--step", step, expected))
    if state.fingerprint != manifest.fingerprint:
        state = carry_over(state, manifest)
    return replace(state, next_block=batch.until(position))


def _standing(noted: Sequence[JsonObject], record: Sequence[JsonMapping]) -> list[JsonObject]:
    """Return the lines of cursors that no later start has undone by resuming before their step.

    A line of cursors is written after the record's line of the same checkpoint, and is matched with
    it by step. If lines are missing, one may be matched with an older checkpoint of the same step;
    then fewer lines are left and the replay begins earlier, with the same result.
    """
    # For each line of the record, the first step that it or a later start has undone.
    undone_from = [sys.maxsize]
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


def _replay(
    manifest: DataManifest,
    encoder: DocumentEncoder,
    reader: Reader,
    state: DataState,
    start: _Start,
    step: int,
) -> tuple[dict[int, int], list[tuple[int, Block]]]:
    """Return digests by step, and the blocks of `step` with their numbers.

    The digests are those of `step` and of the step to check it with, which may be the same.
    """
    batch = start.batch
    digests: dict[int, int] = {}
    step_blocks: list[tuple[int, Block]] = []
    # The first step from this one on with a logged digest, unless it is too far away.
    checked = min((number for number in start.digests if number >= step), default=step)
    wanted = {
        step,
        checked if batch.until(checked) - batch.until(step) <= MAX_BLOCKS_TO_CHECK else step,
    }
    first, stop = batch.until(step - 1), batch.until(max(wanted))
    blocks = replay(manifest, encoder, reader, state, first, stop)
    for number in range(step, max(wanted) + 1):
        numbered = [next(blocks) for _ in range(batch.of(number))]
        if number in wanted:
            first = batch.until(number - 1)
            made = batch_of(numbered, manifest, first_block=first, wait_seconds=0.0, ended=False)
            digests[number] = made.digest
        if number == step:
            step_blocks = numbered
    return digests, step_blocks


def _check_digest(start: _Start, digests: Mapping[int, int]) -> int | None:
    """Return the step whose logged digest agrees; None if it was not logged.

    Raises UserError if the recomputed digest differs from the logged one.
    """
    step, digest = max(digests.items())
    logged = start.digests.get(step)
    if logged is None:
        return None
    if logged != f"{digest:016x}":
        expected = f"{logged}, which the run logged: these are not the blocks it was trained on"
        remedy = (
            "bring back the data as it was: names, sizes and ends of the files are the same, so a "
            "file was changed inside, or manifest.json, tokenizer/, cursors.jsonl or "
            "skipped-units.jsonl of the run were"
        )
        raise UserError(Problem(f"batch_digest of step {step}", f"{digest:016x}", expected, remedy))
    return step


def _documents(
    manifest: DataManifest,
    reader: Reader,
    numbered: Sequence[tuple[int, Block]],
    tokenizer: Tokenizer | None,
) -> tuple[DocumentSpan, ...]:
    """Return the documents in these blocks; with their text if a tokenizer is given."""
    placed = [
        (g, block, span, document_of(manifest, g, block, span))
        for g, block in numbered
        for span in block.spans
    ]
    known = origins(manifest, reader, {document for *_, document in placed})
    return tuple(
        DocumentSpan(
            source=manifest.labels[block.source],
            g=g,
            tokens=(span.start, span.stop),
            **_places(block, span, tokenizer),
            **known[document]._asdict(),
        )
        for g, block, span, document in placed
    )


def _places(block: Block, span: Span, tokenizer: Tokenizer | None) -> JsonObject:
    """Return where a document is in the block, and its text there if a tokenizer is given."""
    pair = next((pair for pair in block.pairs if pair.begin == span.at), None)
    stop = span.at + span.stop - span.start
    first, second = (span.at, stop), None
    if pair is not None:
        first, second = (pair.begin, pair.end), (pair.second, pair.stop)
    texts = [
        text_of(tokenizer, block.ids[slice(*part)]) if tokenizer and part else None
        for part in (first, second)
    ]
    return {"span": first, "text": texts[0], "second": second, "second_text": texts[1]}
