import copy
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.rings import needs
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import AdapterConfig, DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import engine, state
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.engines.engine import TorchEngine
from llmtrain.distributed.engines.state import create_state
from llmtrain.model import trainable
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import SLOTS, StepVector


@pytest.fixture
def launched():
    yield make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0))
    close()


def tiny():
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape)).train()


def vector(squares, **slots):
    said = {"squares": squares, **slots}
    values = [said.get(slot, 0.0) for slot in SLOTS]
    return StepVector(torch.tensor([*values, said.get("tokens", 8.0)], dtype=torch.float64))


def prepared(launched, model, name="adamw", *, fused=True):
    asked = OptimizerConfig(name=name, learning_rate=1e-2)
    optimizer = make_optimizer(model, asked, fused=fused)
    launched.engine.prepare(LossModule(model), model, optimizer)
    create_state(optimizer, 0)
    return optimizer


def backward(launched, model):
    ids = made_up_batch(2, 9, 32, torch.device("cpu"))
    launched.engine.backward(LossModule(model)(ids[:, :-1], ids[:, 1:]), torch.tensor(1.0))


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_is_torchs_own(launched, fused):
    ours, theirs = tiny(), tiny()
    optimizer = prepared(launched, ours, fused=fused)
    backward(launched, ours)
    backward(launched, theirs)
    sums = vector(float(launched.engine.squares()))
    launched.engine.clip(sums, 0.5)
    launched.engine.step(1.0, sums)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert float(launched.engine.norm(sums)) == pytest.approx(float(norm), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        first = optimizer.state[one]["exp_avg"] / (1 - OptimizerConfig().betas[0])
        torch.testing.assert_close(first, other.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("then", ["a small step", "a refused step"])
def test_a_step_is_clipped_only_by_its_own_factor(launched, then):
    ours, alone = tiny(), tiny()
    optimizer = prepared(launched, ours)
    backward(launched, ours)
    refused = {"not_finite": 1.0} if then == "a refused step" else {}
    sums = vector(float(launched.engine.squares()), **refused)
    launched.engine.clip(sums, 1e-3)
    launched.engine.step(0.0, sums)
    for held in optimizer.state.values():
        held["exp_avg"].zero_()
    backward(launched, ours)
    launched.engine.clip(vector(1.0), 2.0)  # no need to clip
    launched.engine.step(0.0, vector(1.0))
    backward(launched, alone)
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        first = optimizer.state[one]["exp_avg"] / (1 - OptimizerConfig().betas[0])
        torch.testing.assert_close(first, other.grad, rtol=1e-5, atol=1e-8)


def test_the_squares_of_small_and_large_gradients_are_summed_in_fp64():
    sizes = [1, *(size + more for size in (engine._SMALL, engine._SLAB) for more in (-1, 0, 1))]
    drawn = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=drawn) for size in sizes]
    for some in (gradients, *([one] for one in gradients)):
        expected = math.fsum(x * x for one in some for x in one.tolist())
        assert float(engine._squares(some)) == pytest.approx(expected, rel=1e-12)


def test_no_limit_leaves_gradients_alone(launched):
    model = tiny()
    prepared(launched, model)
    backward(launched, model)
    before = [p.grad.clone() for p in model.parameters()]
    launched.engine.clip(vector(1e6), None)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_is_adamw_at_the_groups_rate_times_the_factor(launched):
    ours, theirs = tiny(), tiny()
    prepared(launched, ours)
    reference = make_optimizer(theirs, OptimizerConfig(learning_rate=1e-2 * 0.25), fused=False)
    for _ in range(3):
        backward(launched, ours)
        backward(launched, theirs)
        launched.engine.step(0.25, vector(1.0))
        reference.step()
        reference.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "forbidden",
    [
        {"squares": float("nan")},
        {"squares": 1e80},  # its root is no fp32
        {"squares": 1.0, "not_finite": 3.0},
        {"squares": 1.0, "data_failed": 2.0},
        {"squares": 1.0, "tokens": 0.0},
    ],
    ids=["NaN norm", "infinite norm", "three ranks not finite", "two without data", "no token"],
)
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("adamw", True),
        ("adamw", False),
        ("muon", True),
        pytest.param("adamw_8bit", True, marks=needs("bitsandbytes")),
    ],
)
def test_a_forbidden_step_changes_no_weight_moment_or_count(launched, forbidden, name, fused):
    model = tiny()
    optimizer = prepared(launched, model, name, fused=fused)
    backward(launched, model)
    launched.engine.step(1.0, vector(1.0))
    before = [p.detach().clone() for p in model.parameters()]
    moments = copy.deepcopy(list(optimizer.state.values()))
    backward(launched, model)
    next(model.parameters()).grad.fill_(float("nan"))
    launched.engine.step(1.0, vector(**forbidden))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for now, then in zip(optimizer.state.values(), moments, strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(torch.as_tensor(now[k]), torch.as_tensor(then[k])) for k in then)


def test_evaluating_means_no_dropout_and_no_gradient_and_ends_with_training(launched):
    model = tiny()
    prepared(launched, model)
    with launched.engine.evaluating():
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training
    assert torch.is_grad_enabled()


def test_mixed_precision_and_accumulation_of_the_environment_do_not_get_in(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0))
    try:
        assert launched.accelerator.gradient_accumulation_steps == 1
        assert launched.accelerator.mixed_precision == "no"
    finally:
        close()


def test_of_equal_ranks_one_counts_gradients_and_writes_buffers_and_all_write_a_share():
    model = tiny()
    model.register_buffer("seen", torch.arange(3.0))
    optimizer = make_optimizer(model, OptimizerConfig(), fused=False)
    create_state(optimizer, 0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    spec = state.spec(model, optimizer, 1 << 30)
    written: dict[int, dict[str, int]] = {}
    for rank in (0, 1):
        place = SimpleNamespace(process_index=rank, num_processes=2, device=torch.device("cpu"))
        one = TorchEngine(place, None)
        one._bare, one._optimizer, one._parameters = model, optimizer, list(model.parameters())
        counted = sum(p.numel() for p in model.parameters()) if rank == 0 else 0
        assert float(one.squares()) == counted
        pieces = list(one.pieces(spec, writing=True, dealt=True))
        written[rank] = {piece.name: piece.data.numel() for piece in pieces}
    assert ("seen" in written[0], "seen" in written[1]) == (True, False)
    names = written[0].keys() | written[1].keys()
    sizes = {name: sum(each.get(name, 0) for each in written.values()) for name in names}
    held = {name: math.prod(one.shape) for part in spec.values() for name, one in part.items()}
    assert sizes == held


def test_replicas_compare_what_is_trained_and_once_the_frozen_base(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(
        engine, "unequal_ranks", lambda names, _held, _count: seen.append(names) or {}
    )
    model = tiny()
    trainable.attach(model, AdapterConfig(kind="lora", r=2, targets="q_proj"))
    pair = TorchEngine(SimpleNamespace(process_index=0, num_processes=2), None)
    pair._bare = model
    assert pair.unequal_replicas() == pair.unequal_replicas(base=True) == {}
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert seen[0] == [place.format("A"), place.format("B")]
    assert seen[1] == [name for name, _ in model.named_parameters()]
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in seen[1]
