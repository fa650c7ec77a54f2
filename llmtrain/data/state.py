"""What a checkpoint keeps of the data: one cursor per lane and source, and a few numbers.

A block comes with the cursors of its lane after it. So the state after a step is known without
asking the stream: each lane's cursors are those of its last block so far, which the rank of that
block has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import xxhash

from llmtrain.config.binding import touches, way_out
from llmtrain.data.manifest import DataManifest
from llmtrain.errors import Problem, raise_any
from llmtrain.types import Cursor, JsonMapping, JsonObject

VERSION = 1
# Part of the fingerprint → the config keys that decide it; messages name the first.
_KEYS = {
    "files": ("data.sources",),
    "units": ("data.sources", "data.lanes"),
    "columns": ("data.sources",),
    "held-out documents": ("data.heldout", "data.sources", "data.lanes", "evaluation.sources"),
    "tokenizer": ("model.tokenizer", "model.from"),
    "tokenizer backend": ("model.tokenizer", "model.from"),
    "tokenizer probe": ("model.tokenizer", "model.from"),
    "seq_len": ("data.seq_len",),
    "packing": ("data.packing",),
    "document_mask": ("data.document_mask", "data.packing"),
    "max_epochs": ("data.sources", "training.epochs"),
    "evaluation.sources": ("evaluation.sources",),
    "seed": ("run.seed",),
    "lanes": ("data.lanes", "data.sources"),
    "chat": ("chat", "data.sources", "model.tokenizer", "model.from"),
}
_ORDER = {"files", "units", "seed", "lanes"}
_KEPT = {"document_mask", "max_epochs", "evaluation.sources"}
Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, eq=False)
class DataState:
    """The state of the stream between two steps.

    next_block: first block of the next step
    weights_from: first block to which the present weights of the sources apply
    cursors (L, sources, 4) int64
    stream_digest: rolling hash of the steps' batch digests
    counts: label → dropped, replaced, heldout → how many
    parts: what the fingerprint is made of
    """

    fingerprint: str
    parts: Mapping[str, str]
    lanes: int
    next_block: int
    weights_from: int
    cursors: np.ndarray
    stream_digest: int
    counts: Counts

    @staticmethod
    def fresh(manifest: DataManifest) -> DataState:
        """Return the state before the first step."""
        cursors = np.zeros((manifest.lanes, len(manifest.sources), 4), np.int64)
        return DataState(manifest.fingerprint, manifest.parts, manifest.lanes, 0, 0, cursors, 0, {})

    def to_json(self) -> JsonObject:
        """Return the state as JSON, with each cursor as a list [epoch, unit, row, offset]."""
        values = {name: getattr(self, name) for name in _names()}
        values |= {"cursors": self.cursors.tolist(), "stream_digest": f"{self.stream_digest:016x}"}
        return {"version": VERSION, **values}

    @staticmethod
    def from_json(stored: JsonMapping) -> DataState:
        """Return the inverse of `to_json`."""
        values = {name: stored[name] for name in _names()}
        cursors = np.array(stored["cursors"], np.int64).reshape(stored["lanes"], -1, 4)
        values |= {"cursors": cursors, "stream_digest": int(stored["stream_digest"], 16)}
        return DataState(**values)


def _names() -> list[str]:
    return [field.name for field in fields(DataState)]


def differing(state: DataState, manifest: DataManifest) -> list[str]:
    """Return the names of the parts in which the manifest differs from the state."""
    if state.fingerprint == manifest.fingerprint:
        return []
    now = manifest.parts
    return [name for name in sorted({*now, *state.parts}) if now.get(name) != state.parts.get(name)]


def check(state: DataState, manifest: DataManifest, accepted: Sequence[str]) -> None:
    """Raise UserError if the state differs from the manifest in parts that are not accepted.

    accepted: `checkpoint.accept_changes`
    """
    problems = [
        Problem(
            f"data: {name}",
            manifest.parts.get(name),
            f"{state.parts.get(name)}, as in the checkpoint",
            f"restore the manifest.json of the run, or {way_out(_KEYS[name][0])}",
        )
        for name in differing(state, manifest)
        if not any(touches(key, accepted) for key in _KEYS[name])
    ]
    raise_any(problems)


def carry_over(state: DataState, manifest: DataManifest) -> DataState:
    """Return the state for changed data. If the order is the same, it keeps its place in it.

    If files, units, seed or lanes differ, the new order starts at its beginning. If only the tokens
    or the blocks differ, each lane starts its current document again.
    """
    changed = set(differing(state, manifest))
    cursors = state.cursors.copy()
    if changed & _ORDER:
        cursors = DataState.fresh(manifest).cursors
    elif changed - _KEPT:
        cursors[:, :, 3] = 0
    return replace(
        state,
        fingerprint=manifest.fingerprint,
        parts=manifest.parts,
        lanes=manifest.lanes,
        cursors=cursors,
    )


def roll(stream_digest: int, batch_digest: int) -> int:
    """Return the stream's digest after a step: xxh3_64 of both, 8 bytes little-endian each."""
    both = stream_digest.to_bytes(8, "little") + batch_digest.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(both)


def contribution(
    consumed: Mapping[int, Sequence[Cursor]],
    shape: tuple[int, int],
    *,
    first_block: int,
    next_block: int,
    rank: int,
    world_size: int,
) -> np.ndarray:
    """Return this rank's cursors: (L, sources, 4) int64, zeros for lanes of other ranks.

    consumed: lane → the cursors that came with its last block on this rank
    shape: (L, sources)
    first_block: the block with which this start of the run began
    """
    lanes, sources = shape
    part = np.zeros((lanes, sources, 4), np.int64)
    for lane in range(lanes):
        last = last_block(lane, lanes, next_block)
        if last >= first_block and (last - first_block) % world_size == rank:
            part[lane] = consumed[lane]
    return part


def merge_cursors(
    old: np.ndarray, parts: Iterable[np.ndarray], *, first_block: int, next_block: int
) -> np.ndarray:
    """Return the cursors of all lanes at `next_block`.

    old: cursors at `first_block`, kept for lanes that have had no block since
    parts: every rank's `contribution`
    """
    merged = sum(parts, np.zeros_like(old))
    for lane in range(len(old)):
        if last_block(lane, len(old), next_block) < first_block:
            merged[lane] = old[lane]
    return merged


def last_block(lane: int, lanes: int, next_block: int) -> int:
    """Return the last block of a lane before `next_block`; negative = no such block."""
    return next_block - 1 - (next_block - 1 - lane) % lanes
