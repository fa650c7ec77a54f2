"""ZeRO's masters and moments as ranges of named, whole tensors.

    stages 1, 2   a flat tensor of each group of parameters is cut evenly over the ranks; what one
                  rank has of a parameter is a fragment, often none, often all of it
    stage 3       each parameter is cut evenly; the last ranks have less, or padding alone

What is computed with is a copy of the masters: in bf16 a rounded one, of stage 3 one that is
gathered when it is needed. So what is read goes into masters, and `renew_copies` makes the copies
again. Frozen parameters have no masters: their fp32 values are kept here where the copy is rounded.
The private names of DeepSpeed 0.19 are in this file and in `zero_engine.overflowing`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from llmtrain.distributed.engines import state
from llmtrain.types import Piece, Spec

Kind = Literal["partitions", "bf16", "fragments"]
# Which of DeepSpeed's optimizers: of stage 3, of stage 1 in bf16, of stages 1 and 2 → its masters.
_MASTERS: dict[Kind, str] = {
    "partitions": "fp32_partitioned_groups_flat",
    "bf16": "fp32_groups_flat_partition",
    "fragments": "single_partition_of_fp32_groups",
}


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What the names of a checkpoint stand for on this rank.

    parameters: of the bare model.
    trained: names of those that the optimizer changes.
    buffers: the persistent ones.
    frozen: flat fp32 values of frozen parameters whose copy is rounded; in stage 3 this rank's
        range. Before DeepSpeed has the model: the weights of all parameters.
    """

    parameters: Mapping[str, Parameter]
    trained: frozenset[str]
    buffers: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]


def before(model: Module, optimizer: torch.optim.Optimizer) -> Held:
    """Names and values of the bare model. The values' memory lives on until `after` has them."""
    parameters = dict(model.named_parameters())
    trained = frozenset(state.trained_parameters(model, optimizer))
    values = {name: weight.detach() for name, weight in parameters.items()}
    return Held(parameters, trained, state.persistent_buffers(model), values)


def after(held: Held, optimizer: Any) -> Held:
    """Copy the weights as they were into DeepSpeed's masters, which it makes of rounded ones."""
    frozen = {}
    for name, parameter in held.parameters.items():
        value = held.frozen[name].reshape(-1)
        if _dtype(parameter) == value.dtype:
            continue
        if name in held.trained:
            if (master := _master(optimizer, name, parameter, None)) is not None:
                data = master.data
                data.copy_(value[master.start : master.start + data.numel()])
            continue
        start, copy = _frozen_copy(parameter)
        if _is_split(parameter) or dist.get_rank() == 0:
            frozen[name] = value[start : start + copy.numel()].clone()
    return replace(held, frozen=frozen)


def kind(optimizer: Any) -> Kind:
    """Which of DeepSpeed's optimizers it is, by the attribute that holds its masters."""
    return next((one for one, name in _MASTERS.items() if name in vars(optimizer)), "fragments")


def create_state(optimizer: Any) -> None:
    """Give every master of this rank moments of zero, with no step made."""
    base = optimizer.optimizer
    counts_on_host = type(base).__name__ == "DeepSpeedCPUAdam"  # a Python number
    fused = any(group.get("fused") for group in base.param_groups)
    for master in vars(optimizer)[_MASTERS[kind(optimizer)]]:
        device = master.device if fused else torch.device("cpu")
        step = 0 if counts_on_host else torch.zeros((), dtype=torch.float32, device=device)
        base.state[master] = {
            "step": step,
            **{moment: torch.zeros_like(master, requires_grad=False) for moment in state.MOMENTS},
        }
    if kind(optimizer) != "partitions":
        # Again, where a backward or a step has done it: they would be of the old moments.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def pieces(
    held: Held,
    optimizer: Any,
    spec: Spec,
    *,
    writing: bool,
    everywhere: Container[str] = frozenset(),
) -> Iterator[Piece]:
    """This rank's ranges in the order of the spec: views of the masters and moments themselves.

    writing: the ranks together yield each element once, except that every rank yields those of
        `everywhere`. Otherwise each rank yields all that it has to read, and rounded copies are
        made from what was read when the next piece is asked for.
    """
    for part in spec.values():
        for name in part:
            if name in held.buffers:
                if dist.get_rank() == 0 or not writing:
                    yield Piece(name, 0, held.buffers[name].detach().view(-1))
                continue
            owner, moment = _owner(held, name)
            parameter = held.parameters[owner]
            if owner in held.trained:
                if (master := _master(optimizer, name, parameter, moment)) is not None:
                    yield master
            elif name in everywhere:
                yield Piece(name, *_frozen_copy(parameter))
            else:
                yield from _frozen(held, name, parameter, writing=writing)


