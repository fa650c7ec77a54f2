"""Documents that are never trained on, and one exact pass over them.

A few units of a source are its evaluation units. A document in them is held out if the hash of its
id is below a threshold. So the split does not depend on file order or on what else is read, and one
pass over the held-out documents reads a few units, not the whole source.

Held-out documents lie in blocks that score every token of them once. Texts are one stream:

    ids      eos  d o c u m e n t  eos  d o c  eos …        scored: the letters

(a tokenizer with a begin token: bos d o c u m e n t eos bos d o c eos …)

Behind them come the conversations, which are never cut: `seq_len` ids at a time are filled with
whole sequences and padding, and what the model would have to say is scored. Both halves of a pair
of answers are in one block, as in training; a judged answer is paired with that of the next row of
its source. With packing single each text, sequence and pair begins a block of its own, and ends
with padding; the second half of a pair begins in the middle of the block.

The trap: with a document mask and no begin token, nothing precedes a document's first token, so
training never predicts it. Then it is not scored and its bytes are not counted, so that
bits_per_byte covers only tokens that a model could learn.
"""

import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from llmtrain import system
from llmtrain.data.batches import pairs_of
from llmtrain.data.documents.reader import Reader, Reading, bad_row
from llmtrain.data.documents.units import Rows
from llmtrain.data.lanes import NOTHING, document
from llmtrain.data.manifest import DataManifest, Source
from llmtrain.data.packing import Document, PlacedPair, fit, with_others
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.tokens.encode import DocumentEncoder, Encoded
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix
from llmtrain.pairs import Pairs
from llmtrain.types import NOT_TRAINED

FIRST_TOKENS = 8  # that are searched for the first character, which has at most four bytes


class HeldOutDocument(NamedTuple):
    """A held-out document: the number of its source, its text, its ids with separators."""

    source: int
    text: str
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class HeldOutPart:
    """The documents of one source in a held-out set.

    bytes: UTF-8 bytes of their scored text; 0 for conversations
    chat: whether they are conversations, of which a byte says nothing
    """

    label: str
    documents: int
    bytes: int
    chat: bool = False


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out set as tokens.

    ids (n,) int32
    scored (n,) bool: which ids are scored
    starts (m,) int64: where texts, sequences of conversations and padding begin
    documents: number of documents
    bytes: UTF-8 bytes of the scored text; that of conversations is not counted
    pad: id that fills the last block
    parts: the sources, if there are several, or if one is chat
    owners (m,) int64: number in `parts` of the source of what begins there; None without parts
    pairs (p, 6) int64: for each pair of answers, `PlacedPair` in ids, and the number in `parts` of
        its source; None without pairs
    """

    ids: np.ndarray
    scored: np.ndarray
    starts: np.ndarray
    documents: int
    bytes: int
    pad: int
    parts: tuple[HeldOutPart, ...] = ()
    owners: np.ndarray | None = None
    pairs: np.ndarray | None = None

    def num_blocks(self, seq_len: int) -> int:
        """Return the number of blocks of `seq_len` positions that cover every token once."""
        return max(1, math.ceil((len(self.ids) - 1) / seq_len))

    def block(self, g: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids, labels and starts of block g.

        ids (S + 1,) int32
        labels (S,) int64: −100 = not scored
        starts (n,) int32: where documents begin in ids[:-1]; the first is 0

        After the last token there is padding, as a document of its own; also in blocks after the
        last.
        """
        begin = g * seq_len
        part = slice(begin, begin + seq_len + 1)
        ids = np.full(seq_len + 1, self.pad, dtype=np.int32)
        scored = np.zeros(seq_len + 1, dtype=bool)
        size = len(self.ids[part])
        ids[:size], scored[:size] = self.ids[part], self.scored[part]
        first, last = np.searchsorted(self.starts, (begin + 1, begin + seq_len))
        starts = np.concatenate([[0], self.starts[first:last] - begin, [size]])
        starts = starts[starts < seq_len] if size else starts[:1]
        labels = np.where(scored[1:], ids[1:], NOT_TRAINED).astype(np.int64)
        return ids, labels, starts.astype(np.int32)

    def block_parts(self, g: int, seq_len: int) -> np.ndarray:
        """Return the number in `parts` of the source of each label of block g, (S,) int64.

        Labels before the first document, and behind the last one, are not scored.
        """
        assert self.owners is not None, "there are no parts"
        labels = np.arange(1, seq_len + 1) + g * seq_len
        documents = np.searchsorted(self.starts, labels, side="right") - 1
        parts: np.ndarray = self.owners[documents.clip(0)]
        return parts

    def pairs_of(self, blocks: Sequence[int], seq_len: int) -> Pairs:
        """Return the pairs of answers in these blocks, whose rows are numbered as they are given.

        There are none in blocks after the last.
        """
        rows = []
        for g in blocks:
            ids, labels, _ = self.block(g, seq_len)
            pairs = [pair.shifted(-g * seq_len) for pair, _ in self._pairs(g, seq_len)]
            rows.append((ids, labels, pairs))
        return pairs_of(rows)

    def pair_parts(self, blocks: Sequence[int], seq_len: int) -> np.ndarray:
        """Return the number in `parts` of the source of each pair that `pairs_of` returns, (N,)."""
        parts = [part for g in blocks for _, part in self._pairs(g, seq_len)]
        return np.array(parts, np.int64)

    def _pairs(self, g: int, seq_len: int) -> list[tuple[PlacedPair, int]]:
        if self.pairs is None:
            return []
        first, last = np.searchsorted(self.pairs[:, 0], (g * seq_len, (g + 1) * seq_len))
        rows = self.pairs[first:last].tolist()
        return [(PlacedPair(a, b, c, d, bool(e)), part) for a, b, c, d, e, part in rows]


