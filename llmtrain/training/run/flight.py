"""How a start writes checkpoints, and the checkpoint in flight between two boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmtrain.checkpoint.background import Writer
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.write import Begun
from llmtrain.config.schema import CheckpointConfig

# The error if this rank could not write its part, else None; and what it wrote.
Written = tuple[BaseException | None, Extents]


@dataclass(frozen=True, slots=True)
class Flight:
    """A checkpoint between begin and commit.

    cursors: the line for `cursors.jsonl`, at rank 0
    last: whether this start makes no step after it
    blocked: seconds for which training has waited so far, without those that the writer counts
    written: the result if it was written in line; None if the background writer writes it
    """

    step: int
    reason: str
    begun: Begun
    cursors: bytes
    last: bool
    blocked: float
    written: Written | None


@dataclass(slots=True)
class Saves:
    """How this start writes checkpoints, and the checkpoint in flight.

    policy: the section that names the checkpoints to keep
    writer: the background writer; None if checkpoints are written in line
    sent: whether ranks send their parts to rank 0, which writes; with collectives, so in line
    dealt: whether tensors that all ranks have copies of are divided among the ranks for writing
    flight: the checkpoint in flight
    kept: names of the checkpoints that existed after the last retention (rank 0)
    failed_in_a_row: number of saves in a row that failed
    has_room: whether each host was found to have the memory for the copies
    grace_told: whether the warning that a launcher may not wait for a save was given
    """

    policy: CheckpointConfig
    writer: Writer | None
    sent: bool
    dealt: bool
    flight: Flight | None = None
    kept: set[str] = field(default_factory=set)
    failed_in_a_row: int = 0
    has_room: bool = False
    grace_told: bool = False

    def wait_snapshot(self) -> None:
        """Wait until the writer has copied the weights and moments, so that they may change."""
        if self.writer is not None:
            self.writer.wait_snapshot()

    def flags(self) -> dict[str, bool]:
        """Return what this rank's writer reports in the step's vector."""
        state = self.writer.state if self.writer and self.flight else "idle"
        return {"writer_ready": state == "ready", "writer_failed": state == "failed"}
