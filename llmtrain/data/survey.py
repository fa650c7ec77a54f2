"""From files to units: what rank 0 decides once, and what every later start checks.

    survey         ─►  training_texts  ─►  (a tokenizer is trained)  ─►  freeze  ─►  manifest.json
                                                                                          │
    later starts:   manifest.load  ─►  check(manifest, …)                  ◄──────────────┘

`file_parts.py` finds the parts of files and cuts them into units. Whether a source has
conversations is found out here, too, with what that means for packing and lanes.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from llmtrain import system
from llmtrain.config.binding import EPOCHS, DataSettings, changes, refusals, way_out
from llmtrain.config.schema import Answers, DataConfig, DocumentsConfig, PackingName, SourceConfig
from llmtrain.data import file_parts, heldout
from llmtrain.data.chat import rows as chat_rows
from llmtrain.data.chat.pairs import examples
from llmtrain.data.documents.reader import Reader, Reading, reading_of
from llmtrain.data.lanes import default_chat_lanes, default_lanes
from llmtrain.data.manifest import ChatFacts, DataManifest, Source, TokenizerFacts
from llmtrain.data.sources.fetch import Stopping
from llmtrain.data.sources.hub import resolve
from llmtrain.data.sources.local import Resolved, bounded, edges_digest, labels
from llmtrain.data.sources.token_cache import check_tokenizer
from llmtrain.data.tokens.encode import DocumentEncoder, differing_chat
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.hashing import mix
from llmtrain.text import harmless


def as_source(configured: SourceConfig, resolved: Resolved, label: str) -> Source:
    """Return a source into whose files nobody has looked: without form, id column and units."""
    return Source(
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
        columns=configured.columns,
        whole_files=configured.document == "file",
    )


def with_form(source: Source, key: str, reader: Reader, answers: Answers | None = None) -> Source:
    """Return the source with the form of its rows, if its first file has one.

    answers: as for `form_of`

    Raises UserError for columns that the source lacks, and for judged answers (`form_of`).
    """
    names = file_parts.first_columns(source, key, reader)
    if not names:
        return source
    columns = f"{key}.columns"
    tag = chat_rows.KTO_TAG
    if answers == "feedback" and tag in names and "label" not in (*names, *source.columns):
        source = replace(source, columns={"label": tag, **source.columns})
    ours = chat_rows.our_names(names, source.columns, columns)
    return replace(source, form=chat_rows.form_of(ours, columns, source.columns, answers))


_WANTED: Mapping[Answers, str] = {
    "pairs": "pairs of answers with preference.loss {}: chosen and rejected, with a prompt",
    "feedback": "answers with a label with preference.loss {}: prompt, completion and label",
}


def require_answers(source: Source, key: str, settings: DataSettings, reader: Reader) -> None:
    """Raise UserError if a run with `preference.loss` has a source of other rows than it takes."""
    answers = settings.preference.answers
    if answers is None or source.form is not None:
        return
    other: Answers = "pairs" if answers == "feedback" else "feedback"
    remedy = f"preference.loss=none; or name its columns: {key}.columns={{…}}"
    if source.cached:
        what, remedy = "a token cache, whose tokens are texts", "preference.loss=none"
    elif with_form(source, key, reader, other).form is not None:
        what = {"pairs": "pairs of answers", "feedback": "answers with a label"}[other]
        loss = "dpo" if other == "pairs" else "kto"
        remedy = f"preference.loss={loss}, for sources that are all of this kind"
    else:
        try:
            form = with_form(source, key, reader).form
        except chat_rows.PreferenceDataError:
            form = None
        what = "documents of text" if form is None else "conversations"
    expected = f"{_WANTED[answers].format(settings.preference.loss)}; these are {what}"
    raise UserError(Problem(f"{key}.path", source.path, expected, remedy))


def unfit_packing(settings: DataSettings, chat: bool) -> Iterator[Problem]:
    """Yield what of the packing does not go with conversations, or with pairs of answers."""
    data, answers = settings.data, settings.preference.answers
    rows = f"preference.loss {settings.preference.loss}" if answers else "conversations"
    if chat and data.packing == "concat":
        expected = f"bestfit, single or auto with {rows}: concat would cut them anywhere"
        also = "" if data.document_mask is not False else " with data.document_mask=auto"
        yield Problem("data.packing", "concat", expected, f"data.packing=auto{also}")
    if chat and data.document_mask is False:
        those = "the answers" if answers else "those"
        expected = f"true or auto with {rows}: {those} of a block must not see each other"
        yield Problem("data.document_mask", False, expected, "data.document_mask=auto")
    if answers and data.packing == "single":
        yield from uneven(data.seq_len)


def uneven(seq_len: int) -> Iterator[Problem]:
    """Yield the problem of blocks that two answers cannot share evenly."""
    if seq_len % 2:
        expected = "an even number with data.packing single and preference.loss: each answer of a "
        remedy = f"data.seq_len={seq_len + 1}"
        yield Problem("data.seq_len", seq_len, f"{expected}pair has half of a block", remedy)


def max_epochs(source: Source, epochs: float | None) -> int | None:
    """Return the passes over a source: over conversations as many as the run has epochs."""
    if source.max_epochs is None and source.form is not None and epochs is not None:
        return math.ceil(epochs)
    return source.max_epochs


def plain(source: Source, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts for a tokenizer: of a conversation what is said in it, not its JSON."""
    for text in texts:
        if source.form is None:
            yield text
            continue
        try:
            for one in examples(text, source.form, source.columns, source.reading):
                yield chat_rows.contents(one)
        except chat_rows.BadRowError:
            continue  # the first rows are checked, and later ones when they are read


