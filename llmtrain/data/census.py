"""Counts the documents of a source, all of them or a sample: what `llmtrain data inspect` shows.

A sample takes some rows of several units, since neighbours are alike (a dump's oldest pages are its
longest). What is seen in a unit stands for the unit, and the units seen stand for those of their
kind: rows of parquet, bytes of lines and bytes of compressed files have no common measure.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from llmtrain.data import heldout, token_cache
from llmtrain.data.manifest import Manifest, Source, Unit
from llmtrain.data.readers import Reader
from llmtrain.data.rows import Rows
from llmtrain.data.sources import file_format
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.hashing import mix, permutation

SPREAD = 32  # units that a sample is spread over
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
    estimates: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
    looked_at = covered = 0
    exact = True
    for turn, u in enumerate(sorted(units, key=lambda u: mix(seed, 9, k, u))):
        if limit and looked_at >= limit:
            exact = False
            break
        rows = heldout.rows_of(source, u, reader)
        quota = -(-(limit - looked_at) // max(1, min(SPREAD, len(units)) - turn))
        taken = min(len(rows), quota) if limit else len(rows)
        exact = exact and taken == len(rows)
        order = permutation(len(rows), mix(seed, 10, k, u))[:taken]
        some = (
            rows.take(pa.array(order))
            if isinstance(rows, Rows)
            else token_cache.as_text(rows.take(order), tokenizer)
        )
        met = _count(some, manifest, k, u, tokenizer, seen)
        for name in COUNTED:
            estimates[name] += met[name] * len(rows) / max(1, taken)
        looked_at, covered = looked_at + taken, covered + _measure(source.units[u])
    if not exact:
        _scale(estimates, source, units, covered)
    return _Part(estimates, looked_at, exact)


def _scale(estimates: dict[str, float], source: Source, units: Sequence[int], covered: int) -> None:
    """From the units that were looked into to all; the held-out ones by their share, being few."""
    whole = sum(_measure(source.units[u]) for u in units)
    for name in estimates:
        estimates[name] *= whole / covered
    chosen = sum(_measure(source.units[u]) for u in source.heldout_units if u in set(units))
    share = source.threshold / 2**64 * chosen / whole
    estimates["heldout"] = share * estimates["documents"]
    estimates["training_tokens"] = (1 - share) * estimates["tokens"]


def _measure(unit: Unit) -> int:
    return unit.stop - unit.start


def _count(
    rows: Rows, manifest: Manifest, k: int, u: int, tokenizer: Tokenizer, seen: _Seen
) -> Counter[str]:
    """What these rows of unit u are."""
    source = manifest.sources[k]
    chosen = u in source.heldout_units
    met: Counter[str] = Counter()
    for start in range(0, len(rows), BATCH):
        texts, out = [], []
        for row in range(start, min(start + BATCH, len(rows))):
            text, replaced = rows.text(row)
            if text is None:
                met["dropped"] += 1
                continue
            met["replaced"] += replaced
            texts.append(text)
            out.append(chosen and rows.hash(row, manifest.seed) < source.threshold)
        met["documents"] += len(texts)
        met["heldout"] += sum(out)
        _measure_texts(texts, out, met, tokenizer, seen)
    return met


def _measure_texts(
    texts: Sequence[str],
    out: Sequence[bool],
    met: Counter[str],
    tokenizer: Tokenizer,
    seen: _Seen,
) -> None:
    for text, held, ids in zip(texts, out, tokenizer.documents(texts), strict=True):
        encoded = text.encode()
        met["bytes"] += len(encoded)
        met["tokens"] += len(ids)
        met["training_tokens"] += 0 if held else len(ids)
        seen.hashes.append(xxhash.xxh3_64_intdigest(encoded))
        seen.lengths[len(ids)] += 1
