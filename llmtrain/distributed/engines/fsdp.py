"""FSDP2 and HSDP: the arguments for accelerate, the cases that are refused, and calls to torch.

FSDP2 gives every rank 1/N of the rows of each parameter. It gathers a block's parameters when its
forward or backward needs them, and frees them afterwards. HSDP does so within groups of ranks,
which are replicas of each other:

    hsdp of 2 × 2      shard 0   shard 1
        replica 0      rank 0    rank 1     all-gather, reduce-scatter: along a row
        replica 1      rank 2    rank 3     all-reduce of gradients: along a column, once a step

The trap: an accelerate launch sets many FSDP_* variables, some of them from accelerate's defaults,
and they silently override arguments. They are read here, a warning names each one that is not
followed, and all are removed before accelerate could read them.

Weights come from rank 0, which reads or initialises them and sends them in pieces; each rank keeps
its rows. No other rank ever has the whole model, not even in host memory. Tensors that are not in a
checkpoint, such as buffers of rotary frequencies, are sent as well. Batch norm takes its statistics
of the micro-batch's rows on all ranks.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from llmtrain import system
from llmtrain.distributed.engines import state
from llmtrain.distributed.launch.named import hsdp_mesh, one_sided, value
from llmtrain.distributed.plan.memory import OFFLOADS
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_few
from llmtrain.torch_private import fsdp_groups
from llmtrain.types import WHOLE, Cut, ModelCut

_log = logging.getLogger(__name__)


def with_common_statistics(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Replace batch norms by torch's SyncBatchNorm if there are several processes.

    With ordinary batch norm each rank has its own statistics: losses would differ between ranks,
    and a resumed run would continue with the statistics of rank 0. Raises UserError on CPUs, which
    SyncBatchNorm does not support.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]
    if not norms or accelerator.num_processes == 1:
        return module
    if accelerator.device.type == "cpu":
        expected = f"one process on a CPU, for a model with batch norm ({first_few(norms, 1)})"
        raise UserError(Problem("processes", accelerator.num_processes, expected, "GPUs, or one"))
    _log.info("batch norm is computed over all processes (SyncBatchNorm): %s", first_few(norms, 1))
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]  # torch has no stub for it
    return converted


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


# torch has a common class of them, but no public name for it.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
    offload = strategy in OFFLOADS
    if offload and cpu:
        _log.warning("%s on a CPU is rehearsed without offload: torch needs a device", strategy)
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


def mesh(
    strategy: str, env: Mapping[str, str], world_size: int, cut: ModelCut = WHOLE
) -> tuple[int, int]:
    """Return (replicas, shards of each replica) of each part that the model is cut into.

    For HSDP they come from the launch's parallelism_config; without one they are the number of
    nodes and of processes on a node. Raises UserError if HSDP has nothing to replicate or to shard.
    """
    if strategy != "hsdp":
        return 1, world_size // cut.weights
    sizes = hsdp_mesh(env, world_size, cut)
    key = "distributed.strategy"
    raise_any(one_sided(key, sizes))
    if math.prod(sizes) * cut.weights != world_size:
        expected = f"{world_size} processes: as many on every node"
        raise UserError(Problem(key, f"hsdp on {sizes[0]} × {sizes[1]} processes", expected))
    return sizes


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
    driven = state.names_of(optimizer, module)
    module = _shard(module, optimizer, sharding)
    # On meta all addresses are equal, so accelerate gave the optimizer one parameter many times.
    state.replace_parameters(optimizer, module, driven)
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
    # accelerate would look for DeepSpeed's engine in what it shards, and so import DeepSpeed, which
    # takes a second and warns of what FSDP2 does not need.
    has_deepspeed = accelerate.utils.other.is_deepspeed_available
    accelerate.utils.other.is_deepspeed_available = lambda: False
    try:
        prepared: nn.Module = accelerator.prepare(module, optimizer)[0]
    finally:
        accelerate.utils.other.is_deepspeed_available = has_deepspeed
    if on_meta:
        prepared.to_empty(device=torch.device("cpu") if sharding.offload else accelerator.device)
    if _ties(prepared) != ties:
        raise ValueError(f"tied parameters came apart: {ties} became {_ties(prepared)}")
    return prepared


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
    forward, and torch refuses to reduce both together. The price: what no rank used in a step is
    moved by its momentum and its decay.
    """
    for part in _sharded(module):
        for group in fsdp_groups(part):
            waiting = [one.unsharded_accumulated_grad is not None for one in group.fsdp_params]
            if not any(waiting):
                continue
            for one, waits in zip(group.fsdp_params, waiting, strict=True):
                if not waits and one.sharded_param.requires_grad:
                    one.unsharded_accumulated_grad = torch.zeros(
                        one.sharded_param.shape, dtype=one.reduce_dtype, device=group.device
                    )


