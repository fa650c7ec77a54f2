"""Batch norm over several processes, with statistics of the micro-batch's rows on all ranks."""

from __future__ import annotations

import logging

from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from llmtrain.errors import Problem, UserError

_log = logging.getLogger(__name__)


def with_common_statistics(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Replace batch norms by torch's SyncBatchNorm if there are several processes.

    With ordinary batch norm each rank has its own statistics: losses would differ between ranks,
    and a resumed run would continue with the statistics of rank 0. Raises UserError on CPUs, which
    SyncBatchNorm does not support.
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
    """Return the first of the names, and how many more there are."""
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