_log = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")
BYTES_A_TOKEN = 4  # of conversations, about
_Named = tuple[SourceConfig, str, str]  # a source, its label and its key


@dataclass(frozen=True, slots=True)
class Survey:
    """The sources with units and split, before there is a tokenizer.

    has_chat: whether any of them has conversations, or any of `evaluation.sources`
    """

    sources: tuple[Source, ...]
    lanes: int
    settings: DataSettings
    reading: Reading
    has_chat: bool


def survey(
    settings: DataSettings,
    processes: int,
    run_dir: Path | None = None,
    lanes: int | None = None,
    stop: Stopping | None = None,
) -> Survey:
    """Find files, units, lanes and held-out documents.

    processes: ranks × data workers (at least 1 each)
    run_dir, stop: as in `Reading`
    lanes: number of lanes of a run that exists

    Raises UserError with the problems of all sources: no files, unreadable files, no text column,
    no training document left and others; RunError (75) at a stop.
    """
    data, seed = settings.data, settings.seed
    reading = reading_of(settings, run_dir, stop)
    reader = Reader(reading)
    named = _named(data.sources, "data.sources")
    # Those of the evaluation are looked at too, to report all problems at once.
    both = [*named, *_own_evaluation(settings.evaluation)]
    drafts = _each(lambda one: _draft(*one, settings, reader), both)
    _tell_of_files([source for source, _ in drafts])
    has_chat = any(source.form is not None for source, _ in drafts)
    drafts = drafts[: len(named)]
    raise_any(unfit_packing(settings, has_chat))
    if lanes is None:
        auto = data.lanes == "auto"
        lanes = _lanes(drafts, processes, settings, reader) if auto else int(data.lanes)
    sources = []
    for source, parts in drafts:
        units, most = tuple(file_parts.cut(parts, lanes)), max_epochs(source, settings.epochs)
        sources.append(replace(source, units=units, max_epochs=most))
    share = 0.0 if settings.evaluation else data.heldout
    split = _each(lambda k: _split(sources[k], k, share, seed, reader), range(len(sources)))
    return Survey(tuple(split), lanes, settings, reading, has_chat)


