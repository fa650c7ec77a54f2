"""The processes of a run as a group, and their exchanges other than gradients.

Bytes and votes are sent over the control group, which uses gloo and therefore works while a device
is busy or broken. The step's numbers are summed on the device itself. Nothing is pickled.

Before there is a group, ranks agree over a store of this attempt alone. The strategy decides which
kind of group is needed, and is planned first. A rank whose machine cannot join such a group must be
able to report it, or its peers would wait until the timeout.

The trap: in torch 2.13 the ranks of every attempt (`--max_restarts`) use one store, which the
launcher keeps. It still has the addresses of the previous attempt, so a rank that starts early
connects to a dead process and fails, and the attempts are used up one by one. Rank 0 therefore
opens a new store for each further attempt, and writes its port into the launcher's store.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # not in __all__
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from llmtrain.agreement import Alone, Gathering
from llmtrain.distributed.launch.environment import awaited, launcher_variables
from llmtrain.errors import RESTARTABLE, RunError
from llmtrain.text import first_line
from llmtrain.types import ModelCut, RankLayout, Ranks, rank_layout

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
_opened: list[TCPStore] = []  # rank 0's stores, kept until its process ends
_met: set[str] = set()  # attempts whose MASTER_PORT is changed already


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
    places = [rank_layout(rank, world_size, cut) for rank in range(world_size)]

    def group(differ: Callable[[RankLayout], object]) -> dist.ProcessGroup | None:
        """Return the group of the ranks that are alike in what `differ` returns."""
        members: dict[object, list[int]] = {}
        for rank, place in enumerate(places):
            members.setdefault(differ(place), []).append(rank)
        if len(members) == world_size:
            return None
        mine: dist.ProcessGroup
        mine, _ = dist.new_subgroups_by_enumeration([*members.values()], timeout)  # type: ignore[no-untyped-call]  # no stub
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


def meet_again(timeout: timedelta) -> None:
    """Set MASTER_PORT to the port of this attempt's own store, before the group is made.

    timeout: how long to wait for rank 0. Raises torch's DistError after that.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Without the launcher's store, torch's rank 0 opens a new one for each attempt.
    if (
        attempt == "0"
        or attempt in _met
        or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    ):
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launchers = TCPStore(address, port, is_master=False, timeout=timeout)
    shared = PrefixStore(f"llmtrain/attempt-{attempt}", launchers)
    if os.environ["RANK"] == "0":
        _opened.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))
        shared.set("port", str(_opened[-1].port))
    os.environ["MASTER_PORT"] = shared.get("port").decode()
    _met.add(attempt)


_TELL_AFTER_SECONDS = 5.0
_STDERR = 2
_log = logging.getLogger(__name__)
_starts = itertools.count()  # meetings of this process; equal on all ranks


class Meeting(Gathering):
    """`Ranks` over a store. Rank 0 leaves `broadcast` only when all ranks have read the body."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._said = itertools.count()
        self.rank = rank
        self.world_size = world_size

    def gather(self, body: bytes) -> list[bytes]:
        """Return every rank's body at rank 0, in the order of ranks; elsewhere an empty list."""
        topic = f"gather-{next(self._said)}"
        self._store.set(f"{topic}/{self.rank}", body.hex())  # values in a store are text
        if self.rank:
            return []
        return [self._heard(f"{topic}/{rank}") for rank in range(self.world_size)]

    def broadcast(self, body: bytes) -> bytes:
        """Return rank 0's body on every rank."""
        topic = f"broadcast-{next(self._said)}"
        if self.rank:
            received = self._heard(topic)
            self._store.set(f"{topic}/{self.rank}", "read")
            return received
        self._store.set(topic, body.hex())
        # The store may run in rank 0's process, and would end with it.
        self._store.wait([f"{topic}/{rank}" for rank in range(1, self.world_size)])
        return body

    def _heard(self, key: str) -> bytes:
        return bytes.fromhex(self._store.get(key).decode())


def meet(timeout: timedelta, tell_after: float = _TELL_AFTER_SECONDS) -> Ranks:
    """Wait for the ranks of this launch and return them.

    timeout: how long to wait. Raises torch's DistError after that.
    tell_after: seconds until this process logs which ranks it waits for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    with _telling(tell_after):
        meet_again(timeout)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Each attempt has its own store, so a key needs no attempt number. It must not have one: a node
    # that learns of a lost peer before its own rank fails restarts uncounted (torch 2.13, c10d).
    return Meeting(PrefixStore(f"llmtrain/start-{next(_starts)}", store), rank, world_size)


@contextmanager
def _telling(after: float) -> Iterator[None]:
    """Warn once which ranks are awaited, if the wait takes longer than `after` seconds.

    If the shell still has the variables of an earlier launch, no other rank will ever come.
    """
    rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
    text = (
        f"rank {rank} of {size} has waited {after:g} s for {awaited(os.environ)}. If no launcher "
        "started this process, its environment is left over from one: "
        f"unset {' '.join(launcher_variables(os.environ))}"
    )

    def tell() -> None:
        _log.warning(text)
        if rank != "0":  # the log of other ranks is not shown
            os.write(_STDERR, f"rank {rank}: warning: {text}\n".encode())

    timer = threading.Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
