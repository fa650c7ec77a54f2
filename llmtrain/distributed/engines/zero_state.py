"""ZeRO's fp32 masters and moments as ranges of named, whole tensors.

    stages 1, 2   the parameters of a group are joined into a flat tensor, which is split evenly
                  over the ranks; a rank has all, a part or nothing of a parameter
    stage 3       each parameter is split evenly; the last ranks have less, or only padding

The forward uses a copy of the masters: in bf16 it is rounded, in stage 3 it is gathered when it is
needed. A checkpoint is therefore read into the masters, and `renew_copies` makes the copies again.
Frozen parameters have no masters: if their copy is rounded, `Held` keeps their fp32 values. Those
beside adapters are in no checkpoint, so they are not kept.
Private names of DeepSpeed 0.19 are used only in this file and in `zero_engine.overflowing`.
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
from llmtrain.distributed.optimizer_state import states
from llmtrain.types import Piece, Spec

Kind = Literal["partitions", "bf16", "fragments"]
# The attribute with the masters in each of DeepSpeed's optimizers. "partitions" is stage 3, "bf16"
# is stage 1 in bf16, "fragments" is any other stage 1 or 2.
_MASTERS: dict[Kind, str] = {
    "partitions": "fp32_partitioned_groups_flat",
    "bf16": "fp32_groups_flat_partition",
    "fragments": "single_partition_of_fp32_groups",
}


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The tensors on this rank that the names of a checkpoint refer to.

    parameters: those of the bare model; with adapters, only what is trained.
    trained: names of the parameters that the optimizer changes.
    buffers: the persistent buffers.
    frozen: flat fp32 values of the frozen parameters whose copy is rounded; in stage 3 only this
        rank's range. Before DeepSpeed prepares the model: the weights of all parameters.
    """

    parameters: Mapping[str, Parameter]
    trained: frozenset[str]
    buffers: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]


def before(model: Module, optimizer: torch.optim.Optimizer) -> Held:
    """Return the names and values of the bare model. The values stay in memory until `after`."""
    parameters = state.named_parameters(model)
    trained = frozenset(state.trained_parameters(model, optimizer))
    values = {name: weight.detach() for name, weight in parameters.items()}
    buffers = {k: v for k, v in state.named_tensors(model).items() if k not in parameters}
    return Held(parameters, trained, buffers, values)


def after(held: Held, optimizer: Any) -> Held:
    """Copy the exact weights into DeepSpeed's masters, which it made from rounded ones."""
    frozen = {}
    for name, parameter in held.parameters.items():
        value = held.frozen[name].reshape(-1)
        start, copy = _copy_of(parameter)
        if copy.dtype == value.dtype:
            continue
        if name in held.trained:
            if (master := _master(optimizer, name, parameter, None)) is not None:
                data = master.data
                data.copy_(value[master.start : master.start + data.numel()])
        elif _is_split(parameter) or dist.get_rank() == 0:
            frozen[name] = value[start : start + copy.numel()].clone()
    return replace(held, frozen=frozen)


def kind(optimizer: Any) -> Kind:
    """Return which of DeepSpeed's optimizers it is, by the attribute that holds its masters."""
    return next((one for one, name in _MASTERS.items() if name in vars(optimizer)), "fragments")


def create_state(optimizer: Any) -> None:
    """Give every master of this rank moments of zero and a step count of 0."""
    base = optimizer.optimizer
    moments = states("adamw", ())  # ZeRO has no other optimizer
    counts_on_host = type(base).__name__ == "DeepSpeedCPUAdam"  # a Python number
    fused = any(group.get("fused") for group in base.param_groups)
    for master in vars(optimizer)[_MASTERS[kind(optimizer)]]:
        device = master.device if fused else torch.device("cpu")
        step = 0 if counts_on_host else torch.zeros((), dtype=torch.float32, device=device)
        base.state[master] = {
            "step": step,
            **{moment: torch.zeros_like(master, requires_grad=False) for moment in moments},
        }
    if kind(optimizer) != "partitions":
        # A backward or a step may have linked the old moments already, so link them again.
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
    """Yield this rank's ranges in the order of the spec, as views of the masters and moments.

    writing: all ranks together yield each element once. Otherwise each rank yields everything
        that it has to read. The rounded copy of a frozen parameter is then written when the next
        piece is requested.
    everywhere: names of the parameters that every rank yields, also for writing.
    """
    for part in spec.values():
        for name in part:
            if name in held.buffers:
                if dist.get_rank() == 0 or not writing:
                    yield Piece(name, 0, held.buffers[name].detach().view(-1))
                continue
            owner = name if name in held.parameters else name.rpartition(".")[0]
            moment = name[len(owner) + 1 :] or None
            parameter = held.parameters[owner]
            if owner in held.trained:
                if (master := _master(optimizer, name, parameter, moment)) is not None:
                    yield master
            elif name in everywhere:
                yield Piece(name, *_copy_of(parameter))
            else:
                yield from _frozen(held, name, parameter, writing=writing)


def share_pieces(held: Held, optimizer: Any, spec: Spec) -> Iterator[Piece]:
    """Yield `pieces` for writing; frozen parameters that all ranks have in fp32 are shared out."""
    same = frozenset(
        name
        for name, parameter in held.parameters.items()
        if name not in held.trained
        and not _is_split(parameter)
        and parameter.dtype == torch.float32
    )
    own = pieces(held, optimizer, spec, writing=True, everywhere=same)
    return state.share_out(own, same, dist.get_rank(), dist.get_world_size())


def renew_copies(optimizer: Any) -> None:
    """Copy the masters into the weights that the forward uses, on every rank. Collective."""
    if kind(optimizer) != "partitions":
        optimizer.update_lp_params()
        return
    optimizer._partition_all_parameters()  # gathered parameters still have the old values
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)


def _master(optimizer: Any, name: str, parameter: Any, moment: str | None) -> Piece | None:
    """Return this rank's range of a parameter's master (moment None) or moment, if it has one."""
    if kind(optimizer) != "partitions":
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        fragment: Tensor = mapping.get_hp_fragment(moment)
        return Piece(name, mapping.lp_fragment_address.start, fragment.detach())
    # Not `safe_get_local_…`: it returns a copy if the master is in host memory.
    partition, _ = optimizer._get_fp32_opt_state_partition(parameter, True, moment)
    start, count = _range(parameter)
    return Piece(name, start, partition.detach()[:count])


def _frozen(held: Held, name: str, parameter: Any, *, writing: bool) -> Iterator[Piece]:
    """Yield this rank's range of a frozen parameter.

    In stage 3 every rank has its own range. In stages 1 and 2 every rank has the whole parameter,
    and only rank 0 writes it.
    """
    start, copy = _copy_of(parameter)
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


def _copy_of(parameter: Any) -> tuple[int, Tensor]:
    """Return the start of this rank's part of a parameter, and the copy that the forward uses."""
    if not _is_split(parameter):
        return 0, parameter.detach().view(-1)
    start, count = _range(parameter)
    return start, parameter.ds_tensor.detach()[:count]


def _is_split(parameter: Any) -> bool:
    """Whether stage 3 has split a parameter over the ranks: it then has the attribute ds_tensor."""
    return hasattr(parameter, "ds_tensor")


def _range(parameter: Any) -> tuple[int, int]:
    """Return the start and length of this rank's part of a split parameter, without padding."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    start = min(size * dist.get_rank(), total)
    return start, min(size, total - start)
