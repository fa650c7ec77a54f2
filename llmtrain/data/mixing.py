"""Decides which source each block comes from: a pure function of g, without state to resume.

g times the golden ratio, modulo 1, is spread evenly over [0, 1) in any stretch of blocks. This
interval is cut into parts, one for each source, as long as the source's share. In any 32 blocks in
a row, each source then has its share to within 2 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return each weight's share of 2^32 as an integer, at least 1."""
    total = sum(weights)
    return tuple(max(1, round(2**32 * weight / total)) for weight in weights)


def source_of(g: int, integers: Sequence[int]) -> int:
    """Return the source of block g.

    integers: `shares(weights)`, with 0 for sources that have ended
    """
    x = (((g * _GOLDEN) & _MASK) * sum(integers)) >> 64
    for index, share in enumerate(integers):
        if x < share:
            return index
        x -= share
    raise AssertionError("x is below the sum of all shares")
