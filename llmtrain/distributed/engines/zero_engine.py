"""The step adapter of DeepSpeed's ZeRO-1, 2 and 3.

accelerate's `backward` would step inside the last micro-batch; so the engine is driven here
directly: which micro-batch is the last, then the backward, and later the step. Unlike `TorchEngine`
this one waits for the device at every step, as DeepSpeed does: it has a norm, a clip and a skip of
its own. DeepSpeed skips a step whose norm is not finite; what else forbids one (no trained token,
data that failed) is reported to it as an overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from llmtrain.distributed.engines import state, zero_state
from llmtrain.distributed.engines.engine import evaluating, not_finite
from llmtrain.types import Piece, Spec, StepVector


class DeepSpeedEngine:
    """ZeRO on any number of processes; `Engine` says what each function is for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Partition, and put the true fp32 weights into the masters, which DeepSpeed rounds."""
        named = zero_state.before(model, optimizer)
        self._engine: Any = self._accelerator.prepare(module, optimizer)[0]
        self._zero = self._engine.optimizer  # DeepSpeed's, around ours
        if zero_state.kind(self._zero) == "partitions":
            gather_unseen(self._zero.parameter_offload)
        self._held = zero_state.after(named, self._zero)
        for group in self._zero.optimizer.param_groups:
            group["peak_lr"] = group["lr"]
        prepared: nn.Module = self._engine
        return prepared

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are reduced at the last micro-batch (ZeRO-1), or partitioned at each."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """DeepSpeed averages over ranks, as DDP does."""
        self._engine.backward(loss_sum * scale, scale_wrt_gas=False)

    def squares(self) -> Tensor:
        """Nothing is counted: DeepSpeed has the norm when it has stepped."""
        return torch.zeros((), dtype=torch.float64, device=self._accelerator.device)

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Do nothing: DeepSpeed clips in its step, to the norm it was made with."""

    def step(self, factor: float, sums: StepVector) -> None:
        """Waits for the device: whether to step is decided on the host."""
        for group in self._zero.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        forbidden = bool(not_finite(sums))
        with overflowing(self._zero) if forbidden else nullcontext():
            self._engine.step()

    def norm(self, sums: StepVector) -> Tensor:
        """() fp32: DeepSpeed's, infinite where the step was skipped."""
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._accelerator.device)

    def evaluating(self) -> AbstractContextManager[object]:
        """Weights are gathered and freed around each module, with gradients or without."""
        return evaluating(self._engine)

    def clear(self) -> None:
        """Make a step that is skipped, in which DeepSpeed clears its buffers. Collective."""
        self._engine.set_gradient_accumulation_boundary(True)
        with overflowing(self._zero):
            self._engine.step()

    def create_state(self) -> None:
        """As Engine.create_state; without it DeepSpeed has moments only after its first step."""
        zero_state.create_state(self._zero)

    def pieces(self, spec: Spec, *, writing: bool, dealt: bool = False) -> Iterator[Piece]:
        """As Engine.pieces: ranges of the fp32 masters and of their moments."""
        if not (writing and dealt):
            return zero_state.pieces(self._held, self._zero, spec, writing=writing)
        return zero_state.share_pieces(self._held, self._zero, spec)

    def finish_loading(self, steps: int) -> None:
        """Make the copies that are computed with again from the masters. Collective."""
        state.set_steps(self._zero.optimizer, steps)
        zero_state.renew_copies(self._zero)

    def optimizer_steps(self) -> int:
        """As Engine.optimizer_steps."""
        return state.optimizer_steps(self._zero.optimizer)

    def unequal_replicas(self) -> dict[str, list[int]]:
        """As Engine.unequal_replicas: masters are split, and copies are made again at each step."""
        return {}


def gather_unseen(offload: Any) -> None:
    """Hide what stage 3 does around a module from what records or replays the module's operations.

    Selective activation checkpointing counts every operation of a block, and the second forward
    gathers otherwise than the first. offload: DeepSpeed's, whose hooks look these functions up.
    """
    for when in ("pre_sub_module_forward", "post_sub_module_forward", "pre_sub_module_backward"):
        name = f"{when}_function"
        setattr(offload, name, _unseen(getattr(offload, name)))


def _unseen(function: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    def hidden(module: nn.Module) -> None:
        with _disable_current_modes():
            function(module)

    return hidden


@contextmanager
def overflowing(optimizer: Any) -> Iterator[None]:
    """DeepSpeed's optimizer skips the step that is made in here, as it does at an overflow.

    Gradients are dropped; weights, moments and counts stay. What is replaced is private to 0.19:
    the check for an overflow, which stages 1 and 2 do not make in fp32, or the whole step in
    stage 1 in bf16, which has no check.
    """
    patched = _overflow_of(optimizer)
    kept = {name: vars(optimizer)[name] for name in patched if name in vars(optimizer)}
    vars(optimizer).update(patched)
    try:
        yield
    finally:
        for name in patched:
            del vars(optimizer)[name]
        vars(optimizer).update(kept)


def _overflow_of(optimizer: Any) -> dict[str, Any]:
    """Replacements for attributes of DeepSpeed's optimizer, which report an overflow."""

    def overflow(*_: object, **__: object) -> bool:
        optimizer.overflow = True
        return True

    def skip() -> None:
        overflow()
        optimizer._global_grad_norm = float("inf")
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()

    match zero_state.kind(optimizer):
        case "partitions":
            return {"_overflow_check_and_loss_scale_update": overflow}
        case "fragments":
            return {"check_overflow": overflow, "check_grad_overflow": True}
        case "bf16":
            return {"step": skip}
