"""The loss on the held-out documents: exactly one pass, on any number of processes.

If the documents come from several sources, the same pass also gives the loss on each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmtrain import faults, heartbeat
from llmtrain.data.heldout_set import HeldOut
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.model.documents import on
from llmtrain.training.run.due import agreed_stop
from llmtrain.training.run.run import Run
from llmtrain.training.step import flags, hide, padding_keywords, shown, target_keywords
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
    sources = len(heldout.parts) if len(heldout.parts) > 1 else 0
    # Σ nll in nats and tokens: of all documents, then of those of each source
    scored = torch.zeros(1 + sources, 2, dtype=torch.float64, device=run.device)
    with run.engine.evaluating():
        at_once = run.ranks.world_size * run.built.micro_batch_size
        rounds = math.ceil(heldout.num_blocks(run.config.data.seq_len) / at_once)
        for round_ in range(rounds):
            faults.hit("eval.batch", step=run.step)
            heartbeat.beat("a batch of the evaluation", round_ + 1, rounds)
            stops = agreed_stop(run.ranks, flags(run))
            if stops:
                run.due.ask(stops)
                return None
            scored += _score(run, heldout, round_, sources)
    found = result(sum_over_ranks(scored).tolist(), heldout)
    return replace(found, seconds=time.perf_counter() - start)


def _score(run: Run, heldout: HeldOut, round_: int, sources: int) -> Tensor:
    """Return Σ nll and tokens of this rank's blocks of a round, (1 + sources, 2) fp64.

    sources: the number of sources to tell apart; 0 = none
    """
    size, seq_len = run.built.micro_batch_size, run.config.data.seq_len
    mine = [run.ranks.rank + run.ranks.world_size * (round_ * size + k) for k in range(size)]
    blocks = [heldout.block(g, seq_len) for g in mine]
    ids, labels, starts = zip(*blocks, strict=True)
    width = shown(run, np.stack(labels))
    inputs = on(run.device, np.stack(ids)[:, :width].astype(np.int64))
    wanted = np.stack(labels)[:, :width]
    targets = target_keywords(wanted, run.device, whole=False)
    hidden = padding_keywords(run, wanted)
    if run.data.manifest.hides_documents:
        hidden = hide(run, starts)
    each = run.model(inputs, each=True, **targets, **hidden)
    if not sources:
        return totals(each, targets["labels"])
    owners = on(run.device, np.stack([heldout.block_parts(g, seq_len)[:width] for g in mine]))
    return by_source(each, targets["labels"], owners, sources)


def totals(each: Tensor, targets: Tensor) -> Tensor:
    """Return Σ nll in nats and the number of scored tokens, (1, 2) fp64.

    each: (B, T) fp32, the loss of each target in nats
    targets: (B, T) int64; `NOT_TRAINED` where nothing is scored
    """
    return torch.stack([each.double().sum(), (targets != NOT_TRAINED).sum().double()])[None]


def by_source(each: Tensor, targets: Tensor, owners: Tensor, sources: int) -> Tensor:
    """Return what `totals` does, of all and then of each source: (1 + sources, 2) fp64.

    owners: (B, T) int64, the number of the source of each target
    """
    rows = [totals(each, targets)]
    for number in range(sources):
        own = owners == number
        theirs = torch.where(own, each, 0.0), torch.where(own, targets, NOT_TRAINED)
        rows.append(totals(*theirs))
    return torch.cat(rows)


def result(sums: Sequence[Sequence[float]], heldout: HeldOut) -> Evaluation:
    """Return the result on a held-out set, and on each of its sources; no time.

    sums: Σ nll in nats and tokens, of all documents, then of each source if there are several
    """
    whole, *each = sums
    chat = any(part.chat for part in heldout.parts)
    parts = {
        part.label: figures(own, part.documents, None if part.chat else part.bytes)
        for part, own in zip(heldout.parts, each, strict=False)
        if own[1]
    }
    found = figures(whole, heldout.documents, None if chat else heldout.bytes)
    return replace(found, bytes=heldout.bytes, sources=parts)


def figures(sums: Sequence[float], documents: int, text_bytes: int | None) -> Evaluation:
    """Return the figures on some documents, without a time.

    sums: Σ nll in nats, and tokens
    text_bytes: in UTF-8, of the documents; None = some of them are conversations
    """
    nll, tokens = sums
    return Evaluation(
        loss=nll / tokens,
        perplexity=math.exp(min(nll / tokens, 700.0)),  # exp overflows a little above 700
        bits_per_byte=None if text_bytes is None else nll / (math.log(2) * text_bytes),
        tokens=round(tokens),
        bytes=text_bytes or 0,
        documents=documents,
        seconds=0.0,
    )
