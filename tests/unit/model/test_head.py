from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from helpers.rings import needs
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.config.schema import AdapterConfig
from llmtrain.model import attention, trainable
from llmtrain.model.count import fake_tensors
from llmtrain.model.loss import Head, LossModule, examine, why_wrapped
from llmtrain.model.shape import from_config

SMALL = small_fields(32, 2, 4, num_key_value_heads=2, head_dim=8, vocab_size=97)
SMALL |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
OLDER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FALCON = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
LATENT = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4}

# class → fields, and what the probe finds
PLAIN, LOGITS = Head(), "logits"
KINDS: dict[str, tuple[dict[str, Any], Head | str]] = {
    "llama": ({"tie_word_embeddings": True}, PLAIN),
    "qwen3": ({}, PLAIN),
    "gpt2": ({**OLDER, **DROPOUT}, PLAIN),
    "gemma2": ({}, Head(softcap=30.0)),
    "recurrent_gemma": ({"lru_width": 32}, Head(softcap=30.0)),
    "nanochat": ({}, Head(softcap=15.0)),
    "cohere": ({}, Head(scale=0.0625)),
    "granite": ({"logits_scaling": 8.0}, Head(scale=0.125)),
    "falcon_h1": ({"lm_head_multiplier": 0.3, **FALCON}, Head(scale=0.3)),
    "minicpm3": (
        {**LATENT, "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4},
        Head(scale=8.0),  # dim_model_base 256 / 32
    ),
    "gptj": ({**OLDER, **DROPOUT, "rotary_dim": 4}, PLAIN),
    "phi": ({"resid_pdrop": 0.0}, PLAIN),
    "mixtral": ({"num_local_experts": 4}, PLAIN),
    "gpt_oss": ({"num_local_experts": 4}, PLAIN),
    "opt": ({"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0}, PLAIN),
    "bert": (
        {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        LOGITS,
    ),
}


def build(kind, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind][0], **more})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def batch():
    ids = (torch.arange(3 * 17).view(3, 17) * 31 + 5) % 97
    labels = ids.clone()
    labels[1, 9:] = -100
    return ids, labels


@contextmanager
def gradients_of(model):
    found: dict[str, torch.Tensor] = {}
    model.zero_grad(set_to_none=True)
    yield found
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)


def assert_same(model, head):
    """Assert that loss and gradients are those of transformers' own loss."""
    ids, labels = batch()
    trained = int((labels[:, 1:] != -100).sum())
    with gradients_of(model) as expected:
        own = model(ids, labels=labels, use_cache=False).loss * trained
        own.backward()
    with gradients_of(model) as found:
        # transformers shifts the labels; the last position has none
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        module = LossModule(model, head)
        ours = module(ids, shifted)
        ours.backward()
    router = 0.0 if module.router_loss is None else module.router_loss.item()
    assert ours.item() + router == pytest.approx(own.item(), rel=1e-5)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        most = float(right.abs().max())
        assert float((found[name] - right).abs().max()) <= 1e-5 * max(most, 1.0), name


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=needs("transformers", "5.23" if kind == "minicpm3" else "0"))
        for kind in KINDS
    ],
)
def test_the_loss_is_the_models_own(kind):
    model = build(kind)
    found, expected = examine(model), KINDS[kind][1]
    if expected == LOGITS:
        assert isinstance(found, str)
    else:
        assert found == expected
    assert_same(model, found if isinstance(found, Head) else None)
    with torch.no_grad():
        module = LossModule(model.eval(), found if isinstance(found, Head) else None)
        last = module(batch()[0])
        every = module(batch()[0], all_logits=True)
    torch.testing.assert_close(last, every[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_loss_of_a_router_is_added(kind):
    """`output_router_logits` was once dropped without a word."""
    model = build(kind, output_router_logits=True, router_aux_loss_coef=0.5)
    assert examine(model) == "the loss of its router comes with its logits"
    assert_same(model, None)
    ids, labels = batch()
    module = LossModule(model)
    trained, scored = module(ids, labels), module.eval()(ids, labels)
    assert module.router_loss is not None
    assert module.router_loss > 1.0
    torch.testing.assert_close(trained, scored)  # both are the loss of the tokens alone


def adapted(kind, tokens=(), targets="auto", **more):
    model = build(kind, **more)
    attention.install(model, 17)
    trainable.attach(model, AdapterConfig(kind="lora", r=4, targets=targets), tokens)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # B is zero at the start, which would hide its absence
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(
    ("tied", "tokens"), [(True, (3, 5)), (False, (3, 5)), (True, ()), (False, ())]
)
def test_a_head_that_an_adapter_wraps_keeps_its_logits(tied, tokens):
    model = adapted("llama", tokens, tie_word_embeddings=tied)
    found = why_wrapped(model)
    assert ("TrainableTokensWrapper" in found) == bool(tokens)
    assert_same(model, None if found else Head())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "bert", "mixtral"])
def test_a_model_on_paper_gets_the_same_answer(kind):
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind][0]})
    with fake_tensors():
        found = examine(from_config(config), compare=False)
    assert isinstance(found, Head) == isinstance(KINDS[kind][1], Head)


def test_a_cap_shows_although_the_logits_of_a_new_model_are_small():
    model = build("gemma2", final_logit_softcapping=None)
    assert examine(model) == Head()
    model.config.final_logit_softcapping = 30.0
    assert examine(model) == Head(softcap=30.0)
    assert examine(build("llama", final_logit_softcapping=1000.0)) == Head()  # it does not cap


@pytest.mark.parametrize("change", [1.0, 5e-5])  # of the largest logit
def test_a_model_that_changes_its_logits_otherwise_keeps_them(change):
    model = build("llama")
    own = model.forward

    def forward(*arguments, **keywords):
        output = own(*arguments, **keywords)
        most = change * float(output.logits.abs().max())
        output.logits = output.logits + most * torch.linspace(-1.0, 1.0, 97)
        return output

    model.forward = forward  # type: ignore[method-assign]
    assert examine(model) == "its logits are not those of its decoder and its head alone"
    assert model.training


class Doubled(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_without_a_linear_head_there_is_a_reason():
    for head in (torch.nn.Sequential(torch.nn.Linear(32, 97)), Doubled(32, 97)):
        model = build("llama")
        model.lm_head = head
        assert examine(model) == f"its head is no plain linear layer but {type(head).__name__}"


def test_a_model_that_calls_its_head_twice_keeps_its_logits():
    model = build("llama")
    own = model.forward

    def forward(*arguments, **keywords):
        output = own(*arguments, **keywords)
        model.lm_head(torch.zeros(1, 32))
        return output

    model.forward = forward  # type: ignore[method-assign]
    assert examine(model) == "it does not call its head once"
