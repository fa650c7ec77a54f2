"""A forward and backward whose results are discarded, before a run's state is loaded.

DDP orders its buckets by the first backward it sees. Without this pass, a resumed run would sum the
gradients of its first step in another order than an uninterrupted run, and with three or more
processes the last bits would differ. Also, a lack of memory is noticed before the first step.
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
    """A prepared model, and what is needed to run it on made-up tokens.

    hiding: the attention that hides documents, None if they are not hidden
    compiled: whether the model is compiled
    """

    model: nn.Module
    launched: Launched
    seq_len: int
    vocabulary: int
    hiding: str | None = None
    compiled: bool = False


def discarded_pass(trial: Trial, micro_batch_size: int) -> None:
    """Make a forward and backward with gradient synchronisation.

    Afterwards buffers and random states are restored and gradients are cleared.
    """
    with leaving_no_trace(trial.model, trial.launched.device):
        _pass(trial, micro_batch_size, last=True)
        trial.launched.engine.clear()


def fitting_micro_batch(trial: Trial, candidates: list[int]) -> int:
    """Return the first of `candidates` (in descending order) that fits the memory of every device.

    Each rank tries two micro-batches by itself without synchronisation, and then all vote: a rank
    that ran out of memory inside a collective would leave the others hanging. Nothing is tried on a
    CPU, which does not report that memory runs out. State is restored as by `discarded_pass`, and
    candidates that did not fit do not count in the run's peak memory. Raises UserError if none
    fits.
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
    expected = "a forward and backward that fit this device's memory"
    remedy = "a smaller model, a shorter data.seq_len or a device with more memory"
    raise UserError(Problem("training.micro_batch_size", candidates[-1], expected, remedy))


def _pass(trial: Trial, rows: int, *, last: bool) -> None:
    engine, device, seq_len = trial.launched.engine, trial.launched.device, trial.seq_len
    ids = made_up_batch(rows, seq_len, trial.vocabulary, device)
    halves = [np.array([0, seq_len // 2])] * rows
    documents = {}
    if trial.hiding:
        name, compiled = trial.hiding, trial.compiled
        documents = document_tensors(halves, seq_len, name, device, compiled=compiled)
    with engine.micro(last=last):
        loss = trial.model(input_ids=ids, labels=ids, all_trained=True, **documents)
        engine.backward(loss, torch.ones((), device=device))
