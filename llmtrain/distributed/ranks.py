"""What the processes of a run say to each other besides gradients.

Bytes and votes go over the control group (gloo, so that they work beside a busy or broken device);
the step's numbers are summed on the device itself. Nothing pickled is ever sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from llmtrain import heartbeat
from llmtrain.errors import RESTARTABLE, PeerError, RunError
from llmtrain.types import Alone, Failure, Ranks, Vote, failure

T = TypeVar("T")

# What gloo and NCCL say when a peer is gone: bare RuntimeErrors out of whatever was called.
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


class Group:
    """`Ranks` over a gloo process group."""

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, body: bytes) -> list[bytes]:
        """Every rank's body at rank 0, in the order of ranks; an empty list elsewhere."""
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
        """Rank 0's body on every rank."""
        size = torch.tensor([len(body)])
        dist.broadcast(size, src=0, group=self._group)
        data = _tensor(body) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.broadcast(data, src=0, group=self._group)
        return _bytes(data)

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Say whether this rank failed, and hear who did."""
        return vote(self, error, body)

    def highest(self, value: int) -> int:
        """The largest number that any rank says."""
        said = torch.tensor([value])
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        return int(said)


class Single(Alone):
    """`Ranks` of a single process, with the same questions."""

    def highest(self, value: int) -> int:
        """This process's number."""
        return value


ControlGroup = Group | Single


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0).byte()


def _bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


def _split(ballot: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(ballot[:8], "little")
    return ballot[8 : 8 + size], ballot[8 + size :]


def vote(ranks: Ranks, error: BaseException | None, body: bytes) -> Vote:
    """`Ranks.vote`, of what gathers and broadcasts."""
    _, phase = heartbeat.read()
    heartbeat.beat(f"a vote of all processes ({phase})")
    said = b"" if error is None else json.dumps(asdict(failure(ranks.rank, error))).encode()
    heard = ranks.gather(len(said).to_bytes(8, "little") + said + body)
    ballots = [_split(ballot) for ballot in heard]
    failed = [json.loads(said) for said, _ in ballots if said]
    failed = json.loads(ranks.broadcast(json.dumps(failed).encode()))
    heartbeat.beat(phase)
    return Vote(tuple(Failure(**one) for one in failed), tuple(body for _, body in ballots))


def agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work` on every rank; if it fails on any, raise on all.

    The failing rank raises its own error, the others a `PeerError` with its text and exit code
    (several: 2 before 1 before 75, as a cause outranks its consequences).
    """
    error: Exception | None = None
    result: T
    try:
        result = work()
    except Exception as caught:  # whatever it is, the peers must hear of it before it goes on
        error = caught
    refuse(ranks.vote(error), error)
    return result


def refuse(vote: Vote, error: BaseException | None) -> None:
    """Raise what a vote decided, if any rank failed."""
    if error is not None:
        raise error
    if vote.failures:
        order = {2: 0, 74: 1, 1: 2, RESTARTABLE: 3}
        first = min(vote.failures, key=lambda one: order.get(one.exit_code, 2))
        raise PeerError(first.text, first.exit_code, first.rank)


def from_rank_zero(ranks: Ranks, work: Callable[[], bytes]) -> bytes:
    """Do `work` on rank 0 alone and give its bytes to every rank; raise on all if it fails."""
    body = agreed(ranks, lambda: work() if ranks.rank == 0 else b"")
    return ranks.broadcast(body)


def on_rank_zero(ranks: Ranks, work: Callable[[], object]) -> None:
    """Do `work` on rank 0 alone while the others wait; raise on all if it fails."""
    agreed(ranks, lambda: work() if ranks.rank == 0 else None)


def sum_over_ranks(vector: torch.Tensor) -> torch.Tensor:
    """The step's reduction: add up `vector` over all ranks, in place, on its own device."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    return vector


def lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def peer_lost(error: BaseException) -> RunError:
    """What a person reads when another process is gone."""
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RunError(
        f"a peer process is gone: {first_line}",
        RESTARTABLE,
        "start the same command again: it resumes; logs/ says which rank failed first",
    )
