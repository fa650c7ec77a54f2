"""Bytes of a plan, against the table they come from and against real tensors."""

from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.live_storage import fake_model, live_storage, peak_of_two_steps, two_steps
from helpers.on_paper import GIB, LlamaCount, gpus, llama, work
from helpers.rings import needs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import GPT2Config, LlamaConfig

from llmtrain.distributed.plan import memory as module
from llmtrain.distributed.plan.balance import held_passes, parts_of, stages_of
from llmtrain.distributed.plan.memory import (
    PARTS,
    Hardware,
    Layout,
    Work,
    arithmetic_of,
    checkpoint_bytes,
    head_bytes,
    largest_block,
    memory,
    missing_package,
    model_states,
    shards,
    state_bytes,
    states,
)
from llmtrain.model.count import count_saved
from llmtrain.model.cross_entropy import chunk_of
from llmtrain.model.loss import Head
from llmtrain.model.shape import describe_parameters
from llmtrain.types import DTYPES, ModelCut, ModelShape, ParameterShape, Saved

EIGHT = llama(4096, 14336, 32, 32, 8, 128_256)
COUNT = LlamaCount(4096, 14336, 32, 32, 8, 8192)
NOTHING = Saved(0, 0, 0, 0)
STRATEGIES = (
    "ddp", "fsdp2", "hsdp", "fsdp2_offload", "zero1", "zero2", "zero3", "zero3_offload"
)  # fmt: skip


def planned(
    strategy, hardware, saved=NOTHING, shape=EIGHT, precision="bf16", sync="every", micro=1
):
    layout = Layout(strategy, "none", micro, 4, sync)
    return memory(shape, saved, work(8192, 64, precision=precision), layout, hardware)


def of(*shapes, frozen=(), **values):
    parameters = [ParameterShape(one, True, False, 0) for one in shapes]
    parameters += [ParameterShape(one, False, False, 0) for one in frozen]
    facts = {"hidden": 4, "vocabulary": 8, "embedding": 0, "head": 0, "tied": False, "blocks": 1,
             "block_class": None, "attention": 0, "buffers": 0}  # fmt: skip
    return ModelShape(tuple(parameters), **(facts | values))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_plan_has_every_part_and_its_total_is_their_sum(strategy, precision):
    plan = planned(strategy, gpus(8, 80, nodes=2), precision=precision, saved=COUNT("fp32", "none"))
    assert tuple(plan.parts) == PARTS
    assert plan.total_bytes == sum(plan.parts.values())
    assert all(isinstance(size, int) and size >= 0 for size in plan.parts.values())


@pytest.mark.parametrize(
    ("strategy", "precision", "parameters", "gradients", "optimizer"),
    [  # bytes a parameter, over both ranks; counted in real runs of two processes
        ("ddp", "bf16", 8, 8, 16),
        ("ddp", "fp32", 8, 8, 16),
        ("fsdp2", "bf16", 4, 4, 8),
        ("fsdp2", "fp32", 4, 4, 8),
        ("zero1", "bf16", 4, 8, 12),
        ("zero1", "fp32", 8, 8, 12),
        ("zero2", "bf16", 4, 4, 12),
        ("zero3", "bf16", 2, 4, 12),
        ("zero3", "fp32", 4, 4, 12),
    ],
)
def test_states_are_the_bytes_a_parameter_of_the_table(
    strategy, precision, parameters, gradients, optimizer
):
    states = model_states(EIGHT, strategy, precision, gpus(2, 80))
    found = (
        2 * part / EIGHT.count for part in (states.parameters, states.gradients, states.optimizer)
    )
    assert list(found) == pytest.approx([parameters, gradients, optimizer], rel=1e-4)


def test_hsdp_shards_inside_a_node_and_fsdp2_over_all():
    hardware = gpus(8, 80, nodes=4)
    states = {name: model_states(EIGHT, name, "bf16", hardware) for name in ("hsdp", "fsdp2")}
    sizes = {name: sum(astuple(one)) for name, one in states.items()}
    assert sizes["hsdp"] == pytest.approx(16 * EIGHT.count / 8, rel=1e-3)
    assert sizes["fsdp2"] == pytest.approx(16 * EIGHT.count / 32, rel=1e-3)


