"""Documents that are never trained on, and one exact pass over them.

A few units of a source are its evaluation units. A document in them is held out if the hash of its
id is below a threshold. So the split does not depend on file order or on what else is read, and one
pass over the held-out documents reads a few units, not the whole source.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmtrain import heartbeat
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.documents.row_places import bad_row
from llmtrain.data.documents.rows import Rows
from llmtrain.data.heldout_set import Held, lay_out, save
from llmtrain.data.manifest import Manifest, Source
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.encode import Encoded, Encoder
from llmtrain.errors import Problem, UserError
from llmtrain.hashing import mix

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
    for _, text in training_rows(source, u, seed, reader):
        yield text


def training_rows(source: Source, u: int, seed: int, reader: Reader) -> Iterator[tuple[int, str]]:
    """Yield the training documents of unit u with their rows, in file order."""
    for rows, row in _rows(source, u, seed, reader, heldout=False):
        assert isinstance(rows, Rows), "a token cache has no texts"
        yield row, str(rows.text(row)[0])


def texts(sources: Sequence[Source], seed: int, reading: Reading) -> Iterator[str]:
    """Yield the held-out documents of sources of text, from the sources in turn."""
    reader = Reader(reading)

    def of(source: Source) -> Iterator[str]:
        for u in source.heldout_units:
            for rows, row in _rows(source, u, seed, reader, heldout=True):
                assert isinstance(rows, Rows), "a token cache has no texts"
                yield str(rows.text(row)[0])

    return in_turn([of(source) for source in sources])


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
    source: Source, k: int, encoder: Encoder, seed: int, reader: Reader
) -> Iterator[Held]:
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
                    yield Held(k, text, encoded)
            else:
                ids = token_cache.text_ids(rows.ids(row, tokenizer.length), tokenizer)
                whole = np.array([*begin, *ids, tokenizer.eos], np.int32)
                yield Held(k, tokenizer.decode(ids), Encoded(whole))


def prepare(
    manifest: Manifest,
    encoder: Encoder,
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
    documents: list[Held] = []
    for one in islice(in_turn(streams), max_documents):
        heartbeat.beat("tokenizing the held-out documents", len(documents) + 1, max_documents)
        documents.append(one)
    parts = [(source.label, source.form is not None) for source in asked]
    held = lay_out(
        documents,
        parts,
        tokenizer,
        document_mask=manifest.document_mask,
        seq_len=manifest.seq_len,
        alone=manifest.packing == "single",
    )
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
