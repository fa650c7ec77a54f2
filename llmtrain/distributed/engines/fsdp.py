"""FSDP2 and HSDP: the arguments for accelerate, the cases that are refused, and calls to torch.

FSDP2 gives every rank 1/N of the rows of each parameter. It gathers a block's parameters when its
forward or backward needs them, and frees them afterwards. HSDP does so within groups of ranks,
which are replicas of each other:

    hsdp of 2 × 2      shard 0   shard 1
        replica 0      rank 0    rank 1     all-gather, reduce-scatter: along a row
        replica 1      rank 2    rank 3     all-reduce of gradients: along a column, once a step

An accelerate launch sets many FSDP_* variables, some of them from accelerate's defaults, and they
silently override arguments. They are read here, a warning names each one that is not followed, and
all are removed before accelerate could read them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from llmtrain.distributed.engines.batch_norm import with_common_statistics
from llmtrain.distributed.launch.keys import value
from llmtrain.distributed.launch.named import hsdp_mesh, one_sided
from llmtrain.errors import Problem, UserError, raise_any

_log = logging.getLogger(__name__)

# Values of a launch file that are not followed: (key, value, reason or replacement).
_OVERRULED = (
    (
        "fsdp_cpu_ram_efficient_loading",
        "true",
        "rank 0 builds the model and sends each rank its part",
    ),
    ("fsdp_activation_checkpointing", "true", "model.activation_checkpointing decides"),
    ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "blocks are sharded one by one"),
    ("fsdp_auto_wrap_policy", "NO_WRAP", "blocks are sharded one by one"),
    ("fsdp_state_dict_type", "FULL_STATE_DICT", "checkpoints have a format of their own"),
)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The settings of FSDP2 for a run.

    accelerator: the `Accelerator` that shards the model.
    wrap_class: as `distributed.wrap_class`.
    sync: as `distributed.fsdp_sync`: gradients are reduced at every or the last micro-batch.
    replica: number of this rank's replica (0 except under HSDP).
    replicas: number of replicas.
    offload: whether shards are kept in host memory.
    """

    accelerator: Accelerator
    wrap_class: str
    sync: str
    replica: int
    replicas: int
    offload: bool


def plugin(
    strategy: str, precision: str, env: Mapping[str, str], *, cpu: bool
) -> FullyShardedDataParallelPlugin:
    """Return the plugin that configures FSDP2 in accelerate.

    env: the environment of the launch. `fsdp_reshard_after_forward` is taken from it, and values
        that are not followed are logged. `os.environ` itself must have no FSDP_* variable.
    cpu: whether this is a rehearsal on a CPU, which has no offload.
    """
    for key, ignored, done in _OVERRULED:
        if value(env, key).lower() == ignored.lower():
            _log.warning("%s: %s of the launch file is not used: %s", key, ignored, done)
    offload = strategy == "fsdp2_offload"
    if offload and cpu:
        _log.warning("fsdp2_offload on a CPU is rehearsed without offload: torch needs a device")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        # Without a policy accelerate 1.15 makes one from `mixed_precision`, which reduces gradients
        # in bf16 and returns the summed loss with eight bits.
        mixed_precision_policy=bf16 if precision == "bf16" else MixedPrecisionPolicy(),
        reshard_after_forward=value(env, "fsdp_reshard_after_forward").lower() != "false",
        cpu_offload=offload and not cpu,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


def mesh(strategy: str, env: Mapping[str, str], world_size: int) -> tuple[int, int]:
    """Return (replicas, shards of each replica).

    For HSDP they come from the launch's parallelism_config; without one they are the number of
    nodes and of processes on a node. Raises UserError if HSDP has nothing to replicate or to shard.
    """
    if strategy != "hsdp":
        return 1, world_size
    sizes = hsdp_mesh(env, world_size)
    key = "distributed.strategy"
    raise_any(one_sided(key, sizes))
    if math.prod(sizes) != world_size:
        expected = f"{world_size} processes: as many on every node"
        raise UserError(Problem(key, f"hsdp on {sizes[0]} × {sizes[1]} processes", expected))
    return sizes


def rehearse(timeout: timedelta) -> None:
    """Make accelerate shard on a CPU, which it supports for other devices only.

    Without this an FSDP launch on a CPU silently becomes plain DDP. It uses a private name of
    accelerate 1.15, which appears nowhere else and has its own test.
    """
    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def prepare(module: nn.Module, optimizer: torch.optim.Optimizer, sharding: Sharding) -> nn.Module:
    """Shard `module` and give the optimizer the new parameters; both in place.

    If the module is sharded already, it and its optimizer are only checked. Raises UserError for a
    model that FSDP2 does not support. Raises ValueError for parameters on meta, because accelerate
    identifies parameters by their address, and if the result does not match the given model.
    """
    if not isinstance(module, FSDPModule):
        if names := [name for name, one in module.named_parameters() if one.is_meta]:
            raise ValueError(f"{len(names)} parameters are on meta, {names[0]} among them")
        module = _shard(module, optimizer, sharding)
    _verify(module, optimizer)
    assert isinstance(module, FSDPModule)
    # Ranks or micro-batches may use different parameters (experts). Without this they would reduce
    # tensors of different sizes, and wait for each other permanently.
    module.set_reduce_scatter_unused_params(True)
    return module


