import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.model.loss import Head, LossModule, made_up_batch

SHAPES = {
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "qwen3": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
    },
}


def build(model_type):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](vocab_size=64, **SHAPES[model_type])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("model_type", list(SHAPES))
def test_the_sum_is_transformers_own_mean_times_its_tokens(model_type):
    model = build(model_type)
    ids = made_up_batch(3, 9, 64, torch.device("cpu"))
    labels = ids.clone()
    labels[1, 4:] = -100
    trained = int((labels[:, 1:] != -100).sum())
    ours = LossModule(model)(ids[:, :-1], labels[:, 1:])
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    assert ours.item() == pytest.approx(model(ids, labels=labels).loss.item() * trained, rel=1e-5)


def test_bf16_arithmetic_still_returns_an_fp32_sum():
    model = build("llama")
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    exact = LossModule(model)(ids[:, :-1], ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = LossModule(model)(ids[:, :-1], ids[:, 1:])
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)


def test_without_labels_the_last_positions_logits_come_back():
    model = build("llama")
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    found = LossModule(model)(ids)
    assert torch.equal(found, model(ids).logits[:, -1])


def test_no_cache_is_made_while_training(monkeypatch):
    import transformers.models.llama.modeling_llama as llama

    def refuse(*args, **kwargs):
        raise AssertionError("a cache was made")

    monkeypatch.setattr(llama, "DynamicCache", refuse)
    model = build("llama")
    model.config.use_cache = True
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    LossModule(model)(ids, ids).backward()


def test_it_passes_on_what_accelerate_asks_the_root_for():
    module = LossModule(build("llama"))
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
    model = build("llama")
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
    model = build("llama")
    ids = made_up_batch(2, 9, 64, torch.device("cpu"))
    plain, more = LossModule(model, head)(ids, ids), LossModule(model, head, z_loss=0.01)(ids, ids)
    assert more.item() == plain.item()
    weight = model.lm_head.weight
    logits = model(ids).logits.flatten(0, 1)
    added = 0.01 * logits.logsumexp(-1).square().sum()
    found, without, right = (torch.autograd.grad(one, weight)[0] for one in (more, plain, added))
    torch.testing.assert_close(found - without, right, rtol=1e-4, atol=1e-5)
