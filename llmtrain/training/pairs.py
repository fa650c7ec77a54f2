"""The pairs of answers of a step or of an evaluation, as the loss takes them.

A block has whole pairs, `[prompt + chosen][prompt + rejected]`. Packed, both are documents of one
row. With packing single each half of a block is a row of its own, `seq_len` / 2 long:

    bestfit    (B, S)         x c c c x r r x c c x r r r ·
    single     (2B, S/2)      x c c c · · ·
                              x r r · · · ·
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from llmtrain.config.schema import PreferenceConfig
from llmtrain.data.heldout import HeldOut
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.model.attention import on_device
from llmtrain.model.preference import loss_and_sums
from llmtrain.pairs import PAIR_SLOTS, Pairs, PairTensors, pair_figures
from llmtrain.training.run import Run
from llmtrain.types import NOT_TRAINED, Evaluation, MicroBatch

Rows = TypeVar("Rows", np.ndarray, Tensor)


def in_halves(rows: Rows) -> Rows:
    """Return (B, S) as (2B, S / 2): both halves of each block, one below the other."""
    return rows.reshape(2 * rows.shape[0], rows.shape[1] // 2)


def pair_tensors(
    pairs: Pairs,
    labels: np.ndarray,
    positions: slice,
    known: np.ndarray,
    preference: PreferenceConfig,
    device: torch.device,
    *,
    halves: bool,
) -> PairTensors:
    """Return what the loss of the pairs in some rows is computed from.

    pairs: `rows` numbers the blocks of these rows
    labels: (R, T) int64, of the rows as the model sees them, whole
    positions: those of each row that this process has
    known: (N, 2) fp64, what the pairs are worth to the reference; zeros without one
    halves: whether each block is two rows, as of `in_halves`
    """
    first, second, stop = pairs.borders.T
    if halves:
        rows = np.stack([2 * pairs.rows, 2 * pairs.rows + 1], 1)
        begins, stops = np.zeros_like(rows), np.full_like(rows, labels.shape[1])
    else:
        rows = np.repeat(pairs.rows[:, None], 2, axis=1)
        begins, stops = np.stack([first, second], 1), np.stack([second, stop], 1)
    # How many labels before a position are trained: 0 before the first.
    trained = np.cumsum(labels != NOT_TRAINED, axis=1)
    before = np.concatenate([np.zeros((len(labels), 1), np.int64), trained], axis=1)

    def count(low: int, high: int) -> np.ndarray:
        """Return how many trained labels each half has within these positions, (N, 2) int64."""
        counts: np.ndarray = before[rows, stops.clip(low, high)]
        counts -= before[rows, begins.clip(low, high)]
        return counts

    width = labels.shape[1]
    low, high, _ = positions.indices(width)
    feedback, last = preference.answers == "feedback", None
    if preference.scores:  # behind the last trained label is the last token of its sequence
        behind = (before[rows] == before[rows, stops][..., None]).argmax(-1)
        last = on_device(device, (rows * width + behind).ravel())
    return PairTensors(
        lengths=on_device(device, count(low, high).ravel()),
        sizes=on_device(device, count(0, width).astype(np.float64)),
        reference=on_device(device, known),
        desirable=on_device(device, pairs.desirable) if feedback else None,
        divergence=torch.zeros((), dtype=torch.float64, device=device) if feedback else None,
        last=last,
    )


class Scores(NamedTuple):
    """Pairs that were scored.

    sums: (N, 2) fp64, Σ log p of both answers, or both scores of a reward model
    asked: as `pair_tensors` returns it
    parts: (N,) int64, the number of each pair's source in the held-out set
    """

    sums: Tensor
    asked: PairTensors
    parts: Tensor


def pair_totals(
    scored: Sequence[Scores],
    preference: PreferenceConfig,
    device: torch.device,
    parts: int,
    *,
    tells: bool,
) -> Tensor:
    """Return Σ loss and the sums of `PAIR_SLOTS` of all pairs, then of each source. Collective.

    The divergence of feedback is that of all pairs together.

    tells: whether this process tells the scores of its group

    Returns (1 + parts, 2 + K) fp64, added up over all processes; the last is trained tokens.
    """
    far = divergence_of([one[:2] for one in scored], device, tells=tells)
    totals = torch.zeros(1 + parts, 2 + len(PAIR_SLOTS), dtype=torch.float64, device=device)
    for sums, asked, owners in scored if tells else ():
        if asked.divergence is not None:
            asked = asked.changed(divergence=far)
        totals[0] += _total(sums, asked, preference)
        for part in range(parts):
            mask = owners.to(device) == part
            theirs = asked.changed(
                sizes=asked.sizes[mask],
                reference=asked.reference[mask],
                desirable=None if asked.desirable is None else asked.desirable[mask],
            )
            totals[1 + part] += _total(sums[mask], theirs, preference)
    return sum_over_ranks(totals)


def _total(sums: Tensor, asked: PairTensors, preference: PreferenceConfig) -> Tensor:
    tokens = asked.sizes.sum().reshape(1)
    return torch.cat([loss_and_sums(sums, asked, preference), tokens])


def pair_result(sums: Sequence[Sequence[float]], heldout: HeldOut) -> Evaluation:
    """Return the result on a held-out set of pairs, and on each of its sources; no time.

    sums: of all pairs, then of each source, as of `pair_totals`
    """
    whole, *each = [_figures(one, heldout.documents) for one in sums]
    parts = {
        part.label: replace(evaluation, documents=part.documents)
        for part, evaluation in zip(heldout.parts, each, strict=False)
        if len(heldout.parts) > 1 and evaluation is not None
    }
    assert whole is not None, "a held-out set has something to score"
    return replace(whole, sources=parts)


def _figures(sums: Sequence[float], documents: int) -> Evaluation | None:
    loss, *others, tokens = sums
    figures = pair_figures(others)
    if not figures["pairs"]:
        return None
    return Evaluation(
        loss=loss / figures["pairs"],
        perplexity=None,
        bits_per_byte=None,
        tokens=round(tokens),
        bytes=0,
        documents=documents,
        seconds=0.0,
        pairs=figures,
    )


def divergence_of(
    scored: Sequence[tuple[Tensor, PairTensors]], device: torch.device, *, tells: bool
) -> Tensor:
    """Return how far the model is from its reference on answers of other rows: () fp64, in nats.

    It is max(0, mean of log p − that of the reference) over all processes. Where no answer of
    another row was scored, it is 0. Collective.

    scored: sums and what is asked, as in `Scores`
    tells: whether this process tells the scores of its group
    """
    both = torch.zeros(2, dtype=torch.float64, device=device)
    for sums, asked in scored if tells else ():
        counted = asked.sizes[:, 1] > 0
        apart = sums[:, 1] - asked.reference[:, 1]
        both += torch.stack([torch.where(counted, apart, 0.0).sum(), counted.sum().double()])
    total, count = sum_over_ranks(both)
    mean: Tensor = total / count.clamp(min=1)
    return mean.clamp(min=0)


def measure_divergence(run: Run, forwards: Sequence[MicroBatch]) -> None:
    """Give each micro-batch the divergence of the whole step, by a forward without gradients."""
    with run.engine.evaluating():
        scored = [(run.model(each=True, **one), one["pairs"]) for one in forwards]
    divergence = divergence_of(scored, run.device, tells=run.layout.tells_pairs)
    for one in forwards:
        one["pairs"] = one["pairs"].changed(divergence=divergence)
