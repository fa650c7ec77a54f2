"""Ranks that agree before they are a process group, over the store where a launcher lets them meet.

What kind of group a strategy needs is planned first, and a rank whose machine cannot have it must
be able to say so: in a group that it never joins, its peers would wait for it until the timeout.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.rendezvous import rendezvous

from llmtrain.agreement import Alone, count_votes
from llmtrain.distributed.launch.attempts import meet_anew
from llmtrain.distributed.launch.environment import awaited, launcher_variables
from llmtrain.types import Ranks, Vote

_TELL_AFTER_SECONDS = 5.0
_STDERR = 2
_log = logging.getLogger(__name__)
_starts = itertools.count()  # of this process; equal on all ranks


class Meeting:
    """`Ranks` over a store. Nobody goes on before all have read what was said."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._said = itertools.count()
        self.rank = rank
        self.world_size = world_size

    def gather(self, body: bytes) -> list[bytes]:
        """Every rank's body at rank 0, in the order of ranks; an empty list elsewhere."""
        topic = f"gather-{next(self._said)}"
        self._store.set(f"{topic}/{self.rank}", body.hex())  # a store holds text
        if self.rank:
            return []
        return [self._heard(f"{topic}/{rank}") for rank in range(self.world_size)]

    def broadcast(self, body: bytes) -> bytes:
        """Rank 0's body on every rank."""
        topic = f"broadcast-{next(self._said)}"
        if self.rank:
            heard = self._heard(topic)
            self._store.set(f"{topic}/{self.rank}", "read")
            return heard
        self._store.set(topic, body.hex())
        # The store may be rank 0's own, and ends with it.
        self._store.wait([f"{topic}/{rank}" for rank in range(1, self.world_size)])
        return body

    def _heard(self, key: str) -> bytes:
        return bytes.fromhex(self._store.get(key).decode())

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Say whether this rank failed, and learn who did."""
        return count_votes(self, error, body)

    def highest(self, value: int) -> int:
        """Return the largest number that any rank gives, on every rank."""
        heard = self.gather(b"%d" % value)
        return int(self.broadcast(b"%d" % max(map(int, heard), default=0)))


def meet(timeout: timedelta, tell_after: float = _TELL_AFTER_SECONDS) -> Ranks:
    """The ranks of this launch. Raises torch's DistError if they do not come in time.

    tell_after: seconds until this process says for whom it waits.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    with _telling(tell_after):
        meet_anew(timeout)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Each attempt has a store of its own, and its number may not stand in a key: a node that hears
    # of a lost peer before its own rank fails begins again without counting (torch 2.13, c10d).
    return Meeting(PrefixStore(f"llmtrain/start-{next(_starts)}", store), rank, world_size)


@contextmanager
def _telling(after: float) -> Iterator[None]:
    """Say once what is waited for, if it takes longer: nobody may ever come.

    That is so where the variables of an earlier launch are still in the environment of a shell.
    """
    rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
    text = (
        f"rank {rank} of {size} has waited {after:g} s for {awaited(os.environ)}. If no launcher "
        "started this process, its environment is left over from one: "
        f"unset {' '.join(launcher_variables(os.environ))}"
    )

    def tell() -> None:
        _log.warning(text)
        if rank != "0":  # its log is not shown
            os.write(_STDERR, f"rank {rank}: warning: {text}\n".encode())

    timer = threading.Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
