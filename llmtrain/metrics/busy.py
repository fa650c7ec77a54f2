"""Tells a person what a run is doing while it shows nothing else: anything that takes long.

    reading a unit of the data (41), 3 s
    reading a unit of the data (96), 6 s

The words are those of the heartbeat. A plain log gets them too.
"""

from __future__ import annotations

from llmtrain import heartbeat
from llmtrain.metrics.progress import Progress, duration

# Seconds without a line after which one is due: at the start, and in the loop, where a step may
# take that long.
_FIRST = {False: 3, True: 60}
_MOST = 60  # between two lines


class Busy:
    """Counts the calls of `look`, one a second, since something was last shown.

    The first line comes after three seconds, in the loop after a minute; then each after twice as
    long as the one before, up to a minute.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen = progress.written
        self._quiet = 0
        self._next = 0  # 0: no line was shown since

    def look(self) -> None:
        """Show a line if nothing was shown for long enough."""
        if self._progress.written != self._seen:
            self._seen, self._quiet, self._next = self._progress.written, 0, 0
        self._quiet += 1
        due = self._next or _FIRST[self._progress.begun]
        if self._quiet < due:
            return
        self._next = min(2 * due, due + _MOST)
        self._progress.note(f"{heartbeat.in_words()}, {duration(self._quiet)}")
        self._seen = self._progress.written
