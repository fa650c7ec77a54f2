"""Tokens a second on paper, against published runs and by hand."""

from dataclasses import replace

import pytest
import torch
from helpers import published
from helpers.on_paper import gpus, llama, work
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.config.schema import AdapterConfig
from llmtrain.distributed.plan.balance import slowest_share
from llmtrain.distributed.plan.memory import Hardware, Layout
from llmtrain.distributed.plan.speed import (
    device_by_memory,
    flops,
    head_flops,
    machine_of,
    seconds_at_peak,
    step_time,
)
from llmtrain.model import trainable
from llmtrain.model.loss import Head, LossModule
from llmtrain.model.shape import shape
from llmtrain.model.trainable import freeze
from llmtrain.types import NOT_TRAINED, ModelCut, ModelShape, ParameterShape

# Predicted tokens a second and GPU, and the error in points of the first run: reckoned apart, in
# twenty lines, from the same inputs.
PREDICTED = (5653, 6537, 10890, 4657, 45651, 22917, 3695, 1984, 859)
ERRORS = (0.8, 0.3, 1.3, -3.0, 2.7, 1.7, 1.9, 0.6, -0.7)
H100 = machine_of("NVIDIA H100 80GB HBM3")
A100 = machine_of("NVIDIA A100-SXM4-40GB")
LLAMA_8B = ModelShape(
    (ParameterShape((8_030_000_000,), True, True, 0),), 0, 0, 0, 0, False, 1, None, 32 * 4096, 0
)


@pytest.mark.parametrize("number", range(9))
def test_a_published_run_is_predicted_within_three_points(number):
    row = published.ROWS[number]
    assert abs(published.error(row)) <= 3.0
    assert published.error(row) == pytest.approx(ERRORS[number], abs=0.06)
    assert published.predicted(row) == pytest.approx(PREDICTED[number], abs=0.6)


def test_every_row_is_compared_and_the_two_misses_stay_as_wide_as_they_are():
    assert len(published.ROWS) == len(PREDICTED) == len(ERRORS) == 9
    errors = [published.error(row) for row in published.MISSES]
    assert errors == pytest.approx([-10.5, -34.3], abs=0.06)


def seconds(strategy, devices, **changed):
    layout = Layout(strategy, "full", 2, int(changed.pop("accumulation", 4)), "every")
    layout = replace(layout, **{key: changed.pop(key) for key in ("fsdp_sync",) if key in changed})
    hardware = gpus(devices, 80, nodes=int(changed.pop("nodes", 1)))
    return step_time(LLAMA_8B, work(1024, 512), layout, hardware, H100).seconds


def test_one_device_waits_for_no_link():
    found = step_time(
        LLAMA_8B, work(1024, 8), Layout("ddp", "none", 4, 2, "every"), gpus(1, 80), H100
    )
    by_hand = (6 * 8.03e9 + 12 * 32 * 4096 * 1024) * 8 * 1024 / (0.40 * 989e12)
    assert found.seconds == pytest.approx(by_hand)
    assert found.efficiency == 1.0


def test_recomputing_costs_a_sixth_and_a_third_of_what_grows_with_the_parameters():
    one = [
        step_time(LLAMA_8B, work(2, 1), Layout("ddp", kind, 1, 1, "every"), gpus(1, 80), H100)
        for kind in ("none", "selective", "full")
    ]
    assert [found.seconds / one[0].seconds for found in one] == pytest.approx(
        [1, 7 / 6, 8 / 6], rel=1e-3
    )


def test_frozen_weights_have_no_gradients_to_compute_or_to_reduce():
    parts = (
        ParameterShape((4_000_000,), True, True, 0),
        ParameterShape((4_000_000,), False, True, 1),
    )
    half = replace(LLAMA_8B, parameters=parts, attention=0)
    layout = Layout("ddp", "none", 1, 1, "every")
    found = step_time(half, work(1024, 8), layout, gpus(8, 80), H100)
    assert found.compute == pytest.approx((4 * 8e6 + 2 * 4e6) * 1024 / (0.40 * 989e12))
    assert found.links == pytest.approx(8 * 4e6 * 7 / 8 / 360e9)