def test_a_shard_has_whole_rows_and_the_first_rank_the_most():
    three = of((3, 5))  # ceil(3 / 2) = 2 rows of 5
    assert model_states(three, "fsdp2", "fp32", gpus(2, 80)).parameters == 4 * 2 * 5
    assert model_states(of((2, 5)), "fsdp2", "fp32", gpus(8, 80)).parameters == 4 * 1 * 5
    assert model_states(three, "zero3", "fp32", gpus(2, 80)).parameters == 4 * 8  # ceil(15 / 2)


def test_frozen_parameters_have_neither_gradients_nor_moments():
    shape = of((10, 2), frozen=[(100, 2)])
    for strategy in STRATEGIES:
        states = model_states(shape, strategy, "fp32", gpus(1, 80))
        assert states.parameters == 4 * 220
        assert states.gradients == 4 * 20
        assert states.optimizer in (8 * 20, 12 * 20, 16 * 20)


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", 1), ("fsdp2", 8)])
def test_exact_sums_take_eight_bytes_beside_each_gradient(strategy, parts):
    layout = Layout(strategy, "none", 1, 4, "every")
    asked = [work(8192, 64, precision="fp32", same_bits=exact) for exact in (False, True)]
    plain, exact = (memory(EIGHT, NOTHING, one, layout, gpus(8, 80)).parts for one in asked)
    for plan, bytes_each in ((plain, 4), (exact, 12)):
        assert plan["gradients"] == pytest.approx(bytes_each * EIGHT.count / parts, rel=1e-4)
    changed = {name for name in plain if plain[name] != exact[name]}
    assert changed == {"gradients", "reserve"}


def test_what_is_offloaded_is_on_the_host_and_not_on_the_device():
    plan = planned("fsdp2_offload", gpus(1, 80))
    assert [plan.parts[part] for part in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert plan.host_bytes / GIB == pytest.approx(120, abs=0.5)  # 16 bytes a parameter
    zero = planned("zero3_offload", gpus(1, 80))
    assert zero.host_bytes == pytest.approx(22 * EIGHT.count, rel=1e-3)


def test_every_rank_of_a_node_builds_the_model_on_the_host_first():
    assert planned("ddp", gpus(8, 80)).host_bytes == 8 * 4 * EIGHT.count
    assert planned("zero3", gpus(8, 80)).host_bytes == 8 * 4 * EIGHT.count


def test_of_a_sharded_model_one_rank_does_and_fills_what_lies_on_the_host_from_it():
    assert planned("fsdp2", gpus(8, 80)).host_bytes == 4 * EIGHT.count
    assert planned("hsdp", gpus(8, 80, nodes=2)).host_bytes == 4 * EIGHT.count
    one = planned("fsdp2_offload", gpus(8, 80))  # 16 bytes a parameter stay: more than is built
    assert one.host_bytes == pytest.approx(16 * EIGHT.count, rel=1e-3)
    four = planned("fsdp2_offload", gpus(8, 80, nodes=4))  # the whole and a fourth beside it
    assert four.host_bytes == pytest.approx(5 * EIGHT.count, rel=1e-3)


def test_on_a_cpu_there_is_no_reserve_and_the_device_is_the_host():
    cpu = Hardware(8 * GIB, None, 2, 1, cpu=True)
    plan = planned("ddp", cpu, saved=Saved(1000, 10, 0, 0))
    assert plan.parts["reserve"] == 0
    assert plan.host_bytes == 2 * plan.total_bytes


def test_the_reserve_is_the_context_the_groups_of_ranks_and_a_share_of_the_rest():
    for strategy, devices, context in (("ddp", 1, 1.0), ("fsdp2", 8, 1.0), ("hsdp", 8, 1.6)):
        plan = planned(strategy, gpus(devices, 80, nodes=2 if strategy == "hsdp" else 1))
        rest = plan.total_bytes - plan.parts["reserve"]
        assert plan.parts["reserve"] == pytest.approx(context * GIB + 0.06 * rest, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "precision", "tokens", "expected"),
    [  # measured: live bytes of the loss in a second micro-batch, less what the body keeps
        ("fsdp2", "bf16", 8192, 12 * 8192 * 128_256 + 2 * 8192 * 4096),
        ("ddp", "fp32", 8192, 12 * 8192 * 128_256 + 4 * 8192 * 4096),
        ("ddp", "bf16", 8192, 12 * 8192 * 128_256 + 2 * 8192 * 4096),
        ("ddp", "bf16", 64, 4 * 128_256 * 4096 + 4 * 64 * 4096),
        ("fsdp2", "bf16", 64, 2 * 64 * 128_256 + 2 * 128_256 * 4096 + 4 * 64 * 4096),
        ("zero3", "fp32", 64, 4 * 64 * 128_256 + 4 * 128_256 * 4096 + 8 * 64 * 4096),
    ],
)
def test_head_and_loss_take_what_the_loss_module_takes(strategy, precision, tokens, expected):
    layout = Layout(strategy, "none", 1, 1, "every")
    found = head_bytes(EIGHT, NOTHING, work(tokens, 1, precision=precision), layout)
    assert found == (expected, 0)