@dataclass(slots=True)
class _Laid:
    """What is laid out so far, as in `HeldOut`."""

    ids: list[np.ndarray]
    scored: list[np.ndarray]
    starts: list[int]
    owners: list[int]
    end: int
    pairs: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, owner: int, ids: np.ndarray, scored: np.ndarray) -> None:
        self.starts.append(self.end)
        self.owners.append(owner)
        self.ids.append(ids)
        self.scored.append(scored)
        self.end += len(ids)


def lay_out(
    documents: Sequence[HeldOutDocument],
    sources: Sequence[tuple[str, bool]],
    tokenizer: Tokenizer,
    *,
    document_mask: bool,
    seq_len: int,
    alone: bool = False,
) -> HeldOut:
    """Return the set of these documents.

    sources: label, and whether it has conversations
    alone: whether each document, or sequence of one, begins a block
    """
    texts = [one for one in documents if not one.encoded.cuts]
    follows = tokenizer.bos is None and not alone and (texts or not documents)
    first = np.array([tokenizer.eos] if follows else [], np.int32)
    laid = _Laid([first], [np.zeros(len(first), dtype=bool)], [], [], len(first))
    sizes = [0] * len(sources)
    for owner, text, encoded in texts:
        mask, nbytes = _score(text, encoded.ids, tokenizer, document_mask)
        laid.add(owner, encoded.ids, mask)
        sizes[owner] += nbytes
        if alone:
            _pad(laid, -laid.end % seq_len, tokenizer.pad)
    if len(texts) < len(documents):
        _add_conversations(laid, documents, seq_len, tokenizer.pad, alone=alone)
    parts: tuple[HeldOutPart, ...] = ()
    owners: np.ndarray | None = None
    if len(sources) > 1 or sources[0][1]:
        counts = [sum(one.source == k for one in documents) for k in range(len(sources))]
        parts = tuple(
            HeldOutPart(label, counts[k], sizes[k], chat) for k, (label, chat) in enumerate(sources)
        )
        owners = np.array(laid.owners, np.int64)
    ids, scored = np.concatenate(laid.ids), np.concatenate(laid.scored)
    starts = np.array(laid.starts, np.int64)
    total = len(documents), sum(sizes)
    pairs = np.array(laid.pairs, np.int64) if laid.pairs else None
    return HeldOut(ids, scored, starts, *total, tokenizer.pad, parts, owners, pairs)


