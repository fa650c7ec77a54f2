"""Which models can be cut over processes, and which refusal says why another cannot."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from llmtrain.model import tensor
from llmtrain.model.shape import on_meta
from llmtrain.types import Cut, split

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
}


def model(kind, **changes):
    return on_meta(AutoConfig.for_model(kind, **SHAPE | changes))


def refused(kind, size, **changes):
    return [(one.key, one.expected) for one in tensor.refusals(model(kind, **changes), size)]


# Model type → the first layer of its feed-forward part.
KINDS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "cohere"), "gate_proj"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "olmo2"), "gate_proj"),
    "phi": "fc1",
}


@pytest.mark.parametrize(("kind", "layer"), KINDS.items())
def test_models_whose_plan_is_known_are_cut_over_two_and_four(kind, layer):
    assert refused(kind, 2) == refused(kind, 4) == []
    styles = tensor.styles_of(model(kind))
    assert styles[f"model.layers.1.mlp.{layer}"] == "colwise"
    assert "model.norm" not in styles


@pytest.mark.parametrize(
    ("kind", "size", "changes", "key", "words"),
    [
        ("llama", 8, {}, tensor.KEY, "a divisor of the model's 4 key and value heads"),
        ("llama", 3, {}, tensor.KEY, "a divisor of the model's 4 key and value heads"),
        ("llama", 2, {"intermediate_size": 97}, tensor.KEY, "a divisor of the 97 outputs of"),
        ("llama", 2, {"attention_dropout": 0.1}, "model.config.attention_dropout", "0.0 with"),
        ("mixtral", 2, {}, tensor.KEY, "1: the plan of MixtralForCausalLM cuts by moe_tp_experts"),
        ("gpt_oss", 2, {}, tensor.KEY, "cuts 0% of the weights of its blocks"),
        ("gpt2", 2, None, tensor.KEY, "1: transformers has no plan for GPT2LMHeadModel"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(kind, size, changes, key, words):
    if changes is None:
        found = [*tensor.refusals(on_meta(AutoConfig.for_model(kind)), size)]
    else:
        found = [*tensor.refusals(model(kind, **changes), size)]
    assert {one.key for one in found} == {key}
    assert words in found[0].expected


def test_parts_of_a_matrix_are_its_rows_or_columns_in_order():
    whole = torch.arange(35).view(7, 5)
    for axis in (0, 1):
        cut = Cut(axis, split(whole.shape[axis], 3), (7, 5))
        parts = [cut.part(whole, rank) for rank in range(3)]
        assert torch.equal(torch.cat(parts, axis), whole)
        sizes = [part.numel() for part in parts]
        assert [cut.offset(rank) for rank in range(3)] == [0, sizes[0], sizes[0] + sizes[1]]
        assert max(cut.sizes) - min(cut.sizes) <= 1


def test_the_padding_row_has_no_gradient_on_the_process_that_has_it():
    embedding = nn.Embedding(10, 4, padding_idx=7)
    tensor.embedding_rowwise(tensor._Cutter(None, 1, 2), embedding, "model.embed_tokens")
    embedding(torch.tensor([1, 6, 7, 8])).sum().backward()  # it has rows 5 … 9
    assert embedding.weight.grad[:, 0].tolist() == [0, 1, 0, 1, 0]