NARROW_CHUNK = (2 * 256 + 4 * 8) * 128_256  # 8 rows of this vocabulary fit in 4 MiB


@pytest.mark.parametrize(
    ("strategy", "precision", "inputs", "trained", "frozen"),
    [
        ("ddp", "fp32", 8, 4 * 256 * 128_256, 4 * 256 * 128_256),
        ("ddp", "bf16", 10, NARROW_CHUNK, NARROW_CHUNK),
        ("fsdp2", "bf16", 6, 2 * 128_256 * 4096, NARROW_CHUNK),  # its gradient is made narrow
    ],
)
def test_chunks_take_the_gradient_of_the_head_and_two_of_its_input(
    strategy, precision, inputs, trained, frozen
):
    layout = Layout(strategy, "none", 1, 1, "every")
    plain = replace(NOTHING, plain_head=True)
    asked = work(8192, 1, precision=precision, chunk=chunk_of("cpu"))
    gradient, of_inputs = 4 * 128_256 * 4096, inputs * 8192 * 4096
    found = head_bytes(EIGHT, plain, asked, layout)
    assert found == (gradient + of_inputs + trained, gradient)
    found = head_bytes(replace(EIGHT, head_trained=False), plain, asked, layout)
    assert found == (of_inputs + frozen, 0)
    # on a GPU narrow operands are multiplied into fp32, and the gradient has no second copy
    there = head_bytes(EIGHT, plain, replace(asked, chunk=chunk_of("cuda")), layout)[0]
    assert there < head_bytes(EIGHT, NOTHING, asked, layout)[0]


def test_activations_grow_with_the_micro_batch_and_casts_do_not():
    saved = COUNT("autocast", "none")
    one, three = (planned("ddp", gpus(1, 80), saved=saved, micro=micro) for micro in (1, 3))
    assert one.parts["activations"] == saved.blocks + saved.once
    assert three.parts["activations"] == 3 * one.parts["activations"]
    assert one.parts["working"] == three.parts["working"] == saved.casts


def test_a_recomputed_block_takes_the_room_that_the_head_has_left():
    small, large = Saved(100, 0, 1000, 0), Saved(100, 0, 100 * GIB, 0)
    assert planned("ddp", gpus(1, 80), saved=small).parts["activations"] == 100
    plan = planned("ddp", gpus(1, 80), saved=large)
    assert plan.parts["activations"] + plan.parts["head"] == 100 + 100 * GIB


def test_fsdp_gathers_two_blocks_and_the_head_and_reduces_two_blocks():
    block, head = 218_112_000, 128_256 * 4096
    assert largest_block(EIGHT) == block
    every = planned("fsdp2", gpus(8, 80)).parts["working"]
    assert every == 2 * (2 * block + head + 4096) + 6 * 2 * block
    last = planned("fsdp2", gpus(8, 80), sync="last").parts["working"]
    assert last - every == 4 * EIGHT.count


