"""Counts the documents of a source, all of them or a sample: what `llmtrain data inspect` shows.

A sample takes some rows of several units, since neighbours are alike (a dump's oldest pages are its
longest). What is seen in a unit stands for the unit, and the units seen stand for those of their
kind: rows of parquet, bytes of lines and bytes of compressed files have no common measure. The
trap: a few long documents hold half of the text, so text is scaled by its known size, not by rows.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import xxhash

from llmtrain.data import heldout
from llmtrain.data.audit.epochs import text_size
from llmtrain.data.audit.ledger import text_of
from llmtrain.data.documents.reader import Reader
from llmtrain.data.documents.rows import Rows
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.sources.local import file_format
from llmtrain.data.token_cache import source as token_cache
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.hashing import mix, permutation

SPREAD = 64  # units that a sample is spread over
BATCH = 64  # documents tokenized at once
COUNTED = ("documents", "dropped", "replaced", "heldout", "bytes", "tokens", "training_tokens")


@dataclass(frozen=True, slots=True)
class Census:
    """What a source holds.

    exact: every row was looked at; else all but `looked_at`, `duplicates` and `lengths` are
    estimates · documents: that can be used, held-out ones among them · dropped: null, empty or
    blank · replaced: with invalid UTF-8 · duplicates: texts that were met before · bytes: of UTF-8
    text · tokens: with separators; training_tokens: of documents that are not held out · lengths:
    tokens of a document → how many of those looked at.
    """

    exact: bool
    looked_at: int
    documents: int
    dropped: int
    replaced: int
    heldout: int
    bytes: int
    tokens: int
    training_tokens: int
    duplicates: int
    lengths: Counter[int]


class _Seen(NamedTuple):
    """What was looked at, over all kinds of units: hashes of the texts, lengths in tokens."""

    hashes: array[int]
    lengths: Counter[int]


class _Part(NamedTuple):
    """The units of one kind: estimates by name (counts if exact), rows that were looked at."""

    estimates: Mapping[str, float]
    looked_at: int
    exact: bool


def census(manifest: Manifest, k: int, tokenizer: Tokenizer, reader: Reader, limit: int) -> Census:
    """Look at about `limit` rows of source k; 0 = at all of them. Raises as reading does."""
    seen = _Seen(array("Q"), Counter())
    kinds = _by_kind(manifest.sources[k])
    each = -(-limit // len(kinds))
    parts = [_part(manifest, k, units, each, tokenizer, reader, seen) for units in kinds]
    totals = {name: round(sum(part.estimates[name] for part in parts)) for name in COUNTED}
    distinct = len(np.unique(np.frombuffer(seen.hashes, np.uint64)))
    return Census(
        exact=all(part.exact for part in parts),
        looked_at=sum(part.looked_at for part in parts),
        duplicates=len(seen.hashes) - distinct,
        lengths=seen.lengths,
        **totals,
    )


def _by_kind(source: Source) -> list[list[int]]:
    """Units with a common measure: rows, bytes, bytes compressed one way or the other."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for u, unit in enumerate(source.units):
        kinds[file_format(source.files[unit.file].name) if unit.group < 0 else None].append(u)
    return list(kinds.values())


