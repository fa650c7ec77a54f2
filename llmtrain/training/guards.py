"""What ends a run that goes wrong numerically."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.types import Numbers

_log = logging.getLogger(__name__)

_NAMED = 5  # of what differs, in a message; the log has all


class Guards:
    """Looks at every step's numbers; equal on all ranks, so all of them raise or none."""

    def __init__(self, config: TrainingConfig, skipped_in_a_row: int) -> None:
        self._config = config
        self.skipped_in_a_row = skipped_in_a_row

    def check(self, numbers: Numbers) -> None:
        """Count skipped updates; raise when there are too many, or none may be."""
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
            return
        self.skipped_in_a_row += 1
        match self._config.on_nonfinite:
            case "stop":
                raise _diverged(numbers, "training.on_nonfinite is stop")
            case "skip":
                if self.skipped_in_a_row >= self._config.max_skipped_in_a_row:
                    raise _diverged(numbers, f"{self.skipped_in_a_row} updates in a row skipped")
            case _:
                assert_never(self._config.on_nonfinite)


def check_replicas(
    differing: Mapping[str, Sequence[int]], step: int, tell: Callable[..., object]
) -> None:
    """Raise RunError (75) where replicas came apart, so that neither of them is saved.

    differing: as of `Engine.unequal_replicas`, the same on all ranks · tell: event, step, details.
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


def _diverged(numbers: Numbers, why: str) -> RunError:
    return RunError(
        f"training diverged at step {numbers.step}: loss {numbers.loss}, gradient norm "
        f"{numbers.grad_norm} ({why})",
        1,
        "lower optimizer.learning_rate or lengthen warmup_steps, and start a new run.dir",
    )
