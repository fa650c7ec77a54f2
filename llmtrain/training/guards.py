"""Numerical problems of a run: which are reported, and which end it.

A loss is a spike if it exceeds the median of the last steps by more than six of their standard
deviations. The standard deviation is estimated from the median of the distances to that median,
which, unlike other estimates, the spikes themselves do not increase.
"""

import logging
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.text import first_few
from llmtrain.types import Numbers

_log = logging.getLogger(__name__)

_NAMED = 5  # differing tensors named in a message; the log names all of them
_WINDOW = 128  # steps
_ENOUGH = 64  # steps; with 32, pure noise counts as a spike in 4 of 100,000 cases, with 64 in none
_DEVIATIONS = 6
_NORMAL = 1.4826  # σ of normal noise divided by the median distance to its median
_LEAST_DEVIATION = 0.01  # nats; for a loss that hardly varies, where any change would be a spike

ReportEvent = Callable[..., object]  # event, step, details


@dataclass(slots=True)
class Guards:
    """The checks of each step's numbers, which are equal on all ranks, so all raise or none does.

    report_event: called with the name of an event, its step and details

    Losses of an earlier start are not known.
    """

    config: TrainingConfig
    skipped_in_a_row: int
    report_event: ReportEvent
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _sorted: list[float] = field(default_factory=list)  # the same, in order: no step sorts them
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _spiking: bool = False

    def median_seconds(self) -> float:
        """Return the median time of the last steps; 0 before the first one. Thread-safe."""
        return median(tuple(self._seconds) or (0.0,))

    def check(self, numbers: Numbers) -> None:
        """Report loss spikes; raise RunError (1) if the run has diverged.

        That is after a skipped update or after too many in a row, as `training.on_nonfinite` sets.
        Raises UserError for a step without trained tokens before the data has ended.
        """
        self._seconds.append(numbers.seconds)
        if numbers.step_tokens == 0 and (numbers.ended or numbers.padding_only):
            return  # no data was left, which is no sign of divergence
        if numbers.step_tokens == 0:
            expected = "at least one trained token in the whole step"
            raise UserError(Problem(f"step {numbers.step}", None, expected))
        if not numbers.skipped:
            self.skipped_in_a_row = 0
            # Report a loss far above those before it; while it stays high, it is reported once.
            usual, middle = math.inf, len(self._losses) // 2
            if len(self._losses) >= _ENOUGH:
                usual = (self._sorted[middle] + self._sorted[~middle]) / 2  # the median
            above = numbers.loss > usual + _DEVIATIONS * _LEAST_DEVIATION
            if above:
                distance = median(abs(loss - usual) for loss in self._losses)
                sigma = max(_NORMAL * distance, _LEAST_DEVIATION)
                above = numbers.loss > usual + _DEVIATIONS * sigma
                if above and not self._spiking:
                    values = {"loss": numbers.loss, "median": usual, "sigma": sigma}
                    self.report_event("loss_spike", numbers.step, **values)
            self._spiking = above
            if len(self._losses) == _WINDOW:
                del self._sorted[bisect_left(self._sorted, self._losses[0])]
            self._losses.append(numbers.loss)
            insort(self._sorted, numbers.loss)
            return
        self.skipped_in_a_row += 1
        if self.config.on_nonfinite == "stop":
            raise _divergence(numbers, "training.on_nonfinite is stop")
        if self.skipped_in_a_row >= self.config.max_skipped_in_a_row:
            raise _divergence(numbers, f"{self.skipped_in_a_row} updates in a row skipped")


def check_replicas(
    differing: Mapping[str, Sequence[int]], step: int, report_event: ReportEvent
) -> None:
    """Raise RunError (75) if replicas differ, so that none of them is saved.

    differing: from `Engine.unequal_replicas`, the same on all ranks
    report_event: called with the name of an event, its step and details
    """
    if not differing:
        return
    ranks = sorted({rank for named in differing.values() for rank in named})
    names = [f"{name} (rank {', '.join(map(str, named))})" for name, named in differing.items()]
    for name in names:
        _log.error("replicas differ at step %d in %s", step, name)
    report_event("replicas_differ", step, ranks=ranks, count=len(names), names=names[:_NAMED])
    raise RunError(
        f"replicas hold different weights at step {step}: {first_few(names, _NAMED)}",
        RESTARTABLE,
        "the same command resumes from the newest checkpoint, where they were equal; a machine "
        "whose rank is named again and again should be left out",
    )


def _divergence(numbers: Numbers, why: str) -> RunError:
    return RunError(
        f"training diverged at step {numbers.step}: loss {numbers.loss}, gradient norm "
        f"{numbers.grad_norm} ({why})",
        1,
        "lower optimizer.learning_rate or lengthen warmup_steps, and start a new run.dir",
    )
