"""The only place that makes an `Accelerator`, and that times the CPU to choose its precision.

All settings of an `Accelerator` are passed as objects or arguments. Otherwise the environment and a
default config file would decide them unnoticed.

A CPU's flags do not tell how fast it multiplies in fp32 and in bf16, so both are timed: of two CPUs
with AVX512-BF16 and without AMX, one multiplied bf16 four times as fast as fp32, the other at 0.6
of the speed of fp32. A CPU that only emulates bf16 is 70 times as slow in it.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from torch.nn.functional import linear

from llmtrain.agreement import Alone
from llmtrain.config.schema import DdpConfig, DistributedConfig
from llmtrain.distributed.engines import fsdp, zero
from llmtrain.distributed.engines.engine import Engine, TorchEngine
from llmtrain.distributed.engines.exact import ReplicatedExactEngine, ShardedExactEngine
from llmtrain.distributed.engines.fsdp import Sharding
from llmtrain.distributed.engines.pipeline import PipelineEngine
from llmtrain.distributed.engines.zero import DeepSpeedEngine
from llmtrain.distributed.launch.environment import family, model_cut
from llmtrain.distributed.launch.named import is_true
from llmtrain.distributed.plan.memory import OFFLOADS
from llmtrain.distributed.ranks import ModelGroups, RankGroup, meet_again, model_groups
from llmtrain.types import ModelCut, RankLayout, Ranks, rank_layout

_ROWS, _WIDTH = 1024, 768  # a product as in a small model
_FEW_ROWS = 64
_PRODUCTS = 5  # of which the fastest counts
_HOPELESS = 0.25  # bf16 this much slower than fp32 in a small product is not tried further
_WORTH = 1.3  # bf16 has casts besides its products


@dataclass(frozen=True, slots=True)
class Rates:
    """GFLOP/s of a product in each precision."""

    fp32: float
    bf16: float

    @property
    def faster(self) -> str:
        """The precision that a run on this CPU is faster in, bf16 or fp32."""
        return "bf16" if self.bf16 >= _WORTH * self.fp32 else "fp32"

    def __str__(self) -> str:
        return f"fp32 {self.fp32:,.0f} and bf16 {self.bf16:,.0f} GFLOP/s"


def cpu_rates() -> Rates:
    """Time products in both precisions, with the threads that torch has now; takes about 0.2 s."""
    fp32 = _rate(torch.float32, 0.0)
    return Rates(fp32, _rate(torch.bfloat16, _HOPELESS * fp32))


def _rate(dtype: torch.dtype, hopeless: float) -> float:
    """Return the rate of the fastest product; that of a small one if it is below `hopeless`.

    The first product of a size is slower, because its kernel is prepared then.
    """
    few = max(_timed(dtype, _FEW_ROWS) for _ in range(2))
    if few < hopeless:
        return few
    return max(_timed(dtype, _ROWS) for _ in range(1 + _PRODUCTS))


def _timed(dtype: torch.dtype, rows: int) -> float:
    """Return the GFLOP/s of one product of (rows, 768) and (768, 768)."""
    inputs = torch.ones(rows, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    begun = time.perf_counter()
    linear(inputs, weight)
    return 2 * rows * _WIDTH**2 / (time.perf_counter() - begun) / 1e9


# With many gradients, few large sums keep the links busy; with few, the first must not wait long.
_MANY_GRADIENTS = 1_000_000_000  # bytes
_BUCKET_MB, _LARGE_BUCKET_MB = 25, 100


@dataclass(frozen=True, slots=True)
class Launched:
    """A started launch.

    strategy: as `distributed.strategy` names it.
    ranks: the control group, which carries votes and bytes.
    cut: over how many processes one model is cut.
    layout: the place of this process among them.
    groups: the process groups of a cut model.
    engine: the engine of the strategy.
    sharding: the settings of FSDP2 and HSDP; None for other strategies.
    """

    accelerator: Accelerator
    strategy: str
    ranks: Ranks
    cut: ModelCut
    layout: RankLayout
    groups: ModelGroups
    device: torch.device
    engine: Engine
    sharding: Sharding | None = None


def on_cpu() -> bool:
    """Whether this run uses a CPU: no GPU is visible, or a CPU was requested."""
    return is_true(os.environ, "ACCELERATE_USE_CPU") or not torch.cuda.is_available()


def resolve_precision(asked: str) -> tuple[str, str]:
    """Return the precision, bf16 or fp32, that `training.precision` leads to, and the reason.

    For `auto` a CPU is timed, whatever the file of a launch says: most are written for GPUs. Its
    `mixed_precision: 'no'` asks for nothing, there and on a GPU.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked != "auto":
        return asked, "asked for"
    if on_cpu():
        rates = cpu_rates()
        return rates.faster, f"products on this CPU: {rates}"
    if launched == "bf16":
        return "bf16", "mixed_precision of the accelerate config"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "this device computes in bf16"
    return "fp32", "this device is older than Ampere"


