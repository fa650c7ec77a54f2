"""What is reported of a run that goes wrong numerically, and what ends it.

A loss is a spike if it is above the median of the last steps by more than six of their standard
deviations. These are estimated from the median of the distances to that median, since the spikes
themselves would widen any other measure.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import assert_never

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.types import Numbers

_log = logging.getLogger(__name__)

_NAMED = 5  # of what differs, in a message; the log has all
_WINDOW = 128  # steps
_ENOUGH = 64  # steps: of 32, pure noise is a spike in 4 of 100,000 cases, of 64 in none
_DEVIATIONS = 6
_NORMAL = 1.4826  # σ of normal noise over the median of its distances
_LEAST_DEVIATION = 0.01  # nats: a loss that hardly moves has no noise to measure a spike by

Tell = Callable[..., object]  # event, step, details


@dataclass(slots=True)
class Guards:
    """Looks at every step's numbers, which are equal on all ranks: all of them raise, or none.

    tell: takes an event. Losses of an earlier start are not known.
    """

    config: TrainingConfig
    skipped_in_a_row: int
    tell: Tell
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _spiking: bool = False

    def median_seconds(self) -> float:
        """Return the median time of the last steps (from any thread); 0 before the first one."""
        return median(tuple(self._seconds) or (0.0,))

    def check(self, numbers: Numbers) -> None:
        """Count skipped updates, raise if there are too many or none is allowed; report spikes."""
        self._seconds.append(numbers.seconds)
        if numbers.step_tokens == 0 and (numbers.ended or numbers.padding_only):
            return  # nothing was left to train on: no sign of divergence
        if numbers.step_tokens == 0:
            raise UserError(
                Problem(
                    f"step {numbers.step}", None, "at least one trained token in the whole step"
                )
            )
        if not numbers.skipped:
            self.skipped_in_a_row = 0
            self._look_for_a_spike(numbers)
            return
        self.skipped_in_a_row += 1
        match self.config.on_nonfinite:
            case "stop":
                raise _divergence(numbers, "training.on_nonfinite is stop")
            case "skip":
                if self.skipped_in_a_row >= self.config.max_skipped_in_a_row:
                    raise _divergence(numbers, f"{self.skipped_in_a_row} updates in a row skipped")
            case _:
                assert_never(self.config.on_nonfinite)

    def _look_for_a_spike(self, numbers: Numbers) -> None:
        """Compare a loss with those before it; a loss that stays high is one spike."""
        usual, sigma = _spread(self._losses) if len(self._losses) >= _ENOUGH else (math.inf, 0.0)
        above = numbers.loss > usual + _DEVIATIONS * sigma
        if above and not self._spiking:
            values = {"loss": numbers.loss, "median": usual, "sigma": sigma}
            self.tell("loss_spike", numbers.step, **values)
        self._spiking = above
        self._losses.append(numbers.loss)


def _spread(losses: Sequence[float]) -> tuple[float, float]:
    """Return median and standard deviation, neither of which a minority of outliers changes."""
    middle = median(losses)
    distance = median(abs(loss - middle) for loss in losses)
    return middle, max(_NORMAL * distance, _LEAST_DEVIATION)


def check_replicas(differing: Mapping[str, Sequence[int]], step: int, tell: Tell) -> None:
    """Raise RunError (75) if replicas differ, so that neither of them is saved.

    differing: as of `Engine.unequal_replicas`, the same on all ranks · tell: takes an event.
    """
    if not differing:
        return
    ranks = sorted({rank for named in differing.values() for rank in named})
    names = [f"{name} (rank {', '.join(map(str, named))})" for name, named in differing.items()]
    for name in names:
        _log.error("replicas differ at step %d in %s", step, name)
    tell("replicas_differ", step, ranks=ranks, count=len(names), names=names[:_NAMED])
    raise RunError(
        f"replicas hold different weights at step {step}: {_some(names)}",
        RESTARTABLE,
        "the same command resumes from the newest checkpoint, where they were equal; a machine "
        "whose rank is named again and again should be left out",
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _divergence(numbers: Numbers, why: str) -> RunError:
    return RunError(
        f"training diverged at step {numbers.step}: loss {numbers.loss}, gradient norm "
        f"{numbers.grad_norm} ({why})",
        1,
        "lower optimizer.learning_rate or lengthen warmup_steps, and start a new run.dir",
    )
