"""The decisions of a step, from its reduced vector: how far to clip, and whether to update at all.

Where operations are queued, they are tensors of shape (), for which nobody waits. Elsewhere they
are numbers: an operation on a tensor of one element takes as long as thirty on numbers, and there
are twenty of them in a step. Both have the same bits.
"""

from __future__ import annotations

import math
from ctypes import c_float

import torch
from torch import Tensor

from llmtrain.types import SLOTS, StepVector


def queues(device: torch.device) -> bool:
    """Whether operations on this device are queued, so that a read would wait for them."""
    return device.type == "cuda"


def norm(sums: StepVector) -> Tensor | float:
    """Return the gradient norm before clipping, rounded to fp32: () fp32, or a number."""
    if queues(sums.data.device):
        return sums["squares"].sqrt().float()
    return _fp32(math.sqrt(_value(sums, "squares")))


def clip_factor(sums: StepVector, max_norm: float) -> Tensor | float:
    """Return min(1, max_norm / (norm + 1e-6)), computed in fp32 as torch's clip_grad_norm_ does.

    If the update is refused, it may be anything.
    """
    before = norm(sums)
    if isinstance(before, Tensor):
        return (max_norm / (before + 1e-6)).clamp(max=1.0)
    # An operation in fp64 whose result is rounded is one in fp32. torch divides by the reciprocal.
    return min(_fp32(_fp32(1.0 / _fp32(before + _LEAST)) * _fp32(max_norm)), 1.0)


def refused(sums: StepVector) -> Tensor | bool:
    """Whether the update of this step must not be applied: () bool, or a number's bool."""
    before = norm(sums)
    if isinstance(before, Tensor):
        failed = sums["not_finite"] + sums["data_failed"]
        # A comparison with NaN is false, so these hold only for a finite norm.
        return ~((failed == 0) & (sums.tokens > 0) & (before < math.inf))
    failed_on = _value(sums, "not_finite") + _value(sums, "data_failed")
    return failed_on > 0 or not sums.has_tokens or not math.isfinite(before)


def _value(sums: StepVector, slot: str) -> float:
    return sums.values[SLOTS.index(slot)]


def _fp32(number: float) -> float:
    """Round to fp32, or to infinity."""
    return c_float(number).value


_LEAST = _fp32(1e-6)
