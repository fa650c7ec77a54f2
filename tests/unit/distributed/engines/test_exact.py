"""Sums on the grid against rational numbers, and what an engine makes of planted errors."""

import hashlib
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import exact
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.engines.exact import Totals, exact_squares, to_grid
from llmtrain.distributed.engines.state import create_state
from llmtrain.errors import RunError, UserError
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import SLOTS, StepVector

GRID = Fraction(1, 2**42)
CPU = torch.device("cpu")


def rounded(value, grid=GRID):
    """Half to even, by rational arithmetic alone."""
    return round(Fraction(value) / grid) * grid


def gradients(seed, count, size):
    """fp32 of many magnitudes, with halves of the grid among them."""
    drawn = torch.Generator().manual_seed(seed)
    values = torch.randn(count, size, generator=drawn)
    values *= 2.0 ** torch.randint(-60, 5, (count, size), generator=drawn)
    halves = torch.randint(-(2**20), 2**20, (count, size), generator=drawn) * 2.0**-43
    return torch.where(torch.rand(count, size, generator=drawn) < 0.3, halves, values)


@given(st.floats(-511.0, 511.0, width=32))
def test_a_number_is_rounded_to_the_nearest_multiple_of_the_grid(value):
    found = to_grid(torch.tensor([value], dtype=torch.float64), 2.0**-42)
    assert Fraction(found.item()) == rounded(value)


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_exact_in_any_order_and_any_division(seed):
    held = gradients(seed, 24, 40)
    expected = [sum(rounded(value) for value in column) for column in held.T.tolist()]
    drawn = torch.Generator().manual_seed(seed)
    for ranks in (1, 2, 3, 5, 24):
        order = torch.randperm(24, generator=drawn).tolist()
        totals = [Totals(40, CPU) for _ in range(ranks)]
        for number, group in enumerate(order):
            cut = (7 * group + number) % 41
            totals[number % ranks].add(0, held[group, :cut])
            totals[number % ranks].add(cut, held[group, cut:])
        shuffled = torch.randperm(ranks, generator=drawn).tolist()
        whole = sum(totals[number].exact for number in shuffled)
        assert [Fraction(value) for value in whole.tolist()] == expected


@pytest.mark.parametrize("seed", range(4))
def test_squares_add_up_to_the_same_bits_however_they_are_divided(seed):
    values = gradients(seed, 1, 1000)[0]
    parts = exact_squares(values)
    for cuts in ((500,), (1, 2, 999), (333, 334)):
        assert torch.equal(sum(exact_squares(p) for p in values.tensor_split(cuts)), parts)
    exactly = sum(Fraction(value) ** 2 for value in values.tolist())
    assert abs(Fraction(parts.sum().item()) / exactly - 1) < Fraction(1, 10**14)
    small = values * 1e-7
    exactly = sum(Fraction(value) ** 2 for value in small.tolist())
    assert abs(Fraction(exact_squares(small).sum().item()) / exactly - 1) < Fraction(1, 10**5)


def test_a_tensor_longer_than_a_chunk_is_added_whole():
    held = gradients(5, 2, 70_001)
    totals = Totals(70_003, CPU)
    for one in held:
        totals.add(2, one)
    expected = [sum(map(rounded, pair)) for pair in held[:, -300:].T.tolist()]
    assert [Fraction(value) for value in totals.exact[-300:].tolist()] == expected
    assert not totals.exact[:2].any()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 1001])
def test_each_element_is_updated_alike_wherever_a_tensor_ends(size):
    drawn = torch.Generator().manual_seed(0)
    whole = torch.randn(size, generator=drawn)

    def after(parts):
        model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), fused=False)
        for step in range(3):
            gradient = torch.randn(size, generator=torch.Generator().manual_seed(step))
            cuts = gradient.split([part.numel() for part in parts])
            for one, own in zip(model, cuts, strict=True):
                one.grad = own.clone()
            optimizer.step()
        return torch.cat([one.detach() for one in model])

    for cut in {0, 1, size // 2, size // 3, size - 1}:
        assert torch.equal(after([whole[:cut], whole[cut:]]), after([whole]))


@pytest.fixture
def launched():
    asked = DistributedConfig(timeout_minutes=1.0)
    yield make_accelerator("ddp", "fp32", asked, same_bits=True)
    close()


def tiny():
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape)).train()


def vector(squares):
    values = [float(squares) if slot == "squares" else 0.0 for slot in SLOTS]
    return StepVector(torch.tensor([*values, 8.0], dtype=torch.float64))


def trained(launched, groups, scale=1 / 64, flip=None):
    """The SHA-256 of weights and moments after one step over these groups of rows."""
    model, engine = tiny(), launched.engine
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), fused=False)
    prepared = engine.prepare(LossModule(model), model, optimizer)
    create_state(optimizer)
    if flip is not None:
        flip(model)
    rows = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]} for ids in groups]
    for _ in engine.forward_backward(rows, torch.tensor(scale)):
        pass
    sums = vector(engine.squares())
    engine.clip(sums, 1.0)
    engine.step(1.0, sums)
    assert prepared is not None
    moments = [
        held[name] for held in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    every = [*model.parameters(), *moments]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in every)).hexdigest()


def some_groups():
    return list(made_up_batch(8, 9, 32, CPU).split(2))


