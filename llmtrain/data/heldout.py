"""Documents that are never trained on, and one exact pass over them.

A few units of a source are its evaluation units. A document in them is held out if the hash of its
id is below a threshold. So the split does not depend on file order or on what else is read, and one
pass over the held-out documents reads a few units, not the whole source.

The held-out set is one stream, in which every token of a document is scored once:

    ids      eos  d o c u m e n t  eos  d o c  eos …        scored: the letters

(a tokenizer with a begin token: bos d o c u m e n t eos bos d o c eos …)

The trap: with a document mask and no begin token, nothing precedes a document's first token, so
training never predicts it. Then it is not scored and its bytes are not counted, so that
bits_per_byte covers only tokens that a model could learn.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmtrain import durable, heartbeat
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.documents.rows import Rows
from llmtrain.data.manifest import Manifest, Source
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix
from llmtrain.types import NOT_TRAINED

MIN_UNITS = 8
MIN_DOCUMENTS = 16
FIRST_TOKENS = 8  # that are searched for the first character, which has at most four bytes
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
        found = _rows(source, u, seed, reader, heldout=False)  # nothing is held out yet
        hashes += [rows.hash(row, seed) for rows, row in found]
        if sum(found < threshold for found in hashes) >= MIN_DOCUMENTS:
            return replace(source, heldout_units=tuple(chosen), threshold=threshold)
    spare = _has_training_document(source, set(range(count)) - set(chosen), seed, reader)
    return replace(
        source,
        heldout_units=tuple(chosen),
        threshold=_raise_threshold(threshold, sorted(hashes), spare),
    )


def _raise_threshold(threshold: int, hashes: list[int], spare: bool) -> int:
    """Return the threshold, raised if too few documents are below it.

    The last training document of a source is never held out.

    spare: whether there are usable documents in units that are not evaluation units
    """
    wanted = min(MIN_DOCUMENTS, math.ceil(len(hashes) / 10), len(hashes) - (not spare))
    if sum(found < threshold for found in hashes) >= wanted:
        return threshold
    raised = hashes[wanted - 1] + 1
    if not spare and hashes[-1] < raised:  # equal ids: all documents would be held out
        return threshold
    return raised


def has_training_document(source: Source, seed: int, reader: Reader) -> bool:
    """Return whether there is a document to train on. Reads units until one is found."""
    heldout = set(source.heldout_units)
    order = sorted(range(len(source.units)), key=lambda u: u in heldout)
    return _has_training_document(source, order, seed, reader)


def _has_training_document(source: Source, units: Iterable[int], seed: int, reader: Reader) -> bool:
    found = (_rows(source, u, seed, reader, heldout=False) for u in units)
    return any(True for _ in chain.from_iterable(found))


def all_held_out(source: Source, k: int, seed: int) -> Source:
    """Return source number k of `evaluation.sources` with every document held out."""
    order = sorted(range(len(source.units)), key=lambda u: mix(seed, 3, k, u))
    return replace(source, heldout_units=tuple(order), threshold=_WHOLE)


def training_texts(source: Source, u: int, seed: int, reader: Reader) -> Iterator[str]:
    """Yield the training documents of unit u, in file order."""
    for rows, row in _rows(source, u, seed, reader, heldout=False):
        assert isinstance(rows, Rows), "a token cache has no texts"
        yield str(rows.text(row)[0])


def _rows(
    source: Source, u: int, seed: int, reader: Reader, *, heldout: bool
) -> Iterator[tuple[Rows | token_cache.Rows, int]]:
    """Yield the documents of unit u that are held out, or those that are not: (rows, row)."""
    rows = reader.documents(source, source.units[u])
    chosen = u in source.heldout_units
    for row in range(len(rows)):
        out = chosen and rows.hash(row, seed) < source.threshold
        if out == heldout and rows.usable(row):
            yield rows, row


def _documents(
    source: Source, tokenizer: Tokenizer, seed: int, reader: Reader
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the held-out documents as text, and as ids with their separators.

    Units come in the order in which they were chosen, and their documents in file order.
    """
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    for u in source.heldout_units:
        for rows, row in _rows(source, u, seed, reader, heldout=True):
            if isinstance(rows, Rows):
                text = str(rows.text(row)[0])
                yield text, tokenizer.documents([text])[0]
            else:
                ids = token_cache.text_ids(rows.ids(row, tokenizer.length), tokenizer)
                yield tokenizer.decode(ids), np.array([*begin, *ids, tokenizer.eos], np.int32)


