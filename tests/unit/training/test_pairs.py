"""What the loss of pairs is computed from, and how far a model is from its reference."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmtrain.config.schema import PreferenceConfig
from llmtrain.pairs import Pairs, PairTensors
from llmtrain.training.pairs import (
    Scores,
    divergence_of,
    in_halves,
    pair_result,
    pair_tensors,
    pair_totals,
)
from llmtrain.types import NOT_TRAINED

CPU = torch.device("cpu")
# Two blocks of 12 positions: pairs of lengths (3, 4), (2, 2), then (5, 6).
BORDERS = [(0, 3, 7), (7, 9, 11), (0, 5, 11)]
ROWS = [0, 0, 1]


def pairs():
    count = len(ROWS)
    keys, good = np.zeros((count, 2), np.uint64), np.ones(count, bool)
    return Pairs(np.array(ROWS), np.array(BORDERS), keys, good)


def labels():
    """Trained is what is behind the first id of each half, but for one prompt of three ids."""
    found = np.full((2, 12), NOT_TRAINED)
    for row, (first, second, stop) in zip(ROWS, BORDERS, strict=True):
        found[row, first : second - 1] = 7
        found[row, second : stop - 1] = 7
    found[1, 0:2] = NOT_TRAINED
    return found


def tensors(own=slice(None), loss="dpo"):
    known = np.arange(6.0).reshape(3, 2)
    return pair_tensors(
        pairs(), labels(), own, known, PreferenceConfig(loss=loss), CPU, halves=False
    )


def test_lengths_are_the_trained_positions_of_each_half():
    asked = tensors()
    assert asked.lengths.tolist() == [2, 3, 1, 1, 2, 5]
    assert asked.sizes.tolist() == [[2, 3], [1, 1], [2, 5]]
    assert asked.reference.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert int(asked.lengths.sum()) == int((labels() != NOT_TRAINED).sum())


def test_parts_of_rows_have_their_own_lengths_and_the_sizes_of_the_whole():
    left, right = tensors(slice(0, 6)), tensors(slice(6, 12))
    assert (left.lengths + right.lengths).tolist() == tensors().lengths.tolist()
    assert left.lengths.tolist() == [2, 3, 0, 0, 2, 1]
    assert left.sizes.tolist() == right.sizes.tolist() == tensors().sizes.tolist()


def test_a_score_is_read_at_the_last_token_of_each_half():
    last = tensors(loss="reward").last
    assert last is not None
    expected = [
        12 * row + stop - 1
        for row, (_, second, end) in zip(ROWS, BORDERS, strict=True)
        for stop in (second, end)
    ]
    assert last.tolist() == expected


def test_both_halves_of_a_padded_block_are_rows():
    rows = in_halves(np.arange(24).reshape(2, 12))
    assert rows.shape == (4, 6)
    assert rows[:, 0].tolist() == [0, 6, 12, 18]
    wanted = np.full((4, 6), NOT_TRAINED)
    wanted[0, :2], wanted[1, 1:5], wanted[2, :1], wanted[3, :3] = 1, 1, 1, 1
    two = Pairs(
        np.array([0, 1]), np.array([(0, 6, 12)] * 2), np.zeros((2, 2), np.uint64), np.ones(2, bool)
    )
    how = (slice(None), np.zeros((2, 2)), PreferenceConfig(loss="dpo"), CPU)
    asked = pair_tensors(two, wanted, *how, halves=True)
    assert asked.lengths.tolist() == [2, 4, 1, 3]


def scored(numbers, reference, sizes):
    asked = PairTensors(
        lengths=torch.empty(0, dtype=torch.int64),
        sizes=torch.tensor(sizes, dtype=torch.float64),
        reference=torch.tensor(reference, dtype=torch.float64),
    )
    return torch.tensor(numbers, dtype=torch.float64), asked


def test_the_divergence_is_the_mean_over_answers_of_other_rows():
    """Over all micro-batches; a row without another answer has no part in it."""
    one = scored([[-9.0, -3.0], [-1.0, -5.0]], [[0.0, -4.0], [0.0, -5.5]], [[2, 3], [1, 4]])
    two = scored([[-9.0, -100.0], [-1.0, -2.0]], [[0.0, 0.0], [0.0, -4.0]], [[2, 0], [1, 4]])
    expected = ((-3 + 4) + (-5 + 5.5) + (-2 + 4)) / 3
    assert float(divergence_of([one, two], CPU, tells=True)) == pytest.approx(expected, abs=1e-15)
    assert float(divergence_of([one, two], CPU, tells=False)) == 0.0  # another process tells it


def test_a_divergence_below_zero_is_zero():
    below = scored([[0.0, -9.0]], [[0.0, -4.0]], [[1, 1]])
    assert float(divergence_of([below], CPU, tells=True)) == 0.0
    assert float(divergence_of([], CPU, tells=True)) == 0.0


def test_an_evaluation_is_a_mean_over_pairs_that_one_process_of_a_group_tells():
    """By β = 0.5 the first pair is 0.5 right, the second 2 wrong."""
    sums, asked = scored([[-3.0, -5.0], [-6.0, -2.0]], [[-4.0, -5.0], [-6.0, -6.0]], [[2, 3]] * 2)
    given = [Scores(sums, asked, torch.tensor([0, 1]))]
    how = (PreferenceConfig(loss="dpo", beta=0.5), CPU, 2)
    parts = [SimpleNamespace(label=name, documents=1) for name in "ab"]
    totals = pair_totals(given, *how, tells=True).tolist()
    found = pair_result(totals, SimpleNamespace(documents=2, parts=parts))
    losses = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(2.0))]
    assert found.loss == pytest.approx(sum(losses) / 2)
    assert [found.sources[name].loss for name in "ab"] == pytest.approx(losses)
    assert (found.tokens, found.pairs["accuracy"]) == (10, 0.5)
    assert found.pairs["margin"] == pytest.approx((0.5 - 2.0) / 2)
    assert not pair_totals(given, *how, tells=False).any()


def test_pairs_go_with_their_blocks_into_a_micro_batch_and_into_another_order():
    part, turned = pairs().of_blocks(1, 2), pairs().of_rows(np.array([2, 0, 1]))
    assert (part.rows.tolist(), part.borders.tolist()) == ([0], [list(BORDERS[2])])
    assert turned.rows.tolist() == [1, 1, 2]
    turned = pairs().of_rows(np.array([1, 0]))
    assert turned.rows.tolist() == [0, 1, 1]
    assert turned.borders.tolist() == [list(BORDERS[n]) for n in (2, 0, 1)]
