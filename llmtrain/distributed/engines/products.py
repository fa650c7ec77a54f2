"""How fast this machine's CPU multiplies in fp32 and in bf16, found by timing it.

Its flags do not tell: of two CPUs with AVX512-BF16 and without AMX, one multiplied bf16 four times
as fast as fp32, the other at 0.6 of the speed of fp32. A CPU that only emulates bf16 is 70 times as
slow in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

_ROWS, _WIDTH = 1024, 768  # a product as in a small model
_FEW_ROWS = 64
_PRODUCTS = 5  # of which the fastest counts
_HOPELESS = 0.25  # bf16 this much slower than fp32 in a small product is not tried further
_WORTH = 1.3  # bf16 has casts besides its products


@dataclass(frozen=True, slots=True)
class Rates:
    """GFLOP/s of a product in each precision."""

    fp32: float
    bf16: float

    @property
    def faster(self) -> str:
        """The precision that a run on this CPU is faster in, bf16 or fp32."""
        return "bf16" if self.bf16 >= _WORTH * self.fp32 else "fp32"

    def __str__(self) -> str:
        return f"fp32 {self.fp32:,.0f} and bf16 {self.bf16:,.0f} GFLOP/s"


def cpu_rates() -> Rates:
    """Time products in both precisions, with the threads that torch has now; takes about 0.2 s."""
    fp32 = _rate(torch.float32, 0.0)
    return Rates(fp32, _rate(torch.bfloat16, _HOPELESS * fp32))


def _rate(dtype: torch.dtype, hopeless: float) -> float:
    """Return the rate of the fastest product; that of a small one if it is below `hopeless`.

    The first product of a size is slower, because its kernel is prepared then.
    """
    few = max(_timed(dtype, _FEW_ROWS) for _ in range(2))
    if few < hopeless:
        return few
    return max(_timed(dtype, _ROWS) for _ in range(1 + _PRODUCTS))


def _timed(dtype: torch.dtype, rows: int) -> float:
    """Return the GFLOP/s of one product of (rows, 768) and (768, 768)."""
    inputs = torch.ones(rows, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    begun = time.perf_counter()
    linear(inputs, weight)
    return 2 * rows * _WIDTH**2 / (time.perf_counter() - begun) / 1e9
