"""The second attempt of a launcher (`--max_restarts`) meets at its own address.

In torch 2.13 the ranks of every attempt use one store, which the launcher keeps. It still has the
addresses of the previous attempt, so a rank that is early connects to a dead process, and the
attempts are used up one by one. Rank 0 therefore opens a store for this attempt alone, and writes
its port into the launcher's store.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

_opened: list[TCPStore] = []  # rank 0's: they live as long as its process
_met: set[str] = set()  # attempts whose MASTER_PORT is changed already


def meet_anew(timeout: timedelta) -> None:
    """Give the ranks of a restarted attempt their own MASTER_PORT, before the group is made.

    timeout: for the wait for rank 0. Raises torch's DistError if it does not come.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Without the launcher's store, rank 0 opens one for each attempt anyway.
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
