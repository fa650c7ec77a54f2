"""The new lines of a record that another process is writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from llmtrain.rundir.contents import METRICS
from llmtrain.rundir.record import is_of_record, parse

_AT_ONCE = 1 << 18  # bytes


class Tail:
    """Reads a record piece by piece, and each byte once.

    more: whether there may be more lines than those that were returned last

    A file that was replaced or has become shorter (it was copied, or the run directory is
    synchronized from elsewhere) is read again from its beginning. Nothing is written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._file = 0  # inode
        self._read = 0  # bytes
        self._begin = b""  # of the file: a copy over it keeps the inode
        self.unread = 0  # lines that are not of a record
        self.more = False

    def lines(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the next whole lines, and whether they begin at the beginning.

        Of a long record they are not all lines, so that they take little memory.
        """
        try:
            with self._path.open("rb") as file:
                return self._lines_of(file)
        except FileNotFoundError:
            return [], False

    def _lines_of(self, file: BinaryIO) -> tuple[list[dict[str, Any]], bool]:
        known = os.fstat(file.fileno())
        begin = file.read(len(self._begin) or 200)
        again = (
            known.st_ino != self._file or known.st_size < self._read or begin[:200] != self._begin
        ) or not self._read
        if again:
            self._file, self._read, self.unread = known.st_ino, 0, 0
        file.seek(self._read)
        text = b""
        while b"\n" not in text and (piece := file.read(_AT_ONCE)):
            text += piece
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        self.more = bool(whole) and self._read < known.st_size
        if again:
            self._begin = whole[:200]
        found = [parse(line) for line in whole.splitlines()]
        kept = [line for line in found if line is not None and is_of_record(line)]
        self.unread += len(found) - len(kept)
        return kept, again