def test_a_single_micro_batch_has_no_whole_gradients_to_keep():
    layouts = [Layout("fsdp2", "none", 8, 1, sync) for sync in ("every", "last")]
    plans = [memory(EIGHT, NOTHING, work(8192, 64), one, gpus(8, 80)) for one in layouts]
    assert plans[0] == plans[1]


def test_buffers_are_whole_on_every_device():
    shape = replace(EIGHT, buffers=12_345)
    for strategy in STRATEGIES:
        with_buffers, without = (
            planned(strategy, gpus(8, 80), shape=shape),
            planned(strategy, gpus(8, 80)),
        )
        assert with_buffers.parts["parameters"] - without.parts["parameters"] == 12_345


def test_autocast_is_what_ddp_makes_of_bf16():
    assert [arithmetic_of(name, "bf16") for name in ("ddp", "hsdp", "zero2")] == [
        "autocast",
        "bf16",
        "bf16",
    ]
    assert {arithmetic_of(name, "fp32") for name in STRATEGIES} == {"fp32"}


def test_checkpoint_bytes_are_those_of_a_real_models_spec():
    import torch

    from llmtrain.distributed.engines import state

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    spec = state.spec(model, optimizer, 2**30)
    assert checkpoint_bytes(of((7,), (3, 7), frozen=[(7, 5)])) == state.bytes_of(spec)


@pytest.mark.parametrize(("algorithm", "each"), [("adamw", 8), ("muon", 4)])
def test_each_optimizer_has_the_bytes_of_its_own_state(algorithm, each):
    matrix = ParameterShape((9, 4), True, True, 0, algorithm)
    shape = replace(of((7,)), parameters=(matrix, *of((7,)).parameters))
    assert model_states(shape, "ddp", "fp32", gpus(2, 80)).optimizer == each * 36 + 8 * 7
    assert model_states(shape, "fsdp2", "fp32", gpus(2, 80)).optimizer == each * 20 + 8 * 4
    assert checkpoint_bytes(shape) == 4 * 43 + each * 36 + 8 * 7
    frozen = replace(shape, parameters=(replace(matrix, trainable=False),))
    assert model_states(frozen, "ddp", "fp32", gpus(2, 80)).optimizer == 0


def test_8_bit_moments_need_about_a_quarter():
    matrix = ParameterShape((1024, 1024), True, True, 0, "adamw_8bit")
    shape = replace(of(()), parameters=(matrix,))
    found = model_states(shape, "ddp", "fp32", gpus(1, 80)).optimizer
    assert found == pytest.approx(8 * 2**20 / 4, rel=0.02)
    assert checkpoint_bytes(shape) == 4 * 2**20 + found


@pytest.mark.parametrize(
    ("strategy", "precision", "frozen"),
    [("ddp", "bf16", 2), ("ddp", "fp32", 4), ("fsdp2", "bf16", 1), ("fsdp2", "fp32", 2),
     ("zero2", "bf16", 2), ("zero3", "bf16", 1)],
)  # fmt: skip
def test_beside_adapters_frozen_weights_are_held_as_the_forward_needs_them(
    strategy, precision, frozen
):
    """In bytes an element, on each of two devices."""
    plain = of((4, 8), adapted=True)
    both = of((4, 8), frozen=[(10, 6)], adapted=True)
    sizes = [
        model_states(one, strategy, precision, gpus(2, 80)).parameters for one in (plain, both)
    ]
    assert sizes[1] - sizes[0] == frozen * 60
    trained = [model_states(one, strategy, precision, gpus(2, 80)) for one in (plain, both)]
    assert [(one.gradients, one.optimizer) for one in trained[:1]] == [
        (one.gradients, one.optimizer) for one in trained[1:]
    ]


def test_frozen_weights_of_a_whole_model_stay_fp32():
    shape = of((4, 8), frozen=[(10, 6)])
    assert model_states(shape, "ddp", "bf16", gpus(1, 80)).parameters == 4 * (32 + 60)


