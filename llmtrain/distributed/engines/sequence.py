"""Sequence parallelism: processes share the positions of each row, and in attention the heads.

Everything in a model but its attention treats a position by itself. So each of n processes computes
T/n positions of every row, and its activations take a share of the memory. In front of the
attention processes exchange heads for positions, and behind it positions for heads:

    process 0    positions 0 … T/2, all heads  ─┐   ┌─  all positions, heads 0 … H/2
    process 1    positions T/2 … T, all heads  ─┴───┴─  all positions, heads H/2 … H

So the attention itself, and what it knows of documents, is that of whole rows. Weights are not cut:
to gradients the processes are further data ranks. (DeepSpeed calls this Ulysses.)

An exchange is made only where a forward is told that its rows are parts (`in_parts`). Without it
each process computes the rows that it gets, whole, as where samples are written.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmtrain.config.schema import Config
from llmtrain.errors import Problem
from llmtrain.types import ModelCut

KEY = "distributed.sequence_parallel"
# What transformers' attention interface calls: module, query, key, value, mask, and keywords.
Attention = Callable[..., tuple[Tensor, Tensor | None]]


def problems(config: Config, model: PreTrainedConfig, cut: ModelCut) -> Iterator[Problem]:
    """Yield why rows of this config cannot be shared by the processes of a launch."""
    size, described = cut.sequence, model.get_text_config()
    if cut.weights > 1:
        others = f"{cut.tensor} × {cut.pipeline} (tensor × pipeline parallelism)"
        expected = f"1 beside {others}: they are not tried together"
        yield Problem(KEY, size, expected, f"{KEY}=1")
    yield from compile_problems(config, f"with {KEY} = {size}", "exchanges")
    seq_len = config.data.seq_len
    if seq_len % size:
        expected = f"a multiple of the {size} processes that share each row"
        below = seq_len // size * size
        remedy = f"{below} or {below + size}" if below else f"{size}"
        yield Problem("data.seq_len", seq_len, expected, remedy)
    heads = getattr(described, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        expected = f"a divisor of the {heads} query heads, of which each process computes a share"
        yield Problem(KEY, size, expected, ", ".join(fitting))
    of_all = "positions of a micro-batch, and no process has them"
    yield from router_problems(described, f"with {KEY} = {size}", of_all)


def compile_problems(config: Config, with_it: str, what: str) -> Iterator[Problem]:
    """Yield the problem of a model that is cut, of which something cannot be compiled."""
    if (compiled := config.training.compile) not in ("auto", "off"):
        expected = f"off {with_it}, whose {what} are not compiled"
        yield Problem("training.compile", compiled, expected, "training.compile=auto")


def router_problems(described: PreTrainedConfig, with_it: str, of_all: str) -> Iterator[Problem]:
    """Yield the problem of a router's loss where a model is cut. described: that of its text"""
    if getattr(described, "output_router_logits", False):
        key = "model.config.output_router_logits"
        expected = f"false {with_it}: the loss of a router is one of all {of_all}"
        yield Problem(key, True, expected, f"{key}=false")


def refusal(reason: str, cut: ModelCut) -> Iterator[Problem]:
    """Yield the problem of a model whose rows cannot be shared. reason: why not; "" = they can"""
    if reason:
        expected = f"1: processes cannot share the rows of this model, as {reason}"
        yield Problem(KEY, cut.sequence, expected, f"{KEY}=1")


def exchanged(attend: Attention, group: dist.ProcessGroup) -> Attention:
    """Return an attention that exchanges heads for positions where its rows are parts of rows.

    attend: takes (B, H, T, D) and returns (B, T, H, D), of whole rows
    group: the processes that have the parts, in their order

    It takes and returns T/n positions. Raises ValueError if n does not divide the heads of a query.
    """
    size = group.size()

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not more.pop("in_parts", False):
            return attend(module, query, key, value, mask, **more)
        if query.shape[1] % size:
            raise ValueError(f"{size} processes cannot share {query.shape[1]} heads")
        repeats = size // math.gcd(key.shape[1], size)  # so many, as each process gets whole heads
        device = query.device.type
        # What autocast would do in the attention: fewer bytes are exchanged, and the same result.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        heads = [
            _exchange(one if dtype is None else one.to(dtype), group)
            for one in (query, _repeat(key, repeats), _repeat(value, repeats))
        ]
        out, weights = attend(module, *heads, mask, **more)
        return _exchange(out, group), weights

    return attention


def _repeat(heads: Tensor, times: int) -> Tensor:
    return heads if times == 1 else heads.repeat_interleave(times, 1)


@torch.compiler.disable(reason="an exchange")  # type: ignore[no-untyped-call, untyped-decorator]
def _exchange(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each process its share of dimension 1, and join in dimension 2 what all of them send.

    (B, H, T/n, D) becomes (B, H/n, T, D), and what comes of it, (B, T, H/n, D), (B, T/n, H, D).
    """
    result: Tensor = _Exchange.apply(part, group, 1, 2)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """An exchange whose gradient is the one back. It keeps nothing for the backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.dimensions = group, (joined, cut)
        sent = torch.stack(part.chunk(group.size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, ctx.group, *ctx.dimensions), None, None, None  # type: ignore[no-untyped-call]
