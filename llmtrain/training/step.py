"""One optimizer update, which `loop.py` calls in each step, and its parts."""

import math
import random  # noqa: TID251  # not drawn from here; models and libraries may
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from llmtrain import faults, system
from llmtrain.data.batches import NO_PAIRS
from llmtrain.distributed.engines import engine
from llmtrain.distributed.engines.pipeline import PipelineEngine
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.hashing import mix, splitmix64
from llmtrain.model import attention
from llmtrain.model.attention import (
    document_tensors,
    in_parts,
    needed_rows,
    on_device,
    padding_tensors,
)
from llmtrain.pairs import PAIR_SLOTS, Pairs, PairTensors
from llmtrain.training.pairs import in_halves, measure_divergence, pair_tensors
from llmtrain.training.run import Run
from llmtrain.types import NOT_TRAINED, Batch, Flags, MicroBatch, RankLayout, StepVector

DRAWS = 7  # a stream of `mix`


def begin(run: Run, step: int) -> None:
    """Start the clock of a step, seed its draws, keep the state to restore if its data fails."""
    faults.hit("loop.step", step=step)
    layout = run.layout
    part = layout.data_rank * layout.sequence_size + layout.sequence_rank
    seed_generators(run.device, run.config.run.seed, part, step)
    run.feed.begin(step)
    run.meter.begin(step)
    run.signals.begin()
    if run.log.profile is not None:
        run.log.profile.begin(step)


def seed_generators(device: torch.device, seed: int, part: int, step: int) -> None:
    """Seed dropout and whatever else draws in a step, on the host and on the device.

    What is drawn depends on nothing before the step, so there is no state to save, and a resumed
    run draws what an uninterrupted one does.

    part: number of this rank's part of the blocks and their positions; others draw other numbers
    """
    key = splitmix64(_stream(seed, part) ^ step)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # the legacy state that libraries draw from
    torch.default_generator.manual_seed(key)  # `torch.manual_seed` asks for every kind of device
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def _seed_group(run: Run, number: int) -> None:
    """Seed the draws of this rank's next micro-batch, whichever rank it is on.

    number: of those before it in this step; `begin` seeds the first one
    """
    layout = run.layout
    group = layout.data_rank + layout.data_size * number
    seed_generators(run.device, run.config.run.seed, group, run.step + 1)


@lru_cache(1)
def _stream(seed: int, part: int) -> int:
    return mix(seed, DRAWS, part)


def update(run: Run, batch: Batch, factor: float) -> None:
    """Make one optimizer update. Queues work on the device, and does not wait for this work.

    The gradient is that of the mean loss over all trained tokens of the step on all ranks, however
    the blocks are distributed. DDP averages gradients over data ranks, hence the factor in `scale`.
    """
    if run.config.training.same_bits:
        batch = in_groups(batch, group_order(len(batch.ids), run.built.micro_batch_size))
    scale = gradient_scale(run, batch)  # () on the device
    losses: list[Tensor] = []  # each () fp32, summed over trained tokens; with pairs (1 + K,) fp64
    routers: list[Tensor] = []  # the same of the router's loss, if the model has one
    forwards, driver = micro_batches(run, batch), run.engine  # device tensors, each (B, T)
    if run.data.answers == "feedback":
        measure_divergence(run, forwards)
    for loss in driver.forward_backward(forwards, scale):
        losses.append(loss)
        if run.config.training.same_bits:
            _seed_group(run, len(losses))
        if (added := run.built.loss.router_loss) is not None:
            routers.append(added)
    system.beat("the reduction of a step")
    sums = step_vector(run, batch, losses, routers)  # fp64, of this rank
    if run.layout.world_size > 1:
        sum_over_ranks(sums.data)  # of all of them, in one reduction
    driver.clip(sums, run.max_grad_norm)  # decided on the device, as is the skip below
    run.checkpoints.wait_snapshot()  # a background save may still be copying these weights
    driver.step(factor, sums)  # a non-finite update is never applied
    run.meter.send(sums, driver.norm(sums))  # received at the next boundary


def gradient_scale(run: Run, batch: Batch) -> Tensor:
    """Return processes that add gradients up / the step's trained tokens: () fp32 on the device.

    In a run on pairs their number takes the place of the tokens. It is added up over the ranks only
    where they may have different ones.
    """
    layout, exact = run.layout, run.config.training.same_bits
    local_count = batch.trained_tokens if batch.pairs is None else len(batch.pairs.rows)
    ranks = 1 if exact else layout.replicas  # whose engine adds gradients up, and no mean of them
    if layout.data_size == 1 or run.data.manifest.always_full:
        return _scale(ranks, max(layout.data_size * local_count, 1), run.device)
    contribution = np.array(local_count if layout.leads else 0, np.float64 if exact else np.float32)
    return (ranks / sum_over_ranks(on_device(run.device, contribution)).clamp(min=1)).float()


