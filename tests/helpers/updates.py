"""What `update` asks of a run, without the rest of one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.training.run.run import Run
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
    run = SimpleNamespace(
        ranks=launched.ranks,
        device=launched.device,
        engine=launched.engine,
        model=prepared,
        unwrapped=bare,
        config=SimpleNamespace(data=SimpleNamespace(seq_len=seq_len)),
        data=SimpleNamespace(manifest=SimpleNamespace(always_full=False)),
        micro_batch_size=micro_batch_size,
        max_grad_norm=max_grad_norm,
        labels=("all",),
        data_failed=False,
        step=0,
        flags=Flags,
        meter=SimpleNamespace(send=send),
        checkpoints=SimpleNamespace(wait_snapshot=lambda: None),
        sum=lambda vector: StepVector(sum_over_ranks(vector.data)),
    )
    run.trained_tokens = lambda batch: Run.trained_tokens(run, batch)
    run.micro_batches = lambda batch: Run.micro_batches(run, batch)
    run.documents = lambda starts: Run.documents(run, starts)
    return run
