"""What is due at which step.

All decisions that must be the same on all ranks are made here, from numbers that all of them
received.
"""

from dataclasses import KW_ONLY, dataclass, field

from llmtrain.types import STOPS, Flags, Numbers, Ranks


@dataclass(slots=True)
class Due:
    """What is due in one start of a run; `step` always counts finished steps.

    steps: number of steps of the whole run
    first: number of steps that were finished when this start began
    last_evaluation: step of the last evaluation, None before the first one
    heldout: whether there are documents to evaluate on
    data_ended: whether no block is left to train on
    stop_reason: why the run must stop, as all ranks agreed
    keep_best: whether an evaluation that is the best so far is saved
    patience: number of evaluations in a row without a lower loss that end the run; None = none do
    without_gain: number of evaluations in a row so far without a lower loss
    """

    _: KW_ONLY
    steps: int
    evaluate_every: int
    save_every: int
    log_every: int
    first: int
    last_evaluation: int | None
    heldout: bool
    data_ended: bool
    stop_reason: str | None = None
    keep_best: bool = False
    patience: int | None = None
    without_gain: int = 0
    _best: int | None = None
    _saved: set[int] = field(default_factory=set)
    _asked: bool = False
    _in_flight: bool = False
    _written: bool = False

    def __post_init__(self) -> None:
        self._saved.add(self.first)

    def learn(self, numbers: Numbers) -> None:
        """Note what all ranks agreed on at a step."""
        self.ask(numbers.stops)
        self.data_ended = self.data_ended or numbers.ended
        self._asked = self._asked or numbers.save
        self._written = numbers.written

    def ask(self, stops: tuple[str, ...]) -> None:
        """Note a stop that all ranks know of."""
        for reason in STOPS:
            if reason in stops and self.stop_reason is None:
                self.stop_reason = reason

    def record_evaluation(self, step: int, *, lower: bool) -> None:
        """Note that the evaluation of `step` is complete.

        lower: whether its loss is lower than those of all evaluations before
        """
        self.last_evaluation = step
        self.without_gain = 0 if lower else self.without_gain + 1
        if lower and self.keep_best:
            self._best = step

    def begin_save(self, step: int) -> None:
        """Note that a save of `step` begins. It also serves the requests for one so far."""
        self._saved.add(step)
        self._asked = self._written = False
        self._in_flight = True

    def end_save(self, step: int, *, saved: bool) -> None:
        """Note that the save of `step` is over. saved: whether it succeeded."""
        self._in_flight = self._written = False
        if not saved:
            self._saved.remove(step)

    def stop(self, step: int) -> bool:
        """Whether no step may follow `step`."""
        return self.stop_reason is not None or self._last(step)

    def evaluation(self, step: int) -> bool:
        """Whether to evaluate after `step`: at its period or the end, unless done or stopping."""
        wanted = step % self.evaluate_every == 0 or self._last(step)
        missing = self.heldout and self.last_evaluation != step
        return wanted and missing and self.stop_reason is None

    def checkpoint(self, step: int) -> bool:
        """Whether a save begins at `step`, or the one in flight has been written."""
        return self.begins(step) or (self._in_flight and self._written)

    def begins(self, step: int) -> bool:
        """Whether to save `step`: at its period, on request, at the best evaluation or the end."""
        wanted = step % self.save_every == 0 or self._asked or self._best == step
        return (wanted or self.stop(step)) and self.unsaved(step)

    def reason(self, step: int) -> str:
        """Return why `step` is saved: `period`, `asked`, `best`, `end`, or the reason of a stop."""
        if self.stop(step):
            return self.stop_reason or "end"
        if step % self.save_every == 0:
            return "period"
        return "asked" if self._asked else "best"

    def unsaved(self, step: int) -> bool:
        """Whether the state of `step` is neither saved nor being saved."""
        return step not in self._saved

    def anything(self, step: int) -> bool:
        """Whether the numbers of `step` are needed at once, instead of one step later."""
        return self.evaluation(step) or self.checkpoint(step) or self.stop(step)

    def line(self, step: int) -> bool:
        """Whether `step` gets a line of metrics. It is asked before the evaluation of `step`."""
        may_end = self.patience is not None and self.evaluation(step)
        return may_end or self.stop(step) or step == self.first + 1 or step % self.log_every == 0

    def finished(self, step: int) -> bool:
        """Whether the run is complete: the last step is done and nothing is missing."""
        return self._last(step) and not (self.heldout and self.last_evaluation != step)

    @property
    def out_of_patience(self) -> bool:
        """Whether too many evaluations in a row had no lower loss."""
        return self.patience is not None and self.without_gain >= self.patience

    def ended_by(self, step: int) -> str | None:
        """Return why a finished run has ended at `step`, if not because that is its last step."""
        if self.data_ended:
            return "data_ended"
        return "patience" if self.out_of_patience and step != self.steps else None

    def _last(self, step: int) -> bool:
        return step == self.steps or self.data_ended or self.out_of_patience


def agreed_stop(ranks: Ranks, flags: Flags) -> tuple[str, ...]:
    """Return the most important reason for which any rank must stop, or (). Collective.

    For use outside a step, whose own reduction shares the flags.
    """
    is_set = flags._asdict()
    levels = [len(STOPS) - k for k, reason in enumerate(STOPS) if is_set[reason]]
    highest = ranks.highest(max(levels, default=0))
    return (STOPS[-highest],) if highest else ()
