"""DeepSpeed's ZeRO-1, 2 and 3: its config and set-up, its engine, and its state as named tensors.

accelerate and DeepSpeed read many variables of the environment, some of them when DeepSpeed is
imported; so nothing here imports it at the top. accelerate also hands the config to transformers,
which then silently partitions models while it builds them, and gives them other initial weights.
`make` undoes that, and the model is partitioned when it is prepared.

accelerate's `backward` would make a step inside the last micro-batch. So DeepSpeed's engine is
driven directly. It computes its own norm, clips, and skips a step whose norm is not finite; other
reasons to skip a step are reported to it as an overflow. It waits for the device at every step.

    stages 1, 2   the parameters of a group are joined into a flat tensor, which is split evenly
                  over the ranks; a rank has all, a part or nothing of a parameter
    stage 3       each parameter is split evenly; the last ranks have less, or only padding

The forward uses a copy of the fp32 masters: in bf16 it is rounded, in stage 3 it is gathered when
it is needed. A checkpoint is therefore read into the masters, and `finish_loading` makes the copies
again. Frozen parameters have no masters: if their copy is rounded, `HeldWeights` keeps their fp32
values. Those beside adapters are in no checkpoint, so they are not kept.

Private names of DeepSpeed 0.19 are used only in this file.
"""

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn import Module, Parameter

from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.engine import Engine, is_refused
from llmtrain.distributed.launch.environment import INSTALL_DEEPSPEED
from llmtrain.distributed.launch.named import STRATEGIES
from llmtrain.distributed.plan.memory import AHEAD, LARGEST_BUCKET, OFFLOADS, states
from llmtrain.errors import Problem, raise_any
from llmtrain.torch_private import build_directory, without_modes
from llmtrain.types import JsonObject, Piece, Spec, StepVector

_LIVE = 1_000_000_000  # elements; DeepSpeed's default stage3_max_live_parameters
_BUILD_SECONDS = 600.0  # a build takes one minute; those on other nodes cannot be seen
_YAML = "ACCELERATE_DEEPSPEED_"  # the variables that accelerate makes from `deepspeed_config:`
_ADAM = "cpu_adam"


def config(
    strategy: str, precision: str, *, max_grad_norm: float | None, largest_block: int, cpu: bool
) -> JsonObject:
    """Return DeepSpeed's config.

    largest_block: elements of the largest block (`memory.largest_block`), 0 if unknown.
    """
    stage, offload = STRATEGIES["zero"][strategy]["zero_stage"], strategy in OFFLOADS
    optimization: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": min(LARGEST_BUCKET, 2 * largest_block) or LARGEST_BUCKET,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    if stage == 3:
        optimization["stage3_max_live_parameters"] = min(_LIVE, 2 * largest_block) or _LIVE
        optimization["stage3_prefetch_bucket_size"] = min(AHEAD, 2 * largest_block) or AHEAD
    if offload:
        host = {"device": "cpu", "pin_memory": not cpu}
        optimization |= {"offload_optimizer": host, "offload_param": host}
    return {
        "train_micro_batch_size_per_gpu": 1,  # nothing reads it: the step counts its own blocks
        "gradient_accumulation_steps": 1,  # `DeepSpeedEngine.micro` marks the last one
        "managed_gradient_accumulation": True,
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_optimization": optimization,
        "zero_allow_untested_optimizer": True,
        # DeepSpeedCPUAdam is compiled on first use. It is five times as fast as torch's on a host.
        "zero_force_ds_cpu_optimizer": offload and not cpu,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # immediate_grad_update: without it ZeRO-1 keeps all gradients in bf16 as well as in fp32.
        "bf16": {
            "enabled": precision == "bf16",
            "check_grad_overflow": True,
            "immediate_grad_update": True,
        },
        "fp16": {"enabled": False},
    }


