"""Measure the bandwidth of an all-reduce between two real processes of this machine.

    doctor ── TCPStore ──┬── rank 0   python -m llmtrain.tools.doctor.reduce 0 PORT BACKEND
                         └── rank 1   …                                      1 PORT BACKEND

The processes are killed after a time limit, so that a collective that would hang a run gives an
error line here. They exit by `os._exit`, as gloo's threads may outlive the interpreter.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

from llmtrain.tools.doctor.case import Case, Verdict, error, ok
from llmtrain.tools.doctor.machine import gpus

RANKS = 2
BYTES = 64 << 20
_REPEATS = 5
_ANSWER = "seconds:"
ALLOWED_SECONDS = 180.0  # with the import of torch on a busy machine


def all_reduce(case: Case, allowed_seconds: float = ALLOWED_SECONDS) -> Verdict:
    """Sum 64 MiB over two processes; with NCCL if there are two GPUs, else with gloo."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    backend = "nccl" if gpus(case) >= RANKS else "gloo"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "llmtrain.tools.doctor.reduce"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), backend, str(allowed_seconds)],
            env=_environment(case),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return _verdict(ranks, backend, allowed_seconds)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _environment(case: Case) -> dict[str, str]:
    """Return the environment without a launcher's variables, which torch would use."""
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in case.env.items() if name not in mine}


def _verdict(ranks: list[subprocess.Popen[str]], backend: str, allowed_seconds: float) -> Verdict:
    until = time.monotonic() + allowed_seconds
    remedy = (
        "look for a firewall on loopback, a wrong GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "
        "NCCL_DEBUG=INFO tells more of GPUs"
    )
    said = []
    for number, rank in enumerate(ranks):
        try:
            out, err = rank.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            found = f"{RANKS} processes ({backend}) did not finish in {allowed_seconds:g} s"
            return error(found, remedy)
        said.append(out)
        if _ANSWER not in out:
            last = (err.strip().splitlines() or ["no word"])[-1]
            return error(f"rank {number} of {RANKS} ({backend}) failed: {last}", remedy)
    seconds = max(float(out.rpartition(_ANSWER)[2]) for out in said)
    rate = BYTES / 1e6 / seconds
    return ok(f"{RANKS} processes of this machine ({backend}) sum {rate:,.0f} MB/s")


def main() -> None:
    """Sum as one of the two processes, print the median time of a sum in seconds, and exit.

    Raises RuntimeError for a wrong sum.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    number, port, backend, allowed_seconds = sys.argv[1:]
    timeout, rank = timedelta(seconds=float(allowed_seconds)), int(number)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timeout)
    vector = torch.full((BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(vector)
    expected = sum(range(1, RANKS + 1))
    if vector[0].item() != expected or vector[-1].item() != expected:
        raise RuntimeError(f"the sum is {vector[0].item():g}, not {expected}")
    took = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        dist.all_reduce(vector)
        vector[0].item()  # waits for the device
        took.append(time.perf_counter() - start)
    sys.stdout.write(f"{_ANSWER}{statistics.median(took)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
