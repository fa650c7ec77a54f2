"""What a start opens and hands on whole: the processes, the data, the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from llmtrain.config.binding import Bound
from llmtrain.data.heldout import HeldOut
from llmtrain.data.manifest import Manifest
from llmtrain.data.state import DataState
from llmtrain.data.stream import Stream
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.plan.memory import Hardware, Layout, MemoryPlan
from llmtrain.rundir.auto import Auto
from llmtrain.types import ModelShape, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a start.

    memory: None where it could not be planned
    reason: of the layout
    decided_anew: what an earlier start of this kind froze does not fit any more
    """

    layout: Layout
    shape: ModelShape
    hardware: Hardware
    memory: MemoryPlan | None
    reason: str
    decided_anew: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as the `start` line has it."""
        parts = dict(self.memory.parts) if self.memory else None
        total = self.memory.total_bytes if self.memory else None
        device = {"device_bytes": self.hardware.device_bytes}
        said = {"reason": self.reason, "parts": parts, "total_bytes": total}
        return asdict(self.layout) | said | device


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this start, and what is frozen for them.

    decided_anew: an earlier start had another number of processes or kind of device, or froze
    what does not fit any more.
    """

    bound: Bound
    launched: Launched
    planned: Planned
    run_id: str
    auto: Auto
    versions: dict[str, str]
    decided_anew: bool


@dataclass(frozen=True, slots=True)
class DataSide:
    """The data, opened where the last checkpoint left it.

    heldout: None = nothing is held out
    changed: parts of the fingerprint that differ from the checkpoint's, as accepted
    ended: there is no block left to train on
    """

    manifest: Manifest
    tokenizer: Tokenizer
    heldout: HeldOut | None
    stream: Stream
    state: DataState
    changed: tuple[str, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The model, bare and as prepared for its strategy.

    spec: of its checkpoints
    held_before: bytes of the device, or of the process on a CPU, before there was a model
    """

    bare: PreTrainedModel
    prepared: nn.Module
    spec: Spec
    micro_batch_size: int
    held_before: int
