"""Log-probabilities of labels with a gradient, without the logits of a batch."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from llmtrain.model import cross_entropy
from llmtrain.model.cross_entropy import log_probs, token_losses

HIDDEN, VOCABULARY = 12, 83


def inputs(rows, dtype=torch.float32):
    """Hidden, weight, bias and labels; a third of the labels are masked."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    labels[::3] = -100
    return hidden, weight, bias, labels


def plain(hidden, weight, labels, bias=None, scale=1.0, softcap=None):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = labels != -100
    return logits.log_softmax(-1)[kept].gather(1, labels[kept][:, None])[:, 0]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 2e-5)], ids=["fp64", "fp32"]
)
def test_values_and_gradients_are_those_of_full_logits(dtype, within, frozen):
    hidden, weight, bias, labels = inputs(150, dtype)
    options = itertools.product((None, bias), (1.0, 0.25), (None, 5.0), (None, 1, 64), (0, 1))
    incoming = torch.linspace(-1, 2, int((labels != -100).sum()), dtype=dtype)
    for own_bias, scale, softcap, chunk_rows, known in options:
        leaves = [hidden.clone().requires_grad_()]
        leaves += [weight.clone().requires_grad_(not frozen)]
        leaves += [] if own_bias is None else [own_bias.clone().requires_grad_(not frozen)]
        given = {"bias": leaves[2] if len(leaves) > 2 else None, "scale": scale, "softcap": softcap}
        trained = (labels != -100).nonzero()[:, 0] if known else None
        found = log_probs(*leaves[:2], labels, chunk_rows=chunk_rows, trained=trained, **given)
        right = plain(*leaves[:2], labels, **given)
        assert found.dtype == dtype
        torch.testing.assert_close(found, right, rtol=within, atol=within)
        wanted = [one for one in leaves if one.requires_grad]
        made = torch.autograd.grad(found, wanted, incoming)
        for ours, theirs in zip(made, torch.autograd.grad(right, wanted, incoming), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=within, atol=within * 10)


def test_the_values_have_the_bits_of_token_losses():
    hidden, weight, bias, labels = inputs(700)
    each = token_losses(hidden, weight, labels, bias=bias)[labels != -100]
    with torch.no_grad():
        scored = log_probs(hidden, weight, labels, bias=bias)
    trained = log_probs(hidden.requires_grad_(), weight.requires_grad_(), labels, bias=bias)
    assert torch.equal(scored, -each)
    assert torch.equal(trained, -each)
    assert not scored.requires_grad


def test_under_autocast_both_products_are_narrow():
    hidden, weight, _, labels = inputs(90)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        found = log_probs(*leaves, labels, chunk_rows=16)
    narrow = [one.detach().bfloat16().requires_grad_() for one in leaves]
    right = log_probs(*narrow, labels, chunk_rows=16)
    assert found.dtype == torch.float32
    assert torch.equal(found, right)
    made, wanted = (
        torch.autograd.grad(*both) for both in ((found.sum(), leaves), (right.sum(), narrow))
    )
    assert [one.dtype for one in made] == [torch.float32] * 2
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize(("frozen", "products"), [(False, 4), (True, 2)])
def test_logits_are_made_twice_only_for_a_trained_head(monkeypatch, frozen, products):
    """The products are logits and dx, and then logits again and dW."""
    seen = []
    own = cross_entropy._product

    def watched(a, b, *others):
        seen.append(a.shape)
        return own(a, b, *others)

    monkeypatch.setattr(cross_entropy, "_product", watched)
    hidden, weight, _, labels = inputs(90)
    hidden[labels == -100] = torch.nan  # such a row never reaches the head
    found = log_probs(hidden.requires_grad_(), weight.requires_grad_(not frozen), labels)
    found.sum().backward()
    assert len(seen) == products
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[labels == -100].any()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_no_trained_position_has_gradients_of_zeros(frozen):
    hidden, weight, bias, labels = inputs(9)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(not frozen)]
    leaves += [bias.requires_grad_(not frozen)]
    found = log_probs(*leaves[:2], torch.full_like(labels, -100), bias=leaves[2])
    assert found.shape == (0,)
    wanted = [one for one in leaves if one.requires_grad]
    assert all(not one.any() for one in torch.autograd.grad(found.sum(), wanted))


def test_a_second_backward_below_a_frozen_head_raises():
    hidden, weight, _, labels = inputs(4)
    found = log_probs(hidden.requires_grad_(), weight, labels).sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        found.backward()