def test_weights_in_four_bits_take_half_a_byte_and_their_scales():
    shape = of((4, 8), frozen=[(1024, 1024)], adapted=True)
    four = replace(shape.parameters[1], quantized=True)
    found = model_states(replace(shape, parameters=(shape.parameters[0], four)), "ddp", "bf16",
                         gpus(1, 80)).parameters  # fmt: skip
    scales = 2**20 / 64 * (1 + 4 / 256)
    assert found == 4 * 32 + 2**19 + scales


def test_a_checkpoint_of_adapters_holds_what_is_trained():
    assert checkpoint_bytes(of((4, 8), frozen=[(10, 6)], adapted=True)) == 12 * 32
    assert checkpoint_bytes(of((4, 8), frozen=[(10, 6)])) == 12 * 32 + 4 * 60


def test_trained_rows_of_a_head_need_a_copy_of_it_and_the_gradient_of_that():
    layout = Layout("ddp", "none", 1, 1, "every")
    plain, rows = (replace(EIGHT, adapted=True, token_rows=n) for n in (0, 2))
    asked = work(128, 8, precision="bf16")
    more = [head_bytes(one, NOTHING, asked, layout)[0] for one in (plain, rows)]
    assert more[1] - more[0] == 2 * 2 * EIGHT.head


# The whole plan against an oracle that watches two steps, up to 8 billion parameters.
DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def llama_of(h, f, layers, heads, kv, vocabulary, **more):
    return LlamaConfig(
        hidden_size=h,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        **more,
    )


# name: config, micro-batch, seq_len
MODELS: dict[str, tuple[Any, int, int]] = {
    "gpt2 124M": (GPT2Config(**DROPOUT), 8, 1024),
    "llama 1B": (llama_of(2048, 5632, 22, 16, 4, 32000), 4, 2048),
    "llama 8B": (llama_of(4096, 14336, 32, 32, 8, 128256), 1, 8192),
    "gpt2 124M, 4 blocks": (GPT2Config(n_layer=4, **DROPOUT), 8, 1024),
    "llama 1B, 5 blocks": (llama_of(2048, 5632, 5, 16, 4, 32000), 4, 2048),
    "llama 8B, 5 blocks": (llama_of(4096, 14336, 5, 32, 8, 128256), 1, 8192),
    "llama 1B tied, 4 blocks": (
        llama_of(2048, 8192, 4, 32, 8, 128256, tie_word_embeddings=True),
        4,
        2048,
    ),
    "few words": (llama_of(2048, 8192, 4, 16, 4, 512), 4, 4096),  # blocks need more than the head
}


def plan_of(described, micro, seq_len, arithmetic, checkpointing, *, chunked):
    precision = "fp32" if arithmetic == "fp32" else "bf16"
    work = Work(seq_len, 2 * micro, micro, precision, checkpointing, None, 1 << 20)
    work = replace(work, chunk=chunk_of("cpu") if chunked else None)
    layout = Layout("ddp", checkpointing, micro, 2, "every")
    saved = count_saved(described, seq_len, arithmetic, checkpointing)
    without_reserve = Hardware(1 << 40, None, 1, 1, cpu=True)
    return memory(describe_parameters(described), saved, work, layout, without_reserve).total_bytes


@pytest.mark.parametrize(
    ("name", "arithmetic", "checkpointing"),
    [
        pytest.param("gpt2 124M", "autocast", "none", marks=pytest.mark.slow),
        ("gpt2 124M, 4 blocks", "autocast", "none"),
        pytest.param("llama 1B", "fp32", "selective", marks=pytest.mark.slow),
        pytest.param("llama 1B, 5 blocks", "fp32", "selective", marks=pytest.mark.wide),
        pytest.param("llama 8B", "autocast", "none", marks=pytest.mark.slow),
        pytest.param("llama 8B, 5 blocks", "autocast", "none", marks=pytest.mark.wide),
        ("few words", "fp32", "full"),
        pytest.param("few words", "autocast", "none", marks=pytest.mark.wide),
        pytest.param("few words", "autocast", "selective", marks=pytest.mark.wide),
    ],
)
def test_the_plan_is_the_peak_of_two_steps(name, arithmetic, checkpointing):
    found = plan_of(*MODELS[name], arithmetic, checkpointing, chunked=False)
    peak = peak_of_two_steps(*MODELS[name], arithmetic, checkpointing)
    assert 0.99 * peak < found < 1.1 * peak