def make(
    strategy: str,
    precision: str,
    timeout: timedelta,
    *,
    max_grad_norm: float | None,
    largest_block: int,
    **common: Any,
) -> Accelerator:
    """Make the `Accelerator` for ZeRO.

    os.environ must describe a rendezvous. Its other variables for DeepSpeed have been read and
    checked already (`launch`). This function changes os.environ, and the caller restores it.

    common: further arguments of the `Accelerator`; `cpu` asks for a rehearsal with gloo.

    Raises UserError, with every problem, if DeepSpeed cannot work on this machine.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    cpu = bool(common.pop("cpu"))
    refuse(strategy, cpu=cpu)
    # If it is set, accelerate drops DeepSpeed and trains with plain DDP.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    for name in [one for one in os.environ if one.startswith(_YAML)]:
        del os.environ[name]  # DeepSpeedPlugin refuses these keys beside a config
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.handlers.clear()  # they write to stdout; the rank's log has its own handlers
    logger.propagate = True
    if cpu:
        # An all-reduce over shared memory, for inference. Nothing here uses it, and compiling it
        # would delay the first run by a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = config(
        strategy, precision, max_grad_norm=max_grad_norm, largest_block=largest_block, cpu=cpu
    )
    group = InitProcessGroupKwargs(timeout=timeout, backend="gloo" if cpu else None)
    plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], **common)
    unset_hf_deepspeed_config()
    return accelerator


def refuse(strategy: str, *, cpu: bool) -> None:
    """Raise UserError, with every problem, if DeepSpeed cannot work on this machine."""
    raise_any(missing_parts(strategy, cpu=cpu), f"distributed.strategy {strategy}")


def missing_parts(strategy: str, *, cpu: bool) -> Iterator[Problem]:
    """Yield the problems that keep DeepSpeed from working on this machine."""
    if importlib.util.find_spec("deepspeed") is None:
        yield Problem(
            "distributed.strategy", strategy, "DeepSpeed, which is not here", INSTALL_DEEPSPEED
        )
        return
    if cpu and torch.cuda.is_available():
        expected = "no visible GPU where a CPU was asked for: DeepSpeed would mix the two"
        remedy = 'CUDA_VISIBLE_DEVICES="" beside ACCELERATE_USE_CPU=true'
        yield Problem(
            "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"), expected, remedy
        )
    if strategy in OFFLOADS and not cpu:
        yield from build_problems(build_directory(_ADAM).parent)


def build_problems(directory: Path, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """Yield the problems that keep DeepSpeed's CPU Adam from being built in `directory`."""
    compiler = env.get("CXX", "c++")  # as torch chooses it
    for program, remedy in (
        (compiler, "install g++, which brings c++ (or set CXX)"),
        ("ninja", "pip install ninja, and have its directory on PATH"),
    ):
        if shutil.which(program, path=env.get("PATH")) is None:
            expected = "a program on PATH: offload compiles DeepSpeed's Adam when it is first used"
            yield Problem(program, "not found", expected, remedy)
    for lock in stale_locks(directory, env):
        if lock.parent.name == _ADAM:
            expected = "no lock without a process that builds: everyone would wait for it"
            yield Problem(str(lock), "left over", expected, f"rm '{lock}'")


def leave() -> bool:
    """Destroy the process group through DeepSpeed, which has made further groups.

    Return whether it did: False if DeepSpeed has no process group.
    """
    if "WORLD_SIZE" not in os.environ:
        os.environ.pop("LOCAL_RANK", None)  # set by `accelerator`, not by a launcher
    comm = sys.modules.get("deepspeed.comm")
    if comm is None or not comm.is_initialized():
        return False
    comm.destroy_process_group()
    return True


