"""Ropes that depend on length: every document gets the frequencies that it gets alone.

The reference is plain transformers, one document at a time.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bases import small_fields
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.errors import UserError
from llmtrain.model import attention
from llmtrain.model.attention import document_tensors
from llmtrain.model.loss import LossModule
from llmtrain.training.start.trials import Tried, bare_forward, check_padding, find_hiding

CPU = torch.device("cpu")
SEQ_LEN, ORIGINAL = 96, 32
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.0, 1.01, 1.02],
    "long_factor": [1.03, 2.0, 20.0, 60.0],
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SMALL = small_fields(32, 4, 4, num_key_value_heads=2, vocab_size=199, max_position_embeddings=128)
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE},
    "llama": {"rope_parameters": LONGROPE},
    # Its factors stay; it multiplies by another constant in long texts.
    "phimoe": {
        "original_max_position_embeddings": ORIGINAL,
        "num_local_experts": 3,
        "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.5},
    },
    # One rope for each type of layer, and transformers' own attention with a window.
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": LONGROPE,
        },
    },
}
SHORT = np.array([0, 24, 48, 72])  # four documents of 24 tokens


def build(kind, fields, scale=3.0):
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](**copy.deepcopy({**SMALL, **fields}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def some_ids(rows):
    return torch.randint(3, 199, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def alone(model, row, starts):
    """Logits of each document of a row by itself, (T, V)."""
    parts = row.tensor_split(starts[1:].tolist())
    return torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])


def furthest(one, other):
    """The largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
def test_long_factors_of_rope_do_not_reach_short_documents_of_a_row():
    ids = some_ids(2)
    right = alone(build("phi3", MODELS["phi3"]), ids[0], SHORT)
    model = build("phi3", MODELS["phi3"])
    name, forward = attention.install(model, SEQ_LEN), bare_forward(model, CPU, "fp32")
    rows = [SHORT, np.array([0])]
    for count in (1, 2):
        got = forward(ids[:count], **document_tensors(rows[:count], SEQ_LEN, name, CPU))
        assert furthest(got[0], right) == 0.0
    find_hiding(Tried(model, forward, CPU, "fp32", SEQ_LEN))


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_short_and_long_documents_of_a_row_and_of_a_batch_are_as_alone(kind):
    """33 tokens are the fewest for the long factors, 32 the most for the short ones."""
    ids, rows = some_ids(3), [SHORT, np.array([0, 33, 65]), np.array([0, 5])]
    plain, model = build(kind, MODELS[kind]), build(kind, MODELS[kind])
    right = [alone(plain, row, starts) for row, starts in zip(ids, rows, strict=True)]
    name = attention.install(model, SEQ_LEN)
    documents = document_tensors(rows, SEQ_LEN, name, CPU)
    got = bare_forward(model, CPU, "fp32")(ids, **documents)
    for one, other in zip(got, right, strict=True):
        assert furthest(one, other) < 1e-6
    together = plain(ids, position_ids=documents["position_ids"], use_cache=False).logits
    assert furthest(together[0], right[0]) > 1e-3  # so the test can fail


def test_the_gradient_is_that_of_each_document_alone():
    ids, labels = some_ids(2), some_ids(2).roll(-1, 1)
    rows = [SHORT, np.array([0, 40])]
    plain, model = build("phi3", MODELS["phi3"]), build("phi3", MODELS["phi3"])
    name = attention.install(model, SEQ_LEN)
    loss = LossModule(model)(ids, labels, **document_tensors(rows, SEQ_LEN, name, CPU))
    loss.backward()
    right = torch.zeros(())
    for row, targets, starts in zip(ids, labels, rows, strict=True):
        logits = alone(plain, row, starts)
        right = right + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_up_to_the_original_length_no_bit_changes():
    ids, starts = some_ids(2)[:, :ORIGINAL], [np.array([0, 7]), np.array([0])]
    plain, model = build("phi3", MODELS["phi3"]), build("phi3", MODELS["phi3"])
    attention.rope_by_document(model)
    documents = document_tensors(starts, ORIGINAL, "sdpa", CPU)
    one, other = (each(ids, use_cache=False, **documents).logits for each in (plain, model))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_text_by_itself_and_its_generation_are_transformers_own(kind):
    plain, model = build(kind, MODELS[kind]), build(kind, MODELS[kind])
    attention.rope_by_document(model)
    for length in (5, 32, 33, 96):
        ids = some_ids(1)[:, :length]
        assert torch.equal(model(ids).logits, plain(ids).logits)
    prompt = some_ids(1)[:, :28]  # the eighth new token is beyond the original length
    one, other = (
        each.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
        for each in (model, plain)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("check", "scale", "precision"),
    [
        (find_hiding, 1.0, "fp32"),
        (find_hiding, 1.0, "bf16"),
        (find_hiding, 3.0, "fp32"),
        (find_hiding, 3.0, "bf16"),
        (check_padding, 3.0, "fp32"),
    ],
)
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_check_refuses_a_rope_that_chooses_for_the_whole_micro_batch(
    kind, check, scale, precision, monkeypatch
):
    forward = {}
    for chosen in ("by document", "together"):
        if chosen == "together":
            monkeypatch.setattr(attention, "rope_by_document", lambda model: None)
        model = build(kind, MODELS[kind], scale)
        attention.install(model, SEQ_LEN)
        forward[chosen] = model, bare_forward(model, CPU, precision)
    check(Tried(*forward["by document"], CPU, precision, SEQ_LEN))
    check(Tried(*forward["together"], CPU, precision, ORIGINAL))
    with pytest.raises(UserError) as caught:
        check(Tried(*forward["together"], CPU, precision, SEQ_LEN))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("data.seq_len", SEQ_LEN)
    assert "the longrope rope depends on" in problem.expected
    assert f"with {kind} (attention: " in problem.expected
    assert problem.remedy == f"data.seq_len={ORIGINAL}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_dynamic_ntk_is_refused_beyond_its_length_and_passes_up_to_it(precision):
    """Its frequencies depend on the exact length, so there is no choice for each document."""
    model = build("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}, 1.0)
    attention.install(model, SEQ_LEN)
    forward = bare_forward(model, CPU, precision)
    find_hiding(Tried(model, forward, CPU, precision, ORIGINAL))
    with pytest.raises(UserError) as caught:
        find_hiding(Tried(model, forward, CPU, precision, SEQ_LEN))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("data.seq_len", SEQ_LEN)
    assert "the dynamic rope depends on" in problem.expected
    assert problem.remedy == f"data.seq_len={ORIGINAL}"


def test_which_ropes_depend_on_length():
    dynamic = {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}
    assert {
        kind: attention.rope_change(build(kind, fields)) for kind, fields in MODELS.items()
    } == dict.fromkeys(MODELS, ("longrope", ORIGINAL))
    assert attention.rope_change(build("llama", dynamic)) == ("dynamic", 64)
    assert attention.rope_change(build("llama", {})) is None
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 4}
    assert (
        attention.rope_change(AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**gpt2)))
        is None
    )


def test_the_choice_is_installed_once():
    model = build("phi3", MODELS["phi3"])
    for _ in range(2):
        attention.use(model, attention.install(model, SEQ_LEN))
    hooks = [
        len(module._forward_hooks) for module in model.modules() if hasattr(module, "rope_type")
    ]
    assert hooks == [1]
