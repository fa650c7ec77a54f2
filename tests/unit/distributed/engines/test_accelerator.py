"""What is told to torch and accelerate on a GPU, on a machine that only seems to have one."""

import pytest
import torch
from accelerate import Accelerator

from llmtrain.config.schema import DdpConfig, DistributedConfig
from llmtrain.distributed.engines import accelerator
from llmtrain.distributed.engines.accelerator import close, cpu_rates, make_accelerator


@pytest.fixture(autouse=True)
def closed():
    before = torch.get_float32_matmul_precision()
    yield
    close()
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU as far as llmtrain can see; accelerate is left the CPU."""
    monkeypatch.setattr(accelerator, "on_cpu", lambda: False)
    made = Accelerator
    monkeypatch.setattr(accelerator, "Accelerator", lambda **own: made(**(own | {"cpu": True})))


def bucket(gradient_bytes, **asked):
    distributed = DistributedConfig(timeout_minutes=1.0, ddp=DdpConfig(**asked))
    launched = make_accelerator("ddp", "fp32", distributed, gradient_bytes=gradient_bytes)
    return launched.accelerator.ddp_handler.bucket_cap_mb


@pytest.mark.parametrize(("precision", "expected"), [("bf16", "high"), ("fp32", "highest")])
def test_on_a_gpu_products_in_fp32_have_tf32_where_precision_is_mixed(
    on_a_gpu, precision, expected
):
    torch.set_float32_matmul_precision("medium")
    make_accelerator("ddp", precision, DistributedConfig(timeout_minutes=1.0))
    assert torch.get_float32_matmul_precision() == expected


def test_on_a_cpu_they_are_left_alone():
    before = torch.get_float32_matmul_precision()
    make_accelerator("ddp", "bf16", DistributedConfig(timeout_minutes=1.0))
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.parametrize(("gradient_bytes", "expected"), [(999_999_999, 25), (1_000_000_000, 100)])
def test_many_gradients_are_reduced_in_larger_buckets(on_a_gpu, gradient_bytes, expected):
    assert bucket(gradient_bytes) == expected


def test_a_bucket_that_was_asked_for_stays(on_a_gpu):
    assert bucket(2_000_000_000, bucket_cap_mb=25) == 25


def test_on_a_cpu_buckets_are_torchs_own():
    assert bucket(2_000_000_000) == 25


# Which precision a CPU is faster in, by products whose times are made up.


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
