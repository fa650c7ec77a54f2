"""Which blocks of a model each stage of a pipeline has, and which numbers of micro-batches work.

The slowest stage sets the pace of a pipeline, so stages are balanced by the operations of their
blocks and not by the number of these. The last one also has the head: that of a model of
Llama-3-8B's sizes takes as long as 2.4 of its blocks. Each process computes the ranges by itself,
from the same sizes.

With several stages a rank, stage s is on rank s mod p of its pipeline:

    8 blocks, 2 ranks, 2 stages each    rank 0: [0, 2) and [4, 6)    rank 1: [2, 4) and [6, 8)

What a process of a model that is cut holds is again the shape of a model, of which memory and
traffic are planned as of any other.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from llmtrain.types import ModelCut, ModelShape, ParameterShape


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
                (max(slowest, stage_cost), squares + stage_cost**2, (*cuts, end))
                for begin, (slowest, squares, cuts) in best.items()
                if begin < end
                for stage_cost in [cost(stage, begin, end)]
            )
            for end in ends
        }
    return [range(begin, end) for begin, end in pairwise(best[count][2])]


def stages_of(shape: ModelShape, cut: ModelCut, seq_len: int) -> list[range]:
    """Return the blocks of each stage of a model, by the operations of a token's forward."""
    costs = _costs(shape, seq_len)
    return blocks_of_stages(costs, 0.0, 2.0 * shape.head, cut.pipeline * cut.stages)


def _costs(shape: ModelShape, seq_len: int) -> list[float]:
    """Return the operations of each block for a token's forward."""
    costs = [2.0 * shape.attention * seq_len / max(shape.blocks, 1)] * shape.blocks
    for one in shape.parameters:
        if one.block is not None:
            costs[one.block] += 2.0 * one.used * math.prod(one.shape)
    return costs


def slowest_share(shape: ModelShape, cut: ModelCut, seq_len: int) -> float:
    """Return the largest share of a model's operations that a process of a pipeline has."""
    costs, head = _costs(shape, seq_len), 2.0 * shape.head
    stages = [sum(costs[n] for n in one) for one in stages_of(shape, cut, seq_len)]
    stages[-1] += head
    places = range(cut.pipeline)
    return max(sum(stages[place :: cut.pipeline]) for place in places) / (sum(costs) + head)


def can_fill(micro_batches: int, cut: ModelCut, schedule: str) -> bool:
    """Whether a schedule works with so many micro-batches a step: not with fewer than stages.

    schedule: as `distributed.pipeline_schedule`. GPipe works with any number. torch's interleaved
    schedule makes rounds of about as many micro-batches as there are ranks, all of the same number.
    """
    if cut.pipeline == 1 or schedule == "gpipe":
        return True
    rounds = micro_batches // cut.pipeline
    return rounds > 0 and (schedule != "interleaved" or micro_batches % rounds == 0)


def micro_batch_sizes(rows: int, most: int, cut: ModelCut, schedule: str) -> list[int]:
    """Return the sizes of a micro-batch, at most `most`, that a schedule works with; 1 always is.

    rows: of each process in a step, which a size divides
    """
    return [
        size
        for size in range(min(rows, most), 0, -1)
        if rows % size == 0 and (size == 1 or can_fill(rows // size, cut, schedule))
    ]


def held_passes(rank: int, micro_batches: int, cut: ModelCut, schedule: str) -> int:
    """Return the most forwards of a stage that a process of a pipeline keeps for their backwards.

    rank: of the process in its pipeline
    micro_batches: of a step
    schedule: as `distributed.pipeline_schedule`; GPipe runs all forwards before the first backward
    """
    if cut.pipeline == 1:
        return 1
    if schedule == "gpipe":
        return micro_batches
    after = cut.pipeline - rank
    if schedule == "1f1b":
        return min(micro_batches, after)
    return min(micro_batches * cut.stages, (cut.stages - 1) * cut.pipeline + 2 * after - 1)


def parts_of(shape: ModelShape, cut: ModelCut, seq_len: int) -> list[ModelShape]:
    """Return what a process of each place in a pipeline holds of a model that is cut.

    Of a matrix that tensor parallelism cuts it is the largest part. The first place has what comes
    before the blocks, the last one what comes behind them, and both have a matrix that is tied.
    """
    if cut.weights == 1:
        return [shape]
    stages = stages_of(shape, cut, seq_len)
    return [
        _part(shape, cut, place, [*(n for one in stages[place :: cut.pipeline] for n in one)])
        for place in range(cut.pipeline)
    ]


def _part(shape: ModelShape, cut: ModelCut, place: int, numbers: Sequence[int]) -> ModelShape:
    """Return the part of a model that has the blocks of these numbers."""

    def largest(one: ParameterShape) -> ParameterShape:
        sizes = [*one.shape]
        if one.axis is not None:
            sizes[one.axis] = -(-sizes[one.axis] // cut.tensor)
        return replace(one, shape=tuple(sizes))

    first, last = place == 0, place == cut.pipeline - 1
    begin = next((n for n, one in enumerate(shape.parameters) if one.block is not None), 0)
    held = [one for one in shape.parameters if one.block in numbers]
    if first:
        held = [*shape.parameters[:begin], *held]
    if last:
        if shape.tied and not first:
            held.append(shape.parameters[0])
        held += [one for one in shape.parameters[begin:] if one.block is None]
    cut_input = any(one.axis == 0 for one in shape.parameters[:begin])
    cut_head = any(one.axis == 0 for one in shape.parameters[begin:] if one.block is None)
    rows = cut.tensor if cut_head or (shape.tied and cut_input) else 1
    return replace(
        shape,
        parameters=tuple(map(largest, held)),
        vocabulary=-(-shape.vocabulary // rows),
        embedding=-(-shape.embedding // (cut.tensor if cut_input else 1)) if first else 0,
        head=-(-shape.head // rows) if last else 0,
        tied=shape.tied and first and last,
        blocks=len(numbers),
    )
