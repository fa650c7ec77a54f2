import itertools

import numpy as np
import pytest
from helpers.on_paper import llama

from llmtrain.distributed.plan.balance import (
    blocks_of_stages,
    can_fill,
    parts_of,
    slowest_share,
    stages_of,
)
from llmtrain.types import ModelCut, ModelShape, ParameterShape


def slowest(costs, first, last, ranges):
    sums = [sum(costs[number] for number in one) for one in ranges]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def test_blocks_that_are_alike_are_shared_out_evenly():
    assert blocks_of_stages([1.0] * 8, 0, 0, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert blocks_of_stages([1.0] * 4, 0, 0, 1) == [range(4)]


def test_the_last_stage_has_fewer_blocks_where_the_head_is_dear():
    assert blocks_of_stages([1.0] * 32, 0, 2.4, 4)[-1] == range(26, 32)
    assert blocks_of_stages([1.0] * 5, 0, 1.0, 2) == [range(3), range(3, 5)]


def test_every_stage_has_a_block_however_dear_the_head_is():
    assert blocks_of_stages([1.0] * 3, 0, 100.0, 3) == [range(1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_division_has_a_faster_slowest_stage(seed):
    *costs, first, last = np.random.default_rng(seed).integers(1, 9, 9).tolist()
    stages = 3
    found = blocks_of_stages(costs, first, last, stages)
    every = (
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
        for cuts in itertools.combinations(range(1, 7), stages - 1)
    )
    best = min(slowest(costs, first, last, ranges) for ranges in every)
    assert slowest(costs, first, last, found) == best


def test_a_block_counts_by_what_its_tokens_are_multiplied_with():
    shapes = [(50, 4), (10, 10), (10, 10), (100, 10), (10,), (50, 4)]
    blocks, used = [None, 0, 1, 2, 2, None], [0.0, 1.0, 1.0, 0.1, 0.0, 1.0]
    parts = tuple(
        ParameterShape(shape, True, True, block, used=share)
        for shape, block, share in zip(shapes, blocks, used, strict=True)
    )
    model = ModelShape(parts, 10, 50, 200, 200, False, 3, "Block", 0, 0)
    # Of a block of experts a tenth is used, so the three are alike; the head is two of them.
    assert stages_of(model, ModelCut(pipeline=2), 8) == [range(2), range(2, 3)]
    assert slowest_share(model, ModelCut(pipeline=2), 8) == pytest.approx(3 / 5)


def test_of_a_matrix_with_an_odd_row_more_the_larger_part_is_planned_and_a_tied_one_once():
    tied = llama(64, 160, 4, 4, 4, 511, tied=True)
    (part,) = parts_of(tied, ModelCut(tensor=2), 128)
    assert part.parameters[0].shape == (256, 64)
    assert len(part.parameters) == len(tied.parameters)


def test_how_many_micro_batches_a_schedule_takes():
    two, four = ModelCut(pipeline=2), ModelCut(pipeline=4, stages=2)
    assert [can_fill(m, two, "1f1b") for m in (1, 2, 3)] == [False, True, True]
    assert can_fill(1, two, "gpipe")
    assert can_fill(1, ModelCut(), "1f1b")
    assert [m for m in range(1, 13) if can_fill(m, four, "interleaved")] == [4, 5, 6, 7, 8, 10, 12]
