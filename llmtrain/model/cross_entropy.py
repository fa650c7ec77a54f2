"""The cross-entropy of a linear head, a chunk of rows at a time, without the logits of a batch.

The logits of a micro-batch are often its largest tensors: with 16 k tokens and 128 k entries they,
their copy in fp32 and its gradient take 25 GB. Here each chunk's logits are made, turned into
their gradient and used up, before the next chunk:

    forward, for each chunk    z = x·Wᵀ    p = softmax(z)    loss += max z − z[y] − log max p
                               dz = p − onehot(y)    dx = dz·W    dW += dzᵀ·x
    backward                   dx and dW times the gradient of the sum

The gradients are made in the forward, because the logits would otherwise be made twice. One
softmax, in the place of the logits, serves loss and gradient: max z − log max p is logsumexp, as
accurate as one that is computed apart. Products take the compute dtype, as in `F.linear` under
autocast. Softmax, loss, dx and the sum of dW are fp32. Where processes share the vocabulary, each
has the logits of its part; the maximum and the sum of a row are taken over all of them.

What a position weighs in the loss of a pair of answers is known only behind the forward.
`log_probs` therefore makes each chunk's logits twice, except below a head without a gradient:

    forward            log p[y] = −loss of each position
    backward           the chunks above, each row times its gradient
    a frozen head      dx in the forward, each row times its gradient in the backward

Only trained positions are in the chunks. In a conversation most are not: the head takes a share of
its time that is theirs. Their numbers are known where the batch was made, on the host; to look for
them on a GPU would make the host wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from llmtrain.types import NOT_TRAINED, Chunk

_CHUNKS = {
    # So many rows that the sum of dW is seldom read and written; its pieces stay in the cache.
    "cpu": Chunk(least_rows=256, logits_bytes=0, piece_bytes=4 * 2**20, wide=False),
    # Fewer rows starve the products, and the traffic of dW outweighs that of the logits.
    "cuda": Chunk(least_rows=2048, logits_bytes=512 * 2**20, piece_bytes=256 * 2**20, wide=True),
}
_SLAB = 2**20  # elements of dW that are multiplied, widened and added while a CPU's cache has them


class VocabularyPart(NamedTuple):
    """The part of a vocabulary whose logits a process computes.

    group: the processes that have the other parts
    first: the number of its first entry
    """

    group: dist.ProcessGroup
    first: int


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    all_trained: bool = False,
    trained: Tensor | None = None,
    vocabulary: VocabularyPart | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy of `softcap(scale · (hidden·weightᵀ + bias))`: () fp32, nats.

    hidden: (…, h), fp32 or the dtype of autocast.
    weight: (V, h).
    labels: (…) int64; `NOT_TRAINED` where a position has no loss.
    bias: (V,).
    token_weights: (…) fp32, factors of the positions' losses.
    softcap: c of c · tanh(z / c).
    z_loss: adds the gradient of z_loss · logsumexp², but nothing to the result.
    all_trained: whether no label is `NOT_TRAINED`.
    trained: (n,) int64, the positions in the flat labels that have a loss; None = they are all, or
        are looked for, which waits for a GPU.
    vocabulary: which part of the vocabulary weight and bias have; None = all. Each process of its
        group then gets the whole loss, and its part of the gradient of `hidden`, to be summed.
    chunk_rows: rows whose logits are in memory at once; None = chosen by device and V.

    The result has one backward, which fails if it is called again. From fp64 it is fp64.
    """
    settings = _LossSettings(scale, softcap, z_loss, all_trained, trained, vocabulary, chunk_rows)
    if torch.is_grad_enabled():
        result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, token_weights, settings
        )
        return result
    rows = _in_rows(hidden, weight, bias, labels, token_weights, settings)
    return _losses(rows, _NOTHING)[0].sum()


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    all_trained: bool = False,
    trained: Tensor | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """Return the loss of each position in nats, fp32 in the shape of `labels`; no gradient.

    It is 0 where a label is `NOT_TRAINED`. The sum has the bits of `linear_cross_entropy`, where
    the arguments are explained.
    """
    settings = _LossSettings(scale, softcap, 0.0, all_trained, trained, vocabulary, None)
    with torch.no_grad():
        rows = _in_rows(hidden, weight, bias, labels, None, settings)
        return _losses(rows, _NOTHING)[0].view(labels.shape)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    all_trained: bool = False,
    trained: Tensor | None = None,
    vocabulary: VocabularyPart | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the log-probability of each trained position's label, in order: (n,) fp32.

    Its values have the bits of `token_losses`, negated. The arguments are those of
    `linear_cross_entropy`. With a frozen head the result has one backward, which fails if it is
    called again. From fp64 it is fp64.
    """
    settings = _LossSettings(scale, softcap, 0.0, all_trained, trained, vocabulary, chunk_rows)
    if torch.is_grad_enabled():
        result: Tensor = _LogProbs.apply(hidden, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
        return result
    rows = _in_rows(hidden, weight, bias, labels, None, settings)
    return _log_probs(rows, _losses(rows, _NOTHING)[0])


def chunk_of(device_type: str) -> Chunk:
    """Return how much of the loss is in memory at once on a kind of device."""
    return _CHUNKS["cuda" if device_type == "cuda" else "cpu"]


class _LossSettings(NamedTuple):
    scale: float
    softcap: float | None
    z_loss: float
    all_trained: bool
    trained: Tensor | None
    vocabulary: VocabularyPart | None
    chunk_rows: int | None


class _Rows(NamedTuple):
    """The positions in a row, and the head, in the dtype of the products.

    hidden: (N, h); weight: (V, h); bias: (V,)
    trained: (n,), the positions with a loss; None = all N have one
    labels, factors: (n, 1), of the trained positions; factors None = all are 1
    wide: the dtype of everything but the products: fp32, or fp64 as hidden
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    trained: Tensor | None
    labels: Tensor
    factors: Tensor | None
    wide: torch.dtype
    settings: _LossSettings