def default_config() -> str | None:
    """Return accelerate's default config file, if it exists and `accelerate launch` was used."""
    path = str(default_config_file)
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # set by every accelerate launch
    return path if launched and Path(path).is_file() else None


def make_accelerator(
    strategy: str,
    precision: str,
    distributed: DistributedConfig,
    *,
    max_grad_norm: float | None = 1.0,
    largest_block: int = 0,
    gradient_bytes: int = 0,
    fsdp_sync: str = "every",
    same_bits: bool = False,
) -> Launched:
    """Join the process group (if there is one) and make the `Accelerator` and the control group.

    strategy: as `distributed.strategy` names it, never auto.
    precision: bf16 or fp32.
    largest_block: elements of the model's largest block.
    gradient_bytes: of all gradients, in fp32.
    fsdp_sync: every or last, never auto.
    same_bits: as `training.same_bits`; only under ddp and fsdp2.

    Raises torch's error if the rendezvous fails, and UserError if `hsdp` has no mesh or DeepSpeed
    cannot work.
    """
    timeout = timedelta(minutes=distributed.timeout_minutes)
    meet_again(timeout)
    common, sharding, kind = _for_any_strategy(precision), None, family(strategy)
    cut = model_cut(os.environ, distributed)
    match kind:
        case "ddp":
            accelerator = _make_ddp(distributed.ddp, gradient_bytes, timeout, common)
        case "fsdp":
            settings = (strategy, precision, distributed, cut)
            sharding = _make_fsdp(*settings, timeout, fsdp_sync, common)
            accelerator = sharding.accelerator
        case "zero":
            zero_settings = {"max_grad_norm": max_grad_norm, "largest_block": largest_block}
            with own_environment():
                accelerator = zero.make(strategy, precision, timeout, **(zero_settings | common))
            # DeepSpeed reads LOCAL_RANK during the whole run, even without a launcher.
            os.environ.setdefault("LOCAL_RANK", "0")
    return _launched(accelerator, strategy, sharding, cut, timeout, same_bits)


def _launched(
    accelerator: Accelerator,
    strategy: str,
    sharding: Sharding | None,
    cut: ModelCut,
    timeout: timedelta,
    same_bits: bool,
) -> Launched:
    """Return the launch with its groups of processes, the place of this one, and the engine."""
    ranks: Ranks = RankGroup(timeout) if accelerator.num_processes > 1 else Alone()
    layout = rank_layout(ranks.rank, ranks.world_size, cut)
    groups = model_groups(ranks.world_size, cut, timeout)
    kind = PipelineEngine if cut.pipeline > 1 else TorchEngine
    if same_bits:
        sharded = sharding is not None and ranks.world_size > 1
        kind = ShardedExactEngine if sharded else ReplicatedExactEngine
    engine: Engine = (
        DeepSpeedEngine(accelerator)
        if family(strategy) == "zero"
        else kind(accelerator, sharding, layout, groups)
    )
    place = (ranks, cut, layout, groups, accelerator.device)
    return Launched(accelerator, strategy, *place, engine, sharding)


