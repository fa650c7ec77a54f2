"""The number of blocks of an epoch: counted, or estimated by a census."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat

import numpy as np

from llmtrain.data import heldout
from llmtrain.data.audit.census import BATCH, Census, census
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.manifest import Manifest
from llmtrain.data.packing import START, Document, open_packing, window_tokens
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.hashing import mix

COUNTED_BYTES = 16 * MIB  # a source of at most that much text is counted
PACKED_WINDOWS = 4
NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the training documents of all sources.

    tokens: with those that separate documents
    blocks: of `seq_len` trained positions
    exact: whether they were counted, not estimated from a sample
    """

    documents: int
    tokens: int
    blocks: int
    exact: bool


def epoch(
    manifest: Manifest, tokenizer: Tokenizer, reading: Reading, known: Sequence[Census] = ()
) -> Epoch:
    """Count, or estimate, one epoch. Raises UserError or RunError as reading does.

    known: a census of each source; one that is exact is not made again
    """
    reader = Reader(reading)
    documents = tokens = blocks = 0.0
    exact = True
    for k in range(len(manifest.sources)):
        found = _training(manifest, k, tokenizer, reader, known[k] if known else None)
        documents, tokens, exact = documents + found[0], tokens + found[1], exact and found[2]
        blocks += found[1] * _blocks_a_token(manifest, k, tokenizer, reader)
    whole = math.ceil(round(blocks, 6))  # 700 · (1 / 100) is a little more than 7
    return Epoch(round(documents), round(tokens), max(1, whole), exact)


def _training(
    manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader, known: Census | None
) -> tuple[float, float, bool]:
    """Return (training documents of source k, their tokens, whether both were counted)."""
    source = manifest.sources[k]
    if source.cached:
        stream = token_cache.training_stream(source, manifest.seed)
        return stream.num_documents, stream.tokens, True
    if known is None or not known.exact:
        known = census(manifest, k, tokenizer, reader, None)
    if not known.exact and known.training.bytes <= COUNTED_BYTES:
        known = census(manifest, k, tokenizer, reader, 0)
    return known.training.documents, known.training.tokens, known.exact


def _blocks_a_token(manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader) -> float:
    """Return the number of blocks per token of source k.

    Packings other than `concat` add padding, which is measured on a few windows.
    """
    seq_len = manifest.seq_len
    if manifest.packing == "concat":
        return 1 / seq_len
    wanted = PACKED_WINDOWS * window_tokens(seq_len)
    packed: list[Document] = []
    tokens = 0
    for ids in _repeat_documents(manifest, k, tokenizer, reader):
        packed.append(Document(0, 0, len(packed), ids, Counter()))
        tokens += len(ids)
        if tokens >= wanted:
            break
    end = Document(0, 0, len(packed), NO_IDS, Counter())
    order = (manifest.seed, 4, k, 0)
    found = open_packing(
        manifest.packing,
        lambda *_: chain(packed, repeat(end)),
        seq_len,
        START,
        pad=tokenizer.pad,
        order=order,
    )
    return sum(1 for _ in found) / tokens


def _repeat_documents(
    manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader
) -> Iterator[np.ndarray]:
    """Yield the training documents of a source as tokens, again and again.

    One pass over a small source may not fill a window.
    """
    source, seed = manifest.sources[k], manifest.seed
    order = sorted(range(len(source.units)), key=lambda u: mix(seed, 9, k, u))
    for u in cycle(order):
        if source.cached:  # with held-out documents, which are as long as others
            rows = token_cache.rows_of(source, source.units[u])
            usable = filter(rows.usable, range(len(rows)))
            yield from (rows.ids(row, tokenizer.length) for row in usable)
            continue
        texts = heldout.training_texts(source, u, seed, reader)
        while some := list(islice(texts, BATCH)):
            yield from tokenizer.documents(some)
