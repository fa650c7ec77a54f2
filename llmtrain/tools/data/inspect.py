"""Inspect what a config would train on: counts of its sources, their packing, the first blocks.

This works before a run exists, and on a run's directory without changing it. A value that is
counted in a part of the documents is an estimate, and is marked as one. The blocks can be opened
for a loop of your own, too.

The trap: reading data writes notes into the run directory, so what only inspects a run reads in a
copy (`scratch.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace

from llmtrain.config.binding import data_settings, worker_count
from llmtrain.config.schema import Answers, Config
from llmtrain.data.audit.count import Counted, count_documents, epoch
from llmtrain.data.audit.first_rows import count_unread
from llmtrain.data.audit.ledger import LaneDocument, document_of, is_whole, replay
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, Reading, reading_of
from llmtrain.data.lanes import Block
from llmtrain.data.manifest import DataManifest
from llmtrain.data.packing import PlacedPair
from llmtrain.data.state import DataState
from llmtrain.data.stream import Stream, open_stream as open_blocks
from llmtrain.data.survey import check
from llmtrain.data.tokens.encode import DocumentEncoder, open_encoder
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.model.build import model_config
from llmtrain.model.tokenizer import special_tokens
from llmtrain.rundir import contents
from llmtrain.tools.data.scratch import scratch_copy_unless_other
from llmtrain.training.start.data import FewSteps, few_steps
from llmtrain.training.start.frozen import find_base
from llmtrain.training.start.prepare import load_manifest, prepare
from llmtrain.types import NOT_TRAINED, JsonObject

MEASURED_TOKENS = 1 << 19  # of blocks in which padding and cut documents are counted
ESTIMATED = ("documents", "dropped", "replaced", "heldout", "bytes", "tokens")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Counts of one source.

    documents: usable ones, including those that are held out, and conversations that are rejected
    dropped: null, empty or blank documents
    replaced: documents with invalid UTF-8
    duplicates: rows among the `looked_at` rows whose text occurred before
    tokens: of the documents, with separators
    epochs: passes over it in the whole run
    unread: keys of its first conversations that nobody reads → in how many rows
    estimated: names of the values that are estimates
    """

    name: str
    revision: str | None
    files: int
    units: int
    documents: int
    dropped: int
    replaced: int
    duplicates: int
    bytes: int
    tokens: int
    heldout: int
    epochs: float
    looked_at: int
    estimated: tuple[str, ...]
    unread: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The number of documents with `least` to `most` tokens."""

    least: int
    most: int
    documents: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers of tokens: the median, that which 90 % do not exceed, and the largest."""

    median: int
    most_of_90: int
    most: int


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What is known of the pairs, or judged answers, that were looked at.

    pairs: their number
    prompt: tokens of it
    answers: tokens of the chosen and of the rejected one, or of the judged one
    too_long: rows that are left out for their length
    truncated: pairs of which an answer is cut
    equal: rows whose answers are equal, those that are so once cut too
    a_block: mean number of pairs in the first blocks
    desirable, undesirable: of judged answers; None = these are pairs
    """

    pairs: int
    prompt: Tokens
    answers: tuple[Tokens, ...]
    too_long: int
    truncated: int
    equal: int
    a_block: float
    desirable: int | None = None
    undesirable: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """One block as text, without its padding.

    borders: positions in `text` at which another document, or half of a pair, begins
    trained: [begin, end) of the characters that are trained on
    padding: in tokens
    conversations: whether its source has conversations, of which only answers are trained
    halves: what each part of the text is, in a block of pairs
    """

    g: int
    source: str | None
    text: str
    borders: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]
    padding: int
    conversations: bool = False
    halves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about a config's data.

    padding: share of the tokens in the first `measured_blocks` blocks
    documents_cut: share of the `measured_documents` documents that begin in these blocks
    lengths: of the documents that were looked at
    estimated: names of the values that are estimates
    sequences: of the conversations that were looked at; None = there are none, as for the next ones
    straddles: turns whose first token reaches into the prompt, which get sequences of their own
    rejected: why rows cannot be used → how many
    rewriting: ids of all sequences for each id that one sequence a row would have
    few_steps: what the run is, if its epochs are few steps, and what to set for more; else None
    pairs: facts of pairs or judged answers, which have no sequences; None = there are none
    """

    sources: tuple[SourceFacts, ...]
    lanes: int
    backend: str
    seq_len: int
    packing: str
    tokens_per_byte: float
    steps_per_epoch: int
    padding: float
    documents_cut: float
    measured_blocks: int
    measured_documents: int
    lengths: tuple[Bucket, ...]
    blocks: tuple[Shown, ...]
    estimated: tuple[str, ...]
    sequences: int | None = None
    straddles: int | None = None
    rejected: Mapping[str, int] | None = None
    rewriting: float | None = None
    few_steps: FewSteps | None = None
    pairs: PairFacts | None = None

    def to_json(self) -> JsonObject:
        """Return the object that `--json` prints."""
        return asdict(self)


