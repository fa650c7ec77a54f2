"""What a run with four-bit weights holds, against the layer that computes with them."""

import importlib.util

import pytest
import torch
from helpers.rings import needs

from llmtrain.errors import UserError
from llmtrain.tools.use import target

QLORA = {"config": {"adapter.kind": "qlora"}}


def test_only_the_base_of_qlora_is_held_in_four_bits(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert target.are_held(QLORA)
    assert not target.are_held({"config": {"adapter.kind": "lora"}})
    assert not target.are_held({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llmtrain\[quantized\]"):
        target.are_held(QLORA)


@needs("bitsandbytes")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_rounded_weights_compute_what_the_four_bit_layer_does(precision, bound):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 128, bias=False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    packed = bnb.nn.Linear4bit(64, 128, bias=False, compute_dtype=dtype, quant_type="nf4")
    weight = dense.weight.detach().to(dtype)
    packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    x = torch.randn(3, 64)
    expected = packed.to("cpu")(x.to(dtype)).float()
    rounded = target.round_weight(
        dense.weight.detach(), {"auto": {"run": {"precision": precision}}}
    )
    assert float((x @ rounded.T - expected).abs().max()) <= bound
    assert float((rounded - dense.weight.detach()).abs().max()) > 1e-3