def _in_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weights: Tensor | None,
    settings: _LossSettings,
) -> _Rows:
    if isinstance(weight, DTensor):
        raise TypeError("the head's weight is sharded: it must be gathered before its loss")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if _casts(device) else hidden.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    column, index = labels.reshape(-1, 1), settings.trained
    factors = None if token_weights is None else token_weights.reshape(-1, 1)
    if index is None and not settings.all_trained:
        index = (column[:, 0] != NOT_TRAINED).nonzero()[:, 0]
    if index is not None and index.shape[0] == column.shape[0]:
        index = None
    if index is not None:
        column = column[index]
        factors = None if factors is None else factors[index]
    operands = hidden.flatten(0, -2).to(dtype), weight.to(dtype)
    added = None if bias is None else bias.to(wide)
    return _Rows(*operands, added, index, column, factors, wide, settings)


class _Wanted(NamedTuple):
    """Which gradients are made with the loss."""

    hidden: bool
    weight: bool
    bias: bool


_NOTHING = _Wanted(False, False, False)


@dataclass(slots=True)
class _Made:
    """The gradients that were made, in fp32; None = it is not wanted, or there is none yet."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *others: Any,  # labels, token_weights, settings
    ) -> Tensor:
        rows = _in_rows(hidden, weight, bias, *others)
        losses, ctx.made = _losses(rows, _Wanted(*ctx.needs_input_grad[:3]))
        ctx.shape = hidden.shape
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """autograd casts each gradient to the dtype of its input."""
        if ctx.made is None:
            raise RuntimeError("linear_cross_entropy has one backward: its gradients were used up")
        made, ctx.made = ctx.made, None
        for one in (made.hidden, made.weight, made.bias):
            if one is not None:
                one.mul_(gradient)
        for_hidden = None if made.hidden is None else made.hidden.view(ctx.shape)
        return for_hidden, made.weight, made.bias, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _LossSettings,
    ) -> Tensor:
        rows = _in_rows(hidden, weight, bias, labels, None, settings)
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        # Whether a row of the gradient is that of its loss times a number that comes later.
        at_once = for_hidden and not for_weight and not for_bias
        losses, made = _losses(rows, _Wanted(at_once, False, False))
        ctx.shape, ctx.at_once, ctx.made, ctx.trained = hidden.shape, at_once, made, rows.trained
        if not at_once:
            device = hidden.device.type
            ctx.casts = device, torch.get_autocast_dtype(device), _casts(device)
            ctx.settings = settings._replace(trained=rows.trained, all_trained=True)
            ctx.save_for_backward(hidden, weight, bias, labels)
        return _log_probs(rows, losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """autograd casts each gradient to the dtype of its input."""
        factors = gradient.neg().unsqueeze(1)
        if ctx.at_once:
            if ctx.made is None:
                raise RuntimeError("log_probs of a frozen head has one backward")
            made, ctx.made = ctx.made, None
            if ctx.trained is not None:
                every = factors.new_zeros(made.hidden.shape[0], 1)
                factors = every.index_copy_(0, ctx.trained, factors)
            made.hidden.mul_(factors)
        else:
            device, dtype, enabled = ctx.casts
            with torch.autocast(device, dtype, enabled=enabled):
                hidden, weight, bias, labels = ctx.saved_tensors
                rows = _in_rows(hidden, weight, bias, labels, None, ctx.settings)
            wanted = _Wanted(*ctx.needs_input_grad[:3])
            _, made = _losses(rows._replace(factors=factors), wanted)
        for_hidden = None if made.hidden is None else made.hidden.view(ctx.shape)
        return for_hidden, made.weight, made.bias, None, None


def _log_probs(rows: _Rows, losses: Tensor) -> Tensor:
    """Return the log-probabilities of the trained positions, (n,). losses: as of `_losses`"""
    column = losses[:, 0] if rows.trained is None else losses[:, 0].index_select(0, rows.trained)
    return column.neg()


def _casts(device: str) -> bool:
    """Whether autocast is on."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _losses(rows: _Rows, wanted: _Wanted) -> tuple[Tensor, _Made]:
    """Return the loss of each position, times its factor, (N, 1) fp32, and the wanted gradients.

    Not many rows are one chunk, and then one piece, without views of parts and without room that is
    made before: a small model's step would pay for these.
    """
    device, count, trained = rows.hidden.device.type, rows.labels.shape[0], rows.trained
    if count == 0:
        return _without_rows(rows, wanted)
    most, made = chunk_of(device), _Made()
    with torch.autocast(device, enabled=False) if _casts(device) else nullcontext():
        vocabulary = rows.weight.shape[0]
        size = min(count, rows.settings.chunk_rows or most.rows(vocabulary))
        piece, wide, narrow = most.piece(vocabulary), rows.wide, rows.hidden.dtype
        products = wide if rows.hidden.is_cuda else narrow  # a CPU has no kernel for other ones
        # Made once: a heap that gets and frees these for each chunk grows by hundreds of MB.
        several = size < count
        logits = rows.hidden.new_empty(size, vocabulary, dtype=products) if several else None
        room = None if products == wide else _room(rows, min(size, piece))
        if wanted.hidden and trained is not None:
            made.hidden = torch.zeros_like(rows.hidden, dtype=wide)
        elif wanted.hidden and several:
            made.hidden = torch.empty_like(rows.hidden, dtype=wide)
        losses: list[Tensor] = []
        x_or_at, in_place = (rows.hidden, made.hidden) if trained is None else (trained, None)
        for x, labels, factors, dx in _split(size, x_or_at, rows.labels, rows.factors, in_place):
            at = None
            if trained is not None:
                at, x = x, rows.hidden.index_select(0, x)
            z = _product(x, rows.weight.t(), products, _first(logits, x))
            apart = products != narrow and any(wanted)
            dz = torch.empty_like(z, dtype=narrow) if apart else z
            pieces = _split(piece, z, labels, factors, dz if any(wanted) else None)
            losses += (_piece(rows, room, *one) for one in pieces)
            if wanted.hidden:
                dx = _product(dz, rows.weight, wide, dx)
                if made.hidden is not None and at is not None:
                    made.hidden.index_copy_(0, at, dx)
            if wanted.weight:
                made.weight = _add_product(dz.t(), x, made.weight, wide, room)
            if wanted.bias:
                summed = dz.sum(0, dtype=wide)
                made.bias = summed if made.bias is None else made.bias + summed
        if trained is None and not several:
            made.hidden = dx
        each = torch.cat(losses) if len(losses) > 1 else losses[0]
        if trained is not None:
            each = each.new_zeros(rows.hidden.shape[0], 1).index_copy_(0, trained, each)
        return each, made