def wrap_classes(model: nn.Module, asked: str) -> list[str]:
    """Return the names of the classes whose modules are sharded one by one.

    asked: `distributed.wrap_class`. Raises UserError if the model has no such module.
    """
    named = getattr(model, "_no_split_modules", None) or ()
    wanted = sorted(named) if asked == "auto" else asked.split(",")
    classes = {type(module).__name__ for module in model.modules()}
    present = [name for name in wanted if name in classes]
    if not present or (asked != "auto" and present != wanted):
        lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one))
        blocks = sorted({type(one[0]).__name__ for one in lists})
        expected = f"the class of the model's repeated blocks; its lists hold {', '.join(blocks)}"
        remedy = f"distributed.wrap_class={blocks[0]}" if blocks else "distributed.strategy=zero3"
        raise UserError(Problem("distributed.wrap_class", asked, expected, remedy))
    return present


def reshard(module: nn.Module) -> None:
    """Free gathered parameters.

    After a forward without a backward, the root module's parameters stay gathered, and a
    checkpoint would find plain tensors.
    """
    for part in _sharded(module):
        part.reshard()


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


_SENT = 8 << 20  # bytes that are sent at once


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, buffers and tensors that are plain attributes of a module, by name."""
    return {**dict(model.named_parameters()), **dict(_other_tensors(model))}


def share_weights(
    model: nn.Module,
    whole: nn.Module | None,
    device: torch.device,
    cuts: Mapping[str, Cut] | None = None,
    tensor_rank: int = 0,
    sent: Mapping[str, Tensor] | None = None,
) -> None:
    """Send every rank its part of the weights of `whole`, and all buffers.

    model: the sharded model, which is filled.
    whole: the same model with its weights on rank 0, None on the other ranks.
    cuts: how parameters are cut before they are sharded: of those, part after part is sent.
    tensor_rank: the number of this rank's part of them.
    sent: the `named_tensors` of the whole model, if `model` is a stage that has only some of them.

    Collective. It needs `_SENT` bytes of extra memory on the device, and on rank 0 a copy of a
    parameter that is cut by columns.
    """
    buffer = torch.empty(_SENT, dtype=torch.uint8, device=device)
    source = named_tensors(whole) if whole else {}
    parameters, others = dict(model.named_parameters()), dict(_other_tensors(model))
    for name, like in (named_tensors(model) if sent is None else sent).items():
        given, cut = source[name].detach() if whole else None, (cuts or {}).get(name)
        start, into = 0, torch.empty(0, dtype=like.dtype, device=device)
        if name in parameters:
            _, start, into = state.piece(name, parameters[name].detach())
        elif name in others:
            # On the device even if parameters are offloaded: those are gathered there.
            into = torch.empty_like(others[name], device=device)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, into)
        if cut is not None:
            start += cut.offset(tensor_rank)
            if given is not None and cut.axis:
                parts = (cut.part(given, rank) for rank in range(len(cut.sizes)))
                given = torch.cat([one.reshape(-1) for one in parts])
        flat = None if given is None else given.reshape(-1)
        size = math.prod(like.shape if cut is None else cut.shape)
        _receive(into.view(-1), start, size, flat, buffer)


def _receive(into: Tensor, start: int, size: int, given: Tensor | None, buffer: Tensor) -> None:
    """Fill `into` with the elements from `start` on of a flat tensor that rank 0 sends.

    size: elements of the whole flat tensor.
    given: the whole flat tensor on rank 0, None on the other ranks.
    buffer: bytes on the device, for what is sent at once.
    """
    item = into.element_size()
    step = buffer.numel() // item
    for first in range(0, size, step):
        used = buffer[: min(step, size - first) * item]
        sent = used.view(into.dtype)
        if given is not None:
            sent.copy_(given[first : first + len(sent)])
        system.beat("sending the weights to all processes")
        dist.broadcast(used, src=0)
        low, high = max(first, start), min(first + len(sent), start + into.numel())
        if low < high:
            into[low - start : high - start].copy_(sent[low - first : high - first])


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, persistent or not, and tensors that are plain attributes of a module."""
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for name, held in (vars(module) | buffers).items():
            if isinstance(held, Tensor):
                yield f"{owner}.{name}".lstrip("."), held
