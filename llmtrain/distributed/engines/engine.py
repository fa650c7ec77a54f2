"""The engine of a strategy: how it runs a micro-batch, clips and applies the gradients.

`TorchEngine` drives DDP, FSDP2, HSDP and a single process. A step does not wait for the device,
except with offloaded shards, which are updated on the host. How far to clip and whether to skip a
bad update is decided from the step's reduced vector, so equally on all ranks. Where operations are
queued, these decisions are tensors of shape (), for which nobody waits. Elsewhere they are numbers:
an operation on a tensor of one element takes as long as thirty on numbers, and there are twenty of
them in a step. Both have the same bits.

Replicas make the same updates from the same gradients, so their weights are equal in every bit. If
they became different, each replica would silently continue with its own. A checksum of each
parameter is therefore compared: the sum of its memory in words of eight bytes, modulo 2^64. Any
single changed bit changes it.

    hsdp of 2 × 2      shard 0   shard 1
        replica 0      rank 0    rank 1       ranks of a column must have equal sums
        replica 1      rank 2    rank 3
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_float
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from llmtrain import faults, system
from llmtrain.distributed.engines import fsdp, state
from llmtrain.distributed.engines.fsdp import Sharding, with_common_statistics
from llmtrain.distributed.ranks import ModelGroups
from llmtrain.torch_private import flattened, multiply_each, norm_of_each
from llmtrain.types import SLOTS, Cut, MicroBatch, Piece, RankLayout, Spec, StepVector


def is_asynchronous(device: torch.device) -> bool:
    """Whether operations on this device are queued, so that a read would wait for them."""
    return device.type == "cuda"


def gradient_norm(sums: StepVector) -> Tensor | float:
    """Return the gradient norm before clipping, rounded to fp32: () fp32, or a number."""
    if is_asynchronous(sums.data.device):
        return sums["squares"].sqrt().float()
    return _fp32(math.sqrt(_value(sums, "squares")))


def clip_factor(sums: StepVector, max_norm: float) -> Tensor | float:
    """Return min(1, max_norm / (norm + 1e-6)), computed in fp32 as torch's clip_grad_norm_ does.

    If the update is refused, it may be anything.
    """
    before = gradient_norm(sums)
    if isinstance(before, Tensor):
        return (max_norm / (before + 1e-6)).clamp(max=1.0)
    # An operation in fp64 whose result is rounded is one in fp32. torch divides by the reciprocal.
    return min(_fp32(_fp32(1.0 / _fp32(before + _EPSILON)) * _fp32(max_norm)), 1.0)


def is_refused(sums: StepVector) -> Tensor | bool:
    """Whether the update of this step must not be applied: () bool, or a number's bool."""
    before = gradient_norm(sums)
    if isinstance(before, Tensor):
        failed = sums["not_finite"] + sums["data_failed"]
        # A comparison with NaN is false, so these hold only for a finite norm.
        return ~((failed == 0) & (sums.tokens > 0) & (before < math.inf))
    failed_on = _value(sums, "not_finite") + _value(sums, "data_failed")
    return failed_on > 0 or not sums.has_tokens or not math.isfinite(before)


def _value(sums: StepVector, slot: str) -> float:
    return sums.values[SLOTS.index(slot)]


def _fp32(number: float) -> float:
    """Round to fp32, or to infinity."""
    return c_float(number).value


_EPSILON = _fp32(1e-6)


_WORD = torch.int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST = torch.iinfo(_WORD).min


def checksum(tensor: Tensor) -> Tensor:
    """Return () int64 on the device: the sum modulo 2^64 of the bits of a contiguous tensor.

    It adds words of eight bytes, then the remaining elements. That is four times as fast as adding
    all elements one by one.
    """
    flat = tensor.detach().view(-1)
    per_word = _WORD.itemsize // flat.dtype.itemsize
    if flat.storage_offset() % per_word:  # torch reads words only at multiples of their size
        flat = flat.clone()
    even = flat.numel() - flat.numel() % per_word
    rest = flat[even:].view(_INTEGERS[flat.dtype.itemsize])
    return flat[:even].view(_WORD).sum() + rest.sum(dtype=_WORD)


