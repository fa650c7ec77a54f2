import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn import functional as F

from llmtrain.distributed.engines.accelerator import own_environment
from llmtrain.model import cross_entropy
from llmtrain.model.cross_entropy import chunk_of, linear_cross_entropy, token_losses

HIDDEN, VOCABULARY = 12, 83


def inputs(rows, dtype=torch.float32, seed=0):
    """Return hidden, weight, bias and labels; a third of the labels are masked."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    labels[::3] = -100
    return [hidden, weight, bias, labels]


def exact(
    hidden, weight, labels, *, bias=None, token_weights=None, scale=1.0, softcap=None, z_loss=0.0
):
    """The plain formulas in float64: the logged loss, and that whose gradient is taken."""
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    factors = (labels != -100).double()
    if token_weights is not None:
        factors = factors * token_weights.double()
    each = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    loss = (each * factors).sum()
    return loss, loss + z_loss * (logits.logsumexp(-1).square() * factors).sum()


def gradients(loss, leaves):
    wanted = [leaf for leaf in leaves if leaf is not None]
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize("rows", [1, 7, 64, 150])
def test_loss_and_gradients_are_those_of_float64(rows):
    hidden, weight, bias, labels = inputs(rows)
    weights = torch.linspace(0.1, 2.0, rows)
    options = itertools.product(
        (None, bias), (None, weights), (1.0, 0.25), (None, 5.0), (0.0, 1e-2), (None, 1, 16, 64)
    )
    for own_bias, factors, scale, softcap, z_loss, chunk_rows in options:
        leaves = [hidden, weight, own_bias]
        leaves = [None if one is None else one.clone().requires_grad_() for one in leaves]
        given = {"token_weights": factors, "scale": scale, "softcap": softcap, "z_loss": z_loss}
        logged, trained = exact(*leaves[:2], labels, bias=leaves[2], **given)
        found = linear_cross_entropy(
            *leaves[:2], labels, bias=leaves[2], chunk_rows=chunk_rows, **given
        )
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(logged.item(), rel=1e-5)
        expected = gradients(trained, leaves)
        for ours, right in zip(gradients(found * 3, leaves), expected, strict=True):
            torch.testing.assert_close(ours, 3 * right.float(), rtol=1e-4, atol=2e-5)


def relative(found, right):
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("narrow_hidden", [True, False], ids=["bf16", "autocast with fp32 hidden"])
def test_bf16_products_sum_in_fp32_over_128_chunks(narrow_hidden):
    hidden, weight, _, labels = inputs(512)
    if narrow_hidden:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logged, _ = exact(*leaves, labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=not narrow_hidden):
        found = linear_cross_entropy(*leaves, labels, chunk_rows=4)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(logged.item(), rel=2e-3 if not narrow_hidden else 1e-3)
    expected = gradients(logged, leaves)
    for ours, right, leaf in zip(gradients(found, leaves), expected, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert relative(ours, right) < 1e-2


def test_under_autocast_the_products_are_narrow(monkeypatch):
    seen = []
    own = cross_entropy._product

    def watched(a, b, *others):
        seen.append((a.dtype, b.dtype))
        return own(a, b, *others)

    monkeypatch.setattr(cross_entropy, "_product", watched)
    hidden, weight, _, labels = inputs(8)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2  # logits and the gradient of hidden


def test_gradients_are_the_differences_of_the_loss():
    """`gradcheck`, but with one backward, in fp64."""
    hidden, weight, bias, labels = inputs(5, torch.float64)
    leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]

    def loss():
        x, w, b = leaves
        return linear_cross_entropy(x, w, labels, bias=b, scale=0.5, softcap=4.0, chunk_rows=2)

    for leaf, found in zip(leaves, gradients(loss(), leaves), strict=True):
        flat = leaf.detach().view(-1)
        for index in range(0, flat.numel(), 7):
            value = flat[index].item()
            sides = []
            for step in (1e-6, -1e-6):
                flat[index] = value + step
                sides.append(loss().item())
            flat[index] = value
            difference = (sides[0] - sides[1]) / 2e-6
            assert found.view(-1)[index].item() == pytest.approx(difference, abs=1e-8, rel=1e-6)


def test_labels_that_the_model_holds_impossible_have_their_loss():
    """Their probability is 0 in fp32, and that of another entry is 1."""
    weight = torch.tensor([[100.0], [-100.0], [0.0]])
    hidden = torch.tensor([[1.0], [2.0], [-2.0], [2.0]]).requires_grad_()
    found = token_losses(hidden, weight, torch.tensor([1, 2, 0, 0]))
    assert found.tolist() == [200.0, 200.0, 400.0, 0.0]
    linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 0, 0])).backward()
    assert hidden.grad is not None
    assert hidden.grad.view(-1).tolist() == [200.0, 100.0, -200.0, 0.0]


@pytest.mark.parametrize("vocabulary", [7, 512, 1031, 50_304])
def test_softmax_in_place_has_the_bits_of_softmax(vocabulary):
    """torch documents no `out=` that is the input; our memory depends on it."""
    logits = torch.randn(65, vocabulary, generator=torch.Generator().manual_seed(0)) * 10
    apart = torch.softmax(logits, 1)
    assert torch.equal(torch.softmax(logits, 1, out=logits), apart)


def test_a_gradient_of_several_slabs_is_that_of_one(monkeypatch):
    hidden, weight, _, labels = inputs(70)
    leaves = [hidden.bfloat16(), weight.bfloat16().requires_grad_()]
    (one,) = gradients(linear_cross_entropy(*leaves, labels, chunk_rows=32), leaves[1:])
    monkeypatch.setattr(cross_entropy, "_SLAB", 10 * HIDDEN)
    (several,) = gradients(linear_cross_entropy(*leaves, labels, chunk_rows=32), leaves[1:])
    torch.testing.assert_close(several, one, rtol=2**-8, atol=0)


def test_rows_without_labels_have_no_loss_and_no_gradient():
    hidden, weight, _, labels = inputs(9)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    found = linear_cross_entropy(*leaves, torch.full_like(labels, -100), z_loss=0.1)
    assert found.item() == 0.0
    assert all(not one.any() for one in gradients(found, leaves))


@pytest.mark.parametrize("known", [False, True], ids=["looked for", "known"])
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_rows_without_a_label_never_reach_the_head(monkeypatch, chunk_rows, known):
    """They may hold anything: a row that is multiplied by 0 would make NaN of NaN."""
    seen: list[int] = []
    own = cross_entropy._product

    def watched(a, b, *others):
        seen.append(a.shape[0])
        return own(a, b, *others)

    monkeypatch.setattr(cross_entropy, "_product", watched)
    hidden, weight, bias, labels = inputs(90)
    hidden[labels == -100] = torch.nan
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    trained = (labels != -100).nonzero()[:, 0] if known else None
    given = {"bias": bias, "trained": trained}
    found = linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows, **given)
    made = gradients(found, leaves)
    few = [hidden.detach()[labels != -100].requires_grad_(), *leaves[1:]]
    logged, _ = exact(*few[:2], labels[labels != -100], bias=bias)
    assert found.item() == pytest.approx(logged.item(), rel=1e-5)
    for ours, right in zip(made, gradients(logged, few), strict=True):
        ours = ours if len(ours) != 90 else ours[labels != -100]
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=2e-5)
    assert not made[0][labels == -100].any()
    assert sum(seen) == 2 * int((labels != -100).sum()) + VOCABULARY


def test_a_frozen_weight_gets_no_gradient_and_no_memory():
    hidden, weight, _, labels = inputs(9)
    found = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    assert found.grad_fn is not None
    assert found.grad_fn.made.weight is None
    found.backward()
    logged, _ = exact(hidden, weight, labels)
    torch.testing.assert_close(hidden.grad, gradients(logged, [hidden])[0].float())


def test_evaluation_makes_no_gradient_and_has_the_same_bits():
    hidden, weight, bias, labels = inputs(700)
    trained = linear_cross_entropy(hidden.requires_grad_(), weight, labels, bias=bias)
    with torch.no_grad():
        scored = linear_cross_entropy(hidden, weight, labels, bias=bias)
        each = token_losses(hidden, weight, labels.view(7, 100), bias=bias)
    assert torch.equal(trained, scored)
    assert not scored.requires_grad
    assert each.shape == (7, 100)
    assert torch.equal(each.sum(), scored)
    assert not each.view(-1)[labels == -100].any()


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_known_to_be_trained_change_no_bit(scale, weighted):
    hidden, weight, _, labels = inputs(90)
    leaves, labels = [hidden.requires_grad_(), weight.requires_grad_()], labels.clamp(min=0)
    given = {"token_weights": torch.linspace(0.1, 2, 90) if weighted else None, "scale": scale}
    found = []
    for known in (False, True):
        loss = linear_cross_entropy(*leaves, labels, all_trained=known, chunk_rows=40, **given)
        found.append([loss, *gradients(loss, leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_second_backward_raises():
    hidden, weight, _, labels = inputs(4)
    found = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        found.backward()


def test_a_sharded_weight_is_refused():
    hidden, weight, _, labels = inputs(4)
    with own_environment():
        mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(weight, mesh)
    dist.destroy_process_group()
    with pytest.raises(TypeError, match="gathered"):
        linear_cross_entropy(hidden, sharded, labels)


def test_chunks_of_a_gpu_have_many_rows_and_bounded_logits():
    assert chunk_of("cpu").rows(50_304) == 256
    assert [chunk_of("cpu").piece(v) for v in (2_048, 50_304, 2**21)] == [512, 20, 1]
    assert chunk_of("cuda").rows(128_256) == 2048
    assert chunk_of("cuda").rows(8_192) == 2**29 // (4 * 8192)