def _add_conversations(
    laid: _Laid, documents: Sequence[HeldOutDocument], seq_len: int, pad: int, *, alone: bool
) -> None:
    """Lay out the sequences of conversations, each whole within `seq_len` ids.

    What is left of these ids is padding, as a document of its own. A sequence's first id is never
    scored: in the stream, that of another one precedes it. Both halves of a pair stay together.
    """
    whole = _with_others(documents, seq_len, alone=alone)
    pieces = [(one, first, stop) for one in whole for first, stop in pairwise(one.cuts)]
    _pad(laid, -laid.end % seq_len, pad)
    if alone:
        bins = [[index] for index in range(len(pieces))]
    else:
        bins = fit([stop - first for _, first, stop in pieces], seq_len)
    for members in bins:
        for one, first, stop in (pieces[index] for index in members):
            places: list[int] = []
            edges = [first, one.second, stop] if one.second else [first, stop]
            for begin, end in pairwise(edges):
                if places and alone:
                    _pad(laid, seq_len // 2 - laid.end % seq_len, pad)
                assert one.trained is not None, "conversations have masks"
                places += [laid.end, laid.end + end - begin]
                scored = np.concatenate(([False], one.trained[begin + 1 : end]))
                laid.add(one.unit, one.ids[begin:end], scored)
            if one.second:
                laid.pairs.append((*places, one.desirable, one.unit))
        _pad(laid, -laid.end % seq_len, pad)


def _with_others(
    documents: Sequence[HeldOutDocument], seq_len: int, *, alone: bool
) -> Iterator[Document]:
    """Yield conversations as documents whose unit is their source, judged answers with others.

    The others are of the same source.
    """
    talks = (one for one in documents if one.encoded.cuts)
    placed = [document((0, one.source, n), one.encoded, NOTHING) for n, one in enumerate(talks)]
    if not any(one.answer for one in placed):
        yield from placed
        return
    for source in sorted({one.unit for one in placed}):
        of_source = [one for one in placed if one.unit == source]
        yield from with_others(of_source, seq_len, apart=alone)


def _pad(laid: _Laid, size: int, pad: int) -> None:
    if size:
        laid.add(0, np.full(size, pad, np.int32), np.zeros(size, dtype=bool))


def _score(
    text: str, ids: np.ndarray, tokenizer: Tokenizer, document_mask: bool
) -> tuple[np.ndarray, int]:
    """Return which tokens of a document are scored, (n,) bool, and the UTF-8 bytes of their text.

    Separators are not scored. With a document mask and no begin token, neither are the tokens of
    the first character.
    """
    mask, size = np.ones(len(ids), dtype=bool), len(text.encode())
    mask[-1] = False
    if tokenizer.bos is not None:
        mask[0] = False
    elif document_mask:
        for count in range(1, min(FIRST_TOKENS, len(ids) - 1) + 1):
            first = tokenizer.decode(ids[:count])
            if first and text.startswith(first):
                mask[:count] = False
                return mask, size - len(first.encode())
        mask[0] = False  # the tokenizer changes the text: leave out the bytes of an average token
        return mask, size - size // max(1, len(ids) - 1)
    return mask, size


def load(path: Path) -> HeldOut | None:
    """Return what `save` wrote, or None if nothing was held out."""
    from safetensors import safe_open

    if not path.exists():
        return None
    with safe_open(str(path), framework="numpy") as file:
        facts = json.loads(file.metadata()["heldout"])
        parts = tuple(HeldOutPart(**part) for part in facts.pop("parts", ()))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return HeldOut(**tensors, **facts, parts=parts)


def save(held: HeldOut, path: Path) -> None:
    """Write a set as a safetensors file."""
    from safetensors.numpy import save as to_bytes

    facts: dict[str, object] = {"documents": held.documents, "bytes": held.bytes, "pad": held.pad}
    tensors = {"ids": held.ids, "scored": held.scored, "starts": held.starts}
    if held.owners is not None:
        facts["parts"] = [asdict(part) for part in held.parts]
        tensors["owners"] = held.owners
    if held.pairs is not None:
        tensors["pairs"] = held.pairs
    system.write_durably(path, to_bytes(tensors, {"heldout": json.dumps(facts)}))


MIN_UNITS = 8
MIN_DOCUMENTS = 16
_WHOLE = 1 << 64
T = TypeVar("T")


def split(source: Source, k: int, fraction: float, seed: int, reader: Reader) -> Source:
    """Return source number k with its evaluation units and threshold. Reads some of these units.

    fraction: share of the documents to hold out; 0 = none
    """
    if fraction == 0:
        return source
    count = len(source.units)
    chosen_count = min(count, max(MIN_UNITS, math.ceil(4 * fraction * count)))
    chosen = heapq.nsmallest(chosen_count, range(count), key=lambda u: mix(seed, 3, k, u))
    threshold = min(int(fraction * count / chosen_count * _WHOLE), _WHOLE - 1)
    hashes: list[int] = []
    for u in chosen:
        documents = _rows(source, u, seed, reader, heldout=False)  # nothing is held out yet
        hashes += [rows.hash(row, seed) for rows, row in documents]
        if sum(one < threshold for one in hashes) >= MIN_DOCUMENTS:
            return replace(source, heldout_units=tuple(chosen), threshold=threshold)
    # Raise the threshold if too few documents are below it; the last training document of a source
    # is never held out. spare: there are usable documents in units that are not evaluation units
    spare = _trains_any(source, set(range(count)) - set(chosen), seed, reader)
    hashes.sort()
    wanted = min(MIN_DOCUMENTS, math.ceil(len(hashes) / 10), len(hashes) - (not spare))
    if sum(one < threshold for one in hashes) < wanted:
        raised = hashes[wanted - 1] + 1
        if spare or hashes[-1] >= raised:  # else equal ids: all documents would be held out
            threshold = raised
    return replace(source, heldout_units=tuple(chosen), threshold=threshold)


def has_training_document(source: Source, seed: int, reader: Reader) -> bool:
    """Return whether there is a document to train on. Reads units until one is found."""
    heldout = set(source.heldout_units)
    order = sorted(range(len(source.units)), key=lambda u: u in heldout)
    return _trains_any(source, order, seed, reader)


def _trains_any(source: Source, units: Iterable[int], seed: int, reader: Reader) -> bool:
    rows = (_rows(source, u, seed, reader, heldout=False) for u in units)
    return any(True for _ in chain.from_iterable(rows))


def all_held_out(source: Source, k: int, seed: int) -> Source:
    """Return source number k of `evaluation.sources` with every document held out."""
    order = sorted(range(len(source.units)), key=lambda u: mix(seed, 3, k, u))
    return replace(source, heldout_units=tuple(order), threshold=_WHOLE)


def training_texts(source: Source, u: int, seed: int, reader: Reader) -> Iterator[str]:
    """Yield the training documents of unit u, in file order."""
    for _, text in training_rows(source, u, seed, reader):
        yield text


def training_rows(source: Source, u: int, seed: int, reader: Reader) -> Iterator[tuple[int, str]]:
    """Yield the training documents of unit u with their rows, in file order."""
    for rows, row in _rows(source, u, seed, reader, heldout=False):
        assert isinstance(rows, Rows), "a token cache has no texts"
        yield row, str(rows.text(row)[0])


def held_out_rows(source: Source, seed: int, reader: Reader) -> Iterator[tuple[int, int, str]]:
    """Yield the held-out documents of a source of text, each as its unit, its row and its text."""
    for u in source.heldout_units:
        for rows, row in _rows(source, u, seed, reader, heldout=True):
            assert isinstance(rows, Rows), "a token cache has no texts"
            yield u, row, str(rows.text(row)[0])


def texts(sources: Sequence[Source], seed: int, reading: Reading) -> Iterator[str]:
    """Yield the held-out documents of sources of text, from the sources in turn."""
    reader = Reader(reading)
    every = (held_out_rows(source, seed, reader) for source in sources)
    return in_turn([(text for _, _, text in rows) for rows in every])


def _rows(
    source: Source, u: int, seed: int, reader: Reader, *, heldout: bool
) -> Iterator[tuple[Rows | token_cache.CachedRows, int]]:
    """Yield the documents of unit u that are held out, or those that are not: (rows, row)."""
    rows = reader.documents(source, source.units[u])
    chosen = u in source.heldout_units
    for row in range(len(rows)):
        out = chosen and rows.hash(row, seed) < source.threshold
        if out == heldout and rows.usable(row):
            yield rows, row


def _documents(
    source: Source, k: int, encoder: DocumentEncoder, seed: int, reader: Reader
) -> Iterator[HeldOutDocument]:
    """Yield the held-out documents of source number k.

    Units come in the order in which they were chosen, and their documents in file order. Raises
    UserError for a row that is no conversation, unless such rows are skipped.
    """
    tokenizer = encoder.tokenizer
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    for u in source.heldout_units:
        for rows, row in _rows(source, u, seed, reader, heldout=True):
            if isinstance(rows, Rows):
                text = str(rows.text(row)[0])
                encoded = encoder.documents(source, [text])[0]
                if encoded.bad is not None and not reader.reading.skip_bad_rows:
                    raise UserError(bad_row(source, u, row, reader, encoded.bad))
                if len(encoded.ids):
                    yield HeldOutDocument(k, text, encoded)
            else:
                ids = token_cache.text_ids(rows.ids(row, tokenizer.length), tokenizer)
                whole = np.array([*begin, *ids, tokenizer.eos], np.int32)
                yield HeldOutDocument(k, tokenizer.decode(ids), Encoded(whole))


def prepare(
    manifest: DataManifest,
    encoder: DocumentEncoder,
    path: Path,
    max_documents: int,
    reading: Reading,
    sources: Sequence[Source] = (),
) -> None:
    """Write up to `max_documents` held-out documents as tokens into a safetensors file.

    The documents come from the sources in turn. If nothing is held out, no file is written.

    sources: those of `evaluation.sources`, which replace the manifest's

    Raises UserError or RunError as reading does, and UserError if `sources` have no document.
    """
    reader, tokenizer = Reader(reading), encoder.tokenizer
    asked = sources or manifest.sources
    token_cache.check_tokenizer(sources, tokenizer)
    streams = [
        _documents(source, k, encoder, manifest.seed, reader) for k, source in enumerate(asked)
    ]
    documents: list[HeldOutDocument] = []
    for one in islice(in_turn(streams), max_documents):
        system.beat("tokenizing the held-out documents", len(documents) + 1, max_documents)
        documents.append(one)
    parts = [(source.label, source.form is not None) for source in asked]
    mask, seq_len, alone = manifest.document_mask, manifest.seq_len, manifest.packing == "single"
    held = lay_out(documents, parts, tokenizer, document_mask=mask, seq_len=seq_len, alone=alone)
    if held.scored.any():
        save(held, path)
    elif sources:
        places = ", ".join(source.path for source in sources)
        expected = "at least one document that is not empty"
        raise UserError(Problem("evaluation.sources", places, expected))


def in_turn(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each stream in turn, until all have ended."""
    left = iter(streams)
    for running in range(len(streams), 0, -1):
        left = cycle(islice(left, running))  # without the one that has just ended
        yield from map(next, left)
