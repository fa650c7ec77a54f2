"""The reference column: what a run's pairs of answers were worth to the weights it began with.

For each pair it holds the log-probabilities of both answers, computed once, before the first step.
A pair is found by a digest of its ids and of what is trained of them. So a value that belongs to
another template, tokenizer, cut or mask is never found, and whether a process, an epoch or another
number of processes asks makes no difference:

    keys    (N, 2) uint64
    values  (N, 2) fp64       Σ log p of the first and of the second answer, in nats
    blocks  (N,) int64        where the pair was scored; of two values the earlier one is kept

The file says what the values depend on besides (`made_with`), and has a digest of all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from llmtrain import system
from llmtrain.errors import Problem, UserError
from llmtrain.types import JsonMapping, JsonObject

KEY = "preference.reference"
BEHIND = 1 << 62  # numbers of held-out blocks are behind those of all others
_META = "reference"


class DamagedColumnError(Exception):
    """A file is no column, or has other bytes than were written."""


@dataclass(frozen=True)
class Column:
    """Values of pairs of answers, found by content.

    keys: (N, 2) uint64
    values: (N, 2) fp64
    blocks: (N,) int64, number of the block in which a pair was scored
    made_with: what the values depend on besides the pairs, as names and short values
    walked: how far the data was read for them, and digests of the columns that it grew out of
    seconds, pairs_a_block: what this start has seen as it computed it; not in the file
    """

    keys: np.ndarray
    values: np.ndarray
    blocks: np.ndarray
    made_with: JsonMapping = field(default_factory=dict)
    walked: JsonMapping = field(default_factory=dict)
    seconds: float = 0.0
    pairs_a_block: float = 0.0

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.keys)

    @cached_property
    def digest(self) -> str:
        """Hash of everything in it, 32 hex digits."""
        hashed = xxhash.xxh3_128(json.dumps([self.made_with, self.walked]).encode())
        hashed.update(self.keys.astype("<u8").tobytes())
        hashed.update(self.values.astype("<f8").tobytes())
        hashed.update(self.blocks.astype("<i8").tobytes())
        return hashed.hexdigest()

    def continues(self, digest: str) -> bool:
        """Whether it is the column of that digest, or has grown out of it."""
        return digest in (self.digest, *self.walked.get("earlier", ()))

    def to_json(self) -> JsonObject:
        """Return the field of a `start` line that tells of it."""
        return {"digest": self.digest, "pairs": len(self), "seconds": round(self.seconds, 3)}

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys as one value each, sorted, and their places."""
        flat = _flat(self.keys)
        order = np.argsort(flat, kind="stable")
        return flat[order], order

    def places(self, keys: np.ndarray) -> np.ndarray:
        """Return where pairs are in the column, (n,) int64; −1 = it has none of that key."""
        known, order = self._sorted
        if not len(known):
            return np.full(len(keys), -1)
        asked = _flat(keys)
        near = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return np.where(known[near] == asked, order[near], -1)

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Return the values of pairs, (n, 2) fp64. Raises UserError for one that it does not have.

        keys: (n, 2) uint64
        """
        places = self.places(keys)
        if len(places) and places.min() < 0:
            number = int((places < 0).sum())
            expected = f"a value for each pair; it has none for {number} of {len(keys)}"
            remedy = f"checkpoint.accept_changes=[{KEY}], which computes the column again"
            raise UserError(Problem(KEY, f"{len(self)} pairs", expected, remedy))
        values: np.ndarray = self.values[places]
        return values

    def plus(self, others: Iterable[Column]) -> Column:
        """Return the column with the pairs of others too, each once: that of the earliest block.

        Which processes have scored a pair twice depends on their number and on kills.
        """
        every = [self, *others]
        keys, values, blocks = (
            np.concatenate([getattr(one, name) for one in every])
            for name in ("keys", "values", "blocks")
        )
        order = np.argsort(blocks, kind="stable")
        _, first = np.unique(_flat(keys[order]), return_index=True)
        chosen = order[first]
        facts = self.made_with, self.walked
        return Column(keys[chosen], values[chosen], blocks[chosen], *facts)

    def save(self, path: Path) -> None:
        """Write it as a safetensors file."""
        from safetensors.numpy import save

        facts = {"made_with": self.made_with, "walked": self.walked, "digest": self.digest}
        tensors = {"keys": self.keys, "values": self.values, "blocks": self.blocks}
        system.write_durably(path, save(tensors, {_META: json.dumps(facts)}))


def empty(made_with: Mapping[str, object]) -> Column:
    """Return a column without pairs."""
    nothing = np.empty((0, 2))
    return Column(nothing.astype(np.uint64), nothing, np.empty(0, np.int64), made_with)


def load(path: Path) -> Column:
    """Read a column. Raises DamagedColumnError, and OSError if the disk does not answer."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            facts = json.loads(file.metadata()[_META])
            keys, values, blocks = map(file.get_tensor, ("keys", "values", "blocks"))
        column = Column(keys, values, blocks, facts["made_with"], facts["walked"])
        if column.digest == facts["digest"]:
            return column
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedColumnError(str(error)) from error
    raise DamagedColumnError("its digest is another one")


def _flat(keys: np.ndarray) -> np.ndarray:
    """Return (n, 2) uint64 as (n,) values that can be sorted."""
    return np.ascontiguousarray(keys.astype(">u8")).view("S16").reshape(-1)
