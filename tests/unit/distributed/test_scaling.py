"""Tokens a second on paper, against published runs. hfu is taken from the first point of each row.

A regression test of the code, no evidence of accuracy elsewhere: both constants of the model were
chosen while looking at these points.
"""

from dataclasses import replace

import pytest
from helpers.on_paper import gpus, work

from llmtrain.distributed.plan import Layout
from llmtrain.distributed.scaling import (
    Machine,
    calibrated,
    device_by_memory,
    machine_of,
    step_time,
)
from llmtrain.types import ModelShape, ParameterShape

H100 = machine_of("NVIDIA H100 80GB HBM3")
A100 = replace(machine_of("NVIDIA A100-SXM4-40GB"), reduce=2)  # those runs were pure bf16
FLOAT8 = replace(H100, gather=1)
RECOMPUTED = {6: "none", 7: "selective", 8: "full"}


def of_size(parameters: float, attention: int) -> ModelShape:
    one = ParameterShape((int(parameters),), True, True, 0)
    return ModelShape((one,), 0, 0, 0, 0, False, 1, None, attention, 0)


def mpt(layers: int, width: int) -> ModelShape:
    """Blocks of 12 h², learned positions, a vocabulary of 50,368, tied."""
    return of_size(12 * layers * width**2 + (50_368 + 2_048) * width, layers * width)


LLAMA_8B = of_size(8.03e9, 32 * 4096)

# name → machine, shape, seq, micro-batches and GPUs of both points, factor of 6 P, published tokens
# a second and GPU of both, error of the prediction in points of the first
POINTS = {
    "8B H100": (H100, LLAMA_8B, 8192, (2, 2), (8, 128), 7, (5762, 5605), 0.8),
    "8B H100 compiled": (H100, LLAMA_8B, 8192, (2, 2), (8, 128), 7, (6667, 6514), 0.3),
    "8B H200 float8": (FLOAT8, LLAMA_8B, 8192, (2, 2), (32, 64), 7, (10938, 10753), 1.3),
    "13B H100": (H100, mpt(40, 5120), 2048, (2, 2), (8, 64), 6, (4792, 4800), -3.0),
    "1B H100": (H100, mpt(24, 2048), 2048, (20, 20), (16, 64), 6, (46037, 44402), 2.7),
    "3B H100": (H100, mpt(32, 2560), 2048, (6, 6), (32, 64), 6, (23021, 22525), 1.7),
    "7B A100": (A100, mpt(32, 4096), 2048, (18, 18), (32, 128), 8, (3725, 3623), 1.9),
    "13B A100": (A100, mpt(40, 5120), 2048, (14, 16), (32, 128), 8, (1998, 1972), 0.6),
    "30B A100": (A100, mpt(48, 7168), 2048, (4, 6), (32, 128), 8, (857, 865), -0.7),
}
# Both start from the smallest micro-batch, probably short of memory.
MISSES = {
    "70B H100": (H100, mpt(80, 8192), 2048, (2, 8), (32, 64), 8, (882, 1039), -10.5),
    "70B A100": (A100, mpt(80, 8192), 2048, (2, 4), (64, 128), 8, (276, 376), -34.3),
}


def error(
    machine: Machine,
    shape: ModelShape,
    seq_len: int,
    micro: tuple[int, int],
    devices: tuple[int, int],
    factor: int,
    published: tuple[int, int],
) -> float:
    """Of the second point, predicted from the first, in percent of the first."""
    layouts = [Layout("fsdp2", RECOMPUTED[factor], size, 1, "every") for size in micro]
    machines = [gpus(8, 80, nodes=count // 8) for count in devices]
    asked = work(seq_len, 1)
    known = calibrated(published[0], shape, asked, layouts[0], machines[0], machine)
    again = step_time(shape, asked, layouts[0], machines[0], known)
    assert again.tokens_per_second / devices[0] == pytest.approx(published[0])
    predicted = step_time(shape, asked, layouts[1], machines[1], known)
    return 100 * (predicted.tokens_per_second / devices[1] - published[1]) / published[0]


@pytest.mark.parametrize("name", POINTS)
def test_a_published_run_is_predicted_within_three_points(name):
    *inputs, expected = POINTS[name]
    found = error(*inputs)
    assert abs(found) <= 3.0
    assert found == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("name", MISSES)
def test_the_two_misses_stay_as_wide_as_they_are(name):
    *inputs, expected = MISSES[name]
    assert error(*inputs) == pytest.approx(expected, abs=0.06)


def seconds(strategy: str, devices: int, **changed: object) -> float:
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
