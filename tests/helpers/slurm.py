"""A batch system of one machine: the programs that a job script calls, and `sbatch` itself.

Nodes are addresses of the loopback network. `srun` starts the command once a node, as the real one
does with one task a node; `scontrol requeue` only writes down that it was asked.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.ranks import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
NODES = ("127.0.0.1", "127.0.0.2")
# What SLURM's own MPI and a shell around the job leave in the environment.
STALE = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9", "OMPI_COMM_WORLD_SIZE": "2"}
STALE |= {"WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "localhost"}

SCONTROL = """\
case "$1" in
show) tr ' ' '\\n' <<<"$FAKE_NODES" ;;
requeue) echo "$2" >>"$FAKE/requeued" ;;
esac
"""
SRUN = """\
echo "$*" >>"$FAKE/started"
while [[ $1 == --* ]]; do
    [[ $1 != --output=* ]] || output=${1#--output=}
    shift
done
number=0
for name in $FAKE_NODES; do
    SLURM_NODEID=$number SLURMD_NODENAME=$name "$@" >>"${output/\\%n/$number}" 2>&1 &
    number=$((number + 1))
done
wait
exit 1 # as launchers do after a run that was asked to stop
"""


def free_job() -> int:
    """A job number whose port nobody uses."""
    for number in range(os.getpid() % 20_000, 40_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 10_000 + number % 20_000)):
                return number
    raise AssertionError("no free port")


@dataclass
class Slurm:
    """A batch system whose programs lie in `folder`."""

    folder: Path
    number: int = field(default_factory=free_job)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.program("scontrol", SCONTROL)
        self.program("srun", SRUN)

    def program(self, name: str, body: str) -> None:
        """Put a program there, or another in its place."""
        path = self.folder / name
        path.write_text(f"#!/usr/bin/env bash\nset -u\n{body}")
        path.chmod(0o755)

    def sbatch(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the job; its output is appended, as with --open-mode=append."""
        job = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "FAKE": str(self.folder),
            "FAKE_NODES": " ".join(NODES),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(len(NODES)),
            "PROCESSES_PER_NODE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.output.open("ab") as output:
            return subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**STALE, **job, **(env or {})},
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        """What the job said, over all its starts."""
        return self.folder / "output.txt"

    @property
    def requeued(self) -> list[str]:
        """Jobs that asked to be put back into the queue."""
        return self._lines("requeued")

    @property
    def started(self) -> list[str]:
        """What `srun` was asked to start."""
        return self._lines("started")

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []
