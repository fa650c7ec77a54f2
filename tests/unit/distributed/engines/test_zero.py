import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.on_paper import llama

from llmtrain.distributed.engines import zero
from llmtrain.distributed.engines.zero import overflowing
from llmtrain.distributed.plan.memory import AHEAD, LARGEST_BUCKET, bucket_elements, largest_block
from llmtrain.errors import UserError


def made(strategy, precision="fp32", **more):
    given = {"max_grad_norm": 1.0, "largest_block": 1000, "cpu": False, **more}
    return zero.config(strategy, precision, **given)


@pytest.mark.parametrize(
    ("strategy", "stage", "offload"),
    [("zero1", 1, False), ("zero2", 2, False), ("zero3", 3, False), ("zero3_offload", 3, True)],
)
def test_a_strategy_is_a_stage_and_where_its_state_lives(strategy, stage, offload):
    found = made(strategy)["zero_optimization"]
    assert found["stage"] == stage
    for key in ("offload_optimizer", "offload_param"):
        assert found.get(key) == ({"device": "cpu", "pin_memory": True} if offload else None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_reduced_and_kept_in_fp32(precision):
    found = made("zero2", precision)
    assert found["communication_data_type"] == "fp32"
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert found["bf16"]["enabled"] == (precision == "bf16")
    assert found["bf16"]["check_grad_overflow"]  # else a step with a NaN is applied
    assert found["fp16"] == {"enabled": False}


def test_the_limit_is_ours_and_none_is_zero():
    assert made("zero2", max_grad_norm=0.5)["gradient_clipping"] == 0.5
    assert made("zero2", max_grad_norm=None)["gradient_clipping"] == 0.0


def test_accumulation_stays_with_the_step():
    found = made("zero3")
    assert found["gradient_accumulation_steps"] == 1
    assert found["managed_gradient_accumulation"] is True
    assert "auto" not in str(found)


def test_buffers_are_as_large_as_two_blocks_and_never_larger_than_deepspeeds_own():
    small = made("zero3", largest_block=1000)["zero_optimization"]
    large = made("zero3", largest_block=10**9)["zero_optimization"]
    unknown = made("zero3", largest_block=0)["zero_optimization"]
    keys = ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size")
    assert [small[key] for key in keys] == [2000, 2000, 2000]
    for one in (large, unknown):
        assert [one[key] for key in keys] == [5 * 10**8, 10**9, 5 * 10**7]


def test_deepspeeds_adam_is_taken_where_a_gpu_offloads():
    forced = {
        (strategy, cpu): made(strategy, cpu=cpu)["zero_force_ds_cpu_optimizer"]
        for strategy in ("zero2", "zero3_offload")
        for cpu in (False, True)
    }
    assert [key for key, value in forced.items() if value] == [("zero3_offload", False)]


def test_without_deepspeed_the_message_names_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name)
    )
    with pytest.raises(UserError) as raised:
        make("zero2", cpu=True)
    (problem,) = raised.value.problems
    assert problem.key == "distributed.strategy"
    assert "pip install 'deepspeed>=0.19.8,<0.20' on Linux" in str(problem)


def test_a_cpu_beside_visible_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match='CUDA_VISIBLE_DEVICES=""'):
        make("zero2", cpu=True)


def test_offload_without_compiler_and_ninja_names_both(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError) as raised:
        make("zero3_offload", cpu=False)
    assert [problem.key for problem in raised.value.problems] == ["c++", "ninja"]
    assert "pip install ninja" in str(raised.value)


def test_without_offload_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(zero.missing_parts("zero3", cpu=False)) == []
    assert list(zero.missing_parts("zero3_offload", cpu=True)) == []


def test_a_lock_that_nobody_holds_is_said_before_anyone_waits_for_it(monkeypatch, tmp_path):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UserError) as raised:
        make("zero3_offload", cpu=False)
    assert any(problem.key == str(lock) for problem in raised.value.problems)
    assert f"rm '{lock}'" in str(raised.value)


