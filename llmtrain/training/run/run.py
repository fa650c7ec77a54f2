"""An open run: the values that the loop works with.

What is done with a run (`update`, `evaluate`, `save`, `finish`) is a function that takes it, in a
module that imports this one; this module imports none of them. `start/open.py` makes the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from llmtrain.checkpoint.read import Found
from llmtrain.config.schema import Config
from llmtrain.distributed.engines.engine import Engine
from llmtrain.metrics.meter import Meter
from llmtrain.training.run.due import Due
from llmtrain.training.run.feed import Feed
from llmtrain.training.run.flight import Saves
from llmtrain.training.run.guards import Guards
from llmtrain.training.run.journal import Journal, RunLog
from llmtrain.training.run.opened import DataSide, ModelSide, Processes
from llmtrain.training.stop.requests import Requests
from llmtrain.training.stop.signals import Signals
from llmtrain.types import Ranks


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a run.

    found: the checkpoint that it resumes from, None in a new run
    first_step: number of steps that were finished when it began
    built: the model
    feed: the state on the host that each step changes, such as the number of finished steps
    checkpoints: how it saves, and the checkpoint in flight
    """

    config: Config
    found: Found | None
    first_step: int
    processes: Processes
    data: DataSide
    built: ModelSide
    feed: Feed
    meter: Meter
    journal: Journal
    log: RunLog
    guards: Guards
    due: Due
    signals: Signals
    requests: Requests
    checkpoints: Saves

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.feed.step

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.config.total_steps

    @property
    def max_grad_norm(self) -> float | None:
        """The largest gradient norm: larger gradients are scaled down to it. None = no limit."""
        return self.config.training.max_grad_norm

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.config.run_dir

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.processes.launched.device

    @property
    def ranks(self) -> Ranks:
        """The communication with the other processes."""
        return self.processes.launched.ranks

    @property
    def engine(self) -> Engine:
        """The engine of the strategy."""
        return self.processes.launched.engine

    @property
    def model(self) -> nn.Module:
        """The module whose forward is called."""
        return self.built.prepared
