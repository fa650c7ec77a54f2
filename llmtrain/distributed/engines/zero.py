"""DeepSpeed's config, which is made in code, and the set-up that DeepSpeed needs.

accelerate and DeepSpeed read many variables of the environment, some of them when DeepSpeed is
imported. Nothing here therefore imports it at the top. accelerate also hands the config to
transformers, which then silently partitions models while it builds them, and gives them other
initial weights. `make` undoes that, and the model is partitioned when it is prepared.
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

from llmtrain.distributed.launch.environment import INSTALL_DEEPSPEED
from llmtrain.distributed.launch.keys import STRATEGIES
from llmtrain.distributed.plan.memory import AHEAD, LARGEST_BUCKET, OFFLOADS
from llmtrain.errors import Problem, raise_any

_LIVE = 1_000_000_000  # elements; DeepSpeed's default stage3_max_live_parameters
_BUILD_SECONDS = 600.0  # a build takes one minute; those on other nodes cannot be seen
_YAML = "ACCELERATE_DEEPSPEED_"  # the variables that accelerate makes from `deepspeed_config:`
_ADAM = "cpu_adam"


def config(
    strategy: str,
    precision: str,
    *,
    max_grad_norm: float | None,
    largest_block: int,
    cpu: bool,
) -> dict[str, Any]:
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
    """Raise UserError, with every problem, if DeepSpeed cannot work on this machine."""
    raise_any(missing(strategy, cpu=cpu), f"distributed.strategy {strategy}")


def missing(strategy: str, *, cpu: bool) -> Iterator[Problem]:
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
        # Here, because it logs a warning where there is a CUDA toolkit and no GPU.
        from torch.utils import cpp_extension

        # Private, but the directory depends on the versions of Python and torch.
        built = Path(cpp_extension._get_build_directory(_ADAM, verbose=False))
        yield from build_problems(built.parent)


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
    found = []
    for lock in sorted(directory.glob("*/lock")):
        try:
            # A file's time stamp can only be compared with the clock.
            age = time.time() - lock.stat().st_mtime  # noqa: TID251
        except FileNotFoundError:  # built by now
            continue
        if not _is_open(lock) and not (several and age < _BUILD_SECONDS) and lock.exists():
            found.append(lock)
    return found


def _is_open(path: Path) -> bool:
    """Whether a process of this machine has the file open. Other users' may not be visible."""
    import psutil

    wanted = os.path.realpath(path)
    opened = (process.info["open_files"] or () for process in psutil.process_iter(["open_files"]))
    return any(os.path.realpath(one.path) == wanted for files in opened for one in files)


def _import(*, cpu: bool) -> None:
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