def inspect(config: Config, *, blocks: int = 3, documents: int = 1000) -> Inspection:
    """Inspect about `documents` documents of each source (0 = all) and the first `blocks` blocks.

    If a run with the same sources began in `config.run.dir`, its manifest and tokenizer are used.
    Raises UserError for problems of the data, and for a config with which that run could not be
    resumed, or a new one not begin: a model that cannot take its blocks or its tokenizer.
    """
    workers = worker_count(config.data)
    settings = data_settings(config)
    with scratch_copy_unless_other(config.run_dir, settings) as directory:
        is_new = not (directory / contents.MANIFEST).exists()
        prepare(config, directory, max(1, workers))
        if is_new:
            tokens = special_tokens(directory / contents.TOKENIZER)
            base = find_base(config.model) if config.model.from_ is not None else None
            how = {"scores": config.preference.scores}
            model_config(config.model, tokens, config.data.seq_len, base, **how)
        manifest = load_manifest(config, directory)
        encoder = open_encoder(directory / contents.TOKENIZER, manifest)
        check(manifest, settings, encoder)
        reading = replace(reading_of(settings, directory), skip_bad_rows=True)  # they are counted
        return _inspection(config, manifest, encoder, reading, blocks, documents)


def _inspection(
    config: Config,
    manifest: DataManifest,
    encoder: DocumentEncoder,
    reading: Reading,
    blocks: int,
    documents: int,
) -> Inspection:
    numbers = range(len(manifest.sources))
    reader = Reader(reading)
    counts = [count_documents(manifest, k, encoder, reader, documents) for k in numbers]
    # Few conversations are counted as by a run, up to the end of its last lane.
    counted = all(one.exact for one in counts)
    state = DataState.fresh(manifest) if counted and config.training.epochs is not None else None
    once = epoch(manifest, encoder, reading, counts, state)
    packed, in_block = _pack(manifest, encoder, reader, blocks, once.blocks)
    training = config.training
    blocks_of_run = (training.epochs or 0) * once.blocks
    if training.steps is not None:
        blocks_of_run = training.batch.until(training.steps)
    read = blocks_of_run * manifest.seq_len * (1 - packed["padding"])
    estimated = [] if counted else ["lengths", "tokens_per_byte"]
    # A run counts its conversations up to where its last lane ends, which takes too long here.
    estimated += [] if once.exact and manifest.chat is None else ["steps_per_epoch"]
    estimated += [] if manifest.always_full else ["padding"]
    unread = [count_unread(one, manifest.seed, reader, encoder) for one in manifest.sources]
    met: Counter[str] = Counter()
    for one in counts:
        met.update(one.chat)
    return Inspection(
        sources=tuple(_facts(manifest, k, counts[k], read, unread[k]) for k in numbers),
        lanes=manifest.lanes,
        backend=encoder.tokenizer.backend,
        seq_len=manifest.seq_len,
        packing=manifest.packing,
        tokens_per_byte=sum(one.all.tokens for one in counts)
        / max(1, sum(one.all.bytes for one in counts)),
        steps_per_epoch=max(1, round(training.batch.steps(once.blocks))),
        lengths=_buckets(counts),
        estimated=(*estimated, "documents_cut"),
        few_steps=few_steps(config.training, asdict(once), manifest),
        pairs=_pairs(counts, met, manifest.answers, in_block),
        **_chat(met),
        **packed,
    )