def test_ddp_reduces_once_a_step_and_fsdp_gathers_for_each_micro_batch():
    ddp = [
        step_time(LLAMA_8B, work(1024, 64), Layout("ddp", "full", 1, n, "every"), gpus(8, 80), H100)
        for n in (1, 8)
    ]
    fsdp = [
        step_time(
            LLAMA_8B, work(1024, 64), Layout("fsdp2", "full", 1, n, "every"), gpus(8, 80), H100
        )
        for n in (1, 8)
    ]
    assert ddp[1].links == ddp[0].links == pytest.approx(8 * 8.03e9 * 7 / 8 / 360e9)
    assert fsdp[0].links == pytest.approx((2 * 2 + 4) * 8.03e9 * 7 / 8 / 360e9)
    assert fsdp[1].links == pytest.approx(8 * fsdp[0].links)


def test_exact_sums_are_reduced_in_fp64_under_ddp_and_exchanged_in_fp32_under_fsdp():
    for strategy, times in (("ddp", 2), ("fsdp2", 1)):
        layout = Layout(strategy, "full", 1, 2, "every")
        plain, exact = (
            step_time(LLAMA_8B, work(1024, 16, same_bits=one), layout, gpus(8, 80), H100).links
            for one in (False, True)
        )
        assert exact == pytest.approx(times * plain)


def test_reducing_the_last_micro_batch_alone_saves_the_others_traffic():
    every, last = seconds("fsdp2", 8), seconds("fsdp2", 8, fsdp_sync="last")
    assert last < every


def test_hsdp_gathers_in_the_node_and_sums_over_nodes_once_a_step():
    layout = Layout("hsdp", "full", 1, 4, "every")
    found = step_time(LLAMA_8B, work(1024, 64), layout, gpus(8, 80, nodes=2), H100)
    inside = 4 * 8 * 8.03e9 * 7 / 8 / 360e9
    assert found.links == pytest.approx(inside + 8 * 8.03e9 * 1 / 2 / 340e9)


def test_offloading_is_slower_than_keeping_the_state_on_the_device():
    assert seconds("fsdp2_offload", 8) > 1.2 * seconds("fsdp2", 8)
    assert seconds("zero3_offload", 8) > 1.2 * seconds("zero3", 8)


def test_fp32_has_a_peak_of_its_own():
    layout = Layout("ddp", "none", 1, 1, "every")
    one, two = (
        step_time(LLAMA_8B, work(1024, 8, precision=precision), layout, gpus(1, 80), H100).compute
        for precision in ("bf16", "fp32")
    )
    assert two / one == pytest.approx(989 / 67)


def test_a_device_is_known_by_its_name_or_assumed_by_its_memory():
    assert machine_of("NVIDIA H100 PCIe").inside < machine_of("NVIDIA H100 80GB HBM3").inside
    assert machine_of("NVIDIA A100 80GB PCIe").peak == A100.peak
    assert machine_of(None) is None
    assert machine_of("Tesla V100-SXM2-16GB") is None
    assert [device_by_memory(gib) for gib in (24, 79.1, 141, 11)] == [
        "RTX 4090",
        "H100",
        "H200",
        None,
    ]


# The operations of a step, against those that torch counts of a real forward and backward.


BLOCKS, TOKENS = 2, 64
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 500, "n_positions": 64}
SPECIAL = {"bos_token_id": None, "eos_token_id": None}


def built(model_type, **fields):
    """Attention without a kernel of its own, so that torch counts its products."""
    described = CONFIG_MAPPING[model_type](**fields, **SPECIAL)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager")
    return model.train()


