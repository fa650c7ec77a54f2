"""A disk that does not answer is asked again, and a stop ends the asking.

Three tries within half a minute: one at once, since many a hiccup of a network file system is over
by then, and one much later. Damage is no trouble of the disk and is not tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from llmtrain import heartbeat

P = ParamSpec("P")
T = TypeVar("T")

PAUSES = (1, 29)  # seconds before the second and the third try
logger = logging.getLogger(__name__)


class StoppedError(Exception):
    """A stop was asked for while a checkpoint was being read; its text is the reason."""

    @property
    def reason(self) -> str:
        """As `stopping` said it."""
        return str(self.args[0])


def never() -> str | None:
    """No stop is asked for."""
    return None


@dataclass(frozen=True, slots=True)
class Patience:
    """stopping: why reading shall end, or None · wait: sleeps for so many seconds."""

    stopping: Callable[[], str | None] = never
    wait: Callable[[float], object] = time.sleep

    def tried(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, which has three tries if the disk does not answer.

        Raises OSError after the third, StoppedError before any if a stop was asked for.
        """
        for pause in PAUSES:
            self.heed()
            try:
                return work(*args, **kwargs)
            except OSError as error:
                logger.warning("reading failed, next try in %d s: %s", pause, error)
                self._rest(pause)
        self.heed()
        return work(*args, **kwargs)

    def heed(self) -> None:
        """Raise StoppedError if a stop was asked for."""
        if reason := self.stopping():
            raise StoppedError(reason)

    def _rest(self, seconds: int) -> None:
        for _ in range(seconds):
            self.heed()
            heartbeat.beat("waiting for the disk of the checkpoints")
            self.wait(1.0)
