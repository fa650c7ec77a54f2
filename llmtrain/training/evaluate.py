"""The loss on the held-out documents: exactly one pass, on any number of processes."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from llmtrain import faults, heartbeat
from llmtrain.data.heldout import HeldOut
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.model.documents import on
from llmtrain.training.run.due import agreed_stop
from llmtrain.training.run.run import Run
from llmtrain.training.step import flags, hide
from llmtrain.types import NOT_TRAINED, Evaluation


def evaluate(run: Run) -> Evaluation | None:
    """Score every held-out token once; return None if an agreed stop interrupted the evaluation.

    Process r takes the blocks g ≡ r (mod W), one micro-batch in each round. All ranks make the
    same number of rounds. Where blocks are missing in the last round, blocks without scored tokens
    take their place.
    """
    heldout = run.data.heldout
    assert heldout is not None, "due.evaluation is false where nothing is held out"
    start = time.perf_counter()
    scored = torch.zeros(2, dtype=torch.float64, device=run.device)  # Σ nll in nats, tokens
    with run.engine.evaluating():
        at_once = run.ranks.world_size * run.built.micro_batch_size
        for round_ in range(math.ceil(heldout.num_blocks(run.config.data.seq_len) / at_once)):
            faults.hit("eval.batch", step=run.step)
            heartbeat.beat("a batch of the evaluation")
            stops = agreed_stop(run.ranks, flags(run))
            if stops:
                run.due.ask(stops)
                return None
            ids, labels, starts = round_blocks(heldout, run, round_)
            inputs = on(run.device, ids[:, :-1].astype(np.int64))
            targets = on(run.device, labels)
            hidden = hide(run, starts) if run.data.manifest.document_mask else {}
            scored[0] += run.model(inputs, targets, **hidden)
            scored[1] += (targets != NOT_TRAINED).sum()
    nll, tokens = sum_over_ranks(scored).tolist()
    return Evaluation(
        loss=nll / tokens,
        perplexity=math.exp(min(nll / tokens, 700.0)),  # exp overflows a little above 700
        bits_per_byte=nll / (math.log(2) * heldout.bytes),
        tokens=round(tokens),
        bytes=heldout.bytes,
        documents=heldout.documents,
        seconds=time.perf_counter() - start,
    )


def round_blocks(
    heldout: HeldOut, run: Run, round_: int
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return this rank's part of a round of m blocks.

    ids: (m, S + 1)
    labels: (m, S)
    starts: m arrays, as in `Batch`
    """
    size = run.built.micro_batch_size
    mine = [run.ranks.rank + run.ranks.world_size * (round_ * size + k) for k in range(size)]
    blocks = [heldout.block(g, run.config.data.seq_len) for g in mine]
    ids, labels, starts = zip(*blocks, strict=True)
    return np.stack(ids), np.stack(labels), list(starts)