def counted(model):
    """Per token, by torch."""
    ids = torch.zeros(BLOCKS, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        logits.sum().backward()
    return counter.get_total_flops() / (BLOCKS * TOKENS)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("llama", LLAMA), ("llama", LLAMA | {"tie_word_embeddings": True}), ("gpt2", GPT2)],
    ids=["llama", "llama, tied", "gpt2"],
)
def test_operations_are_those_that_torch_counts(model_type, fields):
    model = built(model_type, **fields)
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.embed_tokens.*"],
        ["*.mlp.*"],
        ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"],
        ["model.embed_tokens.*", "model.layers.*", "model.norm.*"],
    ],
    ids=["the embedding", "matrices between", "the lower half", "all but the head"],
)
def test_frozen_matrices_have_fewer(patterns):
    model = built("llama", **LLAMA)
    whole = flops(shape(model), TOKENS)
    freeze(model, patterns)
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)
    assert flops(shape(model), TOKENS) <= whole


def test_below_adapters_weights_have_no_gradient_of_their_own():
    model = built("llama", **LLAMA | {"num_hidden_layers": 12})
    trainable.attach(model, AdapterConfig(kind="lora", r=8), ())
    # What reads the input of the first block needs no gradient of it, which is not taken off.
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


def test_of_experts_those_that_are_chosen_count():
    fields = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = built("mixtral", **fields, experts_implementation="eager")
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


def test_a_step_at_the_peak_takes_its_operations_through_all_devices():
    small = llama(64, 160, 3, 4, 4, 500)
    matrices = 3 * (4 * 64 * 64 + 3 * 64 * 160) + 500 * 64
    operations = (6 * matrices + 12 * 3 * 64 * 128) * 128 * 16
    h100 = gpus(8, 80, nodes=2, device="NVIDIA H100 80GB HBM3")
    assert seconds_at_peak(small, work(128, 16), h100) == pytest.approx(operations / (16 * 989e12))
    assert seconds_at_peak(small, work(128, 16, precision="fp32"), h100) == pytest.approx(
        operations / (16 * 67e12)
    )


@pytest.mark.parametrize(
    ("tied", "frozen"),
    [(True, []), (False, []), (False, ["lm_head.*"]), (False, ["model.*"])],
    ids=["tied", "untied", "a frozen head", "the head alone"],
)
def test_the_head_is_computed_for_trained_positions_alone(tied, frozen):
    """Beside torch's count of the same step through the loss module, at a quarter of the rows."""
    model = built("llama", **LLAMA | {"tie_word_embeddings": tied})
    freeze(model, frozen)
    module, ids = LossModule(model, Head()), torch.zeros(BLOCKS, TOKENS, dtype=torch.long)
    labels = torch.full_like(ids, NOT_TRAINED)
    labels[:, : TOKENS // 4] = 0
    with FlopCounterMode(display=False) as counter:
        module(ids, labels).backward()
    found = flops(shape(model), TOKENS) - 0.75 * head_flops(shape(model))
    assert found == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.01)
    small, h100 = shape(model), gpus(8, 80, nodes=2, device="NVIDIA H100 80GB HBM3")
    few, all_ = (seconds_at_peak(small, work(TOKENS, 16), h100, share) for share in (0.25, 1.0))
    assert few is not None
    assert all_ is not None
    assert few / all_ == pytest.approx(found / flops(small, TOKENS))
    half = seconds_at_peak(small, work(TOKENS, 16), h100, 0.5, 0.5)  # the rest is padding
    assert half == pytest.approx(all_ / 2)


def test_without_a_known_peak_there_is_no_share_of_it():
    small = llama(64, 160, 3, 4, 4, 500)
    assert seconds_at_peak(small, work(128, 16), gpus(1, 16, device="Tesla V100")) is None
    assert seconds_at_peak(small, work(128, 16), Hardware(1, 1, 2, 1, None, cpu=True)) is None


EIGHT = llama(4096, 14336, 32, 32, 8, 128_256)
SEVENTY = llama(8192, 28672, 80, 64, 8, 128_256)


