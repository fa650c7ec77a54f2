"""The loss on the held-out documents, and texts that the model writes while it trains.

An evaluation is exactly one pass, on any number of processes. If the documents come from several
sources, the same pass also gives the loss on each of them.

Samples have no effect on the training: `generate` of transformers is not used, since it draws from
the global random state. All ranks run the same forwards together, so that sampling also works where
each holds a part of the weights.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor

from llmtrain import faults, system
from llmtrain.data.heldout import HeldOut
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.hashing import mix
from llmtrain.model.attention import in_parts, on_device
from llmtrain.model.compile import uncompiled
from llmtrain.training.due import agreed_stop
from llmtrain.training.pairs import Scores, pair_result, pair_totals
from llmtrain.training.run import Run
from llmtrain.training.step import (
    flags,
    hide,
    micro_batches,
    padding_keywords,
    shown,
    target_keywords,
)
from llmtrain.types import NOT_TRAINED, Batch, Evaluation, MicroBatch, RankLayout, Sample


def evaluate(run: Run) -> Evaluation | None:
    """Score every held-out token once; return None if an agreed stop interrupted the evaluation.

    All ranks make the same number of rounds. Where blocks are missing in the last one, blocks
    without scored tokens take their place.
    """
    heldout, seq_len = run.data.heldout, run.config.data.seq_len
    assert heldout is not None, "due.evaluation is false where nothing is held out"
    start = time.perf_counter()
    ranks, layout, size = run.ranks, run.layout, run.built.micro_batch_size

    def hidden(labels: np.ndarray, starts: Sequence[np.ndarray]) -> MicroBatch:
        if run.data.manifest.hides_documents:
            return hide(run, starts)
        return padding_keywords(run, labels)

    scored: list[Tensor] = []
    pairs: list[Scores] = []  # in a run on pairs, whose losses are computed once all are scored
    with run.engine.evaluating():
        rounds = rounds_of(heldout, seq_len, layout.data_rank, layout.data_size, size)
        for number, blocks in enumerate(rounds, 1):
            faults.hit("eval.batch", step=run.step)
            system.beat("a batch of the evaluation", number, len(rounds))
            stops = agreed_stop(ranks, flags(run))
            if stops:
                run.due.ask(stops)
                return None
            if run.data.answers:
                (forward,) = micro_batches(run, heldout_batch(run, heldout, blocks))
                parts = torch.from_numpy(heldout.pair_parts(blocks, seq_len))
                pairs.append(Scores(run.model(each=True, **forward), forward["pairs"], parts))
            else:
                how = (run.device, layout, run.model, partial(shown, run), hidden)
                scored.append(score_blocks(heldout, blocks, seq_len, *how))
    if run.data.answers:
        count = max(1, len(heldout.parts))
        given = (pairs, run.config.preference, run.device, count)
        evaluation = pair_result(pair_totals(*given, tells=layout.tells_pairs).tolist(), heldout)
    else:
        total = reduce(torch.add, scored)
        contribution = total if layout.tells_loss else torch.zeros_like(total)
        evaluation = result(sum_over_ranks(contribution).tolist(), heldout)
    return replace(evaluation, seconds=time.perf_counter() - start)


def heldout_batch(run: Run, heldout: HeldOut, blocks: Sequence[int]) -> Batch:
    """Return some held-out blocks of pairs as a batch of one micro-batch."""
    seq_len, hides = run.config.data.seq_len, run.data.manifest.hides_documents
    ids, labels, starts = zip(*(heldout.block(g, seq_len) for g in blocks), strict=True)
    wanted = np.stack(labels)
    return Batch(
        ids=np.stack(ids),
        labels=wanted,
        trained_tokens=int((wanted != NOT_TRAINED).sum()),
        starts=starts if hides else None,
        cursors={},
        digest=0,
        first_block=blocks[0] - run.layout.data_rank,
        sources={},
        counts={},
        wait_seconds=0.0,
        pairs=heldout.pairs_of(blocks, seq_len),
    )


def rounds_of(
    heldout: HeldOut, seq_len: int, rank: int, world_size: int, size: int
) -> list[list[int]]:
    """Return the blocks of each round of a process: g ≡ r (mod W), `size` of them at a time."""
    count = math.ceil(heldout.num_blocks(seq_len) / (world_size * size))
    return [
        [rank + world_size * (first + k) for k in range(size)]
        for first in range(0, count * size, size)
    ]


def score_blocks(
    heldout: HeldOut,
    blocks: Sequence[int],
    seq_len: int,
    device: torch.device,
    layout: RankLayout,
    model: Callable[..., Tensor],
    shown: Callable[[np.ndarray], int],
    hidden: Callable[[np.ndarray, Sequence[np.ndarray]], MicroBatch],
) -> Tensor:
    """Return Σ nll in nats and tokens, of all documents, then of each source, if there are several.

    layout: says which positions of each row are scored here
    model: called as `LossModule.forward`
    shown: returns how many positions of rows with these labels the model is shown
    hidden: returns the keywords that hide padding or other documents, by labels and starts

    Returns (1 + sources, 2) fp64.
    """
    ids, labels, starts = zip(*(heldout.block(g, seq_len) for g in blocks), strict=True)
    width = shown(np.stack(labels))
    wanted, positions = np.stack(labels)[:, :width], layout.positions(width)
    given: MicroBatch = {
        "input_ids": on_device(device, np.stack(ids)[:, positions].astype(np.int64))
    }
    targets = target_keywords(wanted[:, positions], device, whole=False)
    row = given | targets | hidden(wanted, starts)
    each = model(each=True, **(row if layout.sequence_size == 1 else in_parts(row, positions)))
    if len(heldout.parts) < 2:
        return totals(each, targets["labels"])
    owners = np.stack([heldout.block_parts(g, seq_len)[positions] for g in blocks])
    return by_source(each, targets["labels"], on_device(device, owners), len(heldout.parts))


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
        mask = owners == number
        theirs = torch.where(mask, each, 0.0), torch.where(mask, targets, NOT_TRAINED)
        rows.append(totals(*theirs))
    return torch.cat(rows)


def result(sums: Sequence[Sequence[float]], heldout: HeldOut) -> Evaluation:
    """Return the result on a held-out set, and on each of its sources; no time.

    sums: Σ nll in nats and tokens, of all documents, then of each source if there are several
    """
    whole, *each = sums
    chat = any(part.chat for part in heldout.parts)
    parts = {
        part.label: figures(part_sums, part.documents, None if part.chat else part.bytes)
        for part, part_sums in zip(heldout.parts, each, strict=False)
        if part_sums[1]
    }
    evaluation = figures(whole, heldout.documents, None if chat else heldout.bytes)
    return replace(evaluation, bytes=heldout.bytes, sources=parts)


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


_NEW_TOKENS = 64
_TEMPERATURE = 0.5  # low, since a model that is still learning gives no token a high probability
_SEED_STREAM = 8  # for `mix`
_NOTHING = -1  # sent in place of a token's id to end the text


def sample(run: Run) -> list[Sample]:
    """Return one continuation of each of `evaluation.prompts`; [] if a stop was asked for.

    The last step does not count as a stop: people want to see what the finished model writes.
    """
    if run.due.stop_reason is not None:
        return []
    samples = []
    with run.engine.evaluating(), uncompiled():  # each token is another shape
        for prompt in run.config.evaluation.prompts:
            start = time.perf_counter()
            text = _continue(run, prompt)
            samples.append(Sample(prompt, text, time.perf_counter() - start))
    return samples


def _continue(run: Run, prompt: str) -> str:
    """Return what the model writes. Where conversations are trained, the prompt is of a user."""
    tokenizer, chat = run.data.tokenizer, run.data.encoder.chat
    if chat is not None and chat.has_template:
        ids = chat.prompt_ids([{"role": "user", "content": prompt}])
        ends = {tokenizer.eos, *chat.check().ids}
    else:
        start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        ids, ends = [start, *tokenizer.encode(prompt).tolist()], {tokenizer.eos}
    given = len(ids)
    generator = torch.Generator(run.device)
    generator.manual_seed(mix(run.config.run.seed, _SEED_STREAM, run.step))
    while len(ids) < given + _NEW_TOKENS:
        system.beat("a token of a sample", len(ids) - given + 1, _NEW_TOKENS)
        context = torch.tensor([ids[-run.config.data.seq_len :]], device=run.device)
        logits = run.model(context)[0] / _TEMPERATURE  # (V,)
        # Ranks whose logits differ by a bit could draw different tokens and end at different
        # lengths, but with sharded weights each forward needs all ranks. So rank 0 draws for all.
        drawn = _draw(logits, generator) if run.ranks.rank == 0 else _NOTHING
        token = int(run.ranks.broadcast(b"%d" % drawn))
        if token == _NOTHING or token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[given:])


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    """Draw a token; return _NOTHING if the model has diverged. logits: (V,)."""
    if not torch.isfinite(logits).all():
        return _NOTHING
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))
