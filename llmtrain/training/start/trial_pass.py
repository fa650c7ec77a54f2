"""One forward and backward that is thrown away, before a run's state is loaded.

DDP orders its buckets by the first backward it sees: without this pass the next step of a straight
run and the first of a resumed one would add up gradients in another order, and differ in their last
bits from three processes on. And memory that does not suffice shows before the first step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from llmtrain import heartbeat
from llmtrain.distributed.engines.engine import Engine
from llmtrain.distributed.ranks import ControlGroup
from llmtrain.errors import Problem, UserError
from llmtrain.model.documents import document_tensors
from llmtrain.model.loss import made_up_batch
from llmtrain.training.run import rng


def discarded_pass(
    model: nn.Module,
    engine: Engine,
    device: torch.device,
    shape: tuple[int, int, int],
    hiding: str | None = None,
) -> None:
    """Forward and backward with gradient synchronisation on made-up tokens; leaves no trace.

    shape: micro-batch, seq_len, vocabulary · hiding: the attention that hides documents, None where
    they are not hidden. Buffers, random states and gradients are put back.
    """
    states = rng.capture(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    _pass(model, engine, device, shape, hiding, last=True)
    engine.clear()
    for buffer, before in buffers:
        buffer.copy_(before)
    rng.restore(states, device)


def fitting_micro_batch(
    model: nn.Module,
    engine: Engine,
    ranks: ControlGroup,
    device: torch.device,
    candidates: list[int],
    seq_len: int,
    vocabulary: int,
    hiding: str | None = None,
) -> int:
    """The first of `candidates` (falling) whose forward and backward fit every device's memory.

    Each rank tries alone, two micro-batches without synchronisation, and then all vote: a rank that
    ran out of memory inside a collective would leave the others hanging. A CPU does not say when
    memory runs out, so nothing is tried there. Raises UserError when none fits.
    """
    if device.type != "cuda":
        return candidates[0]
    states = rng.capture(device)
    for micro_batch_size in candidates:
        heartbeat.beat("trying a micro-batch")
        failed = 0
        try:
            for _ in range(2):
                shape = (micro_batch_size, seq_len, vocabulary)
                _pass(model, engine, device, shape, hiding, last=False)
        except torch.cuda.OutOfMemoryError:
            failed = 1
        engine.clear()
        torch.cuda.empty_cache()
        rng.restore(states, device)
        if not ranks.highest(failed):
            return micro_batch_size
    raise UserError(
        Problem(
            "training.micro_batch_size",
            candidates[-1],
            "a forward and backward that fit this device's memory",
            "a smaller model, a shorter data.seq_len or a device with more memory",
        )
    )


def _pass(
    model: nn.Module,
    engine: Engine,
    device: torch.device,
    shape: tuple[int, int, int],
    hiding: str | None,
    *,
    last: bool,
) -> None:
    ids = made_up_batch(*shape, device)
    rows, seq_len, _ = shape
    halves = [np.array([0, seq_len // 2])] * rows
    documents = document_tensors(halves, seq_len, hiding, device) if hiding else {}
    with engine.micro(last=last):
        loss = model(input_ids=ids, labels=ids, **documents)
        engine.backward(loss, torch.ones((), device=device))
