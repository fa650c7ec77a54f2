"""Four-bit weights of a frozen base (qlora): nf4 with double quantization, by bitsandbytes.

The model is built as any other; then its linear layers are replaced. Their weights are still whole
numbers of 16 bits: bitsandbytes quantizes each when it is moved to its device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from llmtrain.errors import Problem


def missing(*, cpu: bool) -> Iterator[Problem]:
    """Yield what keeps `adapter.kind: qlora` from working on this machine."""
    key, kind = "adapter.kind", "qlora"
    if cpu:
        yield Problem(key, kind, "a CUDA device for weights in four bits", "adapter.kind=lora")
    elif importlib.util.find_spec("bitsandbytes") is None:
        expected = "bitsandbytes, which is not here"
        yield Problem(
            key, kind, expected, "pip install 'llmtrain[quantized]', or adapter.kind=lora"
        )


def layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers whose weights are held in four bits: linear, not the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the linear layers by layers of four bits, in place.

    dtype: of the forward, from which the weights are quantized
    """
    import bitsandbytes as bnb

    for name in layers(model):
        dense = model.get_submodule(name)
        # Without a dtype for now, or peft would give its matrices that dtype.
        four = bnb.nn.Linear4bit(
            dense.in_features,
            dense.out_features,
            bias=dense.bias is not None,
            compute_dtype=None,
            quant_type="nf4",
            device=torch.device("meta"),
        )
        weight = dense.weight.detach().to(dtype)
        four.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=four)
        if dense.bias is not None:
            four.bias = nn.Parameter(dense.bias.detach(), requires_grad=False)
        model.set_submodule(name, four)


@contextmanager
def as_quantized(model: Any) -> Iterator[None]:
    """Mark a model with four-bit layers in this context, as peft expects it."""
    if not any(type(module).__name__ == "Linear4bit" for module in model.modules()):
        yield
        return
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        del model.is_loaded_in_4bit


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the four-bit layers of a model compute in `dtype`."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype, module.compute_type_is_set = dtype, True


def is_quantized(weight: nn.Parameter) -> bool:
    """Whether a parameter holds four-bit weights, now or once it is on its device."""
    return type(weight).__name__ == "Params4bit"
