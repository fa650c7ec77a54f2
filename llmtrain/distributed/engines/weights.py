"""Send weights from rank 0 into the shards of all ranks.

One rank reads or draws the weights, and sends them a piece at a time; each rank keeps its rows. No
other rank holds the whole model, not even in host memory. The trap: other tensors have to be sent
as well, above all buffers that no checkpoint has (rotary frequencies).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain import heartbeat
from llmtrain.distributed.engines import state

_SENT = 64 << 20  # bytes that are under way at once


def share(model: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Give every rank its part of the weights, and all buffers, of rank 0's `whole`.

    model: the sharded one.
    whole: the same model with its weights, on rank 0; elsewhere None.

    Collective. Extra memory: `_SENT` bytes on the device.
    """
    source = dict(whole.named_parameters()) if whole else {}
    for name, parameter in model.named_parameters():
        part = state.piece(name, parameter.detach())
        given = source[name].detach().reshape(-1) if whole else None
        _receive(part.data, part.start, math.prod(parameter.shape), given, device)
    others = dict(_other_tensors(whole)) if whole else {}
    for (owner, name), tensor in list(_other_tensors(model)):
        # On the device, also where parameters are offloaded: they are gathered there, these not.
        into = torch.empty_like(tensor, device=device)
        given = others[owner, name].reshape(-1) if whole else None
        _receive(into.view(-1), 0, into.numel(), given, device)
        setattr(model.get_submodule(owner), name, into)


def _receive(
    into: Tensor, start: int, size: int, given: Tensor | None, device: torch.device
) -> None:
    """Fill `into` with a flat tensor of `size` from `start` on. given: all of it, on rank 0."""
    step = max(1, _SENT // into.element_size())
    for first in range(0, size, step):
        sent = torch.empty(min(step, size - first), dtype=into.dtype, device=device)
        if given is not None:
            sent.copy_(given[first : first + len(sent)])
        heartbeat.beat("sending the weights to all processes")
        dist.broadcast(sent.view(torch.uint8), src=0)
        low, high = max(first, start), min(first + len(sent), start + into.numel())
        if low < high:
            into[low - start : high - start].copy_(sent[low - first : high - first])


def _other_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Buffers, persistent or not, and tensors that are plain attributes of a module."""
    for owner, module in model.named_modules():
        found = {**vars(module), **module._buffers}
        for name, value in found.items():
            if isinstance(value, Tensor):
                yield (owner, name), value
