"""Real processes of a run, started from a server that has imported torch already.

`Server.start` starts the ranks of one launch with the environment that torch's launcher gives them;
`Ranks.wait` gives their exit codes, `Ranks.kill` ends all of them at once, as a power cut does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0  # far beyond what anything takes; a hang must not last for ever
_PORTS = range(16_000, 29_000)  # below /proc/sys/net/ipv4/ip_local_port_range


def free_port() -> int:
    """Nobody listens on it, and the kernel gives it to nobody who connects in the meantime."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What `accelerate launch` exports to a CPU rank (recorded from accelerate 1.15)."""
    alone = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if world_size == 1:
        return alone
    return alone | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_MIXED_PRECISION": "no",
    }


@dataclass
class Ranks:
    """The processes of one launch."""

    server: Server
    pids: list[int]
    output: Path

    def wait(self) -> list[int]:
        """Exit codes by rank; negative: the signal that ended it."""
        return [self.server.ask({"wait": pid}) for pid in self.pids]

    def kill(self) -> list[int]:
        """SIGKILL to every rank at once."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.wait()

    def alive(self) -> bool:
        """Whether any rank still runs (a zombie does not)."""
        return any(_runs(pid) for pid in self.pids)


class Server:
    """Forks ranks; one for a whole test session."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("rank_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # Threads that wait spin otherwise, and take the cores from what they wait for. Of
            # autograd's threads for devices a fork would have none.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert self._read() == "ready"

    def start(
        self,
        arguments: Sequence[str],
        world_size: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> Ranks:
        """Start `llmtrain ARGUMENTS` in `world_size` processes; their output is in one file."""
        port = free_port()
        kept = {k: os.environ[k] for k in ("PATH", "HOME", "LANG", "TMPDIR") if k in os.environ}
        output = folder / "output.txt"
        output.touch()
        ranks = [
            {
                "argv": list(arguments),
                "env": {**kept, **rank_environment(rank, world_size, port), **(env or {})},
                "cwd": str(folder),
                "output": str(output),
            }
            for rank in range(world_size)
        ]
        return Ranks(self, self.ask({"start": ranks}), output)

    def run(
        self,
        arguments: Sequence[str],
        world_size: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Start and wait; the exit codes."""
        return self.start(arguments, world_size, folder, env).wait()

    def ask(self, command: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.005)
