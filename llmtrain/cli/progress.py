"""A line on stderr that shows the progress of a command, or what it does while that takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmtrain import heartbeat
from llmtrain.errors import harmless

_BUSY_AFTER_SECONDS = 3.0
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


@contextmanager
def busy(what: str) -> Iterator[Callable[[], None]]:
    """While the block runs, show on a terminal what it does, from the third second on.

    what: the first phase; `heartbeat.beat` sets the next ones

    Yields a function that ends this early, before the block shows something itself.
    """
    heartbeat.beat(what)
    line, over, began = ProgressLine(wait=False), threading.Event(), time.monotonic()

    def tell() -> None:
        wait = _BUSY_AFTER_SECONDS
        while not over.wait(wait):
            line.show(f"{heartbeat.in_words()}, {time.monotonic() - began:.0f} s")
            wait = _SECONDS_BETWEEN[True]

    def end() -> None:
        if not over.is_set():
            over.set()
            thread.join()
            line.clear()

    thread = threading.Thread(target=tell, name="busy", daemon=True)
    if line.moves:
        thread.start()
    else:
        over.set()
    try:
        yield end
    finally:
        end()
