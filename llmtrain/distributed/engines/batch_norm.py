"""Batch norm over several processes: statistics of all rows of a micro-batch, on all ranks."""

from __future__ import annotations

import logging

from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from llmtrain.errors import Problem, UserError

_log = logging.getLogger(__name__)


def with_common_statistics(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Replace batch norms by torch's own that sees the rows of all ranks, where there are several.

    Otherwise each rank has statistics of its own: ranks score different losses, and a resumed run
    continues with those of rank 0. torch has no such norm for CPUs, so there it raises UserError.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if not norms or accelerator.num_processes == 1:
        return module
    if accelerator.device.type == "cpu":
        expected = f"one process on a CPU, for a model with batch norm ({_some(norms)})"
        raise UserError(Problem("processes", accelerator.num_processes, expected, "GPUs, or one"))
    _log.info("batch norm is computed over all processes (SyncBatchNorm): %s", _some(norms))
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]  # torch has no stub for it
    return converted


def _some(found: list[str]) -> str:
    """The first of them, and how many there are."""
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
