"""Records what `data.on_bad_unit: skip` left out, one line each in `skipped-units.jsonl`.

    {"source": "en", "file": "7.parquet", "kind": "rows", "group": 3, "start": 0, "stop": 1000,
     "epoch": 0, "reason": "…", "time": 1.7e9}

A line is durable before any block after its unit is used. Before a unit is read, the file decides
whether it is left out. So whoever makes these blocks again leaves out the same units, even if they
could be read by then. The trap: a unit is recorded with the epoch that needed it (null: before the
first step). In one epoch only one lane reads it, so no record changes what another process has
already read; a record for all epochs would be a race between lanes that are in different epochs.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa

from llmtrain import system
from llmtrain.config import secrets
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, needed_on_disk
from llmtrain.text import first_line, harmless

_log = logging.getLogger(__name__)

FILE_NAME = "skipped-units.jsonl"
MANY_IN_A_ROW = 64


class UnreadableError(UserError):
    """Content that cannot be decoded, which `on_bad_unit` may skip. The machine is not at fault."""


@contextmanager
def readable(
    place: str, expected: str = "data that can be read", remedy: str = "replace the file"
) -> Iterator[None]:
    """Raise UnreadableError for bad content, and RunError for an error of the system.

    An OSError with an errno is an error of the system. A missing file raises UserError.
    """
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            message = f"{place} cannot be read: {error}"
            raise RunError(message, RESTARTABLE, "look at the disk, then start again") from error
        problem = Problem(place, first_line(error), expected, remedy)
        if isinstance(error, FileNotFoundError):  # a missing file is never left out
            raise UserError(problem) from error
        raise UnreadableError(problem) from error


class LeftOut(NamedTuple):
    """What is left out, named in the same way on every machine.

    kind: a whole file, rows of a row group, bytes of a file, or one line
    group: −1 if there is no row group
    start, stop: rows, or bytes; for a line both are its first byte
    epoch: None = before the first step; always None for files and lines, since their content alone
        decides
    """

    source: str
    file: str
    kind: Literal["file", "rows", "bytes", "line"]
    group: int
    start: int
    stop: int
    epoch: int | None


class Skipped:
    """The parts that a run leaves out. Several processes may append to one file at a time."""

    def __init__(self, path: Path | None) -> None:
        """Begin with what `path` records, if it exists; None = nothing is recorded on disk."""
        self._path = path
        self._known: set[LeftOut] = set()
        self._told: set[LeftOut] = set()  # with no epoch: one warning is enough
        self._lines: dict[tuple[str, str], set[int]] = {}
        self._offset = 0
        self._lock = threading.Lock()

    def holds(self, part: LeftOut) -> bool:
        """Return whether a part is left out, by what any process has recorded up to now."""
        with self._lock:
            self._read_on()
            return part in self._known

    def lines(self, source: str, file: str) -> frozenset[int]:
        """Return the first bytes of those lines of a file that are left out."""
        with self._lock:
            self._read_on()
            return frozenset(self._lines.get((source, file), ()))

    def add(self, found: Sequence[tuple[LeftOut, str]]) -> None:
        """Record parts, each with its reason. They are on disk when this returns.

        Raises RunError if the disk fails.
        """
        with self._lock:
            self._read_on()
            new = [(part, reason) for part, reason in found if part not in self._known]
            now = round(time.time(), 3)  # noqa: TID251  a time stamp
            if new and self._path is not None:
                hide = secrets.hider(os.environ)
                facts = [(part._asdict(), hide(reason)) for part, reason in new]
                _append(self._path, [{**part, "reason": why, "time": now} for part, why in facts])
            for part, reason in new:
                was_logged = part._replace(epoch=None) in self._told
                level = logging.INFO if was_logged else logging.WARNING
                _log.log(level, "skipped %s: %s", _words(part), reason)
                self._know(part)

    def _know(self, part: LeftOut) -> None:
        self._known.add(part)
        self._told.add(part._replace(epoch=None))
        if part.kind == "line":
            self._lines.setdefault((part.source, part.file), set()).add(part.start)

    def _read_on(self) -> None:
        """Read what was appended since the last call. An unfinished line is left for later.

        The next writer ends a line that a kill cut off. No block that depends on this line was
        used, so nothing is lost with it.
        """
        if self._path is None:
            return
        try:
            if self._path.stat().st_size <= self._offset:
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            part = _parse(line)
            if part is not None:
                self._know(part)


def read(path: Path) -> list[LeftOut]:
    """Return all parts that a run has left out, once each, in the order written."""
    if not path.exists():
        return []
    parts = (_parse(line) for line in path.read_bytes().splitlines())
    return list(dict.fromkeys(part for part in parts if part is not None))


def too_many(source: str, last: UnreadableError | None) -> UserError:
    """Return the error of too many bad parts in a row."""
    what = f"{MANY_IN_A_ROW} parts in a row cannot be read"
    reason = f"; the last: {last.problems[0].key}: {last.problems[0].value}" if last else ""
    wanted = "a source of which most can be read; data.on_bad_unit is skip, but this is no accident"
    remedy = f"look at {FILE_NAME} in the run directory, and at text_column and the files"
    return UserError(Problem(f"source {source}", what, wanted + reason, remedy))


def _parse(line: bytes) -> LeftOut | None:
    try:
        entry = json.loads(line)
        return LeftOut(**{name: entry[name] for name in LeftOut._fields})
    except (ValueError, KeyError, TypeError):
        if line.strip():
            _log.warning("%s: a line that was cut off is ignored: %r", FILE_NAME, line[:80])
        return None


def _append(path: Path, entries: list[dict[str, object]]) -> None:
    """Append the entries in one write, so that writers do not mix; then sync."""
    data = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    with needed_on_disk(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) != len(data):
            raise OSError(f"the disk took only a part of {len(data)} bytes")
        os.fsync(file.fileno())
        if size == 0:
            system.sync_directory(path.parent)


def _words(part: LeftOut) -> str:
    place = {
        "file": "",
        "rows": f", rows {part.start} to {part.stop} of row group {part.group}",
        "bytes": f", bytes {part.start} to {part.stop}",
        "line": f", the line at byte {part.start}",
    }[part.kind]
    epoch = "" if part.epoch is None else f", epoch {part.epoch}"
    return f"{harmless(part.file)} of {part.source}{place}{epoch}"
