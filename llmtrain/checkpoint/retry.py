"""Retries reading when the disk does not answer, unless a stop is asked for.

There are three tries within half a minute: the second one soon, since many failures of a network
file system are short, and the third one much later. Damage is not a failure of the disk and is not
retried.
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
_log = logging.getLogger(__name__)


class StoppedError(Exception):
    """A stop was asked for while a checkpoint was being read; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How reading is retried.

    stopping: returns the reason of a stop, or None
    wait: sleeps for a number of seconds
    """

    stopping: Callable[[], str | None] = lambda: None
    wait: Callable[[float], object] = time.sleep

    def retry(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, which is tried up to three times if it raises OSError.

        Raises OSError after the third try, StoppedError before a try if a stop was asked for.
        """
        for pause in PAUSES:
            self.check_stop()
            try:
                return work(*args, **kwargs)
            except OSError as error:
                _log.warning("reading failed, next try in %d s: %s", pause, error)
                self._rest(pause)
        self.check_stop()
        return work(*args, **kwargs)

    def check_stop(self) -> None:
        """Raise StoppedError if a stop was asked for."""
        if reason := self.stopping():
            raise StoppedError(reason)

    def _rest(self, seconds: int) -> None:
        for _ in range(seconds):
            self.check_stop()
            heartbeat.beat("waiting for the disk of the checkpoints")
            self.wait(1.0)
