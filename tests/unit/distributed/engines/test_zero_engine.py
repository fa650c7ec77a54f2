"""What `overflowing` replaces of DeepSpeed's three optimizers, and that it puts it back."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.distributed.engines.zero import overflowing


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
