"""Send weights from rank 0 into the shards of all ranks.

Rank 0 reads or initialises the weights and sends them in pieces; each rank keeps its rows. No other
rank ever has the whole model, not even in host memory. Tensors that are not in a checkpoint, such
as buffers of rotary frequencies, are sent as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain import heartbeat
from llmtrain.distributed.engines import state

_SENT = 8 << 20  # bytes that are sent at once


def share(model: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Send every rank its part of the weights of `whole`, and all buffers.

    model: the sharded model, which is filled.
    whole: the same model with its weights on rank 0, None on the other ranks.

    Collective. It needs `_SENT` bytes of extra memory on the device.
    """
    buffer = torch.empty(_SENT, dtype=torch.uint8, device=device)
    source = dict(whole.named_parameters()) if whole else {}
    for name, parameter in model.named_parameters():
        part = state.piece(name, parameter.detach())
        given = source[name].detach().reshape(-1) if whole else None
        _receive(part.data, part.start, math.prod(parameter.shape), given, buffer)
    others = dict(_other_tensors(whole)) if whole else {}
    for (owner, name), tensor in list(_other_tensors(model)):
        # On the device even if parameters are offloaded: those are gathered on it, buffers are not.
        into = torch.empty_like(tensor, device=device)
        given = others[owner, name].reshape(-1) if whole else None
        _receive(into.view(-1), 0, into.numel(), given, buffer)
        setattr(model.get_submodule(owner), name, into)


def _receive(into: Tensor, start: int, size: int, given: Tensor | None, buffer: Tensor) -> None:
    """Fill `into` with the elements from `start` on of a flat tensor that rank 0 sends.

    size: elements of the whole flat tensor.
    given: the whole flat tensor on rank 0, None on the other ranks.
    buffer: bytes on the device, for what is sent at once.
    """
    item = into.element_size()
    step = buffer.numel() // item
    for first in range(0, size, step):
        used = buffer[: min(step, size - first) * item]
        sent = used.view(into.dtype)
        if given is not None:
            sent.copy_(given[first : first + len(sent)])
        heartbeat.beat("sending the weights to all processes")
        dist.broadcast(used, src=0)
        low, high = max(first, start), min(first + len(sent), start + into.numel())
        if low < high:
            into[low - start : high - start].copy_(sent[low - first : high - first])


def _other_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield buffers, persistent or not, and tensors that are plain attributes of a module."""
    for owner, module in model.named_modules():
        found = {**vars(module), **module._buffers}
        for name, value in found.items():
            if isinstance(value, Tensor):
                yield (owner, name), value
