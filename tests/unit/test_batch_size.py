"""The blocks of a step as a function of its number, compared with counting them one by one."""

import pytest
from hypothesis import given, strategies as st

from llmtrain.batch_size import BatchSize

GROWING = BatchSize(((1, 4), (4, 8), (6, 24)))
sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=5).map(
    lambda found: BatchSize(
        tuple((1 + sum(gap for gap, _ in found[:n]), size) for n, (_, size) in enumerate(found))
    )
)


def test_a_step_has_the_size_that_began_last():
    assert [GROWING.of(step) for step in range(1, 9)] == [4, 4, 4, 8, 8, 24, 24, 24]
    assert GROWING.of(0) == 4  # of a run that has made no step
    assert BatchSize.constant(7) == BatchSize(((1, 7),))


def test_what_all_sizes_are_multiples_of_and_the_largest():
    assert (GROWING.unit, GROWING.largest) == (4, 24)
    assert BatchSize(((1, 6), (3, 4))).unit == 2


def test_sizes_to_come_are_told():
    assert GROWING.later(1) == "; 8 from step 4; 24 from step 6"
    assert GROWING.later(4) == "; 24 from step 6"
    assert BatchSize.constant(7).later(1) == ""


@given(sizes, st.integers(0, 60))
def test_blocks_are_those_of_each_step_added_up(batch, step):
    assert batch.until(step) == sum(batch.of(number) for number in range(1, step + 1))


@given(sizes, st.integers(0, 60))
def test_steps_are_found_again_from_their_blocks(batch, step):
    assert batch.steps(batch.until(step)) == pytest.approx(step, abs=1e-9)
    half = (batch.until(step) + batch.until(step + 1)) / 2
    assert batch.steps(half) == pytest.approx(step + 0.5)