def _part(
    manifest: Manifest,
    k: int,
    units: Sequence[int],
    limit: int,
    tokenizer: Tokenizer,
    reader: Reader,
    seen: _Seen,
) -> _Part:
    source, seed = manifest.sources[k], manifest.seed
    met: Counter[str] = Counter()  # in the rows that were looked at
    counted: dict[str, float] = dict.fromkeys(COUNTED, 0.0)  # each stands for more of its unit
    covered: dict[int, float] = {}  # unit → bytes of its text
    looked_at, exact = 0, True
    for turn, u in enumerate(sorted(units, key=lambda u: mix(seed, 9, k, u))):
        if limit and looked_at >= limit:
            exact = False
            break
        rows = heldout.rows_of(source, u, reader)
        quota = -(-(limit - looked_at) // max(1, min(SPREAD, len(units)) - turn))
        taken = min(len(rows), quota) if limit else len(rows)
        some = permutation(len(rows), mix(seed, 10, k, u))[:taken].tolist()
        found = _count(manifest, k, u, rows, some, tokenizer, seen)
        for name in COUNTED:
            counted[name] += found[name] * len(rows) / max(1, taken)
        met.update(found)
        covered[u] = _text_bytes(rows)
        looked_at, exact = looked_at + taken, exact and taken == len(rows)
    if not exact:
        separators = 1 if tokenizer.bos is None else 2
        counted = _scaled(counted, met, source, units, covered, separators, reader)
    return _Part(counted, looked_at, exact)


def _scaled(
    counted: Mapping[str, float],
    met: Mapping[str, int],
    source: Source,
    units: Sequence[int],
    covered: Mapping[int, float],
    separators: int,
    reader: Reader,
) -> dict[str, float]:
    """From the units that were looked into to all of them.

    Documents by rows (of lines: by bytes), text by its size, and held-out documents, being few, by
    the share that the manifest holds out. A token cache knows its tokens.
    """
    rows = {u: source.units[u].stop - source.units[u].start for u in units}
    by_rows = sum(rows.values()) / sum(rows[u] for u in covered)
    found = {name: by_rows * value for name, value in counted.items()}
    if source.cached:
        found["tokens"] = sum(_tokens(source, source.units[u]) for u in units)
        found["bytes"] = found["tokens"] * met["bytes"] / max(1, met["tokens"])
    else:
        sizes = {u: text_size(source, source.units[u], reader) for u in units}
        by_size = sum(sizes.values()) / max(1, sum(sizes[u] for u in covered))
        found["bytes"] = by_size * sum(covered.values())
        own = met["tokens"] - separators * met["documents"]
        found["tokens"] = found["bytes"] * own / max(1, met["bytes"])
        found["tokens"] += separators * found["documents"]
    chosen = sum(rows[u] for u in source.heldout_units if u in rows)
    share = source.threshold / 2**64 * chosen / sum(rows.values())
    found["heldout"] = share * found["documents"]
    found["training_tokens"] = (1 - share) * found["tokens"]
    return found


def _text_bytes(rows: Rows | token_cache.Rows) -> float:
    """Of all texts of a unit; of a token cache not known."""
    if isinstance(rows, token_cache.Rows):
        return 0.0
    return float(pc.sum(pc.binary_length(rows.texts)).as_py() or 0)


def _tokens(source: Source, unit: Unit) -> int:
    """How many a unit of a token cache holds."""
    found = token_cache.rows_of(source, unit)
    first, last = (found.documents.span(int(found.numbers[i])) for i in (0, -1))
    return last[2] - first[1]


def _count(
    manifest: Manifest,
    k: int,
    u: int,
    rows: Rows | token_cache.Rows,
    some: Sequence[int],
    tokenizer: Tokenizer,
    seen: _Seen,
) -> Counter[str]:
    """What some rows of unit u are."""
    source = manifest.sources[k]
    chosen = u in source.heldout_units
    met: Counter[str] = Counter()
    for row, text, ids in _documents(rows, some, tokenizer, met):
        held = chosen and rows.hash(row, manifest.seed) < source.threshold
        encoded = text.encode()
        met["documents"] += 1
        met["heldout"] += held
        met["bytes"] += len(encoded)
        met["tokens"] += len(ids)
        met["training_tokens"] += 0 if held else len(ids)
        seen.hashes.append(xxhash.xxh3_64_intdigest(encoded))
        seen.lengths[len(ids)] += 1
    met["dropped"] = len(some) - met["documents"]
    return met


def _documents(
    rows: Rows | token_cache.Rows, some: Sequence[int], tokenizer: Tokenizer, met: Counter[str]
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Those of these rows that can be used: row, text, ids with separators."""
    if isinstance(rows, token_cache.Rows):
        for row in filter(rows.usable, some):
            ids = rows.ids(row, tokenizer.length)
            yield row, text_of(tokenizer, ids), ids
        return
    for start in range(0, len(some), BATCH):
        texts: dict[int, str] = {}
        for row in some[start : start + BATCH]:
            text, replaced = rows.text(row)
            if text is not None:
                texts[row] = text
                met["replaced"] += replaced
        yield from zip(texts, texts.values(), tokenizer.documents([*texts.values()]), strict=True)
