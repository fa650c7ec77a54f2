"""The number of blocks of an epoch: counted, or estimated by a census.

A run trains on conversations exactly as often as asked. So at its start their blocks are counted by
walking all lanes to their end, each conversation being tokenized once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, repeat

import numpy as np
import xxhash

from llmtrain import system
from llmtrain.data import heldout
from llmtrain.data.audit.census import BATCH, Census, census
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Lanes
from llmtrain.data.manifest import Manifest, Source
from llmtrain.data.packing import START, Document, open_packing, window_tokens
from llmtrain.data.state import DataState
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.encode import Encoded, Encoder
from llmtrain.hashing import mix

COUNTED_BYTES = 16 * MIB  # a source of at most that much text is counted
COUNTED_CHAT_BYTES = 512 * MIB  # of conversations, which end a run when they are used up
PACKED_WINDOWS = 4
NO_IDS = np.zeros(0, np.int32)
NO_ID = np.int32(0)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the training documents of all sources.

    tokens: with those that separate documents
    blocks: of `seq_len` trained positions
    exact: whether they were counted, not estimated from a sample
    until_end: blocks until every source has ended; None = not counted, as the next ones then
    passes: over the source that is read most often until then
    first: number of the first block that is not padding; None = all are
    trained: tokens that are trained until then
    """

    documents: int
    tokens: int
    blocks: int
    exact: bool
    until_end: int | None = None
    passes: int | None = None
    first: int | None = None
    trained: int | None = None


def epoch(
    manifest: Manifest,
    encoder: Encoder,
    reading: Reading,
    known: Sequence[Census] = (),
    state: DataState | None = None,
) -> Epoch:
    """Count, or estimate, one epoch. Raises UserError or RunError as reading does.

    known: a census of each source; one that is exact is not made again
    state: where a run is now, whose conversations are counted up to `until_end`; None = there is
        no run, and they are no more than text is
    """
    reader = Reader(reading)
    documents = tokens = blocks = 0.0
    exact = True
    for k in range(len(manifest.sources)):
        most = COUNTED_BYTES
        if state is not None and manifest.sources[k].form is not None:
            most = COUNTED_CHAT_BYTES
        one = _training(manifest, k, encoder, reader, most, known[k] if known else None)
        documents, tokens, exact = documents + one[0], tokens + one[1], exact and one[2]
        blocks += one[1] * _blocks_a_token(manifest, k, encoder, reader)
    whole = math.ceil(round(blocks, 6))  # 700 · (1 / 100) is a little more than 7
    chat = any(one.form is not None for one in manifest.sources)
    found = Epoch(round(documents), round(tokens), max(1, whole), exact)
    passes = [one.max_epochs for one in manifest.sources if one.max_epochs is not None]
    if state is None or not exact or not chat or len(passes) < len(manifest.sources):
        return found
    first, until_end, trained = _extent(manifest, encoder, reader, state)
    return replace(found, until_end=until_end, passes=max(passes), first=first, trained=trained)


def _extent(
    manifest: Manifest, encoder: Encoder, reader: Reader, state: DataState
) -> tuple[int | None, int, int]:
    """Return the numbers of the first block that is not padding, and of that behind the last one.

    The third number is that of the trained tokens in them. state: where to begin
    """
    lengths = _Lengths(encoder)
    lanes = Lanes(manifest, lengths, reader, state.cursors, state.next_block)
    first, last = None, state.next_block
    for g in range(state.next_block, state.next_block + manifest.lanes):
        lane = g - state.next_block + 1
        system.beat("counting the blocks of the run, by lane", lane, manifest.lanes)
        while lanes.take(g).source >= 0:
            first = g if first is None else min(first, g)
            last, g = max(last, g + 1), g + manifest.lanes
    return first, last, lengths.trained


class _Lengths:
    """Encodes each document once, and remembers where its sequences end; its ids are zeros.

    trained: tokens of all that was asked for
    """

    def __init__(self, encoder: Encoder) -> None:
        self.tokenizer = encoder.tokenizer
        self.trained = 0
        self._encoder = encoder
        self._known: dict[tuple[str, bytes], tuple[Encoded, int]] = {}

    def documents(self, source: Source, texts: Sequence[str]) -> list[Encoded]:
        """Return encoded documents as `Encoder` does, in their lengths."""
        keys = [(source.label, xxhash.xxh3_128_digest(text.encode())) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
        found = self._encoder.documents(source, list(new.values()))
        for key, one in zip(new, found, strict=True):
            zeros = np.broadcast_to(NO_ID, len(one.ids))
            trained = len(one.ids) if one.trained is None else int(one.trained.sum())
            self._known[key] = one._replace(ids=zeros, trained=None), trained
        asked = [self._known[key] for key in keys]
        self.trained += sum(trained for _, trained in asked)
        return [one for one, _ in asked]


def _training(
    manifest: Manifest, k: int, encoder: Encoder, reader: Reader, most: int, known: Census | None
) -> tuple[float, float, bool]:
    """Return (training documents of source k, their tokens, whether both were counted).

    most: bytes of text up to which they are counted
    """
    source = manifest.sources[k]
    if source.cached:
        stream = token_cache.training_stream(source, manifest.seed)
        return stream.num_documents, stream.tokens, True
    if known is None or not known.exact:
        known = census(manifest, k, encoder, reader, None)
    if not known.exact and known.training.bytes <= most:
        known = census(manifest, k, encoder, reader, 0)
    return known.training.documents, known.training.tokens, known.exact


def _blocks_a_token(manifest: Manifest, k: int, encoder: Encoder, reader: Reader) -> float:
    """Return the number of blocks per token of source k.

    Packings other than `concat` add padding, which is measured on a few windows.
    """
    seq_len = manifest.seq_len
    if manifest.packing == "concat":
        return 1 / seq_len
    wanted = PACKED_WINDOWS * window_tokens(seq_len)
    packed: list[Document] = []
    tokens = 0
    for one in _repeat_documents(manifest, k, encoder, reader):
        packed.append(Document(0, 0, len(packed), one.ids, Counter(), one.cuts))
        tokens += len(one.ids)
        if tokens >= wanted:
            break
    end = Document(0, 0, len(packed), NO_IDS, Counter())
    order = (manifest.seed, 4, k, 0)
    found = open_packing(
        manifest.packing,
        lambda *_: chain(packed, repeat(end)),
        seq_len,
        START,
        pad=encoder.tokenizer.pad,
        order=order,
    )
    return sum(1 for _ in found) / tokens


def _repeat_documents(
    manifest: Manifest, k: int, encoder: Encoder, reader: Reader
) -> Iterator[Encoded]:
    """Yield the training documents of a source as tokens, again and again.

    One pass over a small source may not fill a window.
    """
    source, seed = manifest.sources[k], manifest.seed
    order = sorted(range(len(source.units)), key=lambda u: mix(seed, 9, k, u))
    for u in cycle(order):
        if source.cached:  # with held-out documents, which are as long as others
            rows = token_cache.rows_of(source, source.units[u])
            usable = filter(rows.usable, range(len(rows)))
            length = encoder.tokenizer.length
            yield from (Encoded(rows.ids(row, length)) for row in usable)
            continue
        texts = heldout.training_texts(source, u, seed, reader)
        while some := list(islice(texts, BATCH)):
            yield from (one for one in encoder.documents(source, some) if len(one.ids))