@dataclass(frozen=True, slots=True)
class Part:
    """The documents of one source in a held-out set.

    bytes: UTF-8 bytes of their scored text
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
    starts (documents,) int64: where documents begin
    documents: number of documents
    bytes: UTF-8 bytes of the scored text
    pad: id that fills the last block
    parts: the sources, if there are several, or if one is chat
    owners (documents,) int64: number of each document's source in `parts`; None without parts
    """

    ids: np.ndarray
    scored: np.ndarray
    starts: np.ndarray
    documents: int
    bytes: int
    pad: int
    parts: tuple[Part, ...] = ()
    owners: np.ndarray | None = None

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
        found = self.ids[part]
        ids[: len(found)], scored[: len(found)] = found, self.scored[part]
        first, last = np.searchsorted(self.starts, (begin + 1, begin + seq_len))
        starts = np.concatenate([[0], self.starts[first:last] - begin, [len(found)]])
        starts = starts[starts < seq_len] if len(found) else starts[:1]
        labels = np.where(scored[1:], ids[1:], NOT_TRAINED).astype(np.int64)
        return ids, labels, starts.astype(np.int32)

    def block_parts(self, g: int, seq_len: int) -> np.ndarray:
        """Return the number in `parts` of the source of each label of block g, (S,) int64.

        Labels before the first document, and behind the last one, are not scored.
        """
        assert self.owners is not None, "there are no parts"
        labels = np.arange(1, seq_len + 1) + g * seq_len
        documents = np.searchsorted(self.starts, labels, side="right") - 1
        found: np.ndarray = self.owners[documents.clip(0)]
        return found


def prepare(
    manifest: Manifest,
    tokenizer: Tokenizer,
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
    reader = Reader(reading)
    asked = sources or manifest.sources
    token_cache.check_tokenizer(sources, tokenizer)
    streams = [
        zip(repeat(k), _documents(source, tokenizer, manifest.seed, reader), strict=False)
        for k, source in enumerate(asked)
    ]
    ids = [np.array([tokenizer.eos], np.int32)] if tokenizer.bos is None else []
    scored = [np.zeros(len(part), dtype=bool) for part in ids]
    starts: list[int] = []
    owners: list[int] = []
    sizes, end = [0] * len(asked), len(ids)
    for k, (text, document) in islice(in_turn(streams), max_documents):
        heartbeat.beat("tokenizing the held-out documents")
        mask, nbytes = _score(text, document, tokenizer, manifest.document_mask)
        starts.append(end)
        owners.append(k)
        ids.append(document)
        scored.append(mask)
        sizes[k] += nbytes
        end += len(document)
    if any(mask.any() for mask in scored):
        found = (np.concatenate(ids), np.concatenate(scored), np.array(starts, np.int64))
        parts = [Part(s.label, owners.count(k), sizes[k]) for k, s in enumerate(asked)]
        whole = HeldOut(*found, len(starts), sum(sizes), tokenizer.pad)
        _save(_with_parts(whole, parts, owners), path)
    elif sources:
        places = ", ".join(source.path for source in sources)
        expected = "at least one document that is not empty"
        raise UserError(Problem("evaluation.sources", places, expected))


def _with_parts(held: HeldOut, parts: Sequence[Part], owners: Sequence[int]) -> HeldOut:
    """Return the held-out set with its sources, unless a single one is text."""
    if len(parts) == 1 and not parts[0].chat:
        return held
    return replace(held, parts=tuple(parts), owners=np.array(owners, np.int64))


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
    """Return what `prepare` wrote, or None if nothing was held out."""
    from safetensors import safe_open

    if not path.exists():
        return None
    with safe_open(str(path), framework="numpy") as file:
        facts = json.loads(file.metadata()["heldout"])
        parts = tuple(Part(**part) for part in facts.pop("parts", ()))
        tensors = [file.get_tensor(name) for name in ("ids", "scored", "starts")]
        held = HeldOut(*tensors, **facts)
        return replace(held, parts=parts, owners=file.get_tensor("owners")) if parts else held


def _save(held: HeldOut, path: Path) -> None:
    from safetensors.numpy import save

    facts: dict[str, object] = {
        "documents": held.documents,
        "bytes": held.bytes,
        "pad": held.pad,
    }
    tensors = {"ids": held.ids, "scored": held.scored, "starts": held.starts}
    if held.owners is not None:
        facts["parts"] = [asdict(part) for part in held.parts]
        tensors["owners"] = held.owners
    durable.write(path, save(tensors, {"heldout": json.dumps(facts)}))


def in_turn(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each stream in turn, until all have ended."""
    left = iter(streams)
    for running in range(len(streams), 0, -1):
        left = cycle(islice(left, running))  # without the one that has just ended
        yield from map(next, left)