def cut_step(shape, cut, devices=8, accumulation=8, machine=H100, recompute="none", **layout):
    planned = Layout("ddp", recompute, 1, accumulation, "every")
    asked = work(4096, accumulation * devices // cut.processes, **layout)
    return step_time(shape, asked, planned, gpus(devices, 80, cut=cut), machine)


@pytest.mark.parametrize(
    ("shape", "machine", "expected"),
    [
        (EIGHT, "H100", (0.05, 0.14, 0.33)),
        (SEVENTY, "H100", (0.03, 0.08, 0.19)),
        (EIGHT, "RTX 4090", (0.14, 0.43, 1.01)),  # PCIe 4
    ],
)
def test_sums_of_activations_take_a_share_of_the_arithmetic(shape, machine, expected):
    each = [cut_step(shape, ModelCut(t), machine=machine_of(machine)) for t in (2, 4, 8)]
    found = [one.sums / one.compute for one in each]
    assert found == pytest.approx(expected, rel=0.09, abs=0.006)


def test_each_device_of_a_model_does_its_part_of_the_arithmetic():
    alone = cut_step(EIGHT, ModelCut(), devices=1)
    for cut in (ModelCut(2), ModelCut(1, 2), ModelCut(1, 1, 2), ModelCut(2, 2)):
        found = cut_step(EIGHT, cut, devices=cut.processes)
        assert found.compute == pytest.approx(alone.compute / cut.processes)
        assert found.tokens == alone.tokens
        if cut.sequence == 1:  # else each has the whole gradient of its positions
            assert found.links == 0.0


@pytest.mark.parametrize(("accumulation", "stages"), [(4, 1), (16, 1), (8, 2)])
def test_a_pipeline_waits_at_its_ends_and_for_its_slowest_stage(accumulation, stages):
    cut = ModelCut(pipeline=4, stages=stages)
    found = cut_step(EIGHT, cut, devices=4, accumulation=accumulation)
    passes = accumulation * stages
    pace = found.compute * 4 * slowest_share(EIGHT, cut, 4096) * (passes + 3) / passes
    sent = 2 * stages * accumulation * 4096 * 4096 * 2 / 360e9
    assert found.seconds == pytest.approx(pace + sent)
    assert 1.0 <= 4 * slowest_share(EIGHT, cut, 4096) <= 1.1


def test_recomputation_sums_again():
    kinds = ("none", "selective", "full")
    none, *others = (cut_step(EIGHT, ModelCut(4), recompute=kind) for kind in kinds)
    assert [one.sums for one in others] == pytest.approx([1.5 * none.sums] * 2)


def test_a_group_across_nodes_sums_over_the_network():
    layout = Layout("ddp", "none", 1, 8, "every")
    inside, across = (
        step_time(EIGHT, work(4096, 8), layout, gpus(8, 80, nodes=2, cut=ModelCut(t)), A100)
        for t in (8, 16)
    )
    assert inside.sums * 240e9 / (7 / 8) == pytest.approx(across.sums * 170e9 / (15 / 16))


def test_gradients_are_reduced_over_those_that_hold_the_same_part():
    layout = Layout("ddp", "none", 1, 1, "every")
    whole, half = (
        step_time(EIGHT, work(4096, 8), layout, gpus(8, 80, cut=cut), H100)
        for cut in (ModelCut(), ModelCut(2))
    )
    assert whole.links == pytest.approx(8 * EIGHT.count * 7 / 8 / 360e9)
    assert half.links == pytest.approx(8 * EIGHT.count / 2 * 3 / 4 / 360e9, rel=1e-4)
    # On several nodes both halves of a node share its network.
    far = step_time(EIGHT, work(4096, 8), layout, gpus(8, 80, nodes=2, cut=ModelCut(2)), H100)
    assert far.links == pytest.approx(8 * EIGHT.count * 7 / 8 / 340e9, rel=1e-4)
