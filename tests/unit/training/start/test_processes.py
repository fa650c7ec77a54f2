"""What the processes of a start agree on before they are a group."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.config import loaded
from torch.distributed import HashStore

from llmtrain.agreement import Alone
from llmtrain.distributed.engines import accelerator
from llmtrain.distributed.engines.accelerator import Rates
from llmtrain.distributed.ranks import Meeting
from llmtrain.training.start.processes import decide_precision


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def config(folder, *overrides):
    return loaded(folder, f"run.dir={folder / 'run'}", *overrides)


def timings(monkeypatch, *ratios):
    """The ratios that timing will find, one after another; those that are left."""
    left = list(ratios)
    monkeypatch.setattr(accelerator, "cpu_rates", lambda: Rates(80.0, 80.0 * left.pop(0)))
    return left


def test_rank_0_times_and_all_ranks_compute_alike(monkeypatch, tmp_path):
    left = timings(monkeypatch, 4.0, 0.6)
    made, store = config(tmp_path), HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [Meeting(store, rank, 2) for rank in range(2)]
        found = list(pool.map(lambda one: decide_precision(made, one), ranks))
    assert found == [("bf16", "products on this CPU: fp32 80 and bf16 320 GFLOP/s")] * 2
    assert left == [0.6]


def test_a_resume_keeps_what_was_found_and_times_nothing(monkeypatch, tmp_path):
    timings(monkeypatch)
    (tmp_path / "run").mkdir()
    frozen = {"run": {"precision": "bf16"}, "launches": {}}
    (tmp_path / "run" / "auto.json").write_text(json.dumps(frozen))
    assert decide_precision(config(tmp_path), Alone()) == ("bf16", "as this run began")


def test_what_is_asked_for_is_not_timed(monkeypatch, tmp_path):
    timings(monkeypatch)
    made = config(tmp_path, "training.precision=bf16")
    assert decide_precision(made, Alone()) == ("bf16", "asked for")


@pytest.mark.parametrize("ratio", [0.6, 4.0])
def test_no_mixed_precision_in_the_file_of_a_launch_asks_for_nothing(monkeypatch, tmp_path, ratio):
    timings(monkeypatch, ratio, ratio)
    without = decide_precision(config(tmp_path), Alone())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert decide_precision(config(tmp_path), Alone()) == without


def test_on_a_gpu_it_asks_for_nothing_either(monkeypatch, tmp_path):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    found = decide_precision(config(tmp_path), Alone())
    assert found == ("bf16", "this device computes in bf16")
