"""What a start opens and passes on as whole values: the processes, the data, the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from llmtrain.config.binding import Bound
from llmtrain.data.heldout_set import HeldOut
from llmtrain.data.manifest import Manifest
from llmtrain.data.state import DataState
from llmtrain.data.stream import Stream
from llmtrain.data.tokens.encode import Encoder
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.plan.memory import Hardware, Layout, MemoryPlan
from llmtrain.model.base import Base
from llmtrain.processes import Threads
from llmtrain.rundir.auto import Auto
from llmtrain.types import Compiled, ModelShape, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.model.loss import LossModule


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a start.

    memory: None if it could not be planned
    reason: why this layout was chosen
    decided_again: whether the values that an earlier start of this kind froze no longer fit
    """

    layout: Layout
    shape: ModelShape
    hardware: Hardware
    memory: MemoryPlan | None
    reason: str
    decided_again: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the plan in the form of the `start` line."""
        parts = dict(self.memory.parts) if self.memory else None
        total = self.memory.total_bytes if self.memory else None
        device = {"device_bytes": self.hardware.device_bytes}
        said = {"reason": self.reason, "parts": parts, "total_bytes": total}
        return asdict(self.layout) | said | device


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this start, and the values frozen for them.

    base: the weights that the run begins with; None = random ones
    decided_again: whether values were chosen again, because no earlier start was of the same kind
        (strategy, device type, number of processes) or because what one froze no longer fits
    precision: of the run, with the reason, for people
    threads_before: those that earlier launches of this kind had; None = there was none
    """

    bound: Bound
    launched: Launched
    planned: Planned
    base: Base | None
    run_id: str
    auto: Auto
    versions: dict[str, str]
    decided_again: bool
    precision: str
    threads: Threads
    threads_before: int | None


@dataclass(frozen=True, slots=True)
class DataSide:
    """The data, opened at the position of the checkpoint.

    heldout: None = nothing is held out
    changed: parts of the fingerprint that differ from the checkpoint's, all of them accepted
    ended: whether no block is left to train on
    """

    manifest: Manifest
    encoder: Encoder
    heldout: HeldOut | None
    stream: Stream
    state: DataState
    changed: tuple[str, ...]
    ended: bool

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, which knows no control tokens in texts."""
        return self.encoder.tokenizer


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The model, bare and prepared for its strategy.

    loss: the module around `bare` that computes the loss; `prepared` is it, or is around it
    spec: the tensors of its checkpoints
    held_before: bytes in use on the device, on a CPU by the process, before there was a model
    adapter: the files beside an adapter's tensors, by name; {} if all weights are trained
    compiled: what of the model torch compiles
    hiding: the attention that hides documents from each other, or `documents.JOINED`; None = there
        is nothing to hide
    """

    bare: PreTrainedModel
    loss: LossModule
    prepared: nn.Module
    spec: Spec
    micro_batch_size: int
    held_before: int
    adapter: Mapping[str, bytes]
    compiled: Compiled = "off"
    hiding: str | None = None
