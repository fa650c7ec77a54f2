"""A separate store for each restart by the launcher (`--max_restarts`).

In torch 2.13 the ranks of every attempt use one store, which the launcher keeps. It still has the
addresses of the previous attempt, so a rank that starts early connects to a dead process and fails,
and the attempts are used up one by one. Rank 0 therefore opens a new store for each further
attempt, and writes its port into the launcher's store.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

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