def _for_any_strategy(precision: str) -> dict[str, Any]:
    """Return the arguments of `Accelerator` that no strategy changes, and set torch's precision."""
    if not on_cpu():
        # For the products that autocast leaves in fp32. A run in fp32 is not to have TF32.
        torch.set_float32_matmul_precision("high" if precision == "bf16" else "highest")
    # A plugin, not the argument: ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment
    # overrides `gradient_accumulation_steps=1`, and backward() then divides our loss by it.
    return {
        "cpu": on_cpu(),
        "mixed_precision": "bf16" if precision == "bf16" else "no",
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1),
    }


def _make_ddp(
    ddp: DdpConfig, gradient_bytes: int, timeout: timedelta, common: dict[str, Any]
) -> Accelerator:
    """Make the `Accelerator` for DDP, or for one process without wrapping."""
    # accelerate refuses a mesh without FSDP, also one that cuts models.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    bucket_mb = ddp.bucket_cap_mb
    if bucket_mb == "auto":
        many = gradient_bytes >= _MANY_GRADIENTS and not common["cpu"]
        bucket_mb = _LARGE_BUCKET_MB if many else _BUCKET_MB
    return Accelerator(
        **common,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timeout),
            # Views halve the memory of gradients. Buffers are equal on all ranks at the start. Not
            # `static_graph`: with it a first backward inside `no_sync` fails (torch 2.13).
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                bucket_cap_mb=bucket_mb,
                find_unused_parameters=ddp.find_unused_parameters,
            ),
        ],
    )


def _make_fsdp(
    strategy: str,
    precision: str,
    distributed: DistributedConfig,
    cut: ModelCut,
    timeout: timedelta,
    sync: str,
    common: dict[str, Any],
) -> Sharding:
    """Make the `Accelerator` and settings of FSDP2 or HSDP, without FSDP_* in os.environ."""
    env, cpu = dict(os.environ), common["cpu"]
    with own_environment():
        for name in env:
            if name.startswith("FSDP_") or name == "ACCELERATE_USE_PARALLELISM_CONFIG":
                del os.environ[name]
        replicas, shards = fsdp.mesh(strategy, env, int(os.environ["WORLD_SIZE"]), cut)
        if cpu:
            rehearse(timeout)
        # What this calls tensor parallelism is every cut of a model over neighbouring processes.
        apart = cut.weights
        sides = {"dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": apart}
        axes = ParallelismConfig(**sides, cp_size=1, sp_size=1)
        accelerator = Accelerator(
            **common,
            fsdp_plugin=fsdp.plugin(strategy, precision, env, cpu=cpu),
            parallelism_config=axes if replicas > 1 or apart > 1 else None,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
        axes.tp_size = 1  # its mesh is made, and accelerate is not to cut the model too
        mesh = accelerator.torch_device_mesh
        replica = mesh.get_local_rank("dp_replicate") if replicas > 1 else 0
    if "FSDP_CPU_RAM_EFFICIENT_LOADING" in env:
        # transformers reads it too, and would load weights on rank 0 only.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    offload = strategy in OFFLOADS and not cpu
    return Sharding(accelerator, distributed.wrap_class, sync, replica, replicas, offload)


@contextmanager
def own_environment() -> Iterator[None]:
    """Set variables that make a single process a group, and restore os.environ at the end.

    For FSDP2 and ZeRO a single process needs a rendezvous too. Also, accelerate writes its settings
    to os.environ, where a child or a second run in this process would take them for a launch.
    """
    before = dict(os.environ)
    if "LOCAL_RANK" not in before:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # Without this accelerate chooses the number of threads.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def close(*, failed: bool = False) -> None:
    """Leave the process group and clear accelerate's state, so that another run may follow.

    failed: whether the run failed. Peers may then be gone or waiting elsewhere, so a group of
        several processes is not destroyed; it ends with the process.
    """
    if dist.is_initialized():
        if failed and dist.get_world_size() > 1:
            return
        if not zero.leave():
            dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def rehearse(timeout: timedelta) -> None:
    """Make accelerate shard on a CPU, which it supports for other devices only.

    Without this an FSDP launch on a CPU silently becomes plain DDP. Of accelerate's private names
    only this one and `_reset_state` above are used, each with a test.
    """
    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
