"""Pairs of answers to one prompt: where they are in a batch, what is computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of sequences in a batch, in order. Both sequences of a pair begin with its prompt.

    Of preference data these are the chosen answer and the rejected one. Of feedback they are the
    answer that was judged, and the answer of another row.

    rows: (N,) int64, the block that a pair is in
    borders: (N, 3) int64, where its first and its second sequence begin in the block, and its end
    keys: (N, 2) uint64, digest of a pair's ids and of what is trained of them
    desirable: (N,) bool, whether the judged answer is a good one; all true of preference data
    """

    rows: np.ndarray
    borders: np.ndarray
    keys: np.ndarray
    desirable: np.ndarray

    def of_blocks(self, first: int, stop: int) -> Pairs:
        """Return the pairs of blocks first … stop − 1, whose numbers then begin with 0."""
        low, high = self.rows.searchsorted((first, stop))
        span = slice(int(low), int(high))
        return self._some(span, self.rows[span] - first)

    def of_rows(self, order: np.ndarray) -> Pairs:
        """Return the pairs of the blocks in another order. order: (n,) int64, numbers of blocks"""
        moved = order.argsort()[self.rows]
        permutation = moved.argsort(kind="stable")
        return self._some(permutation, moved[permutation])

    def _some(self, which: slice | np.ndarray, rows: np.ndarray) -> Pairs:
        """Return some of the pairs, in blocks of these numbers."""
        return Pairs(rows, self.borders[which], self.keys[which], self.desirable[which])


class PairTensors:
    """What the loss of the pairs in some rows is computed from, on the device.

    It is no mapping and no dataclass: in those, FSDP2 would round the numbers to the dtype of the
    forward.

    lengths: (2N,) int64, how many trained positions of these rows each sequence has, in order; they
        are all trained positions of the rows
    sizes: (N, 2) fp64, trained tokens of both sequences, also where a process has a part of a row
    reference: (N, 2) fp64, their log-probabilities by the reference; zeros without one
    desirable: (N,) bool, only of feedback: whether the judged answer is a good one
    divergence: () fp64, only of feedback: how far the model is from its reference, in nats
    last: (2N,) int64, only for a model that scores: the position of each sequence's last token in
        the flat rows
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        sizes: torch.Tensor,
        reference: torch.Tensor,
        desirable: torch.Tensor | None = None,
        divergence: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> None:
        self.lengths, self.sizes, self.reference = lengths, sizes, reference
        self.desirable, self.divergence, self.last = desirable, divergence, last

    def changed(self, **fields: torch.Tensor | None) -> PairTensors:
        """Return the same with other values of some fields."""
        return PairTensors(**{**vars(self), **fields})


# What a run on pairs of answers sums over the pairs of a step: their number; how many answers are
# chosen and rejected (of feedback: desirable or not); how many pairs the model has right, a tie
# being half of one; rewards and log-probabilities of chosen and of rejected answers; trained tokens
# of the chosen ones; and the divergence of the step times its pairs.
PAIR_SLOTS = (
    *("pairs", "chosen", "rejected", "correct", "chosen_reward", "rejected_reward"),
    *("chosen_logp", "rejected_logp", "chosen_tokens", "divergence"),
)


def pair_figures(sums: Sequence[float]) -> dict[str, float | None]:
    """Return the figures of some pairs; None where there was nothing to take the mean of.

    sums: as in `PAIR_SLOTS`

    pairs: their number
    accuracy: the share that the model has right
    margin: mean reward of chosen answers less that of rejected ones
    chosen_reward, rejected_reward: means over the answers
    chosen_logp, rejected_logp: the same; None of a model that scores, whose sums are 0
    chosen_loss: −log p of chosen answers in nats per token
    divergence: only of feedback, in nats
    """
    of = dict(zip(PAIR_SLOTS, sums, strict=True))

    def mean(name: str, over: str) -> float | None:
        return of[name] / of[over] if of[over] else None

    chosen, rejected = mean("chosen_reward", "chosen"), mean("rejected_reward", "rejected")
    lost = mean("chosen_logp", "chosen_tokens")
    # Else both are the number of pairs.
    of_feedback = of["pairs"] and of["chosen"] + of["rejected"] == of["pairs"]
    return {
        "pairs": round(of["pairs"]),
        "accuracy": mean("correct", "pairs"),
        "margin": None if chosen is None or rejected is None else chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "chosen_logp": mean("chosen_logp", "chosen") or None,
        "rejected_logp": mean("rejected_logp", "rejected") or None,
        "chosen_loss": None if lost is None else -lost,
        **({"divergence": mean("divergence", "pairs")} if of_feedback else {}),
    }
