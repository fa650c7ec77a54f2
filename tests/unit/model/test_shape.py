import math
from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from helpers.rings import needs
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.errors import UserError
from llmtrain.model import tensor
from llmtrain.model.shape import describe_parameters, on_meta

SMALL = small_fields(16, 3, 2, vocab_size=64)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 1},
    "qwen3": SMALL | {"head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": SMALL | {"head_dim": 8, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    "gpt_neox": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4, "num_key_value_heads": 2},
    "bert-generation": SMALL | {"is_decoder": True},  # names no block that must stay whole
}


def config(model_type, **changes):
    return CONFIG_MAPPING[model_type](**(CONFIGS[model_type] | changes))


def real(described):
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32)


def elements(shape, **having):
    return sum(
        math.prod(one.shape)
        for one in shape.parameters
        if all(getattr(one, name) == value for name, value in having.items())
    )


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_the_census_agrees_with_the_model_that_is_built(model_type):
    shape, model = describe_parameters(config(model_type)), real(config(model_type))
    assert [one.shape for one in shape.parameters] == [tuple(p.shape) for p in model.parameters()]
    assert shape.count == shape.trainable == sum(p.numel() for p in model.parameters())
    assert shape.buffers == sum(b.numel() * b.element_size() for b in model.buffers())
    assert (shape.hidden, shape.vocabulary, shape.blocks) == (16, 64, 3)
    assert shape.head == shape.embedding == 64 * 16


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_every_parameter_between_embedding_and_head_is_in_its_block(model_type):
    shape, model = describe_parameters(config(model_type)), real(config(model_type))
    for one, (name, _) in zip(shape.parameters, model.named_parameters(), strict=True):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        assert one.block == (numbers[0] if numbers else None), name


def test_blocks_that_the_model_does_not_name_have_no_class():
    assert describe_parameters(config("llama")).block_class == "LlamaDecoderLayer"
    unnamed = describe_parameters(config("bert-generation"))
    assert (unnamed.block_class, unnamed.listed) == (None, "BertGenerationLayer")


def test_a_model_whose_code_cannot_compute_again_says_so():
    ctrl = CONFIG_MAPPING["ctrl"](n_embd=16, n_layer=2, n_head=2, dff=24, vocab_size=64)
    assert not describe_parameters(ctrl).recomputes
    assert describe_parameters(config("llama")).recomputes


def test_a_tied_head_is_counted_once_and_known_as_tied():
    tied, apart = (
        describe_parameters(config("qwen3", tie_word_embeddings=tied)) for tied in (True, False)
    )
    assert (tied.tied, apart.tied) == (True, False)
    assert apart.count - tied.count == apart.head == tied.head


@needs("transformers", "5.14")  # before it, no config tells the sizes of a layer
def test_attention_counts_heads_by_their_size_in_layers_that_have_them():
    assert describe_parameters(config("llama")).attention == 3 * 16
    assert describe_parameters(config("qwen3")).attention == 3 * 2 * 12
    mamba = CONFIG_MAPPING["mamba"](hidden_size=16, num_hidden_layers=2, vocab_size=64)
    assert describe_parameters(mamba).attention == 0
    sizes = {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 64}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    varied = CONFIG_MAPPING["gemma4_text"](**SMALL | sizes, layer_types=kinds)
    assert describe_parameters(varied).attention == 2 * (8 + 8 + 16)


def test_frozen_parameters_are_not_trainable():
    shape = describe_parameters(config("llama"), ("model.layers.0.*", "model.embed_tokens.*"))
    assert shape.count - shape.trainable == elements(shape, block=0) + shape.embedding
    assert elements(shape, block=0, trainable=True) == 0
    with pytest.raises(UserError, match=r"model\.freeze"):
        describe_parameters(config("llama"), ("nothing",))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def test_cast_are_those_whose_bf16_copy_a_real_forward_keeps(model_type):
    model = real(config(model_type)).train()
    owners = {p.data_ptr(): p for p in model.parameters()}
    copies: dict[int, int] = {}
    held = []  # so that no address is used twice

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in owners:
                copies[result.data_ptr()] = args[0].data_ptr()
                held.append(result)
            return result

    kept = set()

    def pack(tensor):
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16)
    with Watch(), saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss = model(torch.arange(8)[None], use_cache=False).logits.float().sum()
    assert loss.requires_grad
    expected = {owner for copy, owner in copies.items() if copy in kept}
    shape = describe_parameters(config(model_type))
    pairs = zip(shape.parameters, model.parameters(), strict=True)
    assert {p.data_ptr() for one, p in pairs if one.cast} == expected != set()


def test_stacked_experts_are_not_cast():
    shape = describe_parameters(config("mixtral"))
    experts = [one for one in shape.parameters if len(one.shape) == 3]
    assert experts
    assert not any(one.cast for one in experts)


def test_a_model_of_any_size_takes_no_memory():
    shape = describe_parameters(
        LlamaConfig(
            hidden_size=8192,
            num_hidden_layers=80,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
    )
    layer = 8192 * (8192 * 2 + 1024 * 2 + 28672 * 3) + 2 * 8192
    assert shape.count == 80 * layer + 2 * 32000 * 8192 + 8192


def test_a_value_that_transformers_looks_up_in_vain_is_named():
    config = LlamaConfig(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4})
    with pytest.raises(UserError) as caught:
        on_meta(config)
    assert "model.config.rope_parameters.rope_type = nonsense" in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gpt_neox", "gpt2", "mixtral"])
def test_the_axis_of_a_parameter_is_that_along_which_it_is_cut(model_type):
    described = (
        config(model_type, num_key_value_heads=2) if model_type != "gpt2" else config("gpt2")
    )
    axes = [one.axis for one in describe_parameters(described).parameters]
    if model_type in ("gpt2", "mixtral"):  # without a plan, or with experts
        assert set(axes) == {None}
        return
    model = on_meta(described)
    names = [name for name, _ in model.named_parameters()]
    cuts = tensor.cut_on_paper(model, 2)
    assert axes == [cuts[name].axis if name in cuts else None for name in names]
    assert {0, 1, None} == set(axes)
