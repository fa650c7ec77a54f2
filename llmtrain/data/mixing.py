"""Decides which source feeds block g: a pure function of g, without state to resume.

g · the golden ratio modulo 1 is spread evenly over [0, 1) in every stretch of blocks; cut into
parts of the sources' shares, any 32 blocks in a row hold each share to within 2 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return weights as integers of 32 bits, at least 1."""
    total = sum(weights)
    return tuple(max(1, round(2**32 * weight / total)) for weight in weights)


def source_of(g: int, integers: Sequence[int]) -> int:
    """Return the source of block g, given `shares(weights)`, with 0 for sources that have ended."""
    x = (((g * _GOLDEN) & _MASK) * sum(integers)) >> 64
    for index, share in enumerate(integers):
        if x < share:
            return index
        x -= share
    raise AssertionError("x is below the sum of all shares")