@pytest.mark.parametrize(
    ("name", "arithmetic", "checkpointing"),
    [
        pytest.param("gpt2 124M", "autocast", "none", marks=pytest.mark.slow),
        ("gpt2 124M, 4 blocks", "autocast", "none"),
        pytest.param("gpt2 124M, 4 blocks", "fp32", "full", marks=pytest.mark.wide),
        pytest.param("llama 1B", "fp32", "selective", marks=pytest.mark.slow),
        pytest.param("llama 1B, 5 blocks", "fp32", "selective", marks=pytest.mark.wide),
        pytest.param("llama 8B, 5 blocks", "autocast", "none", marks=pytest.mark.slow),
        pytest.param("llama 1B tied, 4 blocks", "autocast", "full", marks=pytest.mark.wide),
        pytest.param("few words", "fp32", "full", marks=pytest.mark.wide),
        pytest.param("few words", "autocast", "none", marks=pytest.mark.wide),
    ],
)
def test_the_plan_is_the_peak_with_the_loss_in_chunks(name, arithmetic, checkpointing):
    found = plan_of(*MODELS[name], arithmetic, checkpointing, chunked=True)
    peak = peak_of_two_steps(*MODELS[name], arithmetic, checkpointing, head=Head())
    assert 0.99 * peak < found < 1.1 * peak


@pytest.mark.parametrize("head", [Head(), None], ids=["in chunks", "from logits"])
@pytest.mark.parametrize(
    ("name", "arithmetic", "checkpointing"),
    [
        ("gpt2 124M, 4 blocks", "autocast", "none"),
        pytest.param("few words", "fp32", "full", marks=pytest.mark.wide),
        pytest.param("llama 8B, 5 blocks", "autocast", "none", marks=pytest.mark.slow),
    ],
)
def test_pairs_of_answers_need_what_is_planned(name, arithmetic, checkpointing, head):
    """Their logits are made twice, but a chunk at a time; log-probabilities take a few bytes."""
    case = (*MODELS[name], arithmetic, checkpointing)
    peak = peak_of_two_steps(*case, head=head, pairs=True)
    found = plan_of(*case, chunked=head is not None)
    assert 0.99 * peak < found < 1.1 * peak
    assert peak < 1.001 * peak_of_two_steps(*case, head=head)


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_a_frozen_head_needs_no_gradient(pairs):
    """Below it the gradient of the decoder's output is made once, for pairs too."""
    case = (*MODELS["llama 1B, 5 blocks"], "fp32", "selective")
    whole, frozen = (
        peak_of_two_steps(*case, head=Head(), pairs=pairs, frozen=one) for one in (False, True)
    )
    assert whole - frozen > 4 * 32000 * 2048  # its gradient, and the state of its optimizer


@pytest.mark.parametrize("trained", [0.5, 0.25])
@pytest.mark.parametrize("arithmetic", ["fp32", "autocast"])
def test_with_fewer_trained_tokens_no_more_is_held_than_is_planned(arithmetic, trained):
    """Any micro-batch may have all of its tokens trained, so the plan counts them all.

    Their places, and a chunk's rows that are gathered, are less than a thousandth.
    """
    case = (*MODELS["gpt2 124M, 4 blocks"], arithmetic, "none")
    peak = peak_of_two_steps(*case, head=Head(), trained=trained)
    whole = peak_of_two_steps(*case, head=Head())
    assert peak < 1.001 * whole
    assert peak < 1.01 * plan_of(*case, chunked=True)


