from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from helpers.rings import needs
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.config.schema import AdapterConfig
from llmtrain.model import attention, trainable
from llmtrain.model.attention import padding_tensors
from llmtrain.model.count import fake_tensors
from llmtrain.model.loss import Head, LossModule, examine, made_up_batch, why_wrapped
from llmtrain.model.shape import from_config


def build():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=64, **small_fields(16, 2, 2))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_bf16_arithmetic_still_returns_an_fp32_sum():
    model = build()
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    exact = LossModule(model)(ids[:, :-1], ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = LossModule(model)(ids[:, :-1], ids[:, 1:])
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)


def test_without_labels_the_last_positions_logits_come_back():
    model = build()
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    found = LossModule(model)(ids)
    assert torch.equal(found, model(ids).logits[:, -1])


def test_no_cache_is_made_while_training(monkeypatch):
    import transformers.models.llama.modeling_llama as llama

    def refuse(*args, **kwargs):
        raise AssertionError("a cache was made")

    monkeypatch.setattr(llama, "DynamicCache", refuse)
    model = build()
    model.config.use_cache = True
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    LossModule(model)(ids, ids).backward()


def test_it_passes_on_what_accelerate_asks_the_root_for():
    module = LossModule(build())
    assert module.config is module.model.config
    assert module.base_model is module.model.model
    assert module.get_input_embeddings() is module.model.model.embed_tokens
    assert module.get_output_embeddings() is module.model.lm_head
    assert module._no_split_modules == module.model._no_split_modules
    module.tie_weights()


def test_a_made_up_batch_draws_no_random_numbers():
    before = torch.get_rng_state()
    ids = made_up_batch(4, 7, 11, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert ids.shape == (4, 7)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 11


@pytest.mark.parametrize("kernel", ["chunked", "torch"])
def test_each_kernel_computes_what_the_logits_give(kernel):
    model = build()
    ids = made_up_batch(3, 9, 64, torch.device("cpu"))
    labels = ids.clone()
    labels[1, 4:] = -100
    from_logits, ours = LossModule(model), LossModule(model, Head(), kernel=kernel)
    assert ours(ids, labels).item() == pytest.approx(from_logits(ids, labels).item(), rel=1e-6)
    with torch.no_grad():
        each, right = (module(ids, labels, each=True) for module in (ours, from_logits))
    torch.testing.assert_close(each, right)
    assert each.shape == labels.shape
    assert not each[1, 4:].any()


@pytest.mark.parametrize("head", [None, Head()], ids=["logits", "chunked"])
def test_z_loss_adds_its_gradient_and_not_its_value(head):
    model = build()
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    plain, more = LossModule(model, head)(ids, ids), LossModule(model, head, z_loss=0.01)(ids, ids)
    assert more.item() == plain.item()
    weight = model.lm_head.weight
    logits = model(ids).logits.flatten(0, 1)
    added = 0.01 * logits.logsumexp(-1).square().sum()
    found, without, right = (torch.autograd.grad(one, weight)[0] for one in (more, plain, added))
    torch.testing.assert_close(found - without, right, rtol=1e-4, atol=1e-5)


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


def build_kind(kind, **more):
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
    model = build_kind(kind)
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
    model = build_kind(kind, output_router_logits=True, router_aux_loss_coef=0.5)
    assert examine(model) == "the loss of its router comes with its logits"
    assert_same(model, None)
    ids, labels = batch()
    module = LossModule(model)
    trained, scored = module(ids, labels), module.eval()(ids, labels)
    assert module.router_loss is not None
    assert module.router_loss > 1.0
    torch.testing.assert_close(trained, scored)  # both are the loss of the tokens alone


def adapted(kind, tokens=(), targets="auto", **more):
    model = build_kind(kind, **more)
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
    model = build_kind("gemma2", final_logit_softcapping=None)
    assert examine(model) == Head()
    model.config.final_logit_softcapping = 30.0
    assert examine(model) == Head(softcap=30.0)
    assert examine(build_kind("llama", final_logit_softcapping=1000.0)) == Head()  # it does not cap


@pytest.mark.parametrize("change", [1.0, 5e-5])  # of the largest logit
def test_a_model_that_changes_its_logits_otherwise_keeps_them(change):
    model = build_kind("llama")
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
        model = build_kind("llama")
        model.lm_head = head
        assert examine(model) == f"its head is no plain linear layer but {type(head).__name__}"


def test_a_model_that_calls_its_head_twice_keeps_its_logits():
    model = build_kind("llama")
    own = model.forward

    def forward(*arguments, **keywords):
        output = own(*arguments, **keywords)
        model.lm_head(torch.zeros(1, 32))
        return output

    model.forward = forward  # type: ignore[method-assign]
    assert examine(model) == "it does not call its head once"


# The loss of a mixture's router: trained, kept apart, and blind to padding.
SEQ_LEN, SHARE = 96, 0.5  # the coefficient is made large
SMALL_ROUTED = small_fields(32, 4, 4, num_key_value_heads=2, head_dim=8, vocab_size=199)
SMALL_ROUTED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}
SMALL_ROUTED |= {"output_router_logits": True, "router_aux_loss_coef": SHARE}
SMALL_ROUTED |= {"max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
}


