"""One forward and backward that is thrown away, before a run's state is loaded.

DDP orders its buckets by the first backward it sees: without this pass the next step of a straight
run and the first of a resumed one would add up gradients in another order, and differ in their last
bits from three processes on. And memory that does not suffice shows before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from llmtrain import heartbeat
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.errors import Problem, UserError
from llmtrain.metrics import memory
from llmtrain.model.documents import document_tensors
from llmtrain.model.loss import made_up_batch
from llmtrain.training.run.rng import leaving_no_trace


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried: a prepared model on made-up tokens.

    hiding: the attention that hides documents, None where they are not hidden
    """

    model: nn.Module
    launched: Launched
    seq_len: int
    vocabulary: int
    hiding: str | None = None


def discarded_pass(trial: Trial, micro_batch_size: int) -> None:
    """Make a forward and backward with gradient synchronisation, which leaves no trace.

    Buffers, random states and gradients are put back.
    """
    with leaving_no_trace(trial.model, trial.launched.device):
        _pass(trial, micro_batch_size, last=True)
        trial.launched.engine.clear()


def fitting_micro_batch(trial: Trial, candidates: list[int]) -> int:
    """Return the first of `candidates` (falling) that fits the memory of every device.

    Each rank tries alone, two micro-batches without synchronisation, and then all vote: a rank that
    ran out of memory inside a collective would leave the others hanging. A CPU does not report when
    memory runs out, so nothing is tried there. Raises UserError when none fits. Leaves no trace, as
    `discarded_pass` does; what did not fit does not count in the run's peak of memory.
    """
    device = trial.launched.device
    if device.type != "cuda":
        return candidates[0]
    for micro_batch_size in candidates:
        heartbeat.beat("trying a micro-batch")
        failed = 0
        with leaving_no_trace(trial.model, device):
            try:
                for _ in range(2):
                    _pass(trial, micro_batch_size, last=False)
            except torch.cuda.OutOfMemoryError:
                failed = 1
            trial.launched.engine.clear()
        torch.cuda.empty_cache()
        if not trial.launched.ranks.highest(failed):
            return micro_batch_size
        memory.reset_peak(device)
    raise UserError(
        Problem(
            "training.micro_batch_size",
            candidates[-1],
            "a forward and backward that fit this device's memory",
            "a smaller model, a shorter data.seq_len or a device with more memory",
        )
    )


def _pass(trial: Trial, rows: int, *, last: bool) -> None:
    engine, device, seq_len = trial.launched.engine, trial.launched.device, trial.seq_len
    ids = made_up_batch(rows, seq_len, trial.vocabulary, device)
    halves = [np.array([0, seq_len // 2])] * rows
    documents = document_tensors(halves, seq_len, trial.hiding, device) if trial.hiding else {}
    with engine.micro(last=last):
        loss = trial.model(input_ids=ids, labels=ids, **documents)
        engine.backward(loss, torch.ones((), device=device))