def stale_locks(directory: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the locks of extension builds that no process holds; a run would wait for them.

    A process that builds keeps its lock open. On several nodes, a recent lock is left out: another
    node may hold it.
    """
    several = env.get("WORLD_SIZE", "1") != env.get("LOCAL_WORLD_SIZE", "1")
    locks = sorted(directory.glob("*/lock"))
    # The files that processes of this machine have open; other users' may not be visible.
    processes = psutil.process_iter(["open_files"]) if locks else ()
    opened = [one for process in processes for one in process.info["open_files"] or ()]
    held = {os.path.realpath(one.path) for one in opened}
    stale = []
    for lock in locks:
        try:
            # A file's time stamp can only be compared with the clock.
            age = time.time() - lock.stat().st_mtime  # noqa: TID251
        except FileNotFoundError:  # built by now
            continue
        recent = several and age < _BUILD_SECONDS
        if os.path.realpath(lock) not in held and not recent and lock.exists():
            stale.append(lock)
    return stale


Kind = Literal["partitions", "bf16", "fragments"]
# The attribute with the masters in each of DeepSpeed's optimizers. "partitions" is stage 3, "bf16"
# is stage 1 in bf16, "fragments" is any other stage 1 or 2.
_MASTERS: dict[Kind, str] = {
    "partitions": "fp32_partitioned_groups_flat",
    "bf16": "fp32_groups_flat_partition",
    "fragments": "single_partition_of_fp32_groups",
}


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeights:
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


def held_before(model: Module, optimizer: torch.optim.Optimizer) -> HeldWeights:
    """Return the names and values of the bare model. The values stay in memory until `after`."""
    parameters = state.named_parameters(model)
    trained = frozenset(state.trained_parameters(model, optimizer))
    values = {name: weight.detach() for name, weight in parameters.items()}
    buffers = {k: v for k, v in state.named_tensors(model).items() if k not in parameters}
    return HeldWeights(parameters, trained, buffers, values)


def held_after(held: HeldWeights, optimizer: object) -> HeldWeights:
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


def engine_kind(optimizer: object) -> Kind:
    """Return which of DeepSpeed's optimizers it is, by the attribute that holds its masters."""
    return next((one for one, name in _MASTERS.items() if name in vars(optimizer)), "fragments")


def create_state(optimizer: Any) -> None:
    """Give every master of this rank moments of zero and a step count of 0."""
    base = optimizer.optimizer
    moments = states("adamw", ())  # ZeRO has no other optimizer
    counts_on_host = type(base).__name__ == "DeepSpeedCPUAdam"  # a Python number
    fused = any(group.get("fused") for group in base.param_groups)
    for master in vars(optimizer)[_MASTERS[engine_kind(optimizer)]]:
        device = master.device if fused else torch.device("cpu")
        step = 0 if counts_on_host else torch.zeros((), dtype=torch.float32, device=device)
        base.state[master] = {
            "step": step,
            **{moment: torch.zeros_like(master, requires_grad=False) for moment in moments},
        }
    if engine_kind(optimizer) != "partitions":
        # A backward or a step may have linked the old moments already, so link them again.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def pieces(
    held: HeldWeights,
    optimizer: object,
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


def _master(optimizer: Any, name: str, parameter: Any, moment: str | None) -> Piece | None:
    """Return this rank's range of a parameter's master (moment None) or moment, if it has one."""
    if engine_kind(optimizer) != "partitions":
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        fragment: Tensor = mapping.get_hp_fragment(moment)
        return Piece(name, mapping.lp_fragment_address.start, fragment.detach())
    # Not `safe_get_local_…`: it returns a copy if the master is in host memory.
    partition, _ = optimizer._get_fp32_opt_state_partition(parameter, True, moment)
    start, count = _range(parameter)
    return Piece(name, start, partition.detach()[:count])


def _frozen(held: HeldWeights, name: str, parameter: object, *, writing: bool) -> Iterator[Piece]:
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


def _is_split(parameter: object) -> bool:
    """Whether stage 3 has split a parameter over the ranks: it then has the attribute ds_tensor."""
    return hasattr(parameter, "ds_tensor")


def _range(parameter: Any) -> tuple[int, int]:
    """Return the start and length of this rank's part of a split parameter, without padding."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    start = min(size * dist.get_rank(), total)
    return start, min(size, total - start)


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
        named = held_before(model, optimizer)
        prepared: nn.Module = self._accelerator.prepare(module, optimizer)[0]
        self._model = prepared
        self._zero = self._model.optimizer  # DeepSpeed's, around ours
        self._optimizer = self._zero.optimizer
        if engine_kind(self._zero) == "partitions":
            # Hide the operations of stage 3 from torch's dispatch modes. Selective activation
            # checkpointing records every operation of a block in such a mode, and expects the same
            # ones in the second forward, but stage 3 gathers differently there.
            offload = self._zero.parameter_offload
            for hook in (
                "pre_sub_module_forward",
                "post_sub_module_forward",
                "pre_sub_module_backward",
            ):
                name = f"{hook}_function"
                setattr(offload, name, without_modes(getattr(offload, name)))
        self._held = held_after(named, self._zero)
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
        forbidden = bool(is_refused(sums))
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
        create_state(self._zero)

    def pieces(
        self, spec: Spec, *, writing: bool, replicas_shared: bool = False
    ) -> Iterator[Piece]:
        """See `Engine.pieces`. They are ranges of the fp32 masters and of their moments."""
        if not (writing and replicas_shared):
            return pieces(self._held, self._zero, spec, writing=writing)
        # Frozen parameters that all ranks have in fp32 are shared out.
        same = frozenset(
            name
            for name, parameter in self._held.parameters.items()
            if name not in self._held.trained
            and not _is_split(parameter)
            and parameter.dtype == torch.float32
        )
        local_pieces = pieces(self._held, self._zero, spec, writing=True, everywhere=same)
        return state.share_out(local_pieces, same, dist.get_rank(), dist.get_world_size())

    def finish_loading(self, steps: int) -> None:
        """See `Engine.finish_loading`. It renews the copies of the masters. Collective."""
        state.set_steps(self._optimizer, steps)
        # The masters are copied into the weights that the forward uses, on every rank.
        if engine_kind(self._zero) != "partitions":
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()  # gathered parameters still have the old values
        for group in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)


@contextmanager
def overflowing(optimizer: Any) -> Iterator[None]:
    """Make DeepSpeed's optimizer skip a step in this context, as it does at an overflow.

    Gradients are dropped; weights, moments and counts do not change. It replaces private names of
    DeepSpeed 0.19: the check for an overflow, which is off in stages 1 and 2 in fp32, or the whole
    step of stage 1 in bf16, which has no check.
    """

    def overflow(*_: object, **__: object) -> bool:
        optimizer.overflow = True
        return True

    def skip() -> None:
        overflow()
        optimizer._global_grad_norm = float("inf")
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()

    by_kind: dict[Kind, dict[str, object]] = {
        "partitions": {"_overflow_check_and_loss_scale_update": overflow},
        "fragments": {"check_overflow": overflow, "check_grad_overflow": True},
        "bf16": {"step": skip},
    }
    patched = by_kind[engine_kind(optimizer)]
    originals = {name: vars(optimizer)[name] for name in patched if name in vars(optimizer)}
    vars(optimizer).update(patched)
    try:
        yield
    finally:
        for name in patched:
            del vars(optimizer)[name]
        vars(optimizer).update(originals)
