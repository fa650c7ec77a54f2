"""Requests to stop or save a run, and the flags by which each rank reports them in a step's vector.

    a signal, a launcher that is gone      reported by every rank
    RUN/STOP, `checkpoint.stop_after`      reported by rank 0 alone: end with a checkpoint
    RUN/SAVE, `checkpoint.every_minutes`   reported by rank 0 alone: save and continue

To look for a file costs as much as some operations of a small model, so a step looks only if the
last look is 0.2 s old, or if its numbers decide at once. A file is deleted when its request is
served. If it cannot be deleted, it is ignored from then on, so that it is served only once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from llmtrain.config import duration
from llmtrain.config.schema import CheckpointConfig
from llmtrain.rundir.contents import SAVE, STOP
from llmtrain.types import Flags

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # between two looks for the files


def asked(reason: str | None) -> Flags:
    """Return the flags of this process's own reason to stop. reason: from `Signals`."""
    lost = reason == "launcher_lost"
    return Flags(signal=reason is not None and not lost, launcher_lost=lost)


class Requests:
    """The requests of one start of a run."""

    def __init__(
        self,
        run_dir: Path,
        checkpoint: CheckpointConfig,
        rank: int,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """started: the time by `clock` when this process began. clock: seconds, never goes back."""
        self._paths = {name: run_dir / name for name in (STOP, SAVE)}
        self._decides = rank == 0
        self._clock = clock
        self._started = started
        after = duration.seconds(checkpoint.stop_after or "")
        self._stop_after = math.inf if after is None else after
        self._every = 60 * (checkpoint.every_minutes or math.inf)
        self._begun = clock()
        self._longest_save = 0.0
        self._there: frozenset[str] = frozenset()  # the files that the last look found
        self._looked = -math.inf
        self._served: set[str] = set()
        self._unseen: set[str] = set()
        if self._decides and self._is_there(STOP):
            _log.warning(
                "%s is there already: this start ends before its first step, and deletes it",
                run_dir / STOP,
            )

    def flags(self, reason: str | None, *, look: bool = True) -> Flags:
        """Return the requests that this rank reports now.

        reason: from `Signals`
        look: whether to look for the files in any case, even if that was done a moment ago
        """
        if not self._decides:
            return asked(reason)
        now = self._clock()
        if look or now - self._looked >= _LOOK_SECONDS:
            self._there = frozenset(filter(self._is_there, self._paths))
            self._looked = now
        own = asked(reason)
        return Flags(
            signal=own.signal,
            launcher_lost=own.launcher_lost,
            stop_file=STOP in self._there,
            # Leaves twice the time of the longest save so far, since the last one may be slower.
            stop_after=now - self._started >= self._stop_after - 2 * self._longest_save,
            minutes_due=now - self._begun >= self._every,
            save_file=SAVE in self._there,
        )

    def begin_save(self) -> None:
        """Note that a save serves the requests for one; restart the period in minutes."""
        self._begun = self._clock()
        if self._decides:
            self._delete(SAVE)

    def end_save(self, seconds: float) -> None:
        """Note how many seconds a save took, from its begin to its commit."""
        self._longest_save = max(self._longest_save, seconds)

    def end_stop(self) -> None:
        """Delete the STOP file, now that the run has stopped for whatever reason."""
        if self._decides:
            self._delete(STOP)

    def _is_there(self, name: str) -> bool:
        try:
            there = self._paths[name].exists()
        except OSError as error:
            # Without an answer of the file system there is no request; the next step looks again.
            if name not in self._unseen:
                _log.warning("%s could not be looked for: %s", name, error)
            self._unseen.add(name)
            return False
        self._unseen.discard(name)
        if not there:
            self._served.discard(name)
        return there and name not in self._served

    def _delete(self, name: str) -> None:
        self._looked = -math.inf  # what was found is out of date
        try:
            self._paths[name].unlink(missing_ok=True)
        except OSError as error:
            self._served.add(name)
            _log.warning("%s could not be deleted, and counts no more: %s", name, error)
