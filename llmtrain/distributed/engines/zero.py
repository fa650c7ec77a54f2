"""DeepSpeed's config, made in code, and what must be set up around it.

accelerate and DeepSpeed read much from the environment, some of it when DeepSpeed is imported: so
nothing here imports it at the top. The trap: accelerate hands the config to transformers, which
then silently partitions models while it builds them, with other initial weights. `make` undoes
that, and the model is partitioned when it is prepared.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch.utils import cpp_extension

from llmtrain.distributed.launch.environment import INSTALL_DEEPSPEED
from llmtrain.distributed.launch.keys import STRATEGIES
from llmtrain.distributed.plan.memory import AHEAD, LARGEST_BUCKET, OFFLOADS
from llmtrain.errors import Problem, UserError

_LIVE = 1_000_000_000  # elements; DeepSpeed's own stage3_max_live_parameters
_BUILD_SECONDS = 600.0  # a build of an extension takes one minute; other nodes' are not seen here
_YAML = "ACCELERATE_DEEPSPEED_"  # what accelerate makes of `deepspeed_config:` in its YAML
_ADAM = "cpu_adam"


def config(
    strategy: str,
    precision: str,
    *,
    max_grad_norm: float | None,
    largest_block: int,
    cpu: bool,
) -> dict[str, Any]:
    """Make DeepSpeed's config. largest_block: elements (`plan.largest_block`), 0 if unknown."""
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
        "train_micro_batch_size_per_gpu": 1,  # nobody reads it: the step counts its own blocks
        "gradient_accumulation_steps": 1,  # we name the last micro-batch to the engine
        "managed_gradient_accumulation": True,
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_optimization": optimization,
        "zero_allow_untested_optimizer": True,
        # DeepSpeedCPUAdam is compiled on first use, five times as fast as torch's on a host.
        "zero_force_ds_cpu_optimizer": offload and not cpu,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # ZeRO-1 would else keep all gradients in bf16 beside their sums in fp32.
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
    """Make the `Accelerator` of ZeRO. It changes os.environ, which the caller restores.

    os.environ must hold a rendezvous; its other variables for DeepSpeed were read and checked by
    then (`launch`). common: more arguments, `cpu` for a rehearsal with gloo. Raises UserError, with
    every problem, where DeepSpeed could not work.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    cpu = bool(common.pop("cpu"))
    refuse(strategy, cpu=cpu)
    # With it accelerate drops DeepSpeed and trains plain DDP.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    for name in [one for one in os.environ if one.startswith(_YAML)]:
        del os.environ[name]  # each a key that DeepSpeedPlugin refuses beside a config
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    _import(cpu=cpu)
    settings = config(
        strategy, precision, max_grad_norm=max_grad_norm, largest_block=largest_block, cpu=cpu
    )
    group = InitProcessGroupKwargs(timeout=timeout, backend="gloo" if cpu else None)
    plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], **common)
    unset_hf_deepspeed_config()
    return accelerator


def refuse(strategy: str, *, cpu: bool) -> None:
    """Raise UserError, with every problem, where DeepSpeed could not work on this machine."""
    if problems := list(missing(strategy, cpu=cpu)):
        raise UserError(*problems, where=f"distributed.strategy {strategy}")


def missing(strategy: str, *, cpu: bool) -> Iterator[Problem]:
    """Find what keeps DeepSpeed from working on this machine."""
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
        # Private, but the only place that knows: it depends on Python and on the kind of torch.
        built = Path(cpp_extension._get_build_directory(_ADAM, verbose=False))
        yield from build_problems(built.parent)


def build_problems(directory: Path, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """Find what keeps DeepSpeed's Adam for host memory from being built in `directory`."""
    compiler = env.get("CXX", "c++")  # as torch chooses it
    for program, remedy in (
        (compiler, "install g++, which brings c++ (or set CXX)"),
        ("ninja", "pip install ninja, and have its directory on PATH"),
    ):
        if shutil.which(program, path=env.get("PATH")) is None:
            expected = "a program on PATH: offload compiles DeepSpeed's Adam when it is first used"
            yield Problem(program, "not found", expected, remedy)
    for lock in stale_locks(directory, env):
        if lock.parent.name != _ADAM:
            continue
        expected = "no lock without a process that builds: everyone would wait for it"
        yield Problem(str(lock), "left over", expected, f"rm '{lock}'")


def leave() -> bool:
    """Leave the process group if DeepSpeed knows it: it has further groups of its own."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.pop("LOCAL_RANK", None)  # of no launcher: `accelerator` sets it for DeepSpeed
    comm = sys.modules.get("deepspeed.comm")
    if comm is None or not comm.is_initialized():
        return False
    comm.destroy_process_group()
    return True


def stale_locks(directory: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Find locks of extension builds that nobody works on: a run that needs one never gets past it.

    A builder keeps its lock open. On several nodes one that is young may be another node's.
    """
    several = env.get("WORLD_SIZE", "1") != env.get("LOCAL_WORLD_SIZE", "1")
    found = []
    for lock in sorted(directory.glob("*/lock")):
        try:
            # A time stamp of the file system, hence the clock.
            age = time.time() - lock.stat().st_mtime  # noqa: TID251
        except FileNotFoundError:  # built by now
            continue
        if not _is_open(lock) and not (several and age < _BUILD_SECONDS) and lock.exists():
            found.append(lock)
    return found


def _is_open(path: Path) -> bool:
    """Whether a process of this machine holds a file open (of processes that we may look at)."""
    import psutil

    wanted = os.path.realpath(path)
    for process in psutil.process_iter():
        try:
            if any(os.path.realpath(one.path) == wanted for one in process.open_files()):
                return True
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return False


def _import(*, cpu: bool) -> None:
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.handlers.clear()  # they write to stdout; a rank's log has its own
    logger.propagate = True
    if cpu:
        # Its all-reduce for inference over shared memory: nothing here uses it, and DeepSpeed
        # would compile it for a minute in front of the first run.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
