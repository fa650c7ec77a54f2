"""Show the text of documents on a terminal: without control characters, in lines of a known width.

A document may contain anything. Characters that are not printable are written as escapes, so that
they cannot move the cursor or change the direction of writing. No colours are used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from unicodedata import combining, east_asian_width

from llmtrain.errors import harmless

WIDTH = 80


def show(lines: Iterable[str], keep: str = "") -> None:
    """Print lines, with control characters written as escapes.

    Characters that the terminal's encoding lacks are also escaped. keep: as in `harmless`.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        print(harmless(line, keep))


class LogLine(logging.Formatter):
    """A formatter of log lines for a terminal, used until a run has set up its log file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted message, with control characters escaped."""
        return harmless(super().format(record), keep="\n")


def columns(text: str) -> int:
    """Return the width of a text on a terminal, in columns."""
    return sum(_columns(char) for char in text)


def clip(text: str, width: int) -> str:
    """Shorten a text to a width; three dots mark that something was cut off.

    It is cut between words, unless a long word would take half of the width with it.
    """
    if columns(text) <= width:
        return text
    room, kept = width - 3, ""
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        kept += char
    words = kept.rpartition(" ")[0]
    return (words if 2 * columns(words) > width else kept) + "..."


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
