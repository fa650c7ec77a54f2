"""The step adapter: what a strategy does with one micro-batch, one norm and one update.

`TorchEngine` drives DDP, FSDP2, HSDP and a single process. Nothing here waits for the device (but
for offloaded shards, which are updated on the host): norm, clipping and the skip of a bad update
are computed where the gradients are, from the step's reduced vector, so that they are the same bits
on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from llmtrain.distributed.engines import fsdp, replicas, state
from llmtrain.distributed.engines.batch_norm import with_common_statistics
from llmtrain.distributed.engines.fsdp import Sharding
from llmtrain.types import Piece, Spec, StepVector


class Engine(Protocol):
    """What the loop asks of a strategy."""

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Spread a model over the devices.

        module: what is trained, which holds `model`, the bare one, whose names a checkpoint has.
        Returns the module whose forward the loop calls.
        """

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """Forward and backward of one micro-batch run in here; the last synchronises gradients."""

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """Accumulate the gradient of `loss_sum · scale`. Never steps."""

    def squares(self) -> Tensor:
        """() fp64: Σ g² of the gradient elements that this rank counts."""

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Scale the gradients down to `max_norm`, on the device."""

    def step(self, factor: float, sums: StepVector) -> None:
        """Update, each group at its own rate × `factor`, unless `sums` forbids it."""

    def norm(self, sums: StepVector) -> Tensor:
        """() fp32: the gradient norm before clipping."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Forwards in here do not train: no gradients, no dropout; training mode is back after."""

    def clear(self) -> None:
        """Drop all gradients."""

    def create_state(self) -> None:
        """Moments of zero for every trainable parameter, before any step."""

    def pieces(self, spec: Spec, *, writing: bool, dealt: bool = False) -> Iterator[Piece]:
        """The ranges of weights and moments that this rank holds, in the order of the spec.

        writing: only what this rank shall write, so that all ranks together write each element
            once. Otherwise the caller fills the memory, and then calls `finish_loading`.
        dealt: parameters and moments that every rank holds are shared out among the ranks for
            writing, instead of all to rank 0. Rank 0 writes buffers in any case: they may differ.
        """

    def finish_loading(self, steps: int) -> None:
        """Take over the pieces, filled from a checkpoint of a run that had made `steps` updates."""

    def optimizer_steps(self) -> int:
        """How many updates the optimizer has made. Waits for the device."""

    def unequal_replicas(self) -> dict[str, list[int]]:
        """Parameters whose bits are not those of the other replicas → the ranks that differ.

        Collective; equal on all ranks, and empty where no rank holds what another holds. See
        `replicas.unequal` for which ranks are named. Waits for the device.
        """


