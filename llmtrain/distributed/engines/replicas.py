"""A check that replicas still have equal weights, bit by bit.

Replicas make the same updates from the same gradients, so their weights are equal in every bit. If
they became different, each replica would silently continue with its own. A checksum of each
parameter is therefore compared: the sum of its memory in words of eight bytes, modulo 2^64. Any
single changed bit changes it.

    hsdp of 2 × 2      shard 0   shard 1
        replica 0      rank 0    rank 1       ranks of a column must have equal sums
        replica 1      rank 2    rank 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_WORD = torch.int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST = torch.iinfo(_WORD).min


def checksum(tensor: Tensor) -> Tensor:
    """Return () int64 on the device: the sum modulo 2^64 of the bits of a contiguous tensor.

    It adds words of eight bytes, then the remaining elements. That is four times as fast as adding
    all elements one by one.
    """
    flat = tensor.detach().view(-1)
    per_word = _WORD.itemsize // flat.dtype.itemsize
    if flat.storage_offset() % per_word:  # torch reads words only at multiples of their size
        flat = flat.clone()
    even = flat.numel() - flat.numel() % per_word
    rest = flat[even:].view(_INTEGERS[flat.dtype.itemsize])
    return flat[:even].view(_WORD).sum() + rest.sum(dtype=_WORD)


def unequal(names: Sequence[str], held: Sequence[Tensor], replicas: int) -> dict[str, list[int]]:
    """Return the names of tensors that differ between replicas, each with the ranks that differ.

    held: this rank's part of each tensor.

    A rank is named if its bits are not those of more than half of the tensor's replicas. Without
    such a majority it is unknown which replica is right, and all of them are named. Two replicas
    that differ never have a majority.

    Collective over all ranks of the default group, with the same result on each. It takes one
    reduction of 16 bytes per tensor and shard, and a second exchange only if something differs.
    Waits for the device.
    """
    world_size = dist.get_world_size()
    shards = world_size // replicas
    sums = torch.stack([checksum(tensor) for tensor in held])
    # min(x) is ~max(~x), so one reduction finds the largest and the smallest sum.
    bounds = sums.new_full((shards, 2, len(sums)), _LEAST)
    bounds[dist.get_rank() % shards] = torch.stack([sums, ~sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bool((bounds[:, 0] == ~bounds[:, 1]).all()):
        return {}
    each = [torch.empty_like(sums) for _ in range(world_size)]
    dist.all_gather(each, sums)
    columns = zip(*(one.tolist() for one in each), strict=True)
    found = {name: odd(column, shards) for name, column in zip(names, columns, strict=True)}
    return {name: ranks for name, ranks in found.items() if ranks}


def odd(sums: Sequence[int], shards: int) -> list[int]:
    """Return the ranks whose sum is not that of most replicas of their shard. sums: one a rank."""
    found: list[int] = []
    for shard in range(shards):
        ranks = range(shard, len(sums), shards)
        value, count = Counter(sums[rank] for rank in ranks).most_common(1)[0]
        agreed = 2 * count > len(ranks)
        found += [rank for rank in ranks if not agreed or sums[rank] != value]
    return sorted(found)