def prepare_empty(
    module: nn.Module, optimizer: torch.optim.Optimizer, sharding: Sharding
) -> nn.Module:
    """Shard a module on meta, so that no rank ever has the whole model in memory.

    Its memory is allocated, but not yet filled: call `weights.share`, then `prepare`. Raises the
    same errors as `prepare`.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    driven = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    module = _shard(module, optimizer, sharding)
    # On meta all addresses are equal, so accelerate gave the optimizer one parameter many times.
    parameters = dict(module.named_parameters())
    for group, names in zip(optimizer.param_groups, driven, strict=True):
        group["params"] = [parameters[name] for name in names]
    return module


def _shard(module: nn.Module, optimizer: torch.optim.Optimizer, sharding: Sharding) -> nn.Module:
    accelerator, ties = sharding.accelerator, _ties(module)
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    if scalars := [name for name, one in module.named_parameters() if one.ndim == 0]:
        expected = f"a model without parameters of no dimension, which {scalars[0]} is"
        raise UserError(Problem("distributed.strategy", "fsdp2", expected, "ddp or zero3"))
    module = with_common_statistics(module, accelerator)
    names = wrap_classes(module, sharding.wrap_class)
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = names
    with _without_deepspeed():
        prepared: nn.Module = accelerator.prepare(module, optimizer)[0]
    if on_meta:
        prepared.to_empty(device=torch.device("cpu") if sharding.offload else accelerator.device)
    if _ties(prepared) != ties:
        raise ValueError(f"tied parameters came apart: {ties} became {_ties(prepared)}")
    return prepared


@contextmanager
def _without_deepspeed() -> Iterator[None]:
    """In this context accelerate takes it that DeepSpeed is not installed.

    It would look for DeepSpeed's engine in what it shards, and so import DeepSpeed, which takes a
    second and warns of what FSDP2 does not need.
    """
    own = accelerate.utils.other.is_deepspeed_available
    accelerate.utils.other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        accelerate.utils.other.is_deepspeed_available = own


def _ties(module: nn.Module) -> set[tuple[str, ...]]:
    """Return the names of each parameter that has more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


def _verify(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for errors that other versions of accelerate made silently."""
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if lost := [name for key, name in trained.items() if key not in driven]:
        raise ValueError(f"the optimizer does not drive {lost[0]} ({len(lost)} in all)")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}, expected torch.float32")
        if not isinstance(parameter, DTensor):
            raise ValueError(f"{name} is not sharded")


def reduce_in_backward(module: nn.Module, sharding: Sharding, *, last: bool) -> None:
    """Set which gradients the next backward reduces, and over which ranks.

    Within a replica, gradients are reduced after every micro-batch, or after the last one if
    `sync` is `last`. Between replicas, whose network is slower, only after the last one.
    """
    assert isinstance(module, FSDPModule)
    if sharding.sync == "last":
        if last:
            _fill_unused(module)
        module.set_requires_gradient_sync(last)
    elif sharding.replicas > 1:
        module.set_requires_all_reduce(last)


def _fill_unused(module: nn.Module) -> None:
    """Give unused parameters a gradient of zeros if others of their group have accumulated one.

    Accumulated gradients have the dtype of the reduction, but a first gradient has the dtype of the
    forward, and torch refuses to reduce both together. The private names of torch 2.13 are used
    only here, and have a test.
    """
    for part in _sharded(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            waiting = [one.unsharded_accumulated_grad is not None for one in group.fsdp_params]
            if not any(waiting):
                continue
            for one, waits in zip(group.fsdp_params, waiting, strict=True):
                if not waits and one.sharded_param.requires_grad:
                    one.unsharded_accumulated_grad = torch.zeros(
                        one._orig_size, dtype=one.reduce_dtype, device=group.device
                    )


def wrap_classes(model: nn.Module, asked: str) -> list[str]:
    """Return the names of the classes whose modules are sharded one by one.

    asked: `distributed.wrap_class`. Raises UserError if the model has no such module.
    """
    named = getattr(model, "_no_split_modules", None) or ()
    wanted = sorted(named) if asked == "auto" else asked.split(",")
    classes = {type(module).__name__ for module in model.modules()}
    found = [name for name in wanted if name in classes]
    if not found or (asked != "auto" and found != wanted):
        lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one))
        blocks = sorted({type(one[0]).__name__ for one in lists})
        expected = f"the class of the model's repeated blocks; its lists hold {', '.join(blocks)}"
        remedy = f"distributed.wrap_class={blocks[0]}" if blocks else "distributed.strategy=zero3"
        raise UserError(Problem("distributed.wrap_class", asked, expected, remedy))
    return found


def reshard(module: nn.Module) -> None:
    """Free gathered parameters.

    After a forward without a backward, the root module's parameters stay gathered, and a
    checkpoint would find plain tensors.
    """
    for part in _sharded(module):
        part.reshard()


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