def share_pieces(held: Held, optimizer: Any, spec: Spec) -> Iterator[Piece]:
    """As `pieces` for writing, but frozen parameters that all ranks hold exactly are shared out."""
    same = frozenset(
        name
        for name, parameter in held.parameters.items()
        if name not in held.trained
        and not _is_split(parameter)
        and _dtype(parameter) == torch.float32
    )
    own = pieces(held, optimizer, spec, writing=True, everywhere=same)
    return state.share_out(own, same, dist.get_rank(), dist.get_world_size())


def renew_copies(optimizer: Any) -> None:
    """Make what is computed with equal to the masters again, on every rank. Collective."""
    if kind(optimizer) != "partitions":
        optimizer.update_lp_params()
        return
    optimizer._partition_all_parameters()  # what is gathered still has the old values
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)


def _owner(held: Held, name: str) -> tuple[str, str | None]:
    """The parameter that a tensor of the spec belongs to, and which moment of it it is."""
    if name in held.parameters:
        return name, None
    owner, _, moment = name.rpartition(".")
    return owner, moment


def _master(optimizer: Any, name: str, parameter: Any, moment: str | None) -> Piece | None:
    """This rank's range of a parameter's master (moment None) or moment; None where it has none."""
    if kind(optimizer) != "partitions":
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        fragment: Tensor = mapping.get_hp_fragment(moment)
        return Piece(name, mapping.lp_fragment_address.start, fragment.detach())
    # Not `safe_get_local_…`, which gives a copy where the master lives in host memory.
    partition, _ = optimizer._get_fp32_opt_state_partition(parameter, True, moment)
    start, count = _range(parameter)
    return Piece(name, start, partition.detach()[:count])


def _frozen(held: Held, name: str, parameter: Any, *, writing: bool) -> Iterator[Piece]:
    """In stage 3 every rank has its range; else all have the whole, and rank 0 writes it."""
    start, copy = _frozen_copy(parameter)
    if writing and not _is_split(parameter) and dist.get_rank() != 0:
        return
    exact = held.frozen.get(name)
    if exact is None and copy.dtype == torch.float32:
        yield Piece(name, start, copy)
        return
    if exact is None:  # another rank writes it
        exact = torch.empty(copy.numel(), dtype=torch.float32)
    yield Piece(name, start, exact)
    if not writing:
        copy.copy_(exact)


def _frozen_copy(parameter: Any) -> tuple[int, Tensor]:
    """Where this rank's part of a frozen parameter begins, and the part that is computed with."""
    if not _is_split(parameter):
        return 0, parameter.detach().view(-1)
    start, count = _range(parameter)
    return start, parameter.ds_tensor.detach()[:count]


def _is_split(parameter: Any) -> bool:
    """Whether stage 3 has cut a parameter over the ranks; DeepSpeed hangs the part on it."""
    return hasattr(parameter, "ds_tensor")


def _range(parameter: Any) -> tuple[int, int]:
    """Start and length of this rank's part of a partitioned parameter, without padding."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    start = min(size * dist.get_rank(), total)
    return start, min(size, total - start)


def _dtype(parameter: Any) -> torch.dtype:
    """The dtype that is computed with; a partitioned parameter itself is empty."""
    of = parameter.ds_tensor if _is_split(parameter) else parameter
    dtype: torch.dtype = of.dtype
    return dtype
