"""How much memory a save and a load need on top of a process's own state, in fresh processes.

    python benchmarks/_checkpoint_memory.py save|load|rank0 PARAMETERS DIRECTORY

Prints JSON: bytes of the state, and the peak of resident memory above what was resident with the
state alone (load: above what is resident once it is loaded).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

WIDTH = 1024
RANKS = 2


def measured(what: str, parameters: int, folder: Path) -> dict[str, Any]:
    """In a process of its own; rank 0's figures where there are several."""
    command = [sys.executable, __file__, what, str(parameters), str(folder)]
    if what != "rank0":
        return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    return dict(json.loads(said[0]))


def main() -> None:
    """One measurement."""
    what, parameters, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    import torch
    from _checkpoint_disk import saved, spec_of, values_of

    from llmtrain.metrics.memory import peak_bytes, reset_peak, resident_bytes

    cpu = torch.device("cpu")
    spec = spec_of(1, 64)  # what libraries take at their first use is no part of it
    warm = folder / f"warm-{what}-{os.environ.get('RANK')}"
    saved(warm, 1, spec, values_of(spec))
    loaded(warm, spec, {})
    spec = spec_of(parameters, WIDTH)
    match what:
        case "save":
            values = values_of(spec)
            held = reset_peak(cpu)
            saved(folder / "root", 1, spec, values)
            above = peak_bytes(cpu) - held
        case "load":
            reset_peak(cpu)
            values = {}
            loaded(folder / "root", spec, values)
            above = peak_bytes(cpu) - resident_bytes()
        case _:
            above = sent(parameters, folder)
    size = 12 * parameters
    largest = 4 * WIDTH**2
    print(json.dumps({"state_bytes": size, "above_bytes": above, "largest_bytes": largest}))


def loaded(root: Path, spec: Any, values: dict[str, Any]) -> None:
    """Verify the newest checkpoint, make the tensors, read into them."""
    from _checkpoint_disk import pieces_of, values_of

    from llmtrain.agreement import Alone
    from llmtrain.checkpoint import read

    found = read.find(root, None, Alone())
    assert found is not None
    values.update(values_of(spec))
    read.fill(found, spec, pieces_of(values), Alone())


def sent(parameters: int, folder: Path) -> int:
    """Halves of every tensor on two ranks, which rank 0 writes."""
    import torch
    import torch.distributed as dist
    from _checkpoint_disk import RUN, spec_of

    from llmtrain.checkpoint import write
    from llmtrain.distributed.ranks import Group
    from llmtrain.metrics.memory import peak_bytes, reset_peak
    from llmtrain.types import Piece

    dist.init_process_group("gloo")
    ranks = Group(timedelta(minutes=5))
    spec, half = spec_of(parameters, WIDTH), WIDTH**2 // RANKS
    own = [
        Piece(name, half * ranks.rank, torch.randn(half)) for part in spec.values() for name in part
    ]
    ranks.vote(None)
    cpu = torch.device("cpu")
    held = reset_peak(cpu)
    begun = write.begin(folder / "sent", 1, spec, {}, ranks, RUN)
    assert isinstance(begun, write.Begun), begun
    done = write.commit(begun, write.collect_pieces(begun, own, ranks), None, ranks)
    assert isinstance(done, write.Committed), done
    above = peak_bytes(cpu) - held
    dist.destroy_process_group()
    return above


if __name__ == "__main__":
    main()