def _lanes(
    drafts: Sequence[tuple[Source, list[file_parts.FilePart]]],
    processes: int,
    settings: DataSettings,
    reader: Reader,
) -> int:
    """Return the number of lanes for `data.lanes: auto`."""
    chat = [source.form is not None for source, _ in drafts]
    ends = all(max_epochs(source, settings.epochs) is not None for source, _ in drafts)
    parts = [(source, part.unit) for source, parts in drafts for part in parts]
    by_default = default_lanes(processes, len(parts))
    if not all(chat) and not (any(chat) and ends):
        return by_default
    units = sum(1 if unit.group < 0 else unit.stop - unit.start for _, unit in parts)
    nbytes = sum(file_parts.text_size(source, unit, reader) for source, unit in parts)
    # A judged answer stands in its block with another one behind the same prompt.
    tokens = nbytes / BYTES_A_TOKEN * (2 if settings.preference.answers == "feedback" else 1)
    few = default_chat_lanes(processes, units, tokens / settings.data.seq_len)
    return few if all(chat) or few == 1 else by_default


def evaluation_sources(settings: DataSettings, reading: Reading) -> tuple[Source, ...]:
    """Return `evaluation.sources`, with every document held out; () = none are set.

    Raises UserError as `survey` does.
    """
    reader = Reader(reading)
    configured = _own_evaluation(settings.evaluation)
    drafts = _each(lambda one: _draft(*one, settings, reader), configured)
    sources = [
        replace(s, units=tuple(file_parts.cut(parts, 1)), id_column=None) for s, parts in drafts
    ]
    return tuple(heldout.all_held_out(s, k, settings.seed) for k, s in enumerate(sources))


def _own_evaluation(sources: Sequence[DocumentsConfig]) -> list[_Named]:
    """Return `evaluation.sources` as sources like those of `data.sources`."""
    described = [SourceConfig(**source.model_dump(exclude_unset=True)) for source in sources]
    return _named(described, "evaluation.sources", "evaluation/")


def _named(sources: Sequence[SourceConfig], key: str, prefix: str = "") -> list[_Named]:
    labelled = enumerate(zip(sources, labels(sources), strict=True))
    return [(source, prefix + label, f"{key}.{i}") for i, (source, label) in labelled]


def training_texts(survey: Survey, limit_bytes: int) -> Iterator[str]:
    """Yield training documents for a tokenizer: whole units in random order, sources in turn.

    The last one is the first to reach `limit_bytes` of UTF-8 text, or the last of all units.
    """
    for i, source in enumerate(survey.sources):
        if source.cached:
            expected = "sources of text, since model.tokenizer is to be trained; this is tokens"
            remedy = "set model.tokenizer to the one that wrote the token cache: DIR/tokenizer"
            raise UserError(Problem(f"data.sources.{i}.path", source.path, expected, remedy))
    texts = chain.from_iterable(heldout.in_turn(_units(survey)))
    for number, text in enumerate(_up_to(limit_bytes, texts), 1):
        system.beat("training a tokenizer", number)
        yield text


def some_texts(survey: Survey, count: int, limit_bytes: int) -> Iterator[str]:
    """Yield up to `count` training documents, sources of text in turn. Few units are read.

    The last one is the first to reach `limit_bytes` of UTF-8 text.
    """
    streams = [chain.from_iterable(units) for units in _units(survey)]
    yield from _up_to(limit_bytes, islice(heldout.in_turn(streams), count))


def _units(survey: Survey) -> list[Iterator[Iterator[str]]]:
    """Return the documents of each text source by unit, in an order that no lane has."""
    reader, seed = Reader(survey.reading), survey.settings.seed

    def units(k: int, source: Source) -> Iterator[Iterator[str]]:
        for u in sorted(range(len(source.units)), key=partial(mix, seed, 8, k)):
            yield plain(source, heldout.training_texts(source, u, seed, reader))

    return [units(k, source) for k, source in enumerate(survey.sources) if not source.cached]


