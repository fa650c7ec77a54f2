"""Which blocks of a model each stage of a pipeline has, and which numbers of micro-batches work.

The slowest stage sets the pace of a pipeline, so stages are balanced by the operations of their
blocks and not by the number of these. The last one also has the head: that of a model of
Llama-3-8B's sizes takes as long as 2.4 of its blocks. Each process computes the ranges by itself,
from the same sizes.

With several stages a rank, stage s is on rank s mod p of its pipeline:

    8 blocks, 2 ranks, 2 stages each    rank 0: [0, 2) and [4, 6)    rank 1: [2, 4) and [6, 8)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from llmtrain.types import ModelCut, ModelShape


def blocks_of_stages(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Return the blocks of each stage, in order, so that the slowest stage is as fast as possible.

    costs: of each block; at least as many as there are stages, since none is without a block.
    first, last: what the first and the last stage take in addition.

    Of equally good divisions it is one whose other stages are alike, too.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        ends = first * (stage == 0) + last * (stage == stages - 1)
        return sums[end] - sums[begin] + ends

    # best[end]: of the stages so far, which have the blocks before `end`: their slowest, the sum of
    # their squares, and where each ends.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        ends = range(stage + 1, count - (stages - 1 - stage) + 1)
        best = {
            end: min(
                (max(slowest, own), squares + own**2, (*cuts, end))
                for begin, (slowest, squares, cuts) in best.items()
                if begin < end
                for own in [cost(stage, begin, end)]
            )
            for end in ends
        }
    return [range(begin, end) for begin, end in pairwise(best[count][2])]


def stages_of(shape: ModelShape, cut: ModelCut, seq_len: int) -> list[range]:
    """Return the blocks of each stage of a model, by the operations of a token's forward."""
    costs = [2.0 * shape.attention * seq_len / max(shape.blocks, 1)] * shape.blocks
    for one in shape.parameters:
        if one.block is not None:
            costs[one.block] += 2.0 * one.used * math.prod(one.shape)
    return blocks_of_stages(costs, 0.0, 2.0 * shape.head, cut.pipeline * cut.stages)


def can_fill(micro_batches: int, cut: ModelCut, schedule: str) -> bool:
    """Whether a schedule works with so many micro-batches a step: not with fewer than stages.

    schedule: as `distributed.pipeline_schedule`. GPipe works with any number. torch's interleaved
    schedule makes rounds of about as many micro-batches as there are ranks, all of the same number.
    """
    if cut.pipeline == 1 or schedule == "gpipe":
        return True
    rounds = micro_batches // cut.pipeline
    return rounds > 0 and (schedule != "interleaved" or micro_batches % rounds == 0)
