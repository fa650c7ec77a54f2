"""The record of a run: `metrics.jsonl`, one JSON object a line, only ever appended to.

Each line is written whole with one call, so a reader sees only complete lines, except for a torn
last line after a kill. The trap: appending to a torn line would spoil two lines. So opening the
file removes it:

    {"kind": "train", "step": 1, …}⏎
    {"kind": "train", "st                   ← torn by a kill; removed when the run resumes

`Tail` reads the new lines of a record that another process is writing; `words.py` says what the
fields and the events are.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain import system
from llmtrain.config import secrets
from llmtrain.errors import Problem, RunError, UserError, needed_on_disk
from llmtrain.rundir.contents import METRICS
from llmtrain.types import JsonMapping, JsonObject

_log = logging.getLogger(__name__)

REFUSED = "start_refused"  # the event of a start that has added nothing to the run
_TRAIN = b'{"kind": "train", '  # how `Lines` begins the lines of steps
_AT_ONCE = 1 << 20  # bytes
_COLUMNS = 40  # of numbers in the lines of a kind; our own have half of that
_EXACT = 2.0**53  # below it whole numbers are floats, too
_MISSING = object()
_MOST = 1e100  # a sum of many larger numbers would overflow
_NAMED_LINES = 5  # that are left out; further ones are only counted


class Lines:
    """Appends lines to the `metrics.jsonl` of an existing run directory.

    If the disk refuses a line, it is kept and written with the next one: a disk may be full only
    for a while, and a run continues until saves fail. `sync` raises instead.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._hide = secrets.hider(os.environ)
        self._unwritten = b""
        self._start = b""  # the line of kind `start` that this start has written
        self._one_at_a_time = threading.Lock()  # the watchdog has a thread of its own
        with needed_on_disk(self._path):
            self._file = _open(self._path)

    def write(self, kind: str, step: int, **fields: object) -> None:
        """Append one line without secrets. Numbers that are not finite become null."""
        # A time stamp, not a duration.
        head = {"kind": kind, "time": round(time.time(), 3), "step": step}  # noqa: TID251
        line = _encode(head | fields)
        if self._hide(line) != line:  # rare; most lines have no secrets
            line = _encode(secrets.hidden(head | fields, self._hide))
        encoded = f"{line}\n".encode()
        if kind == "start":
            self._start = encoded
        with self._one_at_a_time:
            waiting = bool(self._unwritten)
            self._unwritten += encoded
            try:
                self._write()
            except OSError as error:
                if not waiting:
                    _log.warning("%s takes no lines: %s; they are kept", self._path, error.strerror)

    def refuse(self, step: int, reason: str) -> None:
        """Record that a start was refused in a run that has begun: it changes nothing else."""
        self.write("event", step, event=REFUSED, detail={"reason": " ".join(reason.split())})

    def sync(self) -> None:
        """Write all lines so far to the disk and wait for it. Raises RunError (74)."""
        with needed_on_disk(self._path):
            with self._one_at_a_time:
                self._write()
            os.fsync(self._file)

    def begin_again(self) -> bool:
        """If the file was removed, make a new one that begins with this start's `start` line.

        Returns whether it was removed. Raises RunError (74).
        """
        with needed_on_disk(self._path), self._one_at_a_time:
            if system.is_at(self._path, self._file):
                return False
            before, self._file = self._file, _open(self._path)
            os.close(before)
            self._unwritten = self._start + self._unwritten.replace(self._start, b"")
            self._write()
            system.sync_directory(self._path.parent)
        return True

    def _write(self) -> None:
        """Write the waiting lines in one call, or in several if the disk takes only a part."""
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def close(self) -> None:
        """Sync and close; later calls do nothing. To learn of errors, call `sync` first."""
        if self._file < 0:
            return
        try:
            self.sync()
        except RunError as error:
            _log.warning("the last lines are lost: %s", error.args[0])
        os.close(self._file)
        self._file = -1


def read(path: Path) -> list[JsonObject]:
    """Return the lines of a file that are JSON objects, oldest first; [] if there is no file.

    A torn last line is skipped, since a run may be writing it. Any other line that is not a JSON
    object (a power cut can leave zeros) is skipped with a warning that names it.
    """
    return [value for value, _, _ in _values(path) if value is not None]


