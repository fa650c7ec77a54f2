"""Engines whose weights are the same to the bit on any number of processes.

A step is divided into groups: micro-batches that no number of processes changes. A kernel gives
equal bits for equal shapes, so each group has the same gradient on whichever process computes it.
What is left is to add up without rounding:

    fp32 gradient of a group ─► fp64, rounded to the grid 2⁻⁴² ─► exact sum ─► fp32, once a step

Multiples of one grid, below 2⁵³ of its steps, add without rounding. So neither the order nor the
algorithm of a reduction matters, nor how tensors are divided. What rounding to the grid drops is
less than 2⁻⁴³ of each group's gradient, where AdamW's epsilon is 2⁻²⁷.

    replicated    hooks add a bucket's gradients to its totals as soon as they are there; those of
                  the last group start an all-reduce in fp64 beside the rest of the backward
    sharded       FSDP2's reduce-scatter becomes an exchange in fp32, and each process adds the
                  parts that it receives to its own totals

The squares of the gradients are added on grids too, so norm and clipping are equal as well. A
gradient that is too large for the grid ends the run, as sums would then depend on their order.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llmtrain.distributed.engines import fsdp, state
from llmtrain.distributed.engines.engine import TorchEngine
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.text import first_few
from llmtrain.torch_private import flattened

_GRID = 2.0**-42
_LARGEST = 2.0**9  # of one group's gradient
_LARGEST_SUM = 2.0**10
# A square is divided into multiples of these. The sums of the parts are exact while the whole is
# below this and there are no more than 2^32 elements; a square below 2^-63 is dropped.
_LARGEST_SQUARES = 2.0**35
_GRIDS_OF_SQUARES = (2.0**-18, 2.0**-40, 2.0**-62)
_SMALL = 1 << 15  # elements; smaller gradients are joined, since a call costs more than their work
_CHUNK = {"cpu": 1 << 15}  # elements that stay in a CPU's cache as fp64
_WHOLE = 1 << 26  # elements; a GPU has no use for small pieces
_REMEDY = (
    "lower optimizer.learning_rate if training diverges, else training.same_bits=false in another "
    "run.dir; the last checkpoint is as it was"
)


def to_grid(values: Tensor, grid: float) -> Tensor:
    """Round fp64 values to multiples of `grid`, in place. They must be below 2^51 grids.

    To the sum with 1.5 · 2^52 grids fp64 keeps exactly the multiples of the grid.
    """
    anchor = 1.5 * 2.0**52 * grid
    return values.add_(anchor).sub_(anchor)


def exact_squares(values: Tensor) -> Tensor:
    """Return Σ x² of fp32 values in parts, (3,) fp64, which are multiples of `_GRIDS_OF_SQUARES`.

    Parts of parts of a tensor add up to those of the whole, in any order.
    """
    rest = values.double().square_()
    parts = []
    for grid in _GRIDS_OF_SQUARES:
        held = to_grid(rest.clone(), grid)
        parts.append(held.sum())
        rest -= held
    return torch.stack(parts)


class Totals:
    """The exact sum of the gradients of some parameters over all groups of a step.

    exact: (n,) fp64, multiples of the grid
    rounded: (n,) fp32, the memory of the gradients that the optimizer sees, once a step is added up
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.exact = torch.zeros(size, dtype=torch.float64, device=device)
        self.rounded = torch.zeros(size, dtype=torch.float32, device=device)
        self.bounds: list[Tensor] = []  # of what was added in this step, () fp32 each
        self._chunk = _CHUNK.get(device.type, _WHOLE)

    def add(self, start: int, gradient: Tensor) -> None:
        """Add a flat fp32 gradient to the elements from `start` on."""
        if not gradient.numel():
            return
        self.bounds += torch.aminmax(gradient)
        chunks = gradient.split(self._chunk)  # type: ignore[no-untyped-call]  # torch has no stub
        for chunk in chunks:
            self.exact[start : start + chunk.numel()] += to_grid(chunk.double(), _GRID)
            start += chunk.numel()

    def squares(self, share: int, of: int) -> Tensor:
        """Return `exact_squares` of this share of the rounded sums, (3,) fp64."""
        chunks = self.rounded.split(self._chunk)[share::of]  # type: ignore[no-untyped-call]  # ditto
        parts = [exact_squares(chunk) for chunk in chunks]
        return torch.stack(parts).sum(0) if parts else self.exact.new_zeros(3)

    def clear(self) -> None:
        """Begin another step."""
        self.exact.zero_()
        self.bounds.clear()