def _up_to(limit_bytes: int, texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        yield text
        size += len(text.encode())
        if size >= limit_bytes:
            return


def freeze(
    survey: Survey, tokenizer: Tokenizer, chat: ChatFacts | None = None, *, apart: bool = False
) -> DataManifest:
    """Return the manifest. From here on nothing about the data is decided again.

    chat: how conversations become tokens, if there are any
    apart: whether `packing: auto` gives each conversation a block of its own

    Raises UserError for a token cache that another tokenizer wrote.
    """
    check_tokenizer(survey.sources, tokenizer)
    settings = survey.settings
    packing, document_mask = packing_of(settings.data, chat=survey.has_chat, apart=apart)
    epochs = {EPOCHS: settings.epochs} if survey.has_chat and settings.epochs else {}
    return DataManifest(
        sources=survey.sources,
        tokenizer=_facts(tokenizer),
        seq_len=settings.data.seq_len,
        packing=packing,
        document_mask=document_mask,
        own_evaluation=bool(settings.evaluation),
        seed=settings.seed,
        lanes=survey.lanes,
        made_with={**settings.values, **epochs},
        chat=chat,
    )


def check(manifest: DataManifest, settings: DataSettings, encoder: DocumentEncoder) -> None:
    """Check at a later start that data and tokenizer are those that the run began with.

    Local files are compared by size and by their first and last 64 KiB; files of the Hub by etag,
    when they are read. Raises UserError that lists all that differs.
    """
    changed = changes(manifest.made_with, values_now(manifest.made_with, settings))
    problems = refusals(changed, settings.accepted, "as when the run began")
    if manifest.answers != settings.preference.answers:
        was = {"pairs": "dpo, or another loss of pairs", "feedback": "kto", None: "none"}
        expected = f"{was[manifest.answers]}, as the run's data was read for"
        loss = settings.preference.loss
        problems.append(Problem("preference.loss", loss, expected, "another run.dir"))
    problems += [*differing_tokenizer(manifest, encoder), *changed_files(manifest)]
    raise_any(problems)


def values_now(made_with: Mapping[str, object], settings: DataSettings) -> dict[str, object]:
    """Return the values to compare with those that a manifest was made with.

    The number of epochs decides how often conversations are read, and so is one of them there.
    """
    epochs = {EPOCHS: settings.epochs} if EPOCHS in made_with else {}
    return {**settings.values, **epochs}


def changed_files(manifest: DataManifest) -> list[Problem]:
    """Return a problem for each local file that is gone or changed, with its source's key."""
    problems: list[Problem] = []
    for i, source in enumerate(manifest.sources):
        if source.remote:
            continue
        changed, key = [], f"data.sources.{i}.path"
        used = {unit.file for unit in source.units}  # without empty files and those left out
        for index, file in enumerate(source.files):
            path = Path(source.where(index))
            if index not in used and not source.cached:
                continue
            if not path.is_file():
                expected = "a file of this name, as when the run began"
            elif path.stat().st_size != file.size:
                expected = f"{file.size} bytes, as when the run began; it has {path.stat().st_size}"
            elif edges_digest(path) != file.etag:
                expected = "the content that the run began with; it has changed"
            else:
                continue
            remedy = f"bring the old data back, or {way_out(key)}"
            changed.append(Problem(key, str(path), expected, remedy))
        problems += bounded(changed, key)
    return problems


def differing_tokenizer(manifest: DataManifest, encoder: DocumentEncoder) -> list[Problem]:
    """Return how tokenizer and chat template differ from the manifest.

    Every process that encodes calls this.
    """
    now, then = asdict(_facts(encoder.tokenizer)), asdict(manifest.tokenizer)
    remedy = (
        f"restore the run's tokenizer/, and the versions it began with: {then['versions']} "
        f"(here: {now['versions']})"
    )
    return [
        Problem(f"tokenizer {name}", now[name], str(then[name]), remedy)
        for name in ("digest", "backend", "probe", "length")
        if now[name] != then[name]
    ] or differing_chat(manifest, encoder)


def packing_of(data: DataConfig, *, chat: bool, apart: bool) -> tuple[PackingName, bool]:
    """Return packing and document mask, with `auto` resolved.

    chat: whether there is any
    apart: whether the model cannot hide the conversations of a block from each other
    """
    for_chat: PackingName = "single" if apart else "bestfit"
    by_default: PackingName = for_chat if chat else "concat"
    packing: PackingName = by_default if data.packing == "auto" else data.packing
    asked = data.document_mask
    return packing, packing != "concat" if asked == "auto" else asked


def _tell_of_files(sources: Sequence[Source]) -> None:
    """Warn of files in two sources: what one holds out, the other may train on.

    Log for each source with text files that a line is a document, not the whole file.
    """
    first: dict[tuple[int, str], str] = {}
    for source in sources:
        for index, file in enumerate(source.files):
            other = first.setdefault((file.size, file.etag), source.label)
            if other != source.label:
                _log.warning(
                    "%s of source %s is in source %s too: what is held out of one of them can be "
                    "trained on through the other",
                    *map(harmless, (source.where(index), source.label, other)),
                )
        kinds = {source.format(file).kind for file in range(len(source.files))}
        if "text" in kinds and not source.whole_files:
            _log.info(
                "%s: each line of a text file is a document of its own "
                "(in .jsonl, one document may have several lines)",
                source.label,
            )


def _each(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return the result for each item. Raises one UserError with the problems of all."""
    results: list[T] = []
    problems: list[Problem] = []
    for item in items:
        try:
            results.append(function(item))
        except UserError as error:
            problems += error.problems
    raise_any(problems)
    return results


def _draft(
    configured: SourceConfig, label: str, key: str, settings: DataSettings, reader: Reader
) -> tuple[Source, list[file_parts.FilePart]]:
    """Return a source without its units, and the parts from which they are cut."""
    reading = reader.reading
    resolved = resolve(configured, f"{key}.path", reading.cache_bytes > 0, reading.stop)
    source = as_source(configured, resolved, label)
    asks_text = "text_column" in configured.model_fields_set
    if asks_text and configured.columns:
        expected = "left out beside text_column: they name the columns of conversations"
        raise UserError(Problem(f"{key}.columns", configured.columns, expected))
    if not asks_text and not source.cached:
        source = with_form(source, key, reader, settings.preference.answers)
    require_answers(source, key, settings, reader)
    parts, columns = file_parts.inspect(source, key, reader)
    if not parts:
        files = range(len(source.files))
        why = "are left out" if any(reader.skips_file(source, i) for i in files) else "are empty"
        expected = f"files with documents; all {why}"
        raise UserError(Problem(f"{key}.path", configured.path, expected))
    name = configured.id_column
    present = all(name in names for names in columns)
    if not present and "id_column" in configured.model_fields_set:
        where = configured.path
        raise UserError(file_parts.missing_column(f"{key}.id_column", name, where, columns[0]))
    return replace(source, id_column=name if present else None), parts


def _split(source: Source, k: int, fraction: float, seed: int, reader: Reader) -> Source:
    source = heldout.split(source, k, fraction, seed, reader)
    if not heldout.has_training_document(source, seed, reader):
        why = "no training document is left after the held-out split"
        expected = f"at least one document that is not empty and not held out: {why}"
        remedy = "add documents, or lower data.heldout"
        raise UserError(Problem(f"data.sources.{k}.path", source.path, expected, remedy))
    return source


def _facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        digest=tokenizer.digest,
        backend=tokenizer.backend,
        probe=tokenizer.probe,
        length=tokenizer.length,
        versions=", ".join(f"{name} {_version(name)}" for name in ("tokenizers", "tiktoken")),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
