"""The losses of pairs beside plain fp64 code, which scores one sequence at a time."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from llmtrain.config.schema import PreferenceConfig
from llmtrain.model.cross_entropy import log_probs
from llmtrain.model.preference import loss_and_sums, sequence_sums
from llmtrain.pairs import PAIR_SLOTS, PairTensors

HIDDEN, VOCABULARY = 8, 31
LENGTHS = (3, 5, 1, 1, 7, 2, 4, 4)  # trained tokens of chosen and rejected answers
CASES = {
    "dpo": {},
    "dpo, smoothed": {"label_smoothing": 0.2},
    "dpo, with the answer's own loss": {"sft_weight": 0.5},
    "dpo_norm": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.1},
    "ipo": {},
    "hinge": {"sft_weight": 0.3},
    "apo_zero": {},
    "orpo": {},
    "simpo": {"gamma": 0.4, "label_smoothing": 0.1},
    "cpo": {"sft_weight": 1.0, "label_smoothing": 0.1},
}


def config(case: str, **more: Any) -> PreferenceConfig:
    return PreferenceConfig(loss=case.split(",")[0], beta=0.3, **(CASES.get(case, {}) | more))


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def plain_loss(case, c, r, c_ref, r_ref, c_size, r_size):
    """§4 of the papers, for one pair: sums of log p by the model and by the reference."""
    beta, asked = 0.3, CASES[case]
    smooth, gamma = asked.get("label_smoothing", 0.0), asked.get("gamma", 0.0)
    name = case.split(",")[0]
    if name == "dpo":
        h = (c - c_ref) - (r - r_ref)
        loss = -(1 - smooth) * log_sigmoid(beta * h) - smooth * log_sigmoid(-beta * h)
    elif name == "dpo_norm":
        h = (c - c_ref) / c_size - (r - r_ref) / r_size
        loss = -(1 - smooth) * log_sigmoid(beta * h) - smooth * log_sigmoid(-beta * h)
    elif name == "robust":
        h = (c - c_ref) - (r - r_ref)
        loss = -(1 - smooth) * log_sigmoid(beta * h) + smooth * log_sigmoid(-beta * h)
        loss = loss / (1 - 2 * smooth)
    elif name == "ipo":
        h = (c - c_ref) / c_size - (r - r_ref) / r_size
        loss = (h - 1 / (2 * beta)) ** 2
    elif name == "hinge":
        loss = (1 - beta * ((c - c_ref) - (r - r_ref))).clamp(min=0)
    elif name == "apo_zero":
        loss = (1 - torch.sigmoid(beta * (c - c_ref))) + torch.sigmoid(beta * (r - r_ref))
    elif name == "orpo":
        c_mean, r_mean = c / c_size, r / r_size
        odds = torch.log(torch.exp(c_mean) / (1 - torch.exp(c_mean)))
        odds = odds - torch.log(torch.exp(r_mean) / (1 - torch.exp(r_mean)))
        loss = -c_mean - beta * log_sigmoid(odds)
    elif name == "simpo":
        h = beta * (c / c_size - r / r_size) - gamma
        loss = -(1 - smooth) * log_sigmoid(h) - smooth * log_sigmoid(-h)
    else:
        h = beta * (c - r)
        loss = -(1 - smooth) * log_sigmoid(h) - smooth * log_sigmoid(-h)
    return loss - asked.get("sft_weight", 0.0) * c / c_size


def made():
    """Hidden states, weight and bias in fp64 that need gradients; labels between masked ones."""
    draw = torch.Generator().manual_seed(5)
    labels = []
    for size in LENGTHS:
        own = torch.randint(VOCABULARY, (size,), generator=draw)
        labels += [torch.tensor([-100, -100]), own]
    labels = torch.cat(labels)
    hidden = torch.randn(len(labels), HIDDEN, generator=draw, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)
    return [one.requires_grad_() for one in (hidden, weight, bias)], labels


def plain_sums(leaves, labels, scale, softcap):
    """Σ log p of each sequence, from full logits."""
    hidden, weight, bias = leaves
    logits = softcap * torch.tanh(scale * F.linear(hidden, weight, bias) / softcap)
    each = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    sums, at = [], 0
    for size in LENGTHS:
        at += 2
        sums.append(each[at : at + size].sum())
        at += size
    return sums


def tensors(reference=None, **more) -> PairTensors:
    sizes = torch.tensor(LENGTHS, dtype=torch.float64).view(-1, 2)
    given = torch.zeros_like(sizes) if reference is None else reference
    return PairTensors(torch.tensor(LENGTHS), sizes, given, **more)


def named(found) -> dict[str, float]:
    return dict(zip(PAIR_SLOTS, found.tolist()[1:], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_each_loss_and_its_gradients_are_those_of_full_logits(case):
    asked = config(case)
    leaves, labels = made()
    reference = torch.linspace(-9, -20, len(LENGTHS), dtype=torch.float64).view(-1, 2)
    pairs = tensors(reference if asked.has_reference else None)
    how = {"bias": leaves[2], "scale": 0.7, "softcap": 4.0}
    sums = sequence_sums(log_probs(*leaves[:2], labels, **how, chunk_rows=4), pairs.lengths)
    found = loss_and_sums(sums, pairs, asked)
    right = plain_sums(leaves, labels, 0.7, 4.0)
    rows = zip(right[::2], right[1::2], pairs.reference, LENGTHS[::2], LENGTHS[1::2], strict=True)
    loss = sum(plain_loss(case, c, r, *ref, m, n) for c, r, ref, m, n in rows)
    assert found.dtype == torch.float64
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-13)
    ours = torch.autograd.grad(found[0], leaves)
    for one, other in zip(ours, torch.autograd.grad(loss, leaves), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-13


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.25)])
def test_kto_pushes_judged_answers_away_from_the_divergence(weights):
    """The other answers have no gradient, nor has the divergence."""
    good, bad = weights
    asked = config("kto", desirable_weight=good, undesirable_weight=bad)
    leaves, labels = made()
    reference = torch.linspace(-9, -20, len(LENGTHS), dtype=torch.float64).view(-1, 2)
    desirable = torch.tensor([True, False, False, True])
    z = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    pairs = tensors(reference, desirable=desirable, divergence=z)
    how = {"bias": leaves[2], "scale": 0.7, "softcap": 4.0}
    sums = sequence_sums(log_probs(*leaves[:2], labels, **how), pairs.lengths)
    found = loss_and_sums(sums, pairs, asked)
    right = plain_sums(leaves, labels, 0.7, 4.0)
    loss, correct = torch.zeros((), dtype=torch.float64), 0
    for one, ref, is_good in zip(right[::2], reference[:, 0], desirable, strict=True):
        ratio = one - ref
        if is_good:
            loss = loss + good * (1 - torch.sigmoid(0.3 * (ratio - 0.8)))
        else:
            loss = loss + bad * (1 - torch.sigmoid(0.3 * (0.8 - ratio)))
        correct += int((ratio > 0.8) == is_good)
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-13)
    ours = torch.autograd.grad(found[0], leaves, retain_graph=True)
    for one, other in zip(ours, torch.autograd.grad(loss, leaves), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-13
    slots = named(found)
    of_good = [right[0].item(), right[6].item()]
    of_bad = [right[2].item(), right[4].item()]
    expected = {
        "pairs": 4,
        "chosen": 2,
        "rejected": 2,
        "correct": correct,
        "chosen_reward": 0.3 * (sum(of_good) - float(reference[[0, 3], 0].sum())),
        "rejected_reward": 0.3 * (sum(of_bad) - float(reference[[1, 2], 0].sum())),
        "chosen_logp": sum(of_good),
        "rejected_logp": sum(of_bad),
        "chosen_tokens": LENGTHS[0] + LENGTHS[6],
        "divergence": 4 * 0.8,
    }
    assert slots == pytest.approx(expected, rel=1e-12)


def test_the_divergence_is_a_constant_of_the_loss():
    sums = torch.tensor([[-3.0, -4.0], [-5.0, -2.0]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    pairs = PairTensors(
        torch.ones(4, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.float64),
        desirable=torch.tensor([True, False]),
        divergence=z,
    )
    loss_and_sums(sums, pairs, config("kto"))[0].backward()
    assert z.grad is None
    assert sums.grad is not None
    assert not sums.grad[:, 1].any()


def test_the_sums_are_those_of_the_answers():
    sums = torch.tensor([[-3.0, -4.0], [-5.0, -2.0], [-6.0, -6.0]], dtype=torch.float64)
    sizes = torch.tensor([[2.0, 4.0], [5.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    reference = torch.tensor([[-3.5, -4.0], [-4.0, -1.0], [-6.0, -6.0]], dtype=torch.float64)
    pairs = PairTensors(sizes.long().view(-1), sizes, reference)
    assert named(loss_and_sums(sums, pairs, config("dpo"))) == pytest.approx(
        {
            "pairs": 3,
            "chosen": 3,
            "rejected": 3,
            "correct": 2.0,  # one, and two ties; a tie counts half
            "chosen_reward": 0.3 * (0.5 - 1.0),
            "rejected_reward": 0.3 * (0.0 - 1.0),
            "chosen_logp": -14,
            "rejected_logp": -12,
            "chosen_tokens": 10,
            "divergence": 0,
        }
    )


def test_with_the_reference_itself_the_margin_is_exactly_0():
    sums = torch.tensor([[-301.123, -425.77]], dtype=torch.float64)
    sizes = torch.full((1, 2), 100.0, dtype=torch.float64)
    pairs = PairTensors(torch.tensor([100, 100]), sizes, sums)
    found = loss_and_sums(sums, pairs, config("dpo"))
    slots = named(found)
    assert found[0].item() == math.log(2)
    assert (slots["chosen_reward"], slots["rejected_reward"], slots["correct"]) == (0.0, 0.0, 0.5)


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_rewards_without_a_reference_are_means_over_tokens_where_the_loss_takes_these(loss):
    sums = torch.tensor([[-3.0, -4.0]], dtype=torch.float64)
    sizes = torch.tensor([[2.0, 8.0]], dtype=torch.float64)
    pairs = PairTensors(torch.tensor([2, 8]), sizes, torch.zeros_like(sums))
    slots = named(loss_and_sums(sums, pairs, config(loss)))
    assert (slots["chosen_reward"], slots["rejected_reward"]) == pytest.approx((-0.45, -0.15))
    assert slots["correct"] == 0.0  # the rejected answer is likelier, token by token


def test_an_answer_that_is_certain_has_a_finite_gradient():
    """log p of 0 in fp32: its odds are infinite."""
    sums = torch.tensor([[0.0, -4.0]], dtype=torch.float64, requires_grad=True)
    pairs = PairTensors(
        torch.tensor([2, 8]), torch.tensor([[2.0, 8.0]]).double(), torch.zeros(1, 2).double()
    )
    found = loss_and_sums(sums, pairs, config("orpo"))
    found[0].backward()
    assert math.isfinite(found[0].item())
    assert sums.grad is not None
    assert sums.grad.isfinite().all()


def test_a_reward_model_is_trained_on_the_difference_of_scores():
    scores = torch.tensor([[1.5, -0.5], [0.2, 0.9]], dtype=torch.float64, requires_grad=True)
    sizes = torch.ones(2, 2, dtype=torch.float64)
    pairs = PairTensors(torch.ones(4, dtype=torch.int64), sizes, torch.zeros_like(sizes))
    found = loss_and_sums(scores, pairs, config("reward"))
    right = math.log1p(math.exp(-2.0)) + math.log1p(math.exp(0.7))
    assert found[0].item() == pytest.approx(right, rel=1e-14)
    slots = named(found)
    assert (slots["chosen_reward"], slots["rejected_reward"]) == pytest.approx((1.7, 0.4))
    assert (slots["correct"], slots["chosen_logp"], slots["chosen_tokens"]) == (1, 0, 0)


def test_a_sequence_without_a_position_here_has_a_sum_of_0():
    own = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float32, requires_grad=True)
    found = sequence_sums(own, torch.tensor([0, 2, 1, 0]))
    assert found.tolist() == [[0.0, -3.0], [-4.0, 0.0]]
    found.sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "kto"])
def test_rows_without_a_pair_have_a_loss_of_0_and_gradients_of_zeros(loss):
    leaves, labels = made()
    nothing = torch.zeros(0, 2, dtype=torch.float64)
    more = {"desirable": nothing[:, 0] > 0, "divergence": torch.tensor(0.3).double()}
    pairs = PairTensors(torch.zeros(0, dtype=torch.int64), nothing, nothing, **more)
    found = log_probs(*leaves[:2], torch.full_like(labels, -100), bias=leaves[2])
    found = loss_and_sums(sequence_sums(found, pairs.lengths), pairs, config(loss))
    assert found.tolist() == [0.0] * (1 + len(PAIR_SLOTS))
    assert all(not one.any() for one in torch.autograd.grad(found[0], leaves))
