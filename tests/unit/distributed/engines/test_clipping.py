"""The decisions of a step are the same, whether they are made on the device or on the host."""

import math
import struct

import pytest
import torch

from llmtrain.distributed.engines import engine
from llmtrain.types import SLOTS, StepVector

AWKWARD = (0.0, 1e-300, 1e-12, 1.0, 1e76, 1.1579208923731618e77, 1e80, math.inf, math.nan)


def sums(squares, tokens=8.0, **slots):
    said = {"squares": squares, **slots}
    values = [said.get(slot, 0.0) for slot in SLOTS]
    return StepVector(torch.tensor([*values, tokens, 0.0], dtype=torch.float64))


def both_ways(monkeypatch, vector, limit):
    """The bits of norm and factor, and whether the update is refused: queued, then on the host."""
    found = []
    for queued in (True, False):
        monkeypatch.setattr(engine, "is_asynchronous", lambda device, queued=queued: queued)
        decided = (engine.gradient_norm(vector), engine.clip_factor(vector, limit))
        refused = engine.is_refused(vector)
        assert all(isinstance(one, torch.Tensor) == queued for one in (*decided, refused))
        numbers = [] if bool(refused) else [struct.pack("<d", float(one)).hex() for one in decided]
        found.append([*numbers, str(bool(refused))])
    return found


def test_both_ways_have_the_same_bits(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    exponents = torch.empty(3000, dtype=torch.float64).uniform_(-20, 20, generator=generator)
    limits = torch.empty(3000, dtype=torch.float64).uniform_(0.01, 9, generator=generator)
    for exponent, limit in zip(exponents.tolist(), limits.tolist(), strict=True):
        device, host = both_ways(monkeypatch, sums(10**exponent), limit)
        assert device == host
        assert device[-1] == "False"


@pytest.mark.parametrize("squares", AWKWARD)
@pytest.mark.parametrize(
    "slots", [{}, {"not_finite": 2.0}, {"data_failed": 1.0}, {"tokens": 0.0}], ids=str
)
def test_both_refuse_the_same(monkeypatch, squares, slots):
    device, host = both_ways(monkeypatch, sums(squares, **slots), 1.0)
    assert device == host
    norm = torch.tensor(squares, dtype=torch.float64).sqrt().float()
    assert device[-1] == str(bool(slots) or not bool(torch.isfinite(norm)))


@pytest.mark.parametrize("tokens", [0.0, 8.0])
def test_a_sum_behind_the_tokens_is_none_of_them(monkeypatch, tokens):
    vector = StepVector(torch.cat([sums(1.0, tokens).data, torch.tensor([3.0])]), 1)
    device, host = both_ways(monkeypatch, vector, 1.0)
    assert device == host
    assert device[-1] == str(not tokens)


def test_on_the_host_it_is_torchs_own_clipping():
    gradients = [torch.randn(7, 3), torch.randn(5)]
    squares = sum(float(one.double().square().sum()) for one in gradients)
    parameter = [torch.zeros_like(one) for one in gradients]
    for one, gradient in zip(parameter, gradients, strict=True):
        one.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameter, 0.3)
    assert engine.gradient_norm(sums(squares)) == pytest.approx(float(norm), rel=1e-6)
    factor = engine.clip_factor(sums(squares), 0.3)
    for one, gradient in zip(parameter, gradients, strict=True):
        torch.testing.assert_close(gradient * factor, one.grad, rtol=1e-6, atol=0)