class ExactEngine(TorchEngine):
    """What both engines share. A subclass adds up the gradients of each micro-batch."""

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """See `Engine.prepare`. Raises UserError for a model with batch norm."""
        named = module.named_modules()
        if norms := [name for name, part in named if isinstance(part, fsdp.BATCH_NORMS)]:
            why = f"whose statistics are of the rows of one process ({first_few(norms, 1)})"
            expected = f"false for a model with batch norm, {why}"
            raise UserError(Problem("training.same_bits", True, expected, "another model"))
        prepared = super().prepare(module, model, optimizer)
        self._groups_added = 0
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._make_totals(prepared)
        return prepared

    @abstractmethod
    def _make_totals(self, module: nn.Module) -> None:
        """Make what adds up the gradients of a prepared module."""

    @contextmanager
    def micro(self, *, last: bool) -> Iterator[None]:
        """See `Engine.micro`. Behind the last one the gradients are those of the whole step."""
        self._groups_added += 1
        self._begin(last=last)
        yield
        self._end(last=last)

    def _begin(self, *, last: bool) -> None:
        """Prepare for the backward of a group; nothing, where torch reduces each by itself."""

    @abstractmethod
    def _end(self, *, last: bool) -> None:
        """Add what this group's backward has left. After the last one, set the gradients."""

    @abstractmethod
    def _totals(self) -> Sequence[Totals]:
        """Return the totals of this rank."""

    def squares(self) -> Tensor:
        """Return Σ g² on the first rank and 0 on others, () fp64: the same bits for any division.

        Collective. Raises RunError (1) on all ranks for a gradient beyond the range of the grid.
        """
        world, rank = self._layout.world_size, self._layout.data_rank
        share = (0, 1) if self._sharding else (rank, world)
        device = self._accelerator.device
        parts = torch.zeros(4, dtype=torch.float64, device=device)
        for totals in self._totals():
            parts[:3] += totals.squares(*share)
        limit = min(_LARGEST, _LARGEST_SUM / (self._groups_added * self._layout.data_size))
        beyond = [_beyond(totals, limit) for totals in self._totals()]
        parts[3] = sum(beyond)
        sum_over_ranks(parts)
        # Where anything is not finite, the step is skipped as in any run, whatever else is there:
        # a tensor that holds such a number hides its other ones, on more or fewer processes.
        if parts[0] < math.inf and (parts[3] or parts[0] >= _LARGEST_SQUARES):
            raise self._out_of_range(limit)
        return parts[:3].sum() if rank == 0 else parts.new_zeros(())

    def _out_of_range(self, limit: float) -> RunError:
        """Return the error of a gradient that is too large. Collective."""
        worst = torch.zeros(len(self._parameters), dtype=torch.float64)
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and (held := state.local(parameter.grad)).numel():
                worst[number] = held.abs().max()
        if dist.is_initialized() and dist.get_world_size() > 1:
            worst = worst.to(self._accelerator.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        number = int(worst.argmax())
        name = self._names[id(self._parameters[number])]
        return RunError(
            f"the gradient of {name} is too large for training.same_bits: of the whole step its "
            f"largest element is {float(worst[number]):.3g}; in one micro-batch elements are to be "
            f"below {limit:.4g}, and the norm of all below {math.sqrt(_LARGEST_SQUARES):,.0f}",
            1,
            _REMEDY,
        )

    def clear(self) -> None:
        """Drop all gradients and totals."""
        super().clear()
        self._groups_added = 0
        for totals in self._totals():
            totals.clear()


def _beyond(totals: Totals, limit: float) -> bool:
    """Whether a finite number that was added is not below the limit. Waits for the device."""
    if not totals.bounds:
        return False
    bounds = torch.stack(totals.bounds).abs()
    return bool(((bounds >= limit) & (bounds < math.inf)).any())


class GradientBucket:
    """Parameters whose gradients are added up, and reduced over the ranks, together.

    The small ones come first, and are one tensor.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        sizes = {id(p): state.local(p).numel() for p in parameters}
        self._small = [p for p in parameters if sizes[id(p)] <= _SMALL]
        self._large = [p for p in parameters if sizes[id(p)] > _SMALL]
        self.parameters = [*self._small, *self._large]
        self.totals = Totals(sum(sizes.values()), device)
        self.waiting = 0  # parameters whose gradient of this group is not there yet
        self._starts: dict[int, int] = {}
        self._gradients: list[Tensor] = []  # in the memory of the rounded totals
        start = 0
        for one in self.parameters:
            self._starts[id(one)] = start
            flat = self.totals.rounded[start : start + sizes[id(one)]]
            self._gradients.append(flat.view(state.local(one).shape))
            start += sizes[id(one)]

    def take(self) -> None:
        """Add the gradients that are there to the totals, and drop them."""
        if any(one.grad is not None for one in self._small):
            held = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._small]
            self.totals.add(0, flattened([state.local(one) for one in held]))
        for one in self._large:
            if one.grad is not None:
                self.totals.add(self._starts[id(one)], state.local(one.grad).reshape(-1))
        for one in self.parameters:
            one.grad = None

    def settle(self) -> None:
        """Give each parameter its part of the totals, rounded to fp32, as its gradient."""
        self.totals.rounded.copy_(self.totals.exact)
        for one, gradient in zip(self.parameters, self._gradients, strict=True):
            one.grad = _as(one, gradient)


def _as(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Return this rank's part of a tensor in the form of the parameter that it belongs to."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ReplicatedExactEngine(ExactEngine):
    """One process, also of FSDP2, and replicas without DDP's wrapper.

    What no group of a step has used has a gradient of zero.
    """

    _adds_up = True  # FSDP2 on one process reduces nothing

    def _make_totals(self, module: nn.Module) -> None:
        self._buckets = self._filled_buckets()
        self._last, self._sent, self._works = False, 0, list[Any]()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                arrived = partial(self._arrived, bucket)
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]  # no stub

    def _filled_buckets(self) -> list[GradientBucket]:
        """Divide the parameters, the last ones of the model first, whose gradients come first."""
        handler = self._accelerator.ddp_handler
        most = 2**18 * (handler.bucket_cap_mb if handler is not None else 25)  # elements of fp32
        members: list[list[nn.Parameter]] = []
        room = 0
        order = {name: number for number, name in enumerate(self._names)}
        for one in sorted(self._parameters, key=lambda p: -order[id(p)]):
            size = state.local(one).numel()
            if size > room:
                members.append([])
                room = most
            members[-1].append(one)
            room -= size
        return [GradientBucket(parameters, self._accelerator.device) for parameters in members]

    def _totals(self) -> Sequence[Totals]:
        return [bucket.totals for bucket in self._buckets]

    def _begin(self, *, last: bool) -> None:
        self._last, self._sent = last, 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def _arrived(self, bucket: GradientBucket, _parameter: Tensor) -> None:
        """Add the gradients of a bucket as soon as all of them are there."""
        bucket.waiting -= 1
        if bucket.waiting == 0:
            bucket.take()
            if self._last:
                self._send()

    def _send(self) -> None:
        """Start to reduce the next buckets that are complete: in the same order on all ranks."""
        while self._sent < len(self._buckets) and self._buckets[self._sent].waiting <= 0:
            if self._layout.world_size > 1:
                exact = self._buckets[self._sent].totals.exact
                self._works.append(dist.all_reduce(exact, async_op=True))
            self._sent += 1

    def _end(self, *, last: bool) -> None:
        for bucket in self._buckets:
            if bucket.waiting > 0:  # this group has not used all of its parameters
                bucket.take()
                bucket.waiting = 0
        if not last:
            return
        self._send()
        for work in self._works:
            work.wait()
        self._works.clear()
        for bucket in self._buckets:
            bucket.settle()


class Exchange:
    """Adds up the gradients that FSDP2 reduces for one of its modules: a `ReduceScatter` of torch.

    totals: this rank's shards, as torch lays them out; None before the first reduction
    """

    totals: Totals | None = None

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is reduced, and then for the result: that of the rounded sums."""
        count = math.prod(size)
        if self.totals is not None and count == self.totals.rounded.numel():
            return self.totals.rounded
        if self.totals is None:
            self.totals = Totals(count // self._world_size, device)
        return torch.empty(count, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Add the shards that all ranks have for this one; the result is set in `settle`."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        assert self.totals is not None
        for part in received.view(self._world_size, -1):
            self.totals.add(0, part)


class ShardedExactEngine(ExactEngine):
    """FSDP2 on several processes."""

    def _make_totals(self, module: nn.Module) -> None:
        self._exchanges: list[Exchange] = []
        self._held: dict[int, Tensor] = {}  # id of a parameter → its gradient, in `rounded`
        for part in module.modules():
            if isinstance(part, FSDPModule):
                self._exchanges.append(Exchange(self._layout.world_size))
                exchange: Any = self._exchanges[-1]  # torch does not export the class of it
                part.set_custom_reduce_scatter(exchange)
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def _totals(self) -> Sequence[Totals]:
        return [one.totals for one in self._exchanges if one.totals is not None]

    def _end(self, *, last: bool) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._held[id(parameter)] = parameter.grad
                parameter.grad = None  # else torch would add the next group's to it
        if not last:
            return
        for totals in self._totals():
            totals.rounded.copy_(totals.exact)
        for parameter in self._parameters:
            parameter.grad = self._held.setdefault(id(parameter), torch.zeros_like(parameter))