class TorchEngine:
    """DDP, FSDP2, HSDP, and one process without wrapping."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        counts_gradients: bool,
        sharding: Sharding | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._sharding = sharding  # None: every rank holds everything
        self._counts = counts_gradients  # replicas hold equal gradients: one of them counts

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Wrap or shard the model, keep the raw optimizer (accelerate's costs 0.1 ms a step).

        Raises UserError for a model that this strategy cannot take.
        """
        self._bare = model
        if self._sharding:
            self._model = fsdp.prepare(module, optimizer, self._sharding)
        else:
            module = with_common_statistics(module, self._accelerator)
            prepared: tuple[nn.Module, object] = self._accelerator.prepare(module, optimizer)
            self._model = prepared[0]
        self._optimizer = optimizer
        self._parameters = [
            p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        self._fused = all(group.get("fused") for group in self._optimizer.param_groups)
        for group in self._optimizer.param_groups:
            group["peak_lr"] = group["lr"]
        return self._model

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """DDP reduces gradients in the backward of the last micro-batch alone."""
        if self._sharding:
            fsdp.reduce_in_backward(self._model, self._sharding, last=last)
        elif not last:
            context: AbstractContextManager[object] = self._accelerator.no_sync(self._model)
            return context
        return nullcontext()

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """Not accelerator.backward: it divides by an accumulation count from the environment."""
        (loss_sum * scale).backward()  # type: ignore[no-untyped-call]  # torch has no stub for it

    def squares(self) -> Tensor:
        """In fp64, so that another way to split the sum rounds to the same fp32 norm."""
        gradients = self._gradients() if self._counts else []
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._accelerator.device)
        norms = torch._foreach_norm(gradients, 2, torch.float64)
        return torch.stack(norms).square().sum().to(self._accelerator.device)

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Multiply by min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_ does."""
        if max_norm is not None:
            factor = (max_norm / (self.norm(sums) + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(self._gradients(), factor.to(self._updates_on))

    def step(self, factor: float, sums: StepVector) -> None:
        """AdamW's fused kernel leaves weights, moments and step alone where `found_inf` is 1.

        A kernel that is not fused has no such flag, so this waits for the device.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        refused = not_finite(sums)
        if self._fused:
            # Never the count: at 2.0 the kernel applies the NaN and lowers its step (torch 2.13).
            found_inf = refused.float().to(self._updates_on)
            self._optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # of fused kernels
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]  # ditto
        if self._fused or not bool(refused):
            self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self, sums: StepVector) -> Tensor:
        """() fp32: the root of all squares."""
        return sums["squares"].sqrt().float()

    def evaluating(self) -> AbstractContextManager[object]:
        """As Engine.evaluating. Weights that FSDP2 gathered for a forward are freed afterwards."""
        return evaluating(self._model)

    def create_state(self) -> None:
        """As Engine.create_state."""
        state.create_state(self._optimizer, steps=0)

    def pieces(self, spec: Spec, *, writing: bool, dealt: bool = False) -> Iterator[Piece]:
        """As Engine.pieces: one of the replicas writes; what is not split, rank 0 writes."""
        rank, ranks = self._accelerator.process_index, self._accelerator.num_processes
        if writing and dealt and not self._sharding:
            yield from self._share_pieces(spec, rank, ranks)
            return
        shards = self._counts or not writing
        whole = rank == 0 or not writing
        yield from state.pieces(self._bare, self._optimizer, spec, shards=shards, whole=whole)

    def _share_pieces(self, spec: Spec, rank: int, of: int) -> Iterator[Piece]:
        buffers = {name for name, _ in self._bare.named_buffers()}
        held = state.pieces(self._bare, self._optimizer, spec)
        own = [piece for piece in held if rank == 0 or piece.name not in buffers]
        names = {piece.name for piece in own} - buffers
        return state.share_out(own, names, rank, of)

    def finish_loading(self, steps: int) -> None:
        """As Engine.finish_loading."""
        state.set_steps(self._optimizer, steps)

    def optimizer_steps(self) -> int:
        """As Engine.optimizer_steps."""
        return state.optimizer_steps(self._optimizer)

    def unequal_replicas(self) -> dict[str, list[int]]:
        """As Engine.unequal_replicas, of DDP and HSDP.

        Parameters alone: a wrong moment makes a wrong weight in the next update, and reading
        moments too would take three times as long. Buffers may depend on what one rank has seen.
        """
        count = self._sharding.replicas if self._sharding else self._accelerator.num_processes
        if count == 1:
            return {}
        named = dict(self._bare.named_parameters())
        return replicas.unequal(list(named), [state.local(p) for p in named.values()], count)

    @property
    def _updates_on(self) -> torch.device:
        offload = self._sharding is not None and self._sharding.offload
        return torch.device("cpu") if offload else self._accelerator.device

    def _gradients(self) -> list[Tensor]:
        """What this rank holds of each gradient; of a short parameter it may be nothing."""
        return [state.local(p.grad) for p in self._parameters if p.grad is not None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the modules are back in training mode afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        fsdp.reshard(model)
        model.train()


def not_finite(sums: StepVector) -> Tensor:
    """() bool on the device: whether the update of this step must not be applied."""
    norm = sums["squares"].sqrt().float()
    refused = (sums["not_finite"] > 0) | (sums["data_failed"] > 0) | (sums.tokens == 0)
    return refused | ~torch.isfinite(norm)