def test_the_order_of_the_groups_does_not_matter_and_their_rows_do(launched):
    groups = some_groups()
    expected = trained(launched, groups)
    assert trained(launched, groups[::-1]) == expected
    assert trained(launched, [*groups[2:], *groups[:2]]) == expected
    assert trained(launched, list(torch.cat(groups).split(4))) != expected


def flip_a_bit(model):
    """The lowest bit of one gradient, as it arrives."""

    def hook(gradient):
        changed = gradient.clone()
        changed.view(-1).view(torch.int32)[0] ^= 1
        return changed

    model.model.norm.weight.register_hook(hook)


@pytest.mark.parametrize("error", ["a group dropped", "a wrong scale", "one bit of a gradient"])
def test_a_planted_error_changes_the_hash(launched, error):
    groups = some_groups()
    changes = {
        "a group dropped": {"groups": groups[:-1]},
        "a wrong scale": {"groups": groups, "scale": 1 / 63},
        "one bit of a gradient": {"groups": groups, "flip": flip_a_bit},
    }
    expected = trained(launched, groups)
    assert trained(launched, **changes[error]) != expected
    assert trained(launched, groups) == expected


def accumulated(launched, model, scale):
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), fused=False)
    launched.engine.prepare(LossModule(model), model, optimizer)
    rows = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]} for ids in some_groups()]
    for _ in launched.engine.forward_backward(rows, torch.tensor(scale)):
        pass


def test_a_gradient_is_that_of_autograd(launched):
    ours, theirs = tiny(), tiny()
    accumulated(launched, ours, 1 / 64)
    for ids in some_groups():
        (LossModule(theirs)(ids[:, :-1], ids[:, 1:]) / 64).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
    assert float(launched.engine.squares()) == pytest.approx(float(norm) ** 2, rel=1e-6)
    launched.engine.clear()
    assert all(one.grad is None for one in ours.parameters())


def test_bad_input_a_gradient_beyond_the_grid_ends_the_run_with_its_name(launched):
    model = tiny()
    model.model.norm.weight.register_hook(lambda gradient: gradient * 1e6)
    accumulated(launched, model, 1 / 64)
    with pytest.raises(
        RunError, match=r"the gradient of model\.norm\.weight is too large"
    ) as caught:
        launched.engine.squares()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_left_to_the_step(launched, value):
    model = tiny()
    model.model.norm.weight.register_hook(lambda gradient: gradient * value)
    accumulated(launched, model, 1 / 64)
    assert not launched.engine.squares().isfinite()


def test_what_is_not_finite_counts_before_what_is_too_large(launched, monkeypatch):
    """In one tensor the second hides behind the first, so it must not decide in two tensors."""
    monkeypatch.setattr(exact, "_SMALL", 0)  # else these are one tensor
    model = tiny()
    model.model.norm.weight.register_hook(lambda gradient: gradient * 1e6)
    model.model.layers[0].input_layernorm.weight.register_hook(lambda one: one * float("nan"))
    accumulated(launched, model, 1 / 64)
    assert not launched.engine.squares().isfinite()


@pytest.mark.parametrize(("groups", "limit"), [(1, 512.0), (2, 512.0), (4, 256.0), (64, 16.0)])
def test_no_sum_of_groups_within_the_range_leaves_it(launched, groups, limit):
    launched.engine.prepare(*in_one(model := nn.Linear(1, 1, bias=False)))
    for value, fits in ((limit * (1 - 2**-20), True), (limit, False), (-limit, False)):
        for number in range(groups):
            with launched.engine.micro(last=number == groups - 1):
                model.weight.sum().backward(torch.tensor(value))
        if fits:
            assert float(model.weight.grad) < 2**10
            launched.engine.squares()
        else:
            with pytest.raises(RunError):
                launched.engine.squares()
        launched.engine.clear()


def test_bad_input_squares_whose_sum_is_not_exact_end_the_run_too(launched, monkeypatch):
    accumulated(launched, tiny(), 1 / 64)
    largest = float(launched.engine.squares())
    monkeypatch.setattr(exact, "_LARGEST_SQUARES", largest * (1 - 2**-10))
    with pytest.raises(RunError, match="too large"):
        launched.engine.squares()


def in_one(model):
    return model, model, torch.optim.SGD(model.parameters())


def test_what_no_group_uses_has_a_gradient_of_zero(launched):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    launched.engine.prepare(*in_one(model))
    with launched.engine.micro(last=True):
        model[0](torch.ones(2)).sum().backward()
    assert model[0].weight.grad.all()
    assert torch.equal(model[1].weight.grad, torch.zeros(2, 2))


def test_buckets_have_each_parameter_once_and_are_no_larger_than_asked(launched, monkeypatch):
    monkeypatch.setattr(launched.accelerator.ddp_handler, "bucket_cap_mb", 1)
    monkeypatch.setattr(exact, "_SMALL", 100)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(9)))
    launched.engine.prepare(*in_one(model))
    with launched.engine.micro(last=True):
        model(torch.ones(1, 300)).sum().backward()
    assert float(launched.engine.squares()) > 0
    by_torch = nn.Sequential(*(nn.Linear(300, 300) for _ in range(9)))
    by_torch.load_state_dict(model.state_dict())
    by_torch(torch.ones(1, 300)).sum().backward()
    for one, other in zip(model.parameters(), by_torch.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-12)


def test_bad_input_batch_norm_is_refused(launched):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UserError, match="statistics are of the rows of one process"):
        launched.engine.prepare(*in_one(model))