@pytest.mark.launches
def test_a_lock_that_a_builder_holds_is_not_stale(tmp_path):
    """As torch's FileBaton holds it; it goes with its process."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    script = (
        "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
        "print('built', flush=True); sys.stdin.read()"
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        assert zero.stale_locks(tmp_path, {}) == []
        builder.kill()
    assert zero.stale_locks(tmp_path, {}) == [lock]


def test_a_young_lock_may_be_another_nodes(tmp_path):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    two_nodes = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert zero.stale_locks(tmp_path, two_nodes) == []
    os.utime(lock, (0, 0))
    assert zero.stale_locks(tmp_path, two_nodes) == [lock]


def make(strategy, *, cpu):
    zero.make(strategy, "fp32", timedelta(minutes=1), max_grad_norm=1.0, largest_block=0, cpu=cpu)


def test_buckets_are_those_that_the_plan_reckons_with_where_no_block_repeats_too():
    blocks = llama(64, 160, 2, 4, 4, 500)
    none = replace(
        blocks, blocks=0, parameters=tuple(replace(one, block=None) for one in blocks.parameters)
    )
    for shape in (blocks, none):
        found = made("zero3", largest_block=largest_block(shape))["zero_optimization"]
        assert found["reduce_bucket_size"] == bucket_elements(shape) < 500_000
    large = made("zero3", largest_block=10**9)["zero_optimization"]
    assert large["reduce_bucket_size"] == LARGEST_BUCKET
    assert large["stage3_prefetch_bucket_size"] == AHEAD


# What `overflowing` replaces of DeepSpeed's three optimizers, and that it puts it back.


class Stage3:
    """As stage 3 decides on a step (DeepSpeed 0.19)."""

    def __init__(self):
        self.fp32_partitioned_groups_flat: list[object] = []
        self.overflow = False

    def _overflow_check_and_loss_scale_update(self, update_scale=True):
        self.overflow = False
        return self.overflow

    def step(self):
        self._overflow_check_and_loss_scale_update(update_scale=False)
        return not self.overflow


class Stage2:
    """As stages 1 and 2 do, in fp32: without a look at the gradients."""

    def __init__(self):
        self.check_grad_overflow = False
        self.overflow = False

    def check_overflow(self, partition_gradients=True):
        self.overflow = False

    def step(self):
        self.overflow = False
        if self.check_grad_overflow:
            self.check_overflow(partition_gradients=True)
        return not self.overflow


@pytest.mark.parametrize("kind", [Stage3, Stage2])
def test_a_step_inside_is_skipped_and_one_behind_it_is_made(kind):
    optimizer = kind()
    before = dict(vars(optimizer))
    with overflowing(optimizer):
        assert not optimizer.step()
    assert optimizer.step()
    assert vars(optimizer) == before


def test_what_fails_inside_leaves_nothing_replaced():
    optimizer = Stage2()
    before = dict(vars(optimizer))
    with pytest.raises(RuntimeError), overflowing(optimizer):
        raise RuntimeError
    assert vars(optimizer) == before


def test_the_optimizer_without_a_check_drops_its_gradients_and_has_no_norm():
    calls: list[str] = []
    optimizer = SimpleNamespace(
        fp32_groups_flat_partition=[],
        step=lambda: calls.append("step"),
        clear_hp_grads=lambda: calls.append("fp32"),
        clear_lp_grads=lambda: calls.append("bf16"),
    )
    with overflowing(optimizer):
        optimizer.step()
    assert calls == ["fp32", "bf16"]
    assert optimizer.overflow
    assert optimizer._global_grad_norm == float("inf")
    optimizer.step()
    assert calls[-1] == "step"


def test_the_names_are_those_of_the_installed_deepspeed():
    """Read from its source: importing it takes seconds, and warns."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed")
    runtime = Path(spec.origin).parent / "runtime"
    for file, names in {
        "zero/stage3.py": (
            "def _overflow_check_and_loss_scale_update(",
            "def _get_fp32_opt_state_partition(",
            "def _reassign_or_swap_out_partitioned_parameters(",
            "def _partition_all_parameters(",
            "self.fp32_partitioned_groups_flat",
        ),
        "zero/stage_1_and_2.py": (
            "def check_overflow(",
            "self.check_grad_overflow",
            "def update_lp_params(",
            "def _lazy_init_hp_params_optimizer_state(",
            "self.single_partition_of_fp32_groups",
        ),
        "zero/parameter_offload.py": (
            "self.pre_sub_module_forward_function(",
            "self.post_sub_module_forward_function(",
            "self.pre_sub_module_backward_function(",
        ),
        "bf16_optimizer.py": (
            "def clear_hp_grads(",
            "def clear_lp_grads(",
            "def update_lp_params(",
            "def _lazy_init_hp_params_optimizer_state(",
            "self.fp32_groups_flat_partition",
        ),
    }.items():
        text = (runtime / file).read_text()
        assert [name for name in names if name not in text] == [], file