@pytest.mark.wide
def test_the_oracle_agrees_with_torchs_memory_tracker():
    described = llama_of(256, 512, 3, 4, 2, 1000)
    with FakeTensorMode():
        model, optimizer = fake_model(described, "none")
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            two_steps(model, optimizer, 2, 128, "autocast", tracker.reset_mod_stats)
    (theirs,) = tracker.get_tracker_snapshot("peak").values()
    ours = peak_of_two_steps(described, 2, 128, "autocast", "none")
    assert ours == pytest.approx(theirs["Total"], abs=2**19)


def test_the_oracle_counts_a_storage_once_and_until_it_is_gone():
    with live_storage() as count:
        one = torch.empty(1000)
        view = one.view(10, 100).t()
        assert count.live == 4000
        two = one + 1
        assert count.live == 8000
        del one, two
        assert count.live == 4000
        del view
    assert (count.live, count.peak) == (0, 8000)


# What the table says of an optimizer's state, and what real optimizers keep.
SHAPES = [(64, 65), (64, 64), (63, 65), (8,), (4096,), (1, 5000)]


def kept(optimizer, parameter):
    """Name → dtype and shape, of a real update."""
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {torch_name: name for name, (_, torch_name) in DTYPES.items()}
    return {
        name: (names[str(value.dtype)], tuple(value.shape))
        for name, value in optimizer.state[parameter].items()
        if name != "step"
    }


def said(algorithm, shape):
    return {name: (one.dtype, one.shape) for name, one in states(algorithm, shape).items()}


def eight_bit(parameters):
    from bitsandbytes import optim

    return optim.AdamW8bit(parameters)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", partial(torch.optim.AdamW, fused=True)),
        ("muon", torch.optim.Muon),
        pytest.param("adamw_8bit", eight_bit, marks=needs("bitsandbytes")),
    ],
)
def test_an_optimizer_keeps_what_the_table_says(name, make):
    for shape in SHAPES:
        if name != "muon" or len(shape) == 2:
            parameter = torch.nn.Parameter(torch.zeros(shape))
            assert kept(make([parameter]), parameter) == said(name, shape), shape


def test_bytes_are_those_of_all_tensors():
    assert state_bytes("adamw", (7, 3)) == 2 * 4 * 21
    assert state_bytes("muon", (7, 3)) == 4 * 21
    assert state_bytes("adamw_8bit", (7, 3)) == 2 * 4 * 21
    assert state_bytes("adamw_8bit", (64, 65)) == 2 * (4160 + 4 * 17 + 4 * 256)
    assert state_bytes("adamw", ()) == 8


