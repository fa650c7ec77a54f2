"""The loss of a mixture's router: trained, kept apart, and blind to padding.

The reference is transformers' own loss, with its router's or without, and its own mask of padding.
"""

from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.model import attention
from llmtrain.model.attention import padding_tensors
from llmtrain.model.loss import LossModule

SEQ_LEN, SHARE = 96, 0.5  # the coefficient is made large
SMALL = small_fields(32, 4, 4, num_key_value_heads=2, head_dim=8, vocab_size=199)
SMALL |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL |= {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": SHARE}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(kind, **more):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    attention.install(model, SEQ_LEN)
    return model


def batch(rows=4):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 199, (rows, SEQ_LEN), generator=generator) for _ in range(2))
    return ids, labels


def trained(model, parts):
    """Loss and router loss of a step a token, as a run logs them, and the gradient."""
    module, (ids, labels) = LossModule(model), batch()
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
    ids, labels = batch()
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
    model = build(kind)
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
    model, (ids, labels) = build("mixtral"), batch()
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
    module = LossModule(build("mixtral", **given)).train(bool(given))
    with torch.no_grad():
        module(*batch())
        module(*batch(), each=True)
    assert module.router_loss is None


@pytest.mark.parametrize("kind", MODELS)
def test_padding_on_the_right_does_not_count_for_the_router(kind):
    """Equal to transformers' loss with a mask of padding, and to that of rows without any."""
    model, (ids, labels) = build(kind), batch(2)
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
    model, (ids, labels) = build("mixtral"), batch(1)
    module = LossModule(model)
    module(ids[:, :20], labels[:, :20]).backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    labels[:, 20:] = -100
    module(ids, labels, real=torch.arange(20)).backward()
    for one, other in zip(right, (p.grad for p in model.parameters()), strict=True):
        assert other is not None
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
