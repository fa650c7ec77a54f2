"""A line on stderr that shows the progress of a command."""

from __future__ import annotations

import sys
import time

from llmtrain.errors import harmless

_SECONDS_BETWEEN = {True: 0.5, False: 30.0}  # True: on a terminal, where lines replace each other


class ProgressLine:
    """A line of progress: on a terminal it replaces the last one, elsewhere it is added below."""

    def __init__(self, wait: bool) -> None:
        """Begin. wait: whether the first line is due only after a normal interval."""
        self.moves = sys.stderr.isatty()
        self._next = time.perf_counter() + _SECONDS_BETWEEN[self.moves] * wait

    def is_due(self) -> bool:
        """Whether it is time for another line. If so, the next one is due after an interval."""
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = now + _SECONDS_BETWEEN[self.moves]
        return True

    def show(self, text: str, *, last: bool = False) -> None:
        """Write the line. last: move the cursor to the next line."""
        begin, end = ("\r\033[K", "\n" * last) if self.moves else ("", "\n")
        print(f"{begin}{harmless(text)}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line, if it is on a terminal."""
        if self.moves:
            self.show("")