def test_a_missing_package_is_one_sentence_with_its_cure(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert missing_package("adamw") == missing_package("muon") == []
    (problem,) = missing_package("adamw_8bit")
    assert (problem.key, problem.value) == ("optimizer.name", "adamw_8bit")
    assert "pip install 'llmtrain[quantized]'" in str(problem)


SEVENTY = llama(8192, 28672, 80, 64, 8, 128_256)
COUNT_70 = LlamaCount(8192, 28672, 80, 64, 8, 8192)
NODES_OF_8 = {"nodes": 4, "cut": ModelCut(tensor=8, pipeline=4)}


def on_32_devices(place_blocks, micro_batches, *, first=False, last=False):
    """Bytes of a device of Llama-3-70B with tp 8 and pp 4, in bf16, with full recomputation.

    Added up from the sizes of its matrices, apart from the plan. place_blocks: of this device.
    """
    h, f, k, v, tokens, t = 8192, 28672, 1024, 128_256, 8192, 8
    matrices = (2 * h * h + 2 * k * h + 3 * f * h) // t
    parameters = place_blocks * (matrices + 2 * h)
    casts = 2 * place_blocks * matrices
    if first:
        parameters += v * h // t
    if last:
        parameters += v * h // t + h
        casts += 2 * v * h // t
    block = tokens * (26 * h + 2 * (2 * h + 2 * k + 4 * f) // t + 4 * 64 // t + 8)  # to be redone
    outside = tokens * (8 * h + 12) if first or last else 0
    passes = 4 if first else 1 if last else None
    kept = passes * (place_blocks * tokens * 4 * h + outside)
    head = 12 * tokens * v // t + 2 * tokens * h if last else 0
    received = micro_batches * tokens * h * 2
    again = max(0, block - head)
    return {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "working": casts,
        "activations": kept + again + received,
        "head": head,
    }


def test_llama_70b_over_eight_devices_and_four_stages_is_what_its_matrices_add_up_to():
    hardware = gpus(8, 80, **NODES_OF_8)
    layout = Layout("ddp", "full", 1, 64, "every")
    asked = work(8192, 64)
    saved = COUNT_70("autocast", "full", 8)
    saved = replace(saved, casts=saved.casts + 2 * SEVENTY.head // 8)  # autocast's copy of the head
    found = memory(SEVENTY, saved, asked, layout, hardware)
    stages = stages_of(SEVENTY, hardware.cut, 8192)
    assert [len(one) for one in stages] == [20, 20, 21, 19]
    each = [
        on_32_devices(len(stages[0]), 64, first=True),
        on_32_devices(len(stages[-1]), 64, last=True),
    ]
    expected = max(each, key=lambda one: sum(one.values()))
    for part, size in expected.items():
        assert found.parts[part] == pytest.approx(size, rel=1e-6), part
    assert found.total_bytes / GIB == pytest.approx(75, abs=1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("cut", [ModelCut(2), ModelCut(1, 2), ModelCut(2, 2), ModelCut(2, 2, 1, 2)])
def test_the_states_of_all_devices_are_those_of_the_model(strategy, cut):
    hardware = gpus(8, 80, nodes=2, cut=cut)
    each = [model_states(one, strategy, "bf16", hardware) for one in parts_of(EIGHT, cut, 8192)]
    copies = cut.tensor * shards(strategy, hardware)
    found = sum(one.parameters for one in each) * copies
    norms = 4 * (2 * 32 + 1) * 4096 * (cut.tensor - 1)  # whole on each device
    assert found == pytest.approx(4 * EIGHT.count + norms, rel=1e-6)
    assert sum(one.optimizer for one in each) == 2 * sum(one.parameters for one in each)


def test_a_tied_matrix_is_held_by_both_ends_of_a_pipeline():
    tied = llama(64, 160, 4, 4, 4, 512, tied=True)
    first, last = parts_of(tied, ModelCut(pipeline=2), 128)
    assert first.count + last.count == tied.count + 512 * 64
    assert (first.embedding, first.head, first.tied) == (512 * 64, 0, False)
    assert (last.embedding, last.head, last.tied) == (0, 512 * 64, False)
    (alone,) = parts_of(tied, ModelCut(tensor=2), 128)
    assert (alone.head, alone.vocabulary, alone.tied) == (256 * 64, 256, True)


@pytest.mark.parametrize(
    ("schedule", "stages", "held"),
    [("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [16, 16, 16, 16]), ("interleaved", 2, [11, 9, 7, 5])],
)
def test_a_schedule_keeps_some_forwards_on_each_device(schedule, stages, held):
    cut = ModelCut(pipeline=4, stages=stages)
    assert [held_passes(rank, 16, cut, schedule) for rank in range(4)] == held
    assert held_passes(0, 2, cut, "1f1b") == 2
    assert held_passes(0, 16, ModelCut(), "gpipe") == 1


def test_devices_that_share_rows_keep_their_part_of_the_activations_and_of_the_logits():
    layout = Layout("ddp", "none", 1, 1, "every")
    alone, four = (
        memory(EIGHT, COUNT("autocast", "none"), work(8192, 8), layout, gpus(8, 80, cut=cut)).parts
        for cut in (ModelCut(), ModelCut(sequence=4))
    )
    assert four["parameters"] == alone["parameters"]
    exchanged = 8192 * EIGHT.attention * 2  # what attention returns, once more in bf16
    assert four["activations"] == pytest.approx((alone["activations"] + exchanged) / 4, rel=1e-3)
    assert four["head"] == pytest.approx(alone["head"] / 4)
