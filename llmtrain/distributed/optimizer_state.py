"""The tensors that each optimizer keeps for a parameter: for checkpoints and for the memory plan.

    adamw        exp_avg, exp_avg_sq   fp32, of the parameter's shape
    muon         momentum_buffer       fp32, of the parameter's shape
    adamw_8bit   state1, state2        one byte an element
                 absmax1, absmax2      fp32, the scale of each block of 256 elements
                 qmap1, qmap2          fp32, the number that each of the 256 bytes stands for
                 A small parameter has state1 and state2 in fp32, and nothing else.

`training/optimizer.py` decides which of them updates a parameter, and writes its name into the
optimizer's groups, as `algorithm`. Counts of updates are not among the tensors: a checkpoint stores
one for all parameters.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import assert_never

from llmtrain.errors import Problem
from llmtrain.types import Algorithm, StateSpec, TensorSpec, tensor_bytes

_BLOCK = 256  # elements with one scale in bitsandbytes, and the number of values of a byte
_SMALL = 4096  # elements: bitsandbytes keeps the moments of smaller parameters in fp32


def states(algorithm: Algorithm, shape: tuple[int, ...]) -> StateSpec:
    """Return the tensors that an optimizer keeps for a parameter of this shape, or a part of it."""
    whole = TensorSpec("F32", shape)
    match algorithm:
        case "adamw":
            return {"exp_avg": whole, "exp_avg_sq": whole}
        case "muon":
            return {"momentum_buffer": whole}
        case "adamw_8bit":
            if math.prod(shape) < _SMALL:
                return {"state1": whole, "state2": whole}
            codes, values = TensorSpec("U8", shape), TensorSpec("F32", (_BLOCK,))
            scales = TensorSpec("F32", (-(-math.prod(shape) // _BLOCK),))
            first = {"state1": codes, "qmap1": values, "absmax1": scales}
            return first | {"state2": codes, "qmap2": values, "absmax2": scales}
        case _:
            assert_never(algorithm)


@cache
def state_bytes(algorithm: Algorithm, shape: tuple[int, ...]) -> int:
    """Return the bytes of all these tensors."""
    return sum(tensor_bytes(tensor) for tensor in states(algorithm, shape).values())


def missing_package(algorithm: Algorithm) -> list[Problem]:
    """Return the problem of an optimizer whose package is not installed. It imports nothing."""
    if algorithm != "adamw_8bit" or importlib.util.find_spec("bitsandbytes"):
        return []
    remedy = "pip install 'llmtrain[quantized]'"
    return [Problem("optimizer.name", algorithm, "an installed bitsandbytes", remedy)]
