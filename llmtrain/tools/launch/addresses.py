"""How this machine meets the others of a run: what torch's launcher would have to guess.

It asks the name service whether this is the machine that all meet at, and by which address others
reach it. On a machine with two networks, or whose name means 127.0.1.1, both answers are wrong: no
machine opens the meeting, or all call themselves. The routing table knows better.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from llmtrain.errors import Problem, UserError


@dataclass(frozen=True, slots=True)
class Meeting:
    """How a launcher finds the other machines.

    options: of `accelerate launch`
    env: variables for it and its ranks
    """

    options: tuple[str, ...]
    env: dict[str, str]


def meeting(backend: str, first: str) -> Meeting:
    """How machines meet by c10d or static (`backend`) at the machine whose address is `first`.

    Raises UserError if this machine has no way to it.
    """
    # accelerate 1.15 reads `rdzv_backend` of its file, and then takes its own default, static.
    options = ("--rdzv_backend", backend)
    if backend != "c10d":
        return Meeting(options, {})
    own, theirs = _addresses(first)
    here = own == theirs
    return Meeting(
        (*options, "--rdzv_conf", f"is_host={int(here)}"),
        {
            "PET_LOCAL_ADDR": first if here else own,
            # torch 2.13 keeps the addresses of ranks for the next attempt of --max_restarts, in
            # which some then call dead ones.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


def _addresses(first: str) -> tuple[str, str]:
    """By which address this machine would talk to `first`, and the address that `first` means."""
    try:
        found = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        expected = f"an address that this machine can reach ({error.strerror or error})"
        raise UserError(Problem("main_process_ip", first, expected)) from error
