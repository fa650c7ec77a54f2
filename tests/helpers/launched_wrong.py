"""Ranks of a launch that went wrong in a way that only a rank itself can bring about."""

import os

from accelerate import Accelerator

from llmtrain.cli.main import main
from llmtrain.distributed.engines import accelerator
from llmtrain.training.start import processes


def alone(config: str) -> None:
    """`llmtrain train CONFIG` with the `Accelerator()` of a two-process launch that a YAML's
    `use_cpu: true` leaves without a device: every process is the first of one."""
    del os.environ["ACCELERATE_USE_CPU"]
    accelerator._make_ddp = lambda *_: Accelerator()
    main(["train", config])


def other_version(config: str) -> None:
    """`llmtrain train CONFIG`; rank 1 has another version of a library."""
    real = processes.version
    if os.environ["RANK"] == "1":
        processes.version = lambda name: "0.0.1" if name == "tokenizers" else real(name)
    main(["train", config])