def _values(path: Path, *, steps: bool = True) -> Iterator[tuple[JsonObject | None, int, int]]:
    """Yield the JSON object of each whole line, its place in the file and its length in bytes.

    None: the line is no JSON object. steps: as for `short_record`
    """
    bad = 0
    for number, place, line in _whole_lines(path, steps=steps):
        value = parse(line.decode("utf-8", "replace"))
        if value is None and (bad := bad + 1) <= _NAMED_LINES:
            _log.warning("left out line %d of %s, which is no JSON object", number, path)
        yield value, place, len(line)
    if bad > _NAMED_LINES:
        _log.warning("left out %d lines of %s that are no JSON objects", bad, path)


def _whole_lines(path: Path, *, steps: bool) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, place and bytes of each line but a torn last one; nothing without a file."""
    if not path.exists():
        return
    newest, place = (0, 0, b""), 0
    # Line by line: a long record is not held as a whole beside its values.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if steps or not line.startswith(_TRAIN):
                yield number, place, line
            else:
                newest = number, place, line
            place += len(line)
    if newest[0]:
        yield newest


def parse(line: str | bytes) -> JsonObject | None:
    """Return the JSON object of a line; None if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def record(run_dir: Path) -> list[JsonObject]:
    """Return the record of a run as `read` does, and skip lines without kind, time or step."""
    return [dict(line.whole()) for line in short_record(run_dir)[0]]


def short_record(run_dir: Path, *, steps: bool = True) -> tuple[list[Line], int]:
    """Return the record of a run, and the number of whole lines of its file that are not in it.

    The lines are those of `record`, but take a tenth of its memory.

    steps: False = leave out all `train` lines but the newest, which comes last; for starts, as
        reading 100,000 of them takes seconds
    """
    path, unread = run_dir / METRICS, 0
    lines: list[Line] = []
    kinds: dict[str, _LinesOfKind] = {}
    for value, start, size in _values(path, steps=steps):
        if value is not None and is_of_record(value):
            kind = value["kind"]
            if kind not in kinds:
                kinds[kind] = _LinesOfKind(path, kind)
            lines.append(kinds[kind].add(value, start, size))
            continue
        unread += 1
        if value is not None and unread <= _NAMED_LINES:
            _log.warning("left out a line of %s without kind, time and step: %.80s", path, value)
    return lines, unread


def require_record(run_dir: Path) -> None:
    """Raise UserError if a directory has no `metrics.jsonl`."""
    if not (run_dir / METRICS).is_file():
        expected = f"a run directory, with {METRICS} in it"
        remedy = "give the directory that the config names as run.dir"
        raise UserError(Problem("RUN", run_dir, expected, remedy))


