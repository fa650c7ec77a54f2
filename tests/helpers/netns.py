"""Two machines on one: network namespaces joined by a cable that a test can pull.

`inside` is what a forked rank does first, so that ranks of the server (helpers/ranks.py) run there;
`Network.start` starts any program there. It needs the right to make namespaces (root has it).
"""

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from shutil import which

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "cable0"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_numbers = count()


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@dataclass
class Network:
    """Two nodes, 0 and 1. Names hold this process's number, so that two test runs never meet."""

    names: tuple[str, str] = field(default_factory=lambda: _names(f"llm{os.getpid()}-"))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def up(self) -> None:
        """Make it, or skip the test where that is not allowed."""
        try:
            ip("netns", "add", self.names[0])
        except FileNotFoundError:
            pytest.skip("two nodes need the program `ip` (iproute2)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two nodes need CAP_NET_ADMIN and CAP_SYS_ADMIN: {error.stderr.strip()}")
        first, second = self.names
        ip("netns", "add", second)
        cable = ["link", "add", DEVICE, "netns", first, "type", "veth"]
        ip(*cable, "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", DEVICE, "up")

    def down(self) -> None:
        """End every process in it, and remove it."""
        if which("ip") is None:  # the test was skipped for that; an error here would hide it
            return
        known = ip("netns", "list")
        for node, name in enumerate(self.names):
            if name in known:
                self.power_off(node)
                ip("netns", "delete", name)
        for program in self.started:
            program.wait()

    def pull_cable(self) -> None:
        """Nothing gets through any more; nobody is told so."""
        ip("-n", self.names[1], "link", "set", DEVICE, "down")

    def plug_in_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", DEVICE, "up")

    def power_off(self, node: int) -> None:
        """SIGKILL to every process of a node."""
        for pid in ip("netns", "pids", self.names[node]).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:  # it has ended since
                continue

    def start(
        self, node: int, command: Sequence[str], output: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program on a node, whose host name is its own; its output is appended."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node-{node}"]
        with output.open("ab") as file:
            program = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *named, *command],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT, **env},
            )
        self.started.append(program)
        return program

    def ranks(self, *arguments: str, apart: Path | None = None) -> list[str]:
        """What `Server.start` takes to run `llmtrain ARGUMENTS` on the nodes, half of them on each.

        apart: a directory that is another one on node 1.
        """
        return ["call", "helpers.netns", "inside", *self.names, str(apart or ""), *arguments]


# For ranks and launchers alike: by which device gloo talks, and where the first rank is.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": DEVICE, "CUDA_VISIBLE_DEVICES": ""}
RANKS = {**ENVIRONMENT, "MASTER_ADDR": ADDRESSES[0]}


def _names(prefix: str) -> tuple[str, str]:
    number = next(_numbers)
    return f"{prefix}{number}a", f"{prefix}{number}b"


def inside(first: str, second: str, apart: str, *arguments: str) -> None:
    """In a forked rank: move to its node, whose host name is its own too, and go on there."""
    share = int(os.environ["WORLD_SIZE"]) // 2
    node, local = divmod(int(os.environ["RANK"]), share)
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(share)}
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{(first, second)[node]}", os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "could not move to the node")
    os.close(namespace)
    socket.sethostname(f"node-{node}")
    if apart and node:
        _mount_another(libc, apart)
    from helpers.rank_server import work

    work(list(arguments))


def _mount_another(libc: ctypes.CDLL, directory: str) -> None:
    """From here on this process sees an empty directory of its own there."""
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "could not leave the mounts")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "apart", directory], check=True)
