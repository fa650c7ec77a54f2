"""`llmtrain train` in a rank of which something is odd, called as `call helpers.odd_ranks NAME …`.

Only what is named is made up, all else is real.
"""

import datetime as dates
import importlib.util
import json
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from llmtrain.cli.main import main
from llmtrain.cli.rank import train_here
from llmtrain.distributed.engines import accelerator
from llmtrain.model import build
from llmtrain.model.loss import LossModule
from llmtrain.rundir import lock, status
from llmtrain.training import evaluate, loop
from llmtrain.training.start import processes, weights

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.6 GiB in use."
)


def with_bad_samples(rank: str, config: str) -> None:
    """One rank's logits are not finite, but only those of samples."""
    if os.environ["RANK"] == rank:
        evaluate._TEMPERATURE = float("nan")
    main(["train", config])


def unequal(config: str, host_bytes: str, package: str, *overrides: str) -> None:
    """Rank 1 has so much memory (0 = what there is) and lacks a package ("" = none)."""
    if os.environ["RANK"] == "1":
        if int(host_bytes):
            psutil.virtual_memory = lambda: SimpleNamespace(total=int(host_bytes))
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: (
            None if name == package else find(name, *more)
        )
    main(["train", config, *overrides])


def alone(config: str) -> None:
    """With the `Accelerator()` of a two-process launch that a YAML's `use_cpu: true` leaves without
    a device: every process is the first of one.
    """
    del os.environ["ACCELERATE_USE_CPU"]
    accelerator._make_ddp = lambda *_: Accelerator()
    main(["train", config])


def of_another_version(config: str) -> None:
    """Rank 1 has another version of a library."""
    real = processes.version
    if os.environ["RANK"] == "1":
        processes.version = lambda name: "0.0.1" if name == "tokenizers" else real(name)
    main(["train", config])


def on_a_full_disk(config: str, free_bytes: str) -> None:
    """The file system says that it has so many free bytes."""
    real = os.statvfs

    def statvfs(path: object) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = int(free_bytes) // fields[1]  # f_bavail, in fragments
        return os.statvfs_result(fields)

    os.statvfs = statvfs
    main(["train", config])


def on_a_full_device(config: str) -> None:
    """The device has no memory left in the first forward of a step."""
    update = loop.update

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    def full(*arguments: Any) -> None:
        LossModule.forward = refuse  # type: ignore[method-assign]
        update(*arguments)

    loop.update = full  # type: ignore[attr-defined]
    train_here(config, [])


def on_another_day(days: str, *arguments: str) -> None:
    """The date is so many days off.

    `time.time` and `datetime.now` are what Python asks for it; both ask the system, so neither
    follows the other.
    """
    off = dates.timedelta(days=float(days))
    real = time.time  # noqa: TID251

    class Date(dates.datetime):
        @classmethod
        def now(cls, tz: dates.tzinfo | None = None) -> dates.datetime:
            return dates.datetime.now(tz) + off

    time.time = lambda: real() + off.total_seconds()  # noqa: TID251
    lock.datetime = status.datetime = Date  # type: ignore[misc, assignment]
    main(["train", *arguments])


def noting_forks(notes: str, *arguments: str) -> None:
    """Each fork without exec adds its stack to `notes`."""

    def hook(event: str, _arguments: object) -> None:
        if event in ("os.fork", "os.forkpty"):
            with Path(notes).open("a") as file:
                traceback.print_stack(file=file)

    sys.addaudithook(hook)
    main(["train", *arguments])


def noting_what_is_built(config: str, output: str) -> None:
    """What was read and is held of a model, before it is sharded, goes to `output`.RANK."""
    read: list[str] = []
    load, make = build.build, weights._build

    def loaded(described: Any, asked: Any, base: Any) -> Any:
        read.append(str(base))
        return load(described, asked, base)

    def built(*args: Any, **more: Any) -> Any:
        made = make(*args, **more)
        held = sum(p.numel() for p in made.model.parameters() if not p.is_meta)
        seen = {"read": read, "held": held, "whole": made.full_model is not None}
        Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(seen))
        return made

    build.build, weights._build = loaded, built
    train_here(config, [])


def repeating_secrets(config: str) -> None:
    """In a log, a warning, an event and an error, with which the rank of CANARY_RANK ends."""
    names = ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD", "LOOKS_LIKE")
    first, second, third, fourth = (os.environ[name] for name in names)
    text = f"look at {first}, {second}, {third} and {fourth}"
    update = loop.update

    def repeating(run, batch, factor):
        if os.environ["RANK"] == os.environ["CANARY_RANK"]:
            if run.step == 0:
                logging.getLogger("llmtrain.some").info("looked%s", text.removeprefix("look"))
                logging.getLogger("a.library").warning(text)
                warnings.warn(text, stacklevel=1)
            if run.step == 2:
                raise ValueError(f"cannot {text}")
        run.journal.event("repeated", run.step, text=text, nested={"inner": [text]})
        update(run, batch, factor)

    loop.update = repeating
    train_here(config, [])
