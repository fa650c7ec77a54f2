"""Agreement between ranks before the process group is made, over a store of this attempt alone.

The strategy decides which kind of group is needed, and is planned first. A rank whose machine
cannot join such a group must be able to report it, or its peers would wait until the timeout.

The trap: in torch 2.13 the ranks of every attempt (`--max_restarts`) use one store, which the
launcher keeps. It still has the addresses of the previous attempt, so a rank that starts early
connects to a dead process and fails, and the attempts are used up one by one. Rank 0 therefore
opens a new store for each further attempt, and writes its port into the launcher's store.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # not in __all__
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from llmtrain.agreement import Alone, Gathering
from llmtrain.distributed.launch.environment import awaited, launcher_variables
from llmtrain.types import Ranks

_opened: list[TCPStore] = []  # rank 0's stores, kept until its process ends
_met: set[str] = set()  # attempts whose MASTER_PORT is changed already


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
