"""What is due at which step. Everything that ranks must decide alike is decided here, from numbers
that all ranks received.
"""

from __future__ import annotations

from llmtrain.config.schema import Config
from llmtrain.types import Flags, Numbers, Ranks

# A lost launcher comes first: ranks are reparented one after another, each with a signal.
STOP_REASONS = ("launcher_lost", "signal", "stop_file", "stop_after")


class Due:
    """Answers for one start of a run; `step` always counts finished steps."""

    def __init__(
        self, config: Config, first: int, evaluated: int | None, *, heldout: bool, ended: bool
    ) -> None:
        assert config.training.steps is not None
        self._steps = config.training.steps
        self._evaluate_every = config.evaluation.every_steps
        self._save_every = config.checkpoint.every_steps
        self._log_every = config.logging.every_steps
        self._first = first + 1
        self._evaluated = evaluated
        self._saved = {first}
        self._asked = False
        self._in_flight = False
        self._written = False
        self._heldout = heldout
        self.data_ended = ended
        self.stop_reason: str | None = None

    def learn(self, numbers: Numbers) -> None:
        """Hear what all ranks said at a step."""
        self.ask(numbers.stops)
        self.data_ended = self.data_ended or numbers.ended
        self._asked = self._asked or numbers.save
        self._written = numbers.written

    def ask(self, stops: tuple[str, ...]) -> None:
        """Take up a stop that all ranks know of."""
        for reason in STOP_REASONS:
            if reason in stops and self.stop_reason is None:
                self.stop_reason = reason

    def evaluated(self, step: int) -> None:
        """An evaluation of `step` was completed."""
        self._evaluated = step

    def begun(self, step: int) -> None:
        """The state of `step` is being saved; what was asked for is served."""
        self._saved.add(step)
        self._asked = self._written = False
        self._in_flight = True

    def ended(self, step: int, *, saved: bool) -> None:
        """What was begun for `step` is on disk, or is not: then the next due step tries again."""
        self._in_flight = self._written = False
        if not saved:
            self._saved.remove(step)

    def stop(self, step: int) -> bool:
        """Whether no step may follow `step`."""
        return self.stop_reason is not None or self._last(step)

    def evaluation(self, step: int) -> bool:
        """Whether to measure now: the base line, the period, the end, or one that was cut off."""
        wanted = step % self._evaluate_every == 0 or self._last(step)
        missing = self._heldout and self._evaluated != step
        return wanted and missing and self.stop_reason is None

    def checkpoint(self, step: int) -> bool:
        """Whether a save begins at `step`, or one that is in flight has been written."""
        return self.begins(step) or (self._in_flight and self._written)

    def begins(self, step: int) -> bool:
        """Whether to save the state of `step`: period, wish, the end of this start."""
        wanted = step % self._save_every == 0 or self._asked or self.stop(step)
        return wanted and self.unsaved(step)

    def reason(self, step: int) -> str:
        """Why `step` is saved: its period, a wish, the end, or what stops the run."""
        if self.stop(step):
            return self.stop_reason or "end"
        return "period" if step % self._save_every == 0 else "asked"

    def unsaved(self, step: int) -> bool:
        """Whether the state of `step` is neither on disk nor on its way there."""
        return step not in self._saved

    def anything(self, step: int) -> bool:
        """Whether a decision of `step` is needed at once, instead of one step later."""
        return self.evaluation(step) or self.checkpoint(step) or self.stop(step)

    def line(self, step: int) -> bool:
        """Whether `step` gets a line of metrics."""
        return self.stop(step) or step == self._first or step % self._log_every == 0

    def finished(self, step: int) -> bool:
        """Whether the run is complete: the last step is done and nothing is missing."""
        return self._last(step) and not (self._heldout and self._evaluated != step)

    def _last(self, step: int) -> bool:
        return step == self._steps or self.data_ended


def agreed_stop(ranks: Ranks, flags: Flags) -> tuple[str, ...]:
    """Outside a step: the reason that outranks what any rank says, or nothing. Collective."""
    said = {
        "launcher_lost": flags.lost_launcher,
        "signal": flags.signal,
        "stop_file": flags.stop_file,
        "stop_after": flags.stop_after,
    }
    levels = [len(STOP_REASONS) - k for k, reason in enumerate(STOP_REASONS) if said[reason]]
    highest = ranks.highest(max(levels, default=0))
    return (STOP_REASONS[-highest],) if highest else ()
