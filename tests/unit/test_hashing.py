"""The order of a seed is a contract: these values may never change."""

import numpy as np
import pytest
import xxhash

from llmtrain.hashing import mix, permutation, splitmix64

MASK = (1 << 64) - 1


def test_splitmix64_gives_the_published_values():
    assert [splitmix64(x) for x in (0, 1, 2)] == [
        0xE220A8397B1DCDAF,
        0x910A2DEC89025CC1,
        0x975835DE1C9756CE,
    ]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0,), 0xE220A8397B1DCDAF),
        ((1, 2, 3), 0xD0734750FDE362B3),
        ((42, 1, 0, 0), 0x3E4A12D70B0AF178),
    ],
)
def test_mix_gives_the_golden_keys(numbers, expected):
    assert mix(*numbers) == expected


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (10, (42, 1, 0, 0), [9, 6, 2, 0, 3, 5, 7, 4, 1, 8]),
        (10, (42, 1, 0, 1), [6, 4, 7, 2, 3, 9, 0, 5, 1, 8]),
        (8, (0, 2, 0, 0, 7), [2, 6, 0, 3, 5, 7, 1, 4]),
    ],
)
def test_small_permutations_are_the_golden_ones(n, key, expected):
    assert permutation(n, mix(*key)).tolist() == expected


def test_a_permutation_of_a_million_is_the_golden_one():
    order = permutation(1_000_000, mix(42, 1, 0, 0))
    assert order[:5].tolist() == [324723, 850990, 521338, 938197, 481527]
    assert order[-1] == 695834
    products = order.astype(object) * np.arange(1, 1_000_001)
    assert sum(int(product) % 1_000_003 for product in products) == 499_870_469_545


@pytest.mark.parametrize("n", [0, 1, 2, 257])
def test_a_permutation_holds_each_item_once(n):
    assert sorted(permutation(n, 7).tolist()) == list(range(n))


def test_a_permutation_sorts_by_the_scalar_hash():
    key = MASK - 3  # so that the sum wraps
    expected = sorted(range(50), key=lambda i: splitmix64((i + key) & MASK))
    assert permutation(50, key).tolist() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 0x7ECD2E572C949F74), ("Anarchism", 0xF95754A103EB7B50), ("", 0x2D06800538D394C2)],
)
def test_xxh3_gives_the_golden_values(text, expected):
    assert xxhash.xxh3_64_intdigest(text.encode(), seed=0) == expected
