"""Which precision a CPU is faster in, by products whose times are made up."""

import pytest
import torch

from llmtrain.distributed.engines import accelerator
from llmtrain.distributed.engines.accelerator import cpu_rates


def timed(monkeypatch, ratio):
    """Products in bf16 are this many times as fast as in fp32; the ones that were tried."""
    tried: list[tuple[torch.dtype, int]] = []

    def product(dtype, rows):
        tried.append((dtype, rows))
        return 80.0 if dtype is torch.float32 else 80.0 * ratio

    monkeypatch.setattr(accelerator, "_timed", product)
    return tried


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.6, "fp32"), (1.2, "fp32"), (1.3, "bf16"), (4.0, "bf16")]
)
def test_bf16_is_taken_where_it_is_a_third_faster(monkeypatch, ratio, expected):
    timed(monkeypatch, ratio)
    found = cpu_rates()
    assert found.faster == expected
    assert str(found) == f"fp32 80 and bf16 {80 * ratio:,.0f} GFLOP/s"


def test_a_cpu_that_emulates_bf16_is_asked_for_no_large_product(monkeypatch):
    tried = timed(monkeypatch, 1 / 70)
    assert cpu_rates().faster == "fp32"
    assert {rows for dtype, rows in tried if dtype is torch.float32} == {64, 1024}
    assert {rows for dtype, rows in tried if dtype is torch.bfloat16} == {64}


def test_the_fastest_of_several_products_counts(monkeypatch):
    times = iter([1.0, 60.0, 2.0, 70.0, 80.0, 3.0, 75.0, 60.0, 1.0, 1.0])
    monkeypatch.setattr(accelerator, "_timed", lambda _dtype, _rows: next(times))
    assert cpu_rates() == accelerator.Rates(80.0, 1.0)


def test_a_real_product_takes_a_time():
    assert 0 < accelerator._timed(torch.float32, 64) < 1e5
