"""Weights as a run with `adapter.kind: qlora` holds them: rounded to four bits.

Its adapter corrects these weights, not those in the files. So they are rounded here, too, and kept
as ordinary numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    from torch import Tensor

_KIND = "qlora"


def are_held(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's run holds its base in four bits. state: its `trainer_state.json`.

    Raises UserError if it does, and bitsandbytes, which rounds them, is not installed.
    """
    if (state.get("config") or {}).get("adapter.kind") != _KIND:
        return False
    if importlib.util.find_spec("bitsandbytes") is None:
        expected, remedy = "an installed bitsandbytes", "pip install 'llmtrain[quantized]'"
        raise UserError(Problem("adapter.kind", _KIND, expected, remedy))
    return True


def round_layers(model: Any, state: Mapping[str, Any]) -> None:
    """Round the weights of a model in place, as `round_weight` does."""
    from llmtrain.model.trainable.quantized import layers

    for name in layers(model):
        weight = model.get_submodule(name).weight
        weight.data = round_weight(weight.data, state)


def round_weight(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return a weight in fp32, rounded as in the run of a checkpoint. state: as for `are_held`."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    precision = ((state.get("auto") or {}).get("run") or {}).get("precision")
    before = weight.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    packed, how = quantize_4bit(before, quant_type="nf4", compress_statistics=True)
    found: Tensor = dequantize_4bit(packed, how).float()
    return found
