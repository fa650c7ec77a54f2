"""Four-bit layers on a CPU."""

import importlib.util
from typing import Any

import torch
from helpers.rings import needs
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import AdapterConfig
from llmtrain.distributed.engines import state
from llmtrain.model import trainable


def llama():
    torch.manual_seed(4)
    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)
    )


def logits(model):
    return model(torch.arange(12)[None] * 5 % 61, use_cache=False).logits


@needs("bitsandbytes")
def test_adapters_on_four_bits_are_adapters_on_the_weights_that_these_stand_for():
    import bitsandbytes as bnb

    model, dense = llama(), llama()
    trainable.attach(model, AdapterConfig(kind="qlora", r=4), dtype=torch.float32)
    assert not hasattr(model, "is_loaded_in_4bit")
    model.to("cpu")  # which quantizes, as any move to a device does
    held = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(held) == 7
    for name in trainable.adapted_layers(model):
        four = model.get_submodule(name).base_layer
        assert four.weight.dtype == torch.uint8
        assert four.weight.quant_state.nested
        exact = bnb.functional.dequantize_4bit(four.weight.data, four.weight.quant_state)
        weight = dense.get_submodule(name).weight
        assert 0 < (exact - weight).abs().max() < 0.2 * weight.abs().max()
        weight.data.copy_(exact)
    assert torch.allclose(logits(model), logits(dense), atol=1e-5)
    trained = state.named_parameters(model)
    assert {one.dtype for one in trained.values()} == {torch.float32}
    logits(model).sum().backward()
    assert all(one.grad is not None for one in trained.values())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


def test_the_layers_in_four_bits_are_linear_and_not_the_head():
    assert {name.rpartition(".")[2] for name in trainable.linear_layers(llama())} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_what_is_missing_for_four_bits_has_a_remedy(monkeypatch):
    (problem,) = trainable.missing_for_four_bits(cpu=True)
    assert (problem.key, problem.value, problem.remedy) == (
        "adapter.kind", "qlora", "adapter.kind=lora",
    )  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (problem,) = trainable.missing_for_four_bits(cpu=False)
    assert "llmtrain[quantized]" in problem.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    assert list(trainable.missing_for_four_bits(cpu=False)) == []
