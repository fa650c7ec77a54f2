"""What `update` asks of a run, without the rest of one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.types import Flags, StepVector


def run_of(
    launched: Launched,
    prepared: nn.Module,
    bare: nn.Module,
    send: Callable[[StepVector, Tensor], object],
    *,
    micro_batch_size: int,
    seq_len: int,
    max_grad_norm: float | None = 1.0,
) -> Any:
    """send: hears the summed vector and the norm of each update."""
    manifest = SimpleNamespace(always_full=False, labels=("all",))
    return SimpleNamespace(
        ranks=launched.ranks,
        device=launched.device,
        engine=launched.engine,
        model=prepared,
        config=SimpleNamespace(data=SimpleNamespace(seq_len=seq_len)),
        data=SimpleNamespace(manifest=manifest),
        built=SimpleNamespace(bare=bare, micro_batch_size=micro_batch_size),
        max_grad_norm=max_grad_norm,
        feed=SimpleNamespace(error=None),
        step=0,
        signals=SimpleNamespace(reason=None),
        requests=SimpleNamespace(flags=lambda reason: Flags()),
        meter=SimpleNamespace(send=send),
        checkpoints=SimpleNamespace(wait_snapshot=lambda: None, flags=dict),
    )