def unequal_ranks(
    names: Sequence[str], held: Sequence[Tensor], replicas: int, neighbours: int = 1
) -> dict[str, list[int]]:
    """Return the names of tensors that differ between replicas, each with the ranks that differ.

    held: this rank's part of each tensor.
    neighbours: how many ranks, one after another, hold the same in each replica.

    A rank is named if its bits are not those of more than half of the tensor's replicas. Without
    such a majority it is unknown which replica is right, and all of them are named. Two replicas
    that differ never have a majority.

    Collective over all ranks of the default group, with the same result on each. It takes one
    reduction of 16 bytes per tensor and shard, and a second exchange only if something differs.
    Waits for the device.
    """
    world_size = dist.get_world_size()
    shards = world_size // (replicas * neighbours)
    sums = torch.stack([checksum(tensor) for tensor in held])
    # min(x) is ~max(~x), so one reduction finds the largest and the smallest sum.
    bounds = sums.new_full((shards, 2, len(sums)), _LEAST)
    bounds[dist.get_rank() // neighbours % shards] = torch.stack([sums, ~sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bool((bounds[:, 0] == ~bounds[:, 1]).all()):
        return {}
    each = [torch.empty_like(sums) for _ in range(world_size)]
    dist.all_gather(each, sums)
    columns = zip(*(one.tolist() for one in each), strict=True)
    odd_by_name = {
        name: odd_ranks(column, shards, neighbours)
        for name, column in zip(names, columns, strict=True)
    }
    return {name: ranks for name, ranks in odd_by_name.items() if ranks}


def odd_ranks(sums: Sequence[int], shards: int, neighbours: int = 1) -> list[int]:
    """Return the ranks whose sum is not that of most replicas of their shard. sums: one a rank."""
    odd: list[int] = []
    for shard in range(shards):
        ranks = [one for one in range(len(sums)) if one // neighbours % shards == shard]
        value, count = Counter(sums[rank] for rank in ranks).most_common(1)[0]
        agreed = 2 * count > len(ranks)
        odd += [rank for rank in ranks if not agreed or sums[rank] != value]
    return sorted(odd)


_SMALL = 1 << 15  # elements; a larger tensor's own work is longer than a call
_SLAB = 1 << 17  # elements that are in a CPU's cache as fp64


def begin_micro_batch(index: int, count: int) -> None:
    """Tell that the forward of a micro-batch begins, of so many in a step."""
    faults.hit("loop.micro")
    system.beat("a micro-batch", index + 1, count)


def trained_loss(output: Tensor) -> Tensor:
    """Return the loss, (), of what a `LossModule` returns: the first number, if there are more."""
    return output[0] if output.ndim else output


class Engine(Protocol):
    """The operations that the training loop needs from a strategy.

    `prepare` sets _model, which it returns, and _optimizer, which makes the updates.

    cuts: how parameters were cut over processes, by name, before `prepare`; none of a whole model.
    """

    cuts: Mapping[str, Cut] = MappingProxyType({})

    _model: nn.Module
    _optimizer: torch.optim.Optimizer

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Distribute a model over the devices, and return the module whose forward the loop calls.

        module: the module that is trained; it contains `model`.
        model: the bare model; a checkpoint uses its parameter names.
        """

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], scale: Tensor
    ) -> Iterator[Tensor]:
        """Accumulate the gradient of all losses times `scale`; the last backward reduces it.

        Yields the loss of each micro-batch, () fp32, detached, after its backward. Of pairs of
        answers it is (1 + slots,) fp64, as the module returns it.
        """
        for index, micro_batch in enumerate(micro_batches):
            begin_micro_batch(index, len(micro_batches))
            with self.micro(last=index == len(micro_batches) - 1):
                loss: Tensor = self._model(**micro_batch)
                self.backward(trained_loss(loss), scale)
            yield loss.detach()

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch. Gradients are fully reduced in the last one."""

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """Accumulate the gradient of `loss_sum · scale`, without a step of the optimizer."""

    def squares(self) -> Tensor:
        """Return () fp64: Σ g² of the gradient elements that this rank counts."""

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Scale the gradients down to a norm of `max_norm`, on the device."""

    def step(self, factor: float, sums: StepVector) -> None:
        """Update the weights at each group's rate times `factor`, unless `sums` forbids it."""

    def norm(self, sums: StepVector) -> Tensor | float:
        """Return the gradient norm before clipping: () fp32 on CUDA, else a number."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in this context, without gradients and dropout, then restore training mode.

        At the end the weights that FSDP2 has gathered are freed; stage 3 of ZeRO frees its own.
        """
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            fsdp.reshard(self._model)
            self._model.train()

    def clear(self) -> None:
        """Drop all gradients."""

    def create_state(self) -> None:
        """Create moments of zero for every trainable parameter, before any step."""

    def pieces(
        self, spec: Spec, *, writing: bool, replicas_shared: bool = False
    ) -> Iterator[Piece]:
        """Yield the ranges of weights and moments on this rank, in the order of the spec.

        writing: yield only what this rank writes; all ranks together write each element once.
            Otherwise the caller fills the memory, and then calls `finish_loading`.
        replicas_shared: when writing, share out the parameters and moments that every rank has,
            instead of giving them all to rank 0; those of a cut model always are its first
            processes'. Rank 0 always writes the buffers, as they may differ.
        """

    def finish_loading(self, steps: int) -> None:
        """Apply the pieces, which were filled from a checkpoint made after `steps` updates."""

    def optimizer_steps(self) -> int:
        """Return how many updates the optimizer has made. Waits for the device."""
        return state.optimizer_steps(self._optimizer)

    def unequal_replicas(self, *, base: bool = False) -> dict[str, list[int]]:
        """Return parameters whose bits differ between replicas, each with the ranks that differ.

        base: whether to compare the frozen base of adapters, too.

        `unequal_ranks` describes which ranks are named. The result is the same on all ranks,
        and empty if the strategy has no replicas. Collective. Waits for the device.
        """
        return {}

    def _set_rates(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times the rate that it was made with."""
        for group in self._optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor


class TorchEngine(Engine):
    """DDP, FSDP2, HSDP, and one process without wrapping."""

    _adds_up = False  # whether it adds up gradients over replicas itself, in place of DDP

    def __init__(
        self,
        accelerator: Accelerator,
        sharding: Sharding | None,
        layout: RankLayout,
        groups: ModelGroups,
    ) -> None:
        self._accelerator = accelerator
        self._sharding = sharding  # None: every rank has all weights of its part of the model
        self._layout = layout
        self._groups = groups
        # Under DDP every rank has all gradients, under HSDP every replica. Only one counts them.
        first = layout.data_rank == 0 and layout.sequence_rank == 0
        self._counts = sharding.replica == 0 if sharding else first

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """Wrap or shard the model. The optimizer is not wrapped: that costs 0.1 ms a step.

        Raises UserError for a model that this strategy does not support.
        """
        self._bare = model
        if self._sharding:
            self._model = fsdp.prepare(module, optimizer, self._sharding)
        elif self._adds_up:
            self._model = self._accelerator.prepare_model(module, evaluation_mode=True)
        elif self.cuts:
            self._model = self._replicated(module)
        else:
            module = with_common_statistics(module, self._accelerator)
            self._model = self._accelerator.prepare(module, optimizer)[0]
        self._optimizer, groups = optimizer, optimizer.param_groups
        self._parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        self._counted = self._counted_parameters()
        self._fused = all(group.get("fused") for group in groups)
        self._scale: Tensor | None = None  # by which the optimizer divides the gradients
        return self._model

    def _replicated(self, module: nn.Module) -> nn.Module:
        """Wrap the module of a cut model in DDP over the ranks that hold the same part of it.

        accelerate would reduce gradients over all ranks.
        """
        accelerator = self._accelerator
        module = accelerator.prepare_model(module, evaluation_mode=True)  # device and autocast
        if self._groups.replicas is None:
            return module
        devices = None if accelerator.device.type == "cpu" else [accelerator.device]
        assert accelerator.ddp_handler is not None, "`make_accelerator` gives one"
        kwargs = accelerator.ddp_handler.to_kwargs()
        return DistributedDataParallel(
            module, device_ids=devices, process_group=self._groups.replicas, **kwargs
        )

    def _counted_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of whose gradients this rank adds up the squares.

        One that is not cut is alike on all processes that share the matrices.
        """
        if not self._counts:
            return []
        if self._layout.tensor_rank == 0:
            return self._parameters
        named = self._bare.named_parameters()
        cut = {id(parameter) for name, parameter in named if name in self.cuts}
        return [one for one in self._parameters if id(one) in cut]

    def micro(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Engine.micro`. DDP reduces gradients in the last micro-batch's backward only."""
        if self._sharding:
            fsdp.reduce_in_backward(self._model, self._sharding, last=last)
        elif not last:
            context: AbstractContextManager[object] = self._accelerator.no_sync(self._model)
            return context
        return nullcontext()

    def backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """See `Engine.backward`.

        Not accelerator.backward, which divides by an accumulation count from the environment.
        """
        loss_sum.backward(scale)  # type: ignore[no-untyped-call]  # torch has no stub for it

    def squares(self) -> Tensor:
        """See `Engine.squares`. In fp64 the fp32 norm does not depend on how the sum is split."""
        gradients = self._gradients(self._counted)
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._accelerator.device)
        return _squares(gradients).to(self._accelerator.device)

    def clip(self, sums: StepVector, max_norm: float | None) -> None:
        """Multiply by min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_ does.

        The fused kernel on a CPU does this in `step`, with a difference in the last bit.
        """
        if max_norm is None:
            return
        factor = clip_factor(self._here(sums), max_norm)
        if isinstance(factor, float):
            if factor == 1.0:
                return
            if self._fused and not self._sharding:  # the kernel does it: one pass less
                divisor = _fp32(1.0 / factor) if factor else math.inf  # 0 at an infinite norm
                self._scale = torch.full((), divisor)
                return
            factor = torch.tensor(factor)  # torch would make one for each gradient
        multiply_each(self._gradients(self._parameters), factor)

    def step(self, factor: float, sums: StepVector) -> None:
        """See `Engine.step`.

        With `found_inf` at 1, AdamW's fused kernel changes neither weights nor moments nor step
        counts. Other kernels have no such flag, so for them this waits for the device.
        """
        self._set_rates(factor)
        refused = is_refused(self._here(sums))
        if self._fused and isinstance(refused, Tensor):
            # Must be 0 or 1: at 2.0 the kernel applies the NaN and lowers its step (torch 2.13).
            self._optimizer.found_inf = refused.float()  # type: ignore[attr-defined]  # of fused kernels
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]  # ditto
            self._optimizer.step()
        elif not refused:
            if self._scale is not None:
                self._optimizer.grad_scale = self._scale  # type: ignore[attr-defined]  # ditto
            self._optimizer.step()
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]  # ditto
        self._scale = None
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self, sums: StepVector) -> Tensor | float:
        """See `Engine.norm`. It is the square root of the sum of squares over all ranks."""
        return gradient_norm(sums)

    def create_state(self) -> None:
        """See `Engine.create_state`."""
        state.create_state(self._optimizer)

    def pieces(
        self, spec: Spec, *, writing: bool, replicas_shared: bool = False
    ) -> Iterator[Piece]:
        """See `Engine.pieces`. One replica writes the shards; rank 0 writes the whole tensors."""
        layout, ranks = self._layout, self._layout.replicas
        rank = layout.data_rank * (ranks // layout.data_size) + layout.sequence_rank
        if self.cuts:
            return self._cut_pieces(spec, writing=writing)
        if writing and replicas_shared and not self._sharding:
            buffers = {name for name, _ in self._bare.named_buffers()}
            held = state.pieces(self._bare, self._optimizer, spec)
            local_pieces = [piece for piece in held if rank == 0 or piece.name not in buffers]
            names = {piece.name for piece in local_pieces} - buffers
            return state.share_out(local_pieces, names, rank, ranks)
        shards = self._counts or not writing
        whole = rank == 0 or not writing
        return state.pieces(self._bare, self._optimizer, spec, shards=shards, whole=whole)

    def _cut_pieces(self, spec: Spec, *, writing: bool) -> Iterator[Piece]:
        """Yield what `pieces` does where matrices are cut.

        The first data rank, or replica, writes; of parameters that are not cut, its first process.
        """
        group, rank = self._groups.tensor, self._layout.tensor_rank
        assert group is not None
        for name, of, held in state.held_tensors(self._bare, self._optimizer, spec):
            cut = self.cuts.get(of)
            is_mine = isinstance(held, DTensor) or self._layout.data_rank == 0
            if writing and not (is_mine and self._counts and (cut or rank == 0)):
                continue
            part = state.piece(name, held)
            if cut is None:
                yield part
            elif cut.axis == 0:
                yield part._replace(start=part.start + cut.offset(rank))
            elif writing:
                yield from state.rows_for_columns(part, cut, group)
            else:
                yield from state.columns_from_rows(part, cut, rank)

    def finish_loading(self, steps: int) -> None:
        """See `Engine.finish_loading`."""
        state.set_steps(self._optimizer, steps)

    def unequal_replicas(self, *, base: bool = False) -> dict[str, list[int]]:
        """See `Engine.unequal_replicas`; DDP and HSDP have replicas.

        Only parameters are compared. A wrong moment makes a wrong weight in the next update, and
        to compare moments too would take three times as long. Buffers may differ rightly, as they
        may depend on the data of one rank.
        """
        named = dict(self._bare.named_parameters()) if base else state.named_parameters(self._bare)
        return self._unequal({name: state.local(p) for name, p in named.items()})

    def _unequal(self, held: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Compare this rank's parts of parameters, which have the same names on all ranks.

        A parameter that is not cut is also compared between the processes that share matrices.
        """
        replicas = self._sharding.replicas if self._sharding else self._layout.replicas
        group, unequal = self._groups.tensor, dict[str, list[int]]()
        beside = 1 if group is None else dist.get_world_size(group)
        for is_cut, neighbours in ((True, 1), (False, beside)):
            compared = {name: part for name, part in held.items() if (name in self.cuts) == is_cut}
            if compared and replicas * neighbours > 1:
                unequal |= unequal_ranks([*compared], [*compared.values()], replicas, neighbours)
        return unequal

    def _here(self, sums: StepVector) -> StepVector:
        """Return the vector where updates are made: on the host if the shards are offloaded."""
        offload = self._sharding is not None and self._sharding.offload
        return replace(sums, data=sums.data.cpu()) if offload else sums

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's part of each gradient, which may be empty for a short parameter."""
        held = [grad for p in parameters if (grad := p.grad) is not None]
        return [state.local(gradient) for gradient in held] if self._sharding else held


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return Σ g² of some tensors, () fp64.

    On a CPU an operation for each tensor costs more than the work on a small one, so small ones are
    joined; and torch would make a whole tensor of fp64 first, so large ones are divided. CUDA has
    one kernel for all.
    """
    if not gradients[0].is_cpu:
        norms = norm_of_each(list(gradients), 2, torch.float64)
        return torch.stack([norm.square() for norm in norms]).sum()
    small = [g for g in gradients if g.numel() <= _SMALL]
    parts = [flattened(small)] if small else []
    if len(small) < len(gradients):
        for large in (g for g in gradients if g.numel() > _SMALL):
            parts += large.flatten().split(_SLAB)  # type: ignore[no-untyped-call]  # no stub
    sums = [torch.dot(wide, wide) for wide in (part.double() for part in parts)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()
