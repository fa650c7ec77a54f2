import copy
import math
import struct
from types import SimpleNamespace

import pytest
import torch
from helpers.rings import needs
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import AdapterConfig, DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import engine, state
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.engines.engine import TorchEngine, checksum, odd_ranks
from llmtrain.distributed.engines.state import create_state
from llmtrain.distributed.ranks import ModelGroups
from llmtrain.model import trainable
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import SLOTS, StepVector, rank_layout


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
    create_state(optimizer)
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


@pytest.mark.parametrize("then", ["a small step", "a refused step", "an infinite norm"])
def test_a_step_is_clipped_only_by_its_own_factor(launched, then):
    ours, alone = tiny(), tiny()
    optimizer = prepared(launched, ours)
    backward(launched, ours)
    refused = {"not_finite": 1.0} if then == "a refused step" else {}
    squares = math.inf if then == "an infinite norm" else float(launched.engine.squares())
    sums = vector(squares, **refused)
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
    create_state(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    spec = state.spec(model, optimizer, 1 << 30)
    written: dict[int, dict[str, int]] = {}
    for rank in (0, 1):
        place = SimpleNamespace(process_index=rank, num_processes=2, device=torch.device("cpu"))
        one = TorchEngine(place, None, rank_layout(rank, 2), ModelGroups())
        one._bare, one._optimizer, one._parameters = model, optimizer, list(model.parameters())
        one._counted = one._counted_parameters()
        counted = sum(p.numel() for p in model.parameters()) if rank == 0 else 0
        assert float(one.squares()) == counted
        pieces = list(one.pieces(spec, writing=True, replicas_shared=True))
        written[rank] = {piece.name: piece.data.numel() for piece in pieces}
    assert ("seen" in written[0], "seen" in written[1]) == (True, False)
    names = written[0].keys() | written[1].keys()
    sizes = {name: sum(each.get(name, 0) for each in written.values()) for name in names}
    held = {name: math.prod(one.shape) for part in spec.values() for name, one in part.items()}
    assert sizes == held


def test_replicas_compare_what_is_trained_and_once_the_frozen_base(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(engine, "unequal_ranks", lambda names, *_: seen.append(names) or {})
    model = tiny()
    trainable.attach(model, AdapterConfig(kind="lora", r=2, targets="q_proj"))
    accelerator = SimpleNamespace(process_index=0, num_processes=2)
    pair = TorchEngine(accelerator, None, rank_layout(0, 2), ModelGroups())
    pair._bare = model
    assert pair.unequal_replicas() == pair.unequal_replicas(base=True) == {}
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert seen[0] == [place.format("A"), place.format("B")]
    assert seen[1] == [name for name, _ in model.named_parameters()]
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in seen[1]


# The decisions of a step are the same, whether they are made on the device or on the host.
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


def slowly(tensor):
    """Words of eight bytes, then the elements behind the last one, as Python adds them."""
    body = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    whole = len(body) - len(body) % 8
    size = tensor.element_size()
    words = [body[k : k + 8] for k in range(0, whole, 8)]
    rest = [body[k : k + size] for k in range(whole, len(body), size)]
    signed = size > 1
    total = sum(int.from_bytes(word, "little", signed=True) for word in words)
    total += sum(int.from_bytes(one, "little", signed=signed) for one in rest)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 1001])
def test_a_checksum_is_the_sum_of_the_memory(dtype, size):
    torch.manual_seed(size)
    tensor = (torch.randn(size) * 100).to(dtype)
    assert int(checksum(tensor)) == slowly(tensor)


def test_a_checksum_takes_any_shape_and_what_begins_inside_a_word():
    tensor = torch.randn(3, 5, 7)
    assert int(checksum(tensor)) == slowly(tensor)
    assert int(checksum(tensor.view(-1)[1:])) == slowly(tensor.view(-1)[1:].clone())
    assert int(checksum(torch.tensor(1.5))) == slowly(torch.tensor([1.5]))


def test_any_single_bit_changes_a_checksum():
    tensor = torch.randn(5)
    before = int(checksum(tensor))
    bits = tensor.view(torch.uint8)
    for place in range(len(bits)):
        for bit in range(8):
            bits[place] ^= 1 << bit
            assert int(checksum(tensor)) != before
            bits[place] ^= 1 << bit
    assert int(checksum(tensor)) == before


def test_not_a_number_and_the_sign_of_zero_are_bits_like_others():
    nan = torch.tensor([float("nan"), 1.0])
    assert int(checksum(nan)) == int(checksum(nan.clone()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))


@pytest.mark.parametrize(
    ("sums", "shards", "expected"),
    [
        ([5, 5, 5], 1, []),
        ([5, 5, 6], 1, [2]),
        ([6, 5, 5], 1, [0]),  # the majority is right, not rank 0
        ([5, 6], 1, [0, 1]),  # nobody knows which
        ([5, 6, 5, 6], 1, [0, 1, 2, 3]),
        ([5, 6, 7], 1, [0, 1, 2]),
        ([5, 8, 5, 8, 5, 9], 2, [5]),  # ranks 0, 2, 4 and ranks 1, 3, 5
        ([5, 8, 5, 8], 2, []),
        ([5, 8, 6, 8], 2, [0, 2]),
    ],
)
def test_the_odd_ranks_are_those_that_hold_what_most_do_not(sums, shards, expected):
    assert odd_ranks(sums, shards) == expected


@pytest.mark.parametrize(("world_size", "shards"), [(3, 1), (8, 1), (6, 2), (12, 3)])
def test_an_odd_rank_among_many_is_found_wherever_it_is(world_size, shards):
    for wrong in range(world_size):
        sums = [rank % shards for rank in range(world_size)]
        sums[wrong] = 99
        assert odd_ranks(sums, shards) == [wrong]
