"""Show text of documents on a terminal: harmless, and as wide as it looks.

A document may hold anything: what is not printable is written as an escape, so that it neither
moves the cursor nor turns the direction of writing. No colours are used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from unicodedata import combining, east_asian_width

from llmtrain.errors import harmless

WIDTH = 80


def show(lines: Iterable[str], keep: str = "") -> None:
    """Print lines, without anything that a terminal would obey.

    What the terminal's encoding lacks is written as an escape. keep: as in `harmless`.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        print(harmless(line, keep))


class LogLine(logging.Formatter):
    """A line of the log for a terminal, where no run has set up its log file."""

    def format(self, record: logging.LogRecord) -> str:
        """The message alone."""
        return harmless(super().format(record), keep="\n")


def columns(text: str) -> int:
    """How wide it is on a terminal."""
    return sum(_columns(char) for char in text)


def clip(text: str, width: int) -> str:
    """Shorten a text to a width; three dots stand for what is cut off."""
    if columns(text) <= width:
        return text
    return next(wrap(text, width - 3)) + "..."


def wrap(text: str, width: int) -> Iterator[str]:
    """Break a text into lines of at most this width, at spaces where there are any."""
    line, used, space = "", 0, -1
    for char in text:
        if used + _columns(char) > width:
            cut = space if space > 0 else len(line)
            yield line[:cut]
            line = line[cut:].removeprefix(" ")
            used, space = columns(line), line.rfind(" ")
        if char == " ":
            space = len(line)
        line, used = line + char, used + _columns(char)
    yield line


def _columns(char: str) -> int:
    if combining(char):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1
