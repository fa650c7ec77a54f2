"""Find the addresses by which the machines of a run meet, which torch's launcher would guess.

Torch's launcher asks the name service whether this machine is the one where all meet, and by which
address others reach it. On a machine with two networks, or whose name means 127.0.1.1, both answers
are wrong: no machine opens the rendezvous, or each connects to itself. The routing table gives the
right answers.
"""

from __future__ import annotations

import socket

from llmtrain.errors import Problem, UserError


def meeting(backend: str, first: str) -> tuple[list[str], dict[str, str]]:
    """Return the settings for machines to meet at the machine whose address is `first`.

    The settings are options for `accelerate launch`, and variables for it and its ranks.

    backend: c10d or static

    Raises UserError if this machine has no route to that address.
    """
    # accelerate 1.15 ignores `rdzv_backend` in its file and uses its default, static.
    options = ["--rdzv_backend", backend]
    if backend != "c10d":
        return options, {}
    own, theirs = _addresses(first)
    here = own == theirs
    return [*options, "--rdzv_conf", f"is_host={int(here)}"], {
        "PET_LOCAL_ADDR": first if here else own,
        # torch 2.13 keeps the addresses of ranks for the next attempt of --max_restarts, and
        # some ranks then connect to dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _addresses(first: str) -> tuple[str, str]:
    """Return this machine's address on the route to `first`, and the address of `first`."""
    try:
        found = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        expected = f"an address that this machine can reach ({error.strerror or error})"
        raise UserError(Problem("main_process_ip", first, expected)) from error
