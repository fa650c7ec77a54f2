"""The engine of DeepSpeed's ZeRO-1, 2 and 3.

accelerate's `backward` would make a step inside the last micro-batch. DeepSpeed's engine is
therefore driven directly: it is told which micro-batch is the last, then runs the backward, and
later the step. DeepSpeed computes its own norm, clips, and skips a step whose norm is not finite.
Other reasons to skip a step (no trained token, failed data) are reported to it as an overflow.
Unlike `TorchEngine`, it waits for the device at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from llmtrain.distributed.engines import state, zero_state
from llmtrain.distributed.engines.clipping import refused
from llmtrain.distributed.engines.engine import Engine
from llmtrain.types import Piece, Spec, StepVector


class DeepSpeedEngine(Engine):
    """ZeRO on any number of processes. See `Engine` for the purpose of each method.

    It has no replicas to compare: masters are split, and each step makes new copies of them.
    """

    _model: Any  # DeepSpeed's engine, around the module

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Partition the model, and copy the exact fp32 weights into DeepSpeed's rounded masters."""
        named = zero_state.before(model, optimizer)
        prepared: nn.Module = self._accelerator.prepare(module, optimizer)[0]
        self._model = prepared
        self._zero = self._model.optimizer  # DeepSpeed's, around ours
        self._optimizer = self._zero.optimizer
        if zero_state.kind(self._zero) == "partitions":
            gather_unseen(self._zero.parameter_offload)
        self._held = zero_state.after(named, self._zero)
        return prepared

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Engine.micro`. ZeRO-1 reduces gradients at the last one, ZeRO-2 and 3 at each."""
        self._model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """See `Engine.backward`. DeepSpeed averages gradients over ranks, as DDP does."""
        self._model.backward(loss_sum * scale, scale_wrt_gas=False)

    def squares(self) -> Tensor:
        """Return 0: DeepSpeed computes the norm in its step."""
        return torch.zeros((), dtype=torch.float64, device=self._accelerator.device)

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Do nothing: DeepSpeed clips in its step, to the `gradient_clipping` of its config."""

    def step(self, factor: float, sums: StepVector) -> None:
        """See `Engine.step`. The host decides whether to step, so this waits for the device."""
        self._set_rates(factor)
        forbidden = bool(refused(sums))
        with overflowing(self._zero) if forbidden else nullcontext():
            self._model.step()

    def norm(self, sums: StepVector) -> Tensor:
        """Return () fp32: DeepSpeed's norm, which is infinite if the step was skipped."""
        norm = self._model.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._accelerator.device)

    def clear(self) -> None:
        """Make a step that DeepSpeed skips, which drops all gradients. Collective."""
        self._model.set_gradient_accumulation_boundary(True)
        with overflowing(self._zero):
            self._model.step()

    def create_state(self) -> None:
        """See `Engine.create_state`. DeepSpeed itself creates moments only in its first step."""
        zero_state.create_state(self._zero)

    def pieces(self, spec: Spec, *, writing: bool, dealt: bool = False) -> Iterator[Piece]:
        """See `Engine.pieces`. They are ranges of the fp32 masters and of their moments."""
        if not (writing and dealt):
            return zero_state.pieces(self._held, self._zero, spec, writing=writing)
        return zero_state.share_pieces(self._held, self._zero, spec)

    def finish_loading(self, steps: int) -> None:
        """See `Engine.finish_loading`. It renews the copies of the masters. Collective."""
        state.set_steps(self._optimizer, steps)
        zero_state.renew_copies(self._zero)


def gather_unseen(offload: Any) -> None:
    """Hide the operations of stage 3 from torch's dispatch modes.

    Selective activation checkpointing records every operation of a block in such a mode, and
    expects the same ones in the second forward, but stage 3 gathers differently there.

    offload: DeepSpeed's `parameter_offload`, whose hooks call the functions that are replaced.
    """
    for when in ("pre_sub_module_forward", "post_sub_module_forward", "pre_sub_module_backward"):
        name = f"{when}_function"
        setattr(offload, name, _disable_current_modes()(getattr(offload, name)))


@contextmanager
def overflowing(optimizer: Any) -> Iterator[None]:
    """Make DeepSpeed's optimizer skip a step in this context, as it does at an overflow.

    Gradients are dropped; weights, moments and counts do not change. It replaces private names of
    DeepSpeed 0.19: the check for an overflow, which is off in stages 1 and 2 in fp32, or the whole
    step of stage 1 in bf16, which has no check.
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
    """Return replacements for attributes of DeepSpeed's optimizer that report an overflow."""

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
