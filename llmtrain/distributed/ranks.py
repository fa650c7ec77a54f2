"""The processes of a run as a group, and their exchanges other than gradients.

Bytes and votes are sent over the control group, which uses gloo and therefore works while a device
is busy or broken. The step's numbers are summed on the device itself. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from llmtrain.agreement import Gathering
from llmtrain.errors import RESTARTABLE, RunError
from llmtrain.text import first_line
from llmtrain.types import ModelCut, RankLayout, rank_layout

# Messages of gloo and NCCL when a peer is gone. They arrive as plain RuntimeErrors from any call.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "Connect timeout",
    "timed out connecting",
    "No route to host",
    "Network is unreachable",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Socket closed",
)


class RankGroup(Gathering):
    """`Ranks` over a gloo process group."""

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, body: bytes) -> list[bytes]:
        """Return every rank's body at rank 0, in the order of ranks; elsewhere an empty list."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(body)]), group=self._group)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [b""] * self.world_size if self.rank == 0 else []
        mine = _tensor(body.ljust(longest, b"\0"))
        parts = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else None
        dist.gather(mine, parts, dst=0, group=self._group)
        return [_bytes(part)[: int(size)] for part, size in zip(parts or [], sizes, strict=False)]

    def broadcast(self, body: bytes) -> bytes:
        """Return rank 0's body on every rank."""
        size = torch.tensor([len(body)])
        dist.broadcast(size, src=0, group=self._group)
        data = _tensor(body) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.broadcast(data, src=0, group=self._group)
        return _bytes(data)


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0).byte()


def _bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """The process groups of a cut model, by what their processes share; None = it is not cut so.

    tensor: each matrix, in the order of their parts
    pipeline: the blocks, in the order of the stages
    sequence: the positions of a row, in their order
    replicas: the same part of the model; None also if one process holds it
    """

    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None


def model_groups(world_size: int, cut: ModelCut, timeout: timedelta) -> ModelGroups:
    """Return the groups of this process. Collective over all ranks, of which each makes all."""
    if cut.processes == 1:
        return ModelGroups()
    here = dist.get_rank()
    places = [rank_layout(rank, world_size, cut) for rank in range(world_size)]

    def group(differ: Callable[[RankLayout], object]) -> dist.ProcessGroup | None:
        """Return the group of the ranks that are alike in what `differ` returns."""
        members: dict[object, list[int]] = {}
        for rank, place in enumerate(places):
            members.setdefault(differ(place), []).append(rank)
        if len(members) == world_size:
            return None
        mine: dist.ProcessGroup | None = None
        for ranks in members.values():
            made = dist.new_group(ranks, timeout=timeout)
            mine = made if here in ranks else mine
        return mine

    return ModelGroups(
        tensor=group(lambda place: (place.data_rank, place.sequence_rank, place.stage)),
        pipeline=group(lambda place: (place.data_rank, place.sequence_rank, place.tensor_rank)),
        sequence=group(lambda place: (place.data_rank, place.stage, place.tensor_rank)),
        replicas=group(lambda place: (place.stage, place.tensor_rank)),
    )


def sum_over_ranks(vector: torch.Tensor) -> torch.Tensor:
    """Sum `vector` over all ranks in place, on its own device, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    return vector


def add_from_peer(tensor: torch.Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Add a peer's tensor in place, and let it add this one: the same bits on both.

    peer: its number in the group
    """
    other = torch.empty_like(tensor)
    exchange = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    tensor += other


def lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def peer_lost(error: BaseException) -> RunError:
    """Return the error that reports a lost process."""
    return RunError(
        f"a peer process is gone: {first_line(error)}",
        RESTARTABLE,
        "start the same command again: it resumes; logs/ says which rank failed first",
    )
