"""One optimizer update: the second half of the page that `loop.py` begins."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmtrain import faults, heartbeat
from llmtrain.types import SLOTS, Batch, Flags, StepVector

if TYPE_CHECKING:
    from llmtrain.training.run.run import Run

_FLAGS = tuple(one.name for one in fields(Flags))  # each has a slot of its name


def update(run: Run, batch: Batch, factor: float) -> None:
    """One optimizer update. Queues work, and waits for nothing of its own step.

    The gradient is that of the mean loss over all trained tokens of the step on all ranks, however
    the blocks are dealt out. DDP averages gradients over ranks, hence `world_size`.
    """
    tokens = run.trained_tokens(batch)  # () on the device; constant where all blocks are full
    scale = run.ranks.world_size / tokens.clamp(min=1)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    micro_batches = run.micro_batches(batch)  # device tensors, each (B, T)
    for index, micro_batch in enumerate(micro_batches):
        faults.hit("loop.micro")
        heartbeat.beat("a micro-batch")
        with run.engine.micro(last=index == len(micro_batches) - 1):  # which reduces gradients
            loss = run.model(**micro_batch)  # () fp32, summed over trained tokens
            run.engine.backward(loss, scale)
        loss_sum += loss.detach()
    heartbeat.beat("the reduction of a step")
    sums = run.sum(step_vector(run, batch, loss_sum))  # fp64, the one reduction
    run.engine.clip(sums, run.max_grad_norm)  # on the device, as is the skip below
    run.checkpoints.wait_snapshot()  # what is saved may still be copied from these weights
    run.engine.step(factor, sums)  # a non-finite update is never applied
    run.meter.send(sums, run.engine.norm(sums))  # received at the next boundary


def step_vector(run: Run, batch: Batch, loss_sum: Tensor) -> StepVector:
    """What this rank says of its part of the step. loss_sum: () fp64 on the device."""
    squares = run.engine.squares()
    bad = ~(torch.isfinite(loss_sum) & torch.isfinite(squares))
    device = torch.stack([loss_sum, squares, bad.double()])
    said = host_part(batch, run.flags(), run.ranks.world_size, run.labels, failed=run.data_failed)
    host = torch.tensor(said, dtype=torch.float64)
    if run.device.type == "cuda":
        host = host.pin_memory().to(run.device, non_blocking=True)
    return StepVector(torch.cat([device, host]))


def host_part(
    batch: Batch, flags: Flags, world_size: int, labels: tuple[str, ...], *, failed: bool
) -> list[float]:
    """The slots behind the first three, then the trained tokens of each source."""
    said = {
        "data_failed": failed,
        **{f"digest_{k}": (batch.digest >> (16 * k)) & 0xFFFF for k in range(4)},
        "wait_seconds": batch.wait_seconds / world_size,
        **{name: getattr(flags, name) for name in _FLAGS},
        "padding_only": not batch.sources,
        "ended": batch.ended,
    }
    return [float(said[slot]) for slot in SLOTS[3:]] + [
        float(batch.sources.get(label, 0)) for label in labels
    ]
