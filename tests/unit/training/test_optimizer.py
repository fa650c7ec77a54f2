import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import AdapterConfig, OptimizerConfig
from llmtrain.model import adapters
from llmtrain.training.optimizer import make_optimizer


def tiny(tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            tie_word_embeddings=tied,
        )
    )


def decayed(model: torch.nn.Module) -> set[str]:
    optimizer = make_optimizer(model, OptimizerConfig())
    found = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    return {name for name, p in model.named_parameters() if id(p) in found}


def test_matrices_decay_and_norms_biases_embeddings_do_not() -> None:
    names = decayed(tiny(tied=False))
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert not any("norm" in name for name in names)
    gpt2 = decayed(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2)))
    assert "transformer.h.0.mlp.c_fc.weight" in gpt2
    assert not any(name.endswith("bias") or "wte" in name or "wpe" in name for name in gpt2)


def test_a_tied_head_is_an_embedding() -> None:
    assert "model.embed_tokens.weight" not in decayed(tiny(tied=True))


def test_each_trainable_parameter_is_in_one_group_once() -> None:
    model = tiny(tied=True)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(betas=(0.8, 0.9), learning_rate=0.5))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(group["lr"] == 0.5 for group in optimizer.param_groups)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("fused", [True, False])
def test_fused_is_an_argument_for_comparisons_of_bits(fused: bool) -> None:
    assert (
        make_optimizer(tiny(tied=True), OptimizerConfig(), fused=fused).defaults["fused"] is fused
    )


def test_of_adapters_a_alone_decays() -> None:
    model = tiny(tied=True)
    adapters.attach(model, AdapterConfig(kind="dora", r=2), (3, 4))
    names = decayed(model)
    assert names
    assert all(name.endswith(".lora_A.default.weight") for name in names)
    optimizer = make_optimizer(model, OptimizerConfig())
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held == sum(p.numel() for p in model.parameters() if p.requires_grad)
