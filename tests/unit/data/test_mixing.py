import pytest

from llmtrain.data.lanes import shares, source_of


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (1, 1, 1), (0.9, 0.1), (5, 3, 1, 0.5)])
def test_any_stretch_of_blocks_holds_each_sources_share(weights):
    integers = shares(weights)
    drawn = [source_of(g, integers) for g in range(20_000)]
    for length, slack in ((32, 2), (1024, 2.8), (20_000, 3.1)):
        for start in range(0, len(drawn) - length + 1, 97):
            part = drawn[start : start + length]
            for k, weight in enumerate(weights):
                expected = length * weight / sum(weights)
                assert abs(part.count(k) - expected) <= slack


def test_one_source_feeds_every_block():
    assert {source_of(g, shares((0.3,))) for g in range(100)} == {0}


def test_the_choice_is_a_contract():
    assert [source_of(g, shares((2, 1))) for g in range(12)] == [0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]


def test_a_tiny_weight_is_never_lost():
    assert shares((1e-12, 1.0)) == (1, 2**32)


def test_sources_that_have_ended_leave_their_blocks_to_the_others_by_weight():
    left = list(shares((2, 1, 1)))
    left[1] = 0
    drawn = [source_of(g, left) for g in range(3000)]
    assert set(drawn) == {0, 2}
    assert abs(drawn.count(0) - 2000) <= 3
    assert {source_of(g, [0, 0, 7]) for g in range(100)} == {2}
