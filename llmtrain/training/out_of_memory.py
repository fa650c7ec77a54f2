"""What a run reports when its device has no memory left: the plan, the peak, and one change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from llmtrain.config.schema import Config
from llmtrain.distributed.plan.memory import arithmetic_of, memory
from llmtrain.distributed.plan.strategy import layout_in_words, remedy
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.metrics.memory import peak_bytes
from llmtrain.model.count import CannotCountError
from llmtrain.text import first_line, size
from llmtrain.training.run.run import Processes
from llmtrain.training.start.planning import describe, work

# torch writes "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"
_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]i)?B")
_BYTES = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@contextmanager
def compared_with_plan(config: Config, processes: Processes) -> Iterator[None]:
    """Turn a lack of device memory in the block into a UserError that compares it with the plan.

    Where that cannot be computed, torch's error is raised.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            problem = _compare(config, processes, error)
        except (CannotCountError, UserError, RunError):  # the model can no longer be read
            problem = None
        if problem is None:
            raise
        raise UserError(problem) from error


def _compare(config: Config, processes: Processes, error: Exception) -> Problem | None:
    """Return the problem, with the smallest change that helps; None if memory was not planned."""
    planned, hardware = processes.planned, processes.planned.hardware
    if planned.memory is None:
        return None
    asked = work(config, processes.auto.run["precision"], cpu=hardware.cpu, run_dir=config.run_dir)
    model = describe(config, hardware, config.run_dir, processes.base)
    layout = planned.layout
    micro = processes.auto.micro_batch_size or layout.micro_batch_size  # as it was found by trying
    share = asked.global_batch_size // processes.launched.layout.data_size
    layout = replace(layout, micro_batch_size=micro, accumulation=share // micro)
    arithmetic = arithmetic_of(layout.strategy, asked.precision)
    saved = model.count(arithmetic, layout.activation_checkpointing, hardware.cut.tensor)
    plan = memory(model.shape, saved, asked, layout, hardware)
    peak, more = peak_bytes(processes.launched.device), asked_bytes(str(error))
    # The run needs at least what it had and asked for; the device refused it, so it was too much.
    needed = max(peak + more, hardware.device_bytes + 1)
    known = (model.shape, model.count, asked, layout, hardware, model.cuts)
    change = remedy(*known, needed - plan.total_bytes)
    summary, _, _ = first_line(error).partition(" Including ")  # how torch divided what it has
    return Problem(
        "device memory",
        f"{size(peak)} at the peak" + (f", and {size(more)} more asked for" if more else ""),
        f"at most the {size(plan.total_bytes)} planned for {layout_in_words(layout)} of "
        f"{size(hardware.device_bytes)} ({summary})",
        f"{change}; `llmtrain plan` shows other changes",
    )


def asked_bytes(text: str) -> int:
    """Return how many bytes the failed allocation asked for; 0 if the message does not tell."""
    match = _ASKED.search(text)
    return int(float(match[1]) * _BYTES[match[2]]) if match else 0
