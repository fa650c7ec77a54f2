"""What is frozen while the type of the device stays: the kernels of attention, what is compiled.

    set in the config ─► else as an earlier start on such a device froze it ─► else chosen now

Kernels are decided before the plan, which counts what they keep. Whether to compile depends on the
length of the run, which is known once the data is open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from llmtrain.agreement import agreed
from llmtrain.config.binding import way_out
from llmtrain.config.schema import Config
from llmtrain.distributed.engines.accelerator import Launched, on_cpu
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import Problem, raise_any
from llmtrain.model import attention
from llmtrain.model import compile as compiling
from llmtrain.rundir.auto import Auto
from llmtrain.rundir.contents import AUTO
from llmtrain.training.run.opened import Processes
from llmtrain.types import Compiled

_log = logging.getLogger(__name__)

_FROZEN = {attention.KEY: "attention_backend", compiling.KEY: "compile"}  # names in auto.json
_LONG_RUN = 2000  # steps from which the minutes of compiling are repaid
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS gives equal bits; the first is faster


@dataclass(frozen=True, slots=True)
class Kernels:
    """Settings of torch that decide which kernels compute.

    attention: flash, cudnn, math, or auto: torch's own order
    compiled: what is compiled; None = it is not decided yet
    deterministic: whether only kernels run that give equal bits each time
    began_with: keys whose values an earlier start has chosen
    """

    attention: str
    compiled: Compiled | None
    deterministic: bool
    began_with: tuple[str, ...] = ()


def decide_kernels(config: Config) -> Kernels:
    """Return the settings of the config, or those that an earlier start on such a device froze.

    An older version of this program compiled nothing, so a run that it began does not either.
    """
    auto = Auto(config.run_dir, f"any/{_device()}/any")
    known = {compiling.KEY: "off"} if auto.has_run_here() else {}
    known |= {key: auto.device[name] for key, name in _FROZEN.items() if name in auto.device}
    asked = {
        attention.KEY: config.model.attention_backend,
        compiling.KEY: config.training.compile,
    }
    chosen = {key: known.get(key) if value == "auto" else value for key, value in asked.items()}
    return Kernels(
        attention=chosen[attention.KEY] or "auto",
        compiled=cast("Compiled | None", chosen[compiling.KEY]),
        deterministic=config.training.deterministic,
        began_with=tuple(key for key, value in asked.items() if value == "auto" and key in known),
    )


def check_kernels(kernels: Kernels) -> None:
    """Raise UserError for settings that this machine cannot have, whoever chose them."""
    cpu = on_cpu()
    found = [
        *attention.kernel_problems(kernels.attention, cpu=cpu),
        *(compiling.problems(kernels.compiled, cpu=cpu) if kernels.compiled else ()),
    ]
    began = f"; {AUTO} has it from an earlier start: {{}}"
    found = [
        replace(one, remedy=one.remedy + began.format(way_out(one.key)))
        if one.key in kernels.began_with
        else one
        for one in found
    ]
    workspace = os.environ.get(_WORKSPACE, _WORKSPACES[0])
    if kernels.deterministic and workspace not in _WORKSPACES:
        expected = f"{' or '.join(_WORKSPACES)} with training.deterministic"
        found.append(Problem(_WORKSPACE, workspace, expected, f"unset {_WORKSPACE}"))
    raise_any(found)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Let torch use these kernels in the whole process. Enter it before CUDA computes anything."""
    with attention.kernels(kernels.attention), _deterministic(asked=kernels.deterministic):
        yield


@contextmanager
def _deterministic(*, asked: bool) -> Iterator[None]:
    if not asked:
        yield
        return
    os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Otherwise every new tensor is filled, which only helps to find reads of memory never written.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def keep_kernels(auto: Auto, kernels: Kernels) -> None:
    """Put what has been decided into the values of `auto.json`."""
    auto.device[_FROZEN[attention.KEY]] = kernels.attention
    if kernels.compiled is not None:
        auto.device[_FROZEN[compiling.KEY]] = kernels.compiled


def decide_compile(config: Config, processes: Processes, *, document_mask: bool) -> Compiled:
    """Return what to compile, and freeze it. Collective.

    Raises UserError for a whole model with documents that are hidden from each other.
    """
    frozen, ranks = processes.auto.device, processes.launched.ranks
    name = _FROZEN[compiling.KEY]
    if name not in frozen:
        frozen[name] = _choose_compile(config.total_steps, processes.launched)
    mode: Compiled = frozen[name]
    cpu = processes.launched.device.type == "cpu"
    found = tuple(compiling.problems(mode, cpu=cpu, document_mask=document_mask))
    agreed(ranks, lambda: raise_any(found))
    return mode


def _choose_compile(steps: int, launched: Launched) -> Compiled:
    """Return `blocks` if that saves time in a run of `steps`, and every rank can; else `off`.

    DeepSpeed's own hooks inside the blocks cut their graphs into pieces.
    """
    device = launched.device.type
    if device != "cuda" or steps < _LONG_RUN or family(launched.strategy) == "zero":
        return "off"
    missing = compiling.missing_compiler(cpu=False)
    if missing:
        _log.warning("nothing is compiled, as torch lacks %s", missing)
    return "off" if launched.ranks.highest(int(bool(missing))) else "blocks"


def _device() -> str:
    return "cpu" if on_cpu() else "cuda"
