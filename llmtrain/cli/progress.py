"""One line on stderr that shows how far a command is."""

from __future__ import annotations

import sys
import time

from llmtrain.errors import harmless

_SECONDS_BETWEEN = {True: 0.5, False: 30.0}  # on a terminal, where a line replaces the one before


class ProgressLine:
    """A line that replaces the one before on a terminal, and is added now and then elsewhere."""

    def __init__(self, wait: bool) -> None:
        """wait: whether the first line is due only after a while."""
        self.moves = sys.stderr.isatty()
        self._next = time.perf_counter() + _SECONDS_BETWEEN[self.moves] * wait

    def is_due(self) -> bool:
        """Whether it is time for another line; then the next one is due a while later."""
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = now + _SECONDS_BETWEEN[self.moves]
        return True

    def show(self, text: str, *, last: bool = False) -> None:
        """Write the line; after the last one the cursor is below it."""
        begin, end = ("\r\033[K", "\n" * last) if self.moves else ("", "\n")
        print(f"{begin}{harmless(text)}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self.moves:
            self.show("")