def _chat(counts: Counter[str]) -> JsonObject:
    """Return the fields of `Inspection` on conversations, of those that were looked at."""
    if not counts:
        return {}
    reasons = {name.partition("_")[2]: n for name, n in counts.items() if "rejected_" in name}
    return {
        "sequences": counts["sequences"],
        "straddles": counts["straddles"],
        "rejected": reasons,
        "rewriting": counts["ids"] / max(1, counts["longest_ids"]),
    }


def _pairs(
    counted: Sequence[Counted], counts: Counter[str], answers: Answers | None, in_block: float
) -> PairFacts | None:
    """Return the facts of pairs, or judged answers.

    counts: of all sources together
    in_block: their mean number in a block
    """
    if answers is None:
        return None
    judges = answers == "feedback"
    rows = [lengths for one in counted for lengths in one.answers]
    prompt, *each = (
        _tokens(sorted(lengths[n] for lengths in rows)) for n in range(2 if judges else 3)
    )
    judged = (counts["desirable"], counts["undesirable"]) if judges else ()
    return PairFacts(
        len(rows),
        prompt,
        tuple(each),
        counts["too_long"],
        counts["truncated"],
        counts["equal"] + counts["rejected_equal"],
        in_block,
        *judged,
    )


def _tokens(lengths: Sequence[int]) -> Tokens:
    """Return figures of sorted lengths."""
    last = len(lengths) - 1
    if last < 0:
        return Tokens(0, 0, 0)
    return Tokens(lengths[last // 2], lengths[int(0.9 * last)], lengths[last])


def _pack(
    manifest: DataManifest, encoder: DocumentEncoder, reader: Reader, wanted: int, epoch_blocks: int
) -> tuple[JsonObject, float]:
    """Count in the first blocks, and keep the first `wanted` of them to show.

    Return the fields of `Inspection` that this fills, and the pairs of a block. A document that
    begins with the last id of a block is not counted there: it begins again in the lane's next
    block.
    """
    enough = min(epoch_blocks, MEASURED_TOKENS // manifest.seq_len)
    count = max(wanted, manifest.lanes, enough)
    shown: list[Shown] = []
    began: set[LaneDocument] = set()
    whole: set[LaneDocument] = set()
    pads = blocks = pairs = 0
    tokenizer = encoder.tokenizer
    for g, block in replay(manifest, encoder, reader, DataState.fresh(manifest), 0, count):
        if g < wanted:
            shown.append(_shown(manifest, tokenizer, g, block))
        if block.source >= 0:
            blocks, pads = blocks + 1, pads + _padding(manifest, block)
            pairs += len(block.pairs)
        for span in (s for s in block.spans if s.start == 0 and s.at < manifest.seq_len):
            document = document_of(manifest, g, block, span)
            began.add(document)
            if is_whole(manifest, tokenizer, document, block, span):
                whole.add(document)
    return {
        "padding": pads / max(1, blocks * (manifest.seq_len + 1)),
        "documents_cut": len(began - whole) / max(1, len(began)),
        "measured_blocks": blocks,
        "measured_documents": len(began),
        "blocks": tuple(shown),
    }, pairs / max(1, blocks)


def _padding(manifest: DataManifest, block: Block) -> int:
    """Return the number of tokens after the last document."""
    return manifest.seq_len + 1 - sum(span.stop - span.start for span in block.spans)


def _shown(manifest: DataManifest, tokenizer: Tokenizer, g: int, block: Block) -> Shown:
    """Return a block as text, decoded by document so that no border is inside a character."""
    batch = batch_of([(g, block)], manifest, first_block=g, wait_seconds=0.0, ended=False)
    targets = [False, *(batch.labels[0] != NOT_TRAINED).tolist()]
    text = ""
    borders: list[int] = []
    trained: list[tuple[int, int]] = []
    parts = [(span.at, span.at + span.stop - span.start) for span in block.spans]
    halves: list[str] = []
    if block.pairs:
        parts = [part for pair in block.pairs for part in (pair[:2], pair[2:4])]
        halves = [name for pair in block.pairs for name in _halves(manifest.answers, pair)]
    for begin, end in parts:
        ids = block.ids[begin:end]
        borders += [len(text)] if text else []
        for first, last in _runs(targets[begin:end]):
            marked = (len(text) + len(tokenizer.decode(ids[:i])) for i in (first, last))
            trained.append((next(marked), next(marked)))
        text += tokenizer.decode(ids)
    source = manifest.labels[block.source] if block.source >= 0 else None
    padding, marks = _padding(manifest, block), tuple(_join(trained))
    chat = block.source >= 0 and manifest.sources[block.source].form is not None
    return Shown(g, source, text, tuple(borders), marks, padding, chat, tuple(halves))


def _halves(answers: Answers | None, pair: PlacedPair) -> tuple[str, str]:
    """Return what both halves of a pair are."""
    if answers == "feedback":
        return "desirable" if pair.desirable else "undesirable", "the answer of another row"
    return "chosen", "rejected"


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return each run of true flags as [first, last)."""
    edges = [i for i, flag in enumerate(flags) if flag != (i > 0 and flags[i - 1])]
    edges += [len(flags)] if flags and flags[-1] else []
    return list(zip(edges[::2], edges[1::2], strict=True))


def _join(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge stretches that touch or overlap, and leave out empty ones."""
    joined: list[tuple[int, int]] = []
    for begin, end in stretches:
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        elif begin < end:
            joined.append((begin, end))
    return joined


def _facts(
    manifest: DataManifest, k: int, counted: Counted, read: float, unread: Mapping[str, int]
) -> SourceFacts:
    """Return the facts of source k. read: tokens of all sources that the whole run trains on."""
    source = manifest.sources[k]
    passes = read * source.weight / sum(manifest.weights) / max(1, counted.training.tokens)
    return SourceFacts(
        name=source.label,
        revision=source.revision,
        files=len(source.files),
        units=len(source.units),
        documents=round(counted.all.documents),
        dropped=round(counted.dropped),
        replaced=round(counted.replaced),
        duplicates=counted.duplicates,
        bytes=round(counted.all.bytes),
        tokens=round(counted.all.tokens),
        heldout=round(counted.all.documents - counted.training.documents),
        epochs=min(passes, source.max_epochs or passes),
        looked_at=counted.looked_at,
        estimated=() if counted.exact else (*ESTIMATED, "epochs"),
        unread=dict(unread),
    )


def _buckets(counted: Sequence[Counted]) -> tuple[Bucket, ...]:
    """Count lengths by powers of two, from the first bucket with a document to the last."""
    counts: Counter[int] = Counter()
    for one in counted:
        for length, documents in one.lengths.items():
            counts[length.bit_length()] += documents
    if not counts:
        return ()
    return tuple(
        Bucket(1 << (bits - 1), (1 << bits) - 1, counts[bits])
        for bits in range(min(counts), max(counts) + 1)
    )


@contextmanager
def open_stream(config: Config, *, rank: int = 0, world_size: int = 1) -> Iterator[Stream]:
    """Open the stream of batches that rank `rank` would train on: `with open_stream(config) as s:`.

    It begins with the first step; `next(s)` returns a `Batch` with this rank's blocks of one step.
    The manifest and tokenizer are those of `config.run.dir` if a run with the same sources began
    there; else they are made in a temporary directory. Nothing is written to `run.dir`. Raises
    UserError for problems of the data.
    """
    workers, settings = worker_count(config.data), data_settings(config)
    with scratch_copy_unless_other(config.run_dir, settings) as directory:
        prepare(config, directory, world_size * max(1, workers))
        stream = open_blocks(
            load_manifest(config, directory),
            directory / contents.TOKENIZER,
            batch=config.training.batch,
            rank=rank,
            world_size=world_size,
            workers=workers,
            reading=reading_of(settings, directory),
        )
        with closing(stream):
            yield stream