def _without_rows(rows: _Rows, wanted: _Wanted) -> tuple[Tensor, _Made]:
    """Return what `_losses` does where no position is trained.

    The gradients are zeros, not missing ones: in their backward the ranks wait for each other.
    """
    operands = zip((rows.hidden, rows.weight, rows.bias), wanted, strict=True)
    zeros = [
        torch.zeros_like(one, dtype=rows.wide) if one is not None and asked else None
        for one, asked in operands
    ]
    return rows.hidden.new_zeros(rows.hidden.shape[0], 1, dtype=rows.wide), _Made(*zeros)


def _split(size: int, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Yield so many rows of each tensor at a time; of None, None."""
    if tensors[0].shape[0] <= size:
        yield tensors
        return
    split = (repeat(None) if one is None else one.split(size) for one in tensors)
    yield from zip(*split, strict=False)  # None is repeated without an end


def _first(tensor: Tensor | None, rows: Tensor) -> Any:
    """Return the first rows, as many as `rows` has; of None, None."""
    if tensor is None or tensor.shape[0] == rows.shape[0]:
        return tensor
    return tensor[: rows.shape[0]]


def _piece(
    rows: _Rows,
    room: _Room | None,
    z: Tensor,
    labels: Tensor,
    factors: Tensor | None,
    dz: Tensor | None,
) -> Tensor:
    """Return the losses of n rows, (n, 1); write the gradient of their products into `dz`, if any.

    z: the products, (n, V); used up
    dz: (n, V), in the place of `z` if both have one dtype
    """
    settings = rows.settings
    logits = z if room is None else _first(room.logits, z).copy_(z)
    if rows.bias is not None:
        logits += rows.bias
    if settings.scale != 1.0:
        logits *= settings.scale
    if settings.softcap is not None:
        logits.div_(settings.softcap).tanh_()
        slope = 1.0 - logits.square()
        logits *= settings.softcap
    change: Tensor | None = None
    if settings.vocabulary is None:
        at_label, largest = logits.gather(1, labels), logits.amax(1, keepdim=True)
        p = torch.softmax(logits, 1, out=logits)
        nll = (largest - at_label).sub_(p.amax(1, keepdim=True).log_())
    else:
        p, nll, at_label, labels, change = _softmax_of_part(logits, labels, settings.vocabulary)
    if dz is not None:
        if settings.z_loss:
            logsumexp = nll + at_label
            p *= 1.0 + 2.0 * settings.z_loss * logsumexp
        if change is None:
            p.scatter_(1, labels, -1.0, reduce="add")
        else:
            p.scatter_add_(1, labels, change)
        if settings.softcap is not None:
            p *= slope
        if settings.scale != 1.0:
            p *= settings.scale if factors is None else factors * settings.scale
        elif factors is not None:
            p *= factors
        if dz.dtype != p.dtype:
            dz.copy_(p)
    return nll if factors is None else nll * factors


def _softmax_of_part(
    logits: Tensor, labels: Tensor, part: VocabularyPart
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the softmax of (n, v) logits over the whole vocabulary, in their place, and more.

    The others are (n, 1): the losses, the logits of the labels, the labels' columns, and what is
    to be added to the softmax there for its gradient: −1, or 0 where another process has the label.

    Collective over the group: a maximum, then a sum of two numbers for each row.
    """
    columns = labels - part.first
    is_here = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.clamp(0, logits.shape[1] - 1)
    largest = logits.amax(1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
    at_label = logits.gather(1, columns).masked_fill_(~is_here, 0.0)
    p = logits.sub_(largest).exp_()
    sums = torch.cat([p.sum(1, keepdim=True), at_label], 1)
    dist.all_reduce(sums, group=part.group)
    total, at_label = sums[:, :1], sums[:, 1:]
    nll = largest - at_label + total.log()
    return p.div_(total), nll, at_label, columns, -is_here.to(p.dtype)


class _Room(NamedTuple):
    """Where a CPU turns narrow products into fp32: it has no kernel that multiplies into it.

    logits: (piece, V) fp32
    product, widened: (slab, h), a part of dW, narrow and in fp32
    """

    logits: Tensor
    product: Tensor
    widened: Tensor


def _room(rows: _Rows, piece: int) -> _Room:
    vocabulary, hidden = rows.weight.shape
    product = rows.weight.new_empty(min(vocabulary, max(1, _SLAB // hidden)), hidden)
    return _Room(
        rows.weight.new_empty(piece, vocabulary, dtype=rows.wide),
        product,
        torch.empty_like(product, dtype=rows.wide),
    )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a·b in a dtype, in `out` if there is one."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    product = torch.mm(a, b)
    return product.to(dtype) if out is None else out.copy_(product)


def _add_product(
    a: Tensor, b: Tensor, total: Tensor | None, dtype: torch.dtype, room: _Room | None
) -> Tensor:
    """Return the sum plus a·b, in its place, without a second tensor of its size.

    total: None = a·b is the first
    """
    if room is not None:
        # Do as `_add_product`, with products that are narrow and widened apart.
        sums = a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if total is None else total
        for part, slab in _split(room.product.shape[0], a, sums):
            product = torch.mm(part, b, out=_first(room.product, part))
            if total is None:
                slab.copy_(product)
            else:  # an addition of two dtypes takes three times as long
                slab += _first(room.widened, part).copy_(product)
        return sums
    if total is None:
        return _product(a, b, dtype)
    if a.dtype == dtype:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)
