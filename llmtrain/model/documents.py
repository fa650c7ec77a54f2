"""The positions and borders of a micro-batch's documents, as arguments of the model.

    starts         [0, 3] [0]               two rows of five tokens
    position_ids   [0 1 2 0 1] [0 1 2 3 4]
    cu_seq_lens    0 3 5 10                 borders in the rows joined end to end
    max_length     5

For a compiled model, to which another number of documents would be another shape:

    cu_seq_lens    0 3 5 10 10 10 10 10     the last border, up to a power of two
    max_length     5                        always seq_len

Kernels of state-space and linear attention layers take such borders too, on CUDA, if all rows are
one (`JOINED`):

    position_ids   [0 1 2 0 1 0 1 2 3 4]    (1, B·T), so the model gets the ids in that shape
    seq_idx        [0 0 0 1 1 2 2 2 2 2]

Rows of one document each (packing single) need none of them: padding is behind the document, where
a causal model does not see it. Such rows are cut behind the last position that any of them needs.
Only a rope that depends on length and the loss of a router have to be told what is padding.

They are computed in numpy. torch would start its threads for arrays of this size, which takes up to
milliseconds on busy cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.model.attention import NAME
from llmtrain.types import NOT_TRAINED

JOINED = "joined"  # in place of an attention's name: borders for all kernels, rows end to end
STEP = 64  # positions: kernels are no slower for a row rounded up to it


def document_tensors(
    starts: Sequence[np.ndarray],
    seq_len: int,
    name: str,
    device: torch.device,
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `LossModule.forward` that hide documents from each other.

    starts: as in `Batch`, one array a row.
    name: the model's attention, or `JOINED`.
    compiled: whether the model is compiled.

    The result has position_ids, (B, T) int64, and for `llmtrain` attention also cu_seq_lens,
    (n + 1,) int32, and max_length. For `JOINED` it has these too, position_ids as (1, B·T), and
    seq_idx, (1, B·T) int32, the number of each position's document. A compiled model gets
    cu_seq_lens with empty documents at the end, so that few lengths occur. Copies to CUDA do not
    wait for the device.
    """
    total = len(starts) * seq_len
    # The documents of the rows joined end to end.
    first = np.concatenate([row.astype(np.int64) + i * seq_len for i, row in enumerate(starts)])
    lengths = np.diff(first, append=total)
    positions = np.arange(total) - np.repeat(first, lengths)
    rows = 1 if name == JOINED else len(starts)
    found: dict[str, Any] = {"position_ids": on(device, positions.reshape(rows, -1))}
    if name == JOINED:
        numbers = np.repeat(np.arange(len(first), dtype=np.int32), lengths)
        found["seq_idx"] = on(device, numbers[None])
    if name in (NAME, JOINED):
        borders = np.append(first, total).astype(np.int32)
        if compiled:
            empty = _power_of_two(len(borders)) - len(borders)
            borders = np.pad(borders, (0, empty), constant_values=total)
        found["cu_seq_lens"] = on(device, borders)
        found["max_length"] = seq_len if compiled else round_up(int(lengths.max()), seq_len)
    return found


def needed(labels: np.ndarray, *, compiled: bool = False) -> int:
    """Return how many positions of rows that end with padding a forward needs.

    labels: (B, T) int64; behind the last one that has a loss there is padding.
    compiled: whether the model is compiled, which takes time for each new shape.
    """
    (columns,) = np.nonzero((labels != NOT_TRAINED).any(axis=0))
    last = int(columns[-1]) + 1 if len(columns) else 1
    up = _power_of_two(max(last, STEP)) if compiled else -(-last // STEP) * STEP
    return min(up, int(labels.shape[1]))


def padding_tensors(
    labels: np.ndarray, device: torch.device, *, by_length: bool, routed: bool
) -> dict[str, Any]:
    """Return the arguments of `LossModule.forward` for rows that end with padding.

    Only what a model computes of whole rows needs to know of it.

    labels: (B, T) int64; behind the last one of a row that has a loss there is padding.
    by_length: whether the model's rope depends on the length of a document: position_ids, (B, T)
        int64, with padding at position 0.
    routed: whether the model is trained with the loss of a router: real, (n,) int64.
    """
    trained = labels != NOT_TRAINED
    real = np.flip(np.maximum.accumulate(np.flip(trained, 1), 1), 1)  # one follows, or it is one
    found: dict[str, Any] = {}
    if by_length:
        found["position_ids"] = on(device, np.where(real, np.arange(labels.shape[1]), 0))
    if routed:
        found["real"] = on(device, np.flatnonzero(real))
    return found


def round_up(longest: int, seq_len: int) -> int:
    """Round up to a power of two, at most seq_len, so that kernels see few different lengths."""
    return min(_power_of_two(longest), seq_len)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def on(device: torch.device, array: np.ndarray) -> Tensor:
    """Return the array on the device. A copy to CUDA does not wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
