"""Peak memory of a process of its own, for `finetune.py` (Linux).

    python benchmarks/_finetune_memory.py imports
    python benchmarks/_finetune_memory.py models
    python benchmarks/_finetune_memory.py command ARGUMENT …
    python benchmarks/_finetune_memory.py rank CONFIG OUTPUT

`imports` imports torch and transformers, `models` the base class of transformers' models as well,
`command` runs a command of llmtrain. The last line of stdout is the peak of resident memory in
bytes. It is not `ru_maxrss`, which a process inherits.
`rank` is one of several processes of a launch, and ends once it has its weights. OUTPUT.RANK
becomes a JSON object: its shard, and its memory before, at most, and after, all in bytes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def command(arguments: list[str]) -> int:
    """Run a command of llmtrain in this process and return its exit code."""
    from llmtrain.cli.main import main

    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def rank(config: str, output: str) -> None:
    """Load a model as a rank of a run does, and leave before the first step."""
    import torch

    from llmtrain.cli.rank import train_here
    from llmtrain.distributed.engines.state import local
    from llmtrain.metrics import memory
    from llmtrain.training.start import weights

    cpu = torch.device("cpu")
    seen: dict[str, int] = {}
    build, prepare = weights._build, weights._prepare

    def built(*given: Any) -> Any:
        seen["before"] = memory.reset_peak(cpu)
        return build(*given)

    def prepared(model: Any, launched: Any, optimizer: Any) -> Any:
        prepare(model, launched, optimizer)
        seen["peak"], seen["after"] = memory.peak_bytes(cpu), memory.resident_bytes()
        seen["shard"] = sum(local(one).nbytes for one in model.bare.parameters())
        seen["model"] = sum(one.nbytes for one in model.bare.parameters())
        Path(f"{output}.{launched.ranks.rank}").write_text(json.dumps(seen))
        launched.ranks.vote(None)
        os._exit(0)

    weights._build, weights._prepare = built, prepared
    train_here(config, [])


def main() -> None:
    """One measurement."""
    what, *arguments = sys.argv[1:]
    if what == "rank":
        rank(*arguments)
    code = 0
    if what in ("imports", "models"):
        import torch  # noqa: F401
        import transformers

        if what == "models":  # it is imported when it is asked for
            assert transformers.PreTrainedModel
    else:
        code = command(arguments)
    print(peak(), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
