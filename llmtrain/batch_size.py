"""How many blocks a step has, where this is a function of the step's number.

size 4 from step 1, 8 from step 4     step     1       2        3        4         5
                                      blocks   0…3     4…7      8…11     12…19     20…27
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The blocks of each step of a run, over all ranks. Steps are numbered from 1.

    sizes: (first step, blocks of a step), in the order of the steps; the first begins with step 1
    """

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, blocks: int) -> BatchSize:
        """Return the size of a run in which all steps have as many blocks."""
        return cls(((1, blocks),))

    @property
    def grows(self) -> bool:
        """Whether steps have different numbers of blocks."""
        return len(self.sizes) > 1

    @property
    def unit(self) -> int:
        """The largest number that divides the blocks of every step."""
        return math.gcd(*(size for _, size in self.sizes))

    @property
    def largest(self) -> int:
        """The most blocks of a step."""
        return max(size for _, size in self.sizes)

    def of(self, step: int) -> int:
        """Return the blocks of a step."""
        return next(size for first, size in reversed(self.sizes) if first <= max(step, 1))

    def until(self, step: int) -> int:
        """Return the blocks of all steps up to and including this one; of step 0, 0."""
        ends = (*(first for first, _ in self.sizes[1:]), step + 1)
        parts = zip(self.sizes, ends, strict=True)
        return sum(size * max(0, min(end, step + 1) - first) for (first, size), end in parts)

    def steps(self, blocks: float) -> float:
        """Return how many steps have these blocks, a part of a step among them."""
        begun = (one for one in reversed(self.sizes) if blocks >= self.until(one[0] - 1))
        first, size = next(begun, self.sizes[0])
        return first - 1 + (blocks - self.until(first - 1)) / size

    def later(self, step: int) -> str:
        """Return in words which other sizes come behind a step; "" if there are none."""
        return "".join(f"; {size:,} from step {at:,}" for at, size in self.sizes if at > step)