@lru_cache(maxsize=1)
def _scale(ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Return ranks / tokens; in most runs every step has as many. torch has the reciprocal too."""
    return on_device(device, np.array(np.float32(1 / tokens) * ranks, np.float32))


def micro_batches(run: Run, batch: Batch) -> list[MicroBatch]:
    """Return the keywords of `LossModule.forward` for each micro-batch, tensors on the device.

    Where processes share each row, they are those of this process's positions.
    """
    device, ids = run.device, batch.ids[:, :-1].astype(np.int64)
    size, count = run.built.micro_batch_size, len(ids)
    parts = [slice(first, first + size) for first in range(0, count, size)]
    whole = batch.trained_tokens == batch.labels.size
    pairs = batch.pairs
    if pairs is None and run.data.answers:  # the data of this rank failed
        pairs = NO_PAIRS
    if run.data.manifest.packing == "single":
        return [_padded(run, ids[part], batch.labels[part], pairs, part) for part in parts]
    layout, labels = run.layout, batch.labels
    if shared := layout.sequence_size > 1:
        positions = layout.positions(labels.shape[1])
        ids, labels = ids[:, positions], labels[:, positions]
    rows: list[MicroBatch] = [
        {"input_ids": on_device(device, ids[part])}
        | target_keywords(labels[part], device, whole=whole)
        for part in parts
    ]
    if batch.starts is not None:  # else documents may attend to each other
        rows = [row | hide(run, batch.starts[part]) for row, part in zip(rows, parts, strict=True)]
    if pairs is not None:
        place = positions if shared else slice(None)
        for row, part in zip(rows, parts, strict=True):
            row["pairs"] = pairs_of(run, pairs, part, batch.labels[part], place)
    return [in_parts(row, positions) for row in rows] if shared else rows


def group_order(count: int, size: int) -> np.ndarray:
    """Return the order in which a rank's blocks of a step are trained with `same_bits`, (n,) int64.

    Of n micro-batches the k-th has blocks k, k + n, k + 2n … of this rank. So it has the same ones
    on any number of processes: of a step's C micro-batches, those with equal numbers modulo C.

    count: this rank's blocks; size: of them, those of a micro-batch
    """
    return np.arange(count).reshape(size, count // size).T.ravel()


def in_groups(batch: Batch, order: np.ndarray) -> Batch:
    """Return the blocks of a step in another order. order: as of `group_order`"""
    return replace(
        batch,
        ids=batch.ids[order],
        labels=batch.labels[order],
        starts=None if batch.starts is None else tuple(batch.starts[row] for row in order),
        pairs=None if batch.pairs is None else batch.pairs.of_rows(order),
    )


def _padded(
    run: Run, ids: np.ndarray, labels: np.ndarray, pairs: Pairs | None, part: slice
) -> MicroBatch:
    """Return the keywords of a micro-batch with a document a row, cut behind the longest."""
    if pairs is not None:
        ids, labels = in_halves(ids), in_halves(labels)
    width = shown(run, labels)
    labels, positions = labels[:, :width], run.layout.positions(width)
    targets = target_keywords(labels[:, positions], run.device, whole=False)
    row = {"input_ids": on_device(run.device, ids[:, positions])} | targets
    row |= padding_keywords(run, labels)
    if pairs is not None:
        row["pairs"] = pairs_of(run, pairs, part, labels, positions)
    return row if run.layout.sequence_size == 1 else in_parts(row, positions)


def pairs_of(
    run: Run, pairs: Pairs, part: slice, labels: np.ndarray, positions: slice
) -> PairTensors:
    """Return what the loss of the pairs in some blocks is computed from.

    part: numbers of the blocks
    labels, positions: as `pair_tensors` takes them
    """
    theirs = pairs.of_blocks(part.start, part.stop)
    column, asked = run.data.reference, run.config.preference
    known = np.zeros((len(theirs.keys), 2)) if column is None else column.of(theirs.keys)
    how = (theirs, labels, positions, known, asked, run.device)
    return pair_tensors(*how, halves=run.data.manifest.packing == "single")


def shown(run: Run, labels: np.ndarray) -> int:
    """Return how many positions of these rows the model is shown. labels: (B, T) int64"""
    if run.data.manifest.packing != "single" or isinstance(run.engine, PipelineEngine):
        return int(labels.shape[1])  # all micro-batches of a pipeline have one shape
    if run.config.preference.scores:  # a score is read behind the last label
        labels = np.concatenate([labels[:, :1], labels[:, :-1]], axis=1)
    width = needed_rows(labels, compiled=run.built.compiled != "off")
    parts = run.layout.sequence_size
    return -(-width // parts) * parts


def padding_keywords(run: Run, labels: np.ndarray) -> MicroBatch:
    """Return the keywords of `LossModule.forward` for the padding of rows. labels: (B, T) int64"""
    if run.data.manifest.packing != "single":
        return {}
    by_length = attention.rope_change(run.built.model) is not None
    routed = run.built.loss.has_router_loss
    return padding_tensors(labels, run.device, by_length=by_length, routed=routed)


def target_keywords(labels: np.ndarray, device: torch.device, *, whole: bool) -> MicroBatch:
    """Return the keywords of `LossModule.forward` for labels that are on the host.

    labels: (B, T) int64
    whole: whether no label is `NOT_TRAINED`, where this is known; else they are looked through
    """
    keywords: MicroBatch = {"labels": on_device(device, labels), "all_trained": True}
    if not whole:
        flat = np.flatnonzero(labels != NOT_TRAINED)
        if len(flat) < labels.size:
            keywords |= {"all_trained": False, "trained": on_device(device, flat)}
    return keywords


def hide(run: Run, starts: Sequence[np.ndarray]) -> MicroBatch:
    """Return the tensors that hide documents from each other. starts: as in `Batch`."""
    built, seq_len = run.built, run.config.data.seq_len
    assert built.hiding is not None, "a batch has starts only where documents are hidden"
    compiled = built.compiled != "off"
    return document_tensors(starts, seq_len, built.hiding, run.device, compiled=compiled)


def flags(run: Run, *, look: bool = True) -> Flags:
    """Return the requests and the state of the save that this rank reports to the others.

    look: as `Requests.flags` takes it
    """
    asked, writer = run.requests.flags(run.signals.reason, look=look), run.checkpoints.flags()
    return asked._replace(**writer) if any(writer.values()) else asked


def step_vector(
    run: Run, batch: Batch, losses: Sequence[Tensor], routers: Sequence[Tensor] = ()
) -> StepVector:
    """Return this rank's part of the step's vector.

    losses: of the micro-batches, () fp32 each; in a run on pairs (1 + K,) fp64, with the sums of
        `PAIR_SLOTS` behind the loss
    routers: of the micro-batches, () fp32 each; none without a router loss
    """
    layout, pairs = run.layout, run.data.answers is not None
    others = min(len(routers), 1) + pairs * len(PAIR_SLOTS)
    if not (layout.tells_pairs if pairs else layout.tells_loss):
        losses, routers = (), [torch.zeros_like(router) for router in routers]
    sums: list[Tensor] = []  # of the pairs, if there are any
    if pairs and losses:
        every = torch.stack(list(losses))
        losses, sums = every[:, 0].unbind(), [every[:, 1:].sum(0)]
    elif pairs:
        sums = [torch.zeros(len(PAIR_SLOTS), dtype=torch.float64, device=run.device)]
    squares = run.engine.squares()
    labels = run.data.manifest.labels
    failed = run.feed.error is not None
    asked = flags(run, look=run.due.anything(run.step + 1))
    host_values = host_part(batch, asked, layout, labels, failed=failed)
    if not engine.is_asynchronous(run.device):
        loss_sum, square_sum = sum(loss.item() for loss in losses), squares.item()
        bad = not math.isfinite(loss_sum + square_sum)
        numbers = [loss_sum, square_sum, bad, *host_values]
        if sums:
            numbers += sums[0].tolist()
        if routers:
            numbers.append(sum(router.item() for router in routers))
        return StepVector(on_device(run.device, np.array(numbers, np.float64)), others)
    total = _total(losses) if losses else torch.zeros_like(squares)
    both = total + squares
    device = torch.stack([total, squares, both - both != 0])  # inf − inf and NaN − NaN are NaN
    added = [_total(routers)[None]] if routers else []
    host = on_device(run.device, np.array(host_values))
    return StepVector(torch.cat([device, host, *sums, *added]), others)


def _total(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum, () fp64, in the order in which `sum` adds up numbers on the host."""
    return reduce(torch.add, losses[1:], losses[0].double())


def host_part(
    batch: Batch, flags: Flags, layout: RankLayout, labels: tuple[str, ...], *, failed: bool
) -> list[float]:
    """Return `SLOTS` after the first three, in their order, then each source's trained tokens.

    What all processes of a group have read alike is 0 on all but the one that tells it.
    """
    if not layout.leads:
        return [failed, 0, 0, 0, 0, 0, *flags, 0, 0, 0, *(0 for _ in labels)]
    limbs = [(batch.digest >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    wait, padding_only = batch.wait_seconds / layout.data_size, not batch.sources
    tokens = [batch.sources.get(label, 0) for label in labels]
    whole = (padding_only, batch.ended, batch.real_tokens)
    return [failed, *limbs, wait, *flags, *whole, *tokens]