def as_number(value: object) -> float | None:
    """Return a number; None for what is none, and for one whose sums would not be finite."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST:
        return float(value)
    return None


def is_of_all(line: JsonMapping) -> bool:
    """Whether a line is an evaluation of all held-out documents, not of those of a source."""
    return line["kind"] == "eval" and line.get("split") == "heldout"


class Line(JsonMapping):
    """A line of the record, of which only the numbers are kept; the rest is read when asked for."""

    __slots__ = ("_kind", "_number")

    def __init__(self, kind: _LinesOfKind, number: int) -> None:
        self._kind = kind
        self._number = number

    def get(self, name: str, default: object = None) -> Any:
        """Return a field, or what is given if there is none of that name."""
        column = self._kind.columns.get(name)
        if column is not None and (value := column[self._number]) == value:  # not NaN
            return int(value) if name in self._kind.integers else value
        if name == "kind":
            return self._kind.name
        if name == "step":
            return self._kind.steps[self._number]
        return self.whole().get(name, default)

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name, _MISSING)) is _MISSING:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def whole(self) -> JsonMapping:
        """Return all fields. Of a file that was replaced meanwhile, those that are kept."""
        return self._kind.whole(self._number)


class _LinesOfKind:
    """The lines of a kind: their numbers by field, and where they are in the file.

    columns: field → its values, NaN in lines where it is no number
    integers: fields whose values are all whole numbers
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.columns: dict[str, array[float]] = {}
        self.integers: set[str] = set()
        self.steps = array("q")
        self._times = array("d")
        self._path = path
        self._places = array("q")
        self._sizes = array("q")
        self._mixed: set[str] = set()
        self._last: tuple[int, JsonMapping] = (-1, {})  # that was asked for

    def add(self, value: JsonMapping, place: int, size: int) -> Line:
        """Add a line."""
        number = len(self._places)
        self.steps.append(value["step"])
        self._times.append(value["time"])
        self._places.append(place)
        self._sizes.append(size)
        for name, one in value.items():
            if type(one) not in (int, float) or abs(one) >= _EXACT or name == "step":
                continue
            column = self.columns.get(name)
            if column is None:
                if name in self._mixed or len(self.columns) >= _COLUMNS:
                    continue
                column = self.columns[name] = array("d", [math.nan]) * number
                if type(one) is int:
                    self.integers.add(name)
            if (name in self.integers) == (type(one) is int):
                column.append(one)
            else:  # what was `1` must not become `1.0`
                self._mixed.add(name)
                del self.columns[name]
        for column in self.columns.values():
            if len(column) == number:
                column.append(math.nan)
        return Line(self, number)

    def whole(self, number: int) -> JsonMapping:
        """Return all fields of a line."""
        if self._last[0] != number:
            with self._path.open("rb") as file:
                file.seek(self._places[number])
                text = file.read(self._sizes[number])
            fields = parse(text.decode("utf-8", "replace"))
            if fields is None:
                numbers = {name: one[number] for name, one in self.columns.items()}
                fields = {name: one for name, one in numbers.items() if not math.isnan(one)}
                fields |= {
                    "kind": self.name,
                    "time": self._times[number],
                    "step": self.steps[number],
                }
            self._last = number, fields
        return self._last[1]


def finite(value: object) -> object:
    """Return `value` with every number in it that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _encode(fields: Mapping[str, object]) -> str:
    return json.dumps(finite(fields), allow_nan=False)


def is_of_record(line: Mapping[str, object]) -> bool:
    """Whether a line has what every line of the record has: a kind, a time and a step."""
    moment, step = line.get("time"), line.get("step")
    if not isinstance(moment, int | float) or type(step) is not int:
        return False
    # No run has others, and a float holds these: nobody who computes with them needs a check.
    plausible = -1e15 < moment < 1e15 and -(2**63) <= step < 2**63
    return plausible and isinstance(line.get("kind"), str)


def _open(path: Path) -> int:
    """Open the file, or make it, for appending lines; remove a torn last line."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    with system.close_on_error(file):
        size = end = os.fstat(file).st_size
        while end:  # look for the last whole line from the end
            start = max(0, end - _AT_ONCE)
            if whole := os.pread(file, end - start, start).rfind(b"\n") + 1:
                end = start + whole
                break
            end = start
        if end < size:
            os.ftruncate(file, end)
            _log.info("removed a torn last line of %d bytes from %s", size - end, path)
    return file


_READ_AT_ONCE = 1 << 18  # bytes


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

    def lines(self) -> tuple[list[JsonObject], bool]:
        """Return the next whole lines, and whether they begin at the beginning.

        Of a long record they are not all lines, so that they take little memory.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return [], False
        with file:
            known = os.fstat(file.fileno())
            again = (
                not self._read
                or known.st_ino != self._file
                or known.st_size < self._read
                or file.read(len(self._begin)) != self._begin
            )
            if again:
                self._file, self._read, self.unread = known.st_ino, 0, 0
            file.seek(self._read)
            text = b""
            while b"\n" not in text and (piece := file.read(_READ_AT_ONCE)):
                text += piece
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        self.more = bool(whole) and self._read < known.st_size
        if again:
            self._begin = whole[:200]
        values = [parse(line) for line in whole.splitlines()]
        lines = [line for line in values if line is not None and is_of_record(line)]
        self.unread += len(values) - len(lines)
        return lines, again