def build_routed(kind, **more):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SMALL_ROUTED, **MODELS[kind], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    attention.install(model, SEQ_LEN)
    return model


def routed_batch(rows=4):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 199, (rows, SEQ_LEN), generator=generator) for _ in range(2))
    return ids, labels


def trained(model, parts):
    """Loss and router loss of a step a token, as a run logs them, and the gradient."""
    module, (ids, labels) = LossModule(model), routed_batch()
    model.zero_grad()
    loss = router = 0.0
    for part in parts:
        one = module(ids[part], labels[part]) / labels.numel()
        one.backward()
        assert module.router_loss is not None
        loss, router = loss + one.item(), router + module.router_loss.item() / labels.numel()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss, router, torch.cat(gradients)


def plain(model, parts):
    """The same by transformers alone."""
    ids, labels = routed_batch()
    model.zero_grad()
    loss = router = 0.0
    for part in parts:
        found = model(ids[part], use_cache=False)
        logits, targets = found.logits.flatten(0, 1), labels[part].flatten()
        own = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / labels.numel()
        added = SHARE * found.aux_loss * targets.numel() / labels.numel()
        (own + added).backward()
        loss, router = loss + own.item(), router + added.item()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss, router, torch.cat(gradients)


WHOLE = [slice(0, 4)]
ROWS = [slice(row, row + 1) for row in range(4)]


def same_loss_apart_from_the_routers(kind):
    model = build_routed(kind)
    (a, a_router, whole), (b, b_router, rows) = trained(model, WHOLE), trained(model, ROWS)
    assert a == pytest.approx(b, abs=1e-6)
    assert abs(a_router - b_router) > 1e-3  # it is not linear in the rows: that is its nature
    assert float((whole - rows).norm() / whole.norm()) > 0.01
    for parts, loss, router, gradient in ((WHOLE, a, a_router, whole), (ROWS, b, b_router, rows)):
        right = plain(model, parts)
        assert (loss, router) == pytest.approx(right[:2], abs=1e-5)
        torch.testing.assert_close(gradient, right[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_the_loss_of_a_mixture_does_not_depend_on_the_split_into_micro_batches(kind):
    same_loss_apart_from_the_routers(kind)


def test_the_gradient_has_the_bits_of_the_sum_of_both_losses():
    model, (ids, labels) = build_routed("mixtral"), routed_batch()
    module = LossModule(model)
    module(ids, labels).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    output = model(ids, use_cache=False)
    logits, targets = output.logits.float().flatten(0, 1), labels.flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (loss + SHARE * output.aux_loss * (targets != -100).sum()).backward()
    for one, other in zip(found, (p.grad for p in model.parameters()), strict=True):
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("given", [{"output_router_logits": False}, {}], ids=["not asked", "eval"])
def test_nothing_is_kept_where_nothing_is_trained(given):
    module = LossModule(build_routed("mixtral", **given)).train(bool(given))
    with torch.no_grad():
        module(*routed_batch())
        module(*routed_batch(), each=True)
    assert module.router_loss is None


@pytest.mark.parametrize("kind", MODELS)
def test_padding_on_the_right_does_not_count_for_the_router(kind):
    """Equal to transformers' loss with a mask of padding, and to that of rows without any."""
    model, (ids, labels) = build_routed(kind), routed_batch(2)
    module, lengths = LossModule(model), torch.tensor([20, 70])
    mask = torch.arange(SEQ_LEN) < lengths[:, None]
    ids, labels = ids.where(mask, 0), labels.where(mask, -100)
    given = padding_tensors(labels.numpy(), torch.device("cpu"), by_length=False, routed=True)
    assert torch.equal(given["real"], mask.flatten().nonzero().flatten())

    def router(rows, width, **more):
        module(ids[rows, :width], labels[rows, :width], **more)
        assert module.router_loss is not None
        return module.router_loss.item()

    with torch.no_grad():
        found = router(slice(0, 2), SEQ_LEN, **given)
        own = model(ids, attention_mask=mask.long(), use_cache=False).aux_loss.item()
        assert found == pytest.approx(SHARE * own * 90, rel=1e-5)
        assert router(slice(0, 2), SEQ_LEN) != pytest.approx(found, rel=1e-3)
        alone = router(slice(0, 1), 20)
        padded = router(slice(0, 1), SEQ_LEN, real=torch.arange(20))
    assert padded == pytest.approx(alone, rel=1e-5)


def test_the_gradient_of_a_padded_row_is_that_of_the_row_alone():
    model, (ids, labels) = build_routed("mixtral"), routed_batch(1)
    module = LossModule(model)
    module(ids[:, :20], labels[:, :20]).backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    labels[:, 20:] = -100
    module(ids, labels, real=torch.arange(20)).backward()
    for one, other in zip(right, (p.grad for p in model.parameters()), strict=True):
        assert other is not None
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
