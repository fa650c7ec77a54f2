import copy
from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.errors import UserError
from llmtrain.model import shape
from llmtrain.model.trainable import freeze

COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
SMALL = small_fields(16, 3, 2, num_key_value_heads=1)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8, "tie_word_embeddings": True},
    "mixtral": SMALL | {"num_local_experts": 3},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2},
}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
IDS = (torch.arange(24).reshape(2, 12) * 7919 + 13) % 64


def build(kind, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**COMMON | MODELS[kind] | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def gradients(model, checkpointing):
    """Of a copy, from the same random state."""
    twin = copy.deepcopy(model)
    shape.apply_checkpointing(twin, checkpointing)
    torch.manual_seed(1)
    twin(IDS, use_cache=False).logits.float().square().sum().backward()
    return {name: p.grad for name, p in twin.named_parameters()}


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function] = self.calls.get(function, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_gradients_are_the_same_to_the_bit(kind, checkpointing):
    model = build(kind, **(WITHOUT_DROPOUT if kind == "gpt2" else {}))
    expected, found = gradients(model, "none"), gradients(model, checkpointing)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert any(one.abs().max() > 0 for one in expected.values())


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(
    ("kind", "dropout"),
    [("gpt2", dict.fromkeys(WITHOUT_DROPOUT, 0.3)), ("llama", {"attention_dropout": 0.3})],
)
def test_dropout_falls_the_same_the_second_time(kind, dropout, checkpointing):
    model = build(kind, **dropout)
    expected, found = gradients(model, "none"), gradients(model, checkpointing)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    still = gradients(build(kind, **dict.fromkeys(dropout, 0.0)), "none")
    assert not all(torch.equal(still[name], one) for name, one in expected.items())


def test_selective_computes_no_matrix_product_and_no_attention_again():
    aten = torch.ops.aten
    dear = (aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)
    calls = {}
    for checkpointing in ("none", "selective", "full"):
        with Counted() as counted:
            gradients(build("llama"), checkpointing)
        calls[checkpointing] = counted.calls
    for operation in dear:
        assert calls["selective"][operation] == calls["none"][operation]
        assert calls["full"][operation] > calls["none"][operation]
    cheap = aten.rsqrt.default
    assert calls["selective"][cheap] > calls["none"][cheap]


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_frozen_parameters_get_no_gradient_and_the_others_the_same(checkpointing):
    model = build("llama")
    freeze(model, ("*embed_tokens*", "*layers.0.*", "*layers.2.mlp*"))
    expected, found = gradients(model, "none"), gradients(model, checkpointing)
    for name, one in expected.items():
        assert (one is None and found[name] is None) or torch.equal(found[name], one)


def test_blocks_below_the_first_trained_parameter_are_not_computed_again():
    model = build("llama")
    freeze(model, ("*embed_tokens*", "*layers.0.*", "*layers.1.*"))
    rsqrt = {}
    for checkpointing in ("none", "full"):
        with Counted() as counted:
            gradients(model, checkpointing)
        rsqrt[checkpointing] = counted.calls[torch.ops.aten.rsqrt.default]
    assert rsqrt["full"] == rsqrt["none"] + 2  # both norms of the last block


def test_none_changes_nothing():
    model = build("llama")
    shape.apply_checkpointing(model, "none")
    assert not any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    shape.apply_checkpointing(model, "full")
    assert any(getattr(one, "gradient_checkpointing", False) for one in model.modules())


def test_a_model_that_does_not_support_it_is_refused():
    config = CONFIG_MAPPING["ctrl"](n_embd=16, n_layer=2, n_head=2, dff=24, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    assert not model.supports_gradient_checkpointing
    with pytest.raises(UserError, match=r"model\.activation_checkpointing = full") as raised:
        shape.apply_checkpointing(model, "full")
    assert "ctrl" in str(raised.value)
