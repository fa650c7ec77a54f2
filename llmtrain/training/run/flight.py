"""How a start writes checkpoints, and the one that is in flight between two boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmtrain.checkpoint.background import Writer
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.retention import Policy
from llmtrain.checkpoint.write import Begun

# Why this rank did not write its part (None = it did), and what it wrote.
Written = tuple[BaseException | None, Extents]


@dataclass(frozen=True, slots=True)
class Flight:
    """A checkpoint between begin and commit.

    cursors: the line of `cursors.jsonl`, at rank 0
    last: this start makes no step after it
    blocked: seconds that the training has waited for it so far, without those that its writer
        counts
    written: the result of one that was written in line, None where a writer has it
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
    """How this start writes checkpoints, and the one that is in flight.

    policy: which checkpoints stay
    writer: None where all is written in line
    sent: rank 0 writes what the others hold parts of, which takes collectives, so in line
    dealt: what every rank holds a copy of is shared out among them
    flight: the checkpoint in flight
    kept: what was there after the last retention (rank 0)
    failed_in_a_row: saves
    has_room: this host has the memory for a copy
    grace_told: the warning that a launcher may not wait for a save was given
    """

    policy: Policy
    writer: Writer | None
    sent: bool
    dealt: bool
    flight: Flight | None = None
    kept: set[str] = field(default_factory=set)
    failed_in_a_row: int = 0
    has_room: bool = False
    grace_told: bool = False

    def wait_snapshot(self) -> None:
        """Wait until what is saved was copied: an update may not change it before."""
        if self.writer is not None:
            self.writer.wait_snapshot()

    def flags(self) -> dict[str, bool]:
        """Return what this rank's writer reports in the step's vector."""
        state = self.writer.state if self.writer and self.flight else "idle"
        return {"writer_ready": state == "ready", "writer_failed": state == "failed"}
