"""The record of a run: `metrics.jsonl`, one JSON object a line, only ever appended to.

Each line is written whole with one call, so a reader sees only complete lines, except for a torn
last line after a kill. The trap: appending to a torn line would spoil two lines. So opening the
file removes it:

    {"kind": "train", "step": 1, …}⏎
    {"kind": "train", "st                   ← torn by a kill; removed when the run resumes
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain import durable
from llmtrain.config import secrets
from llmtrain.errors import RunError, needed_on_disk
from llmtrain.rundir.contents import METRICS

_log = logging.getLogger(__name__)

REFUSED = "start_refused"  # the event of a start that has added nothing to the run

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
            if durable.is_at(self._path, self._file):
                return False
            before, self._file = self._file, _open(self._path)
            os.close(before)
            self._unwritten = self._start + self._unwritten.replace(self._start, b"")
            self._write()
            durable.sync_directory(self._path.parent)
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


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are JSON objects, oldest first; [] if there is no file.

    A torn last line is skipped, since a run may be writing it. Any other line that is not a JSON
    object (a power cut can leave zeros) is skipped with a warning that names it.
    """
    return [value for value in _values(path) if value is not None]


def _values(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object of each whole line, None for a line that is not one."""
    if not path.exists():
        return
    bad = 0
    # Line by line: a long record is not held as a whole beside its values.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break
            value = parse(line)
            if value is None and (bad := bad + 1) <= _NAMED_LINES:
                _log.warning("left out line %d of %s, which is no JSON object", number, path)
            yield value
    if bad > _NAMED_LINES:
        _log.warning("left out %d lines of %s that are no JSON objects", bad, path)


def parse(line: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def record(run_dir: Path) -> list[dict[str, Any]]:
    """Return the record of a run as `read` does, and skip lines without kind, time or step."""
    return record_and_unread(run_dir)[0]


def record_and_unread(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the record of a run, and the number of whole lines of its file that are not in it."""
    path, unread = run_dir / METRICS, 0
    found: list[dict[str, Any]] = []
    for line in _values(path):
        if line is not None and is_of_record(line):
            found.append(line)
            continue
        unread += 1
        if line is not None and unread <= _NAMED_LINES:
            _log.warning("left out a line of %s without kind, time and step: %.80s", path, line)
    return found, unread


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
    with durable.close_on_error(file):
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.ftruncate(file, end)
            _log.info("removed a torn last line of %d bytes from %s", len(content) - end, path)
    return file
