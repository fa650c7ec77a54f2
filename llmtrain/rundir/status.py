"""`status.json`: what a run is doing, for people and other programs.

It is replaced as a whole (temporary file, fsync, rename), so that a reader never sees half of it.
Only rank 0 writes it, which holds the lock of the run directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from llmtrain.config import secrets
from llmtrain.rundir.contents import STATUS, write_atomically

State = Literal["running", "finished", "stopped", "failed"]

# Every field, in the order of the file, with its value at the beginning of a run.
_EMPTY: dict[str, object] = {
    "run_id": None,
    "state": "running",
    "exit_code": None,
    "reason": None,
    "step": 0,
    "checkpoint": None,
    "strategy": None,
    "world_size": None,
    "restarts": 0,
    "updated": None,
}
_TEXT = ("run_id", "state", "reason", "checkpoint", "strategy", "updated")
_CARRIED: tuple[str, ...] = ("run_id", "step", "checkpoint")


def start_status(
    run_dir: Path, *, run_id: str, strategy: str | None, world_size: int
) -> dict[str, Any]:
    """Write that a start of the run has begun. Returns what was written.

    strategy: None until it is chosen

    A later start keeps `run_id` (the argument counts only in the first), `step` and `checkpoint` of
    the one before, and adds 1 to `restarts`. Raises RunError (74).
    """
    before = read_status(run_dir)
    kept = {key: before[key] for key in _CARRIED if before.get(key) is not None}
    restarts = before["restarts"] + 1 if "restarts" in before else 0
    started = {"strategy": strategy, "world_size": world_size, "restarts": restarts}
    return _replace(run_dir, _EMPTY | {"run_id": run_id} | kept | started)


def write_status(
    run_dir: Path, before: Mapping[str, Any] | None = None, **fields: object
) -> dict[str, Any]:
    """Replace some fields and keep the others; `updated` is set. Returns what was written.

    before: what was written last; used if the file has been deleted since

    Raises RunError (74) when the disk refuses, ValueError for a field that does not exist.
    """
    if unknown := fields.keys() - _EMPTY.keys():
        raise ValueError(f"status.json has no field {', '.join(sorted(unknown))}")
    return _replace(run_dir, _EMPTY | (read_status(run_dir) or dict(before or {})) | fields)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the fields of a run directory's status; an empty dict if there is no readable file.

    A field of another type is left out. The file only shows the run; nothing of the run depends on
    it.
    """
    try:
        value = json.loads((run_dir / STATUS).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return {}
    found = value if isinstance(value, dict) else {}
    return {name: field for name, field in found.items() if _can_be(name, field)}


def _can_be(name: str, field: object) -> bool:
    """Whether a field has the type that it is written with."""
    if field is None:
        return _EMPTY.get(name) is None
    return name not in _EMPTY or type(field) is (str if name in _TEXT else int)


def _replace(run_dir: Path, fields: dict[str, object]) -> dict[str, Any]:
    fields = {
        **secrets.hidden(fields, secrets.hider(os.environ)),
        "updated": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    path = run_dir / STATUS
    write_atomically(path, (json.dumps(fields, indent=2) + "\n").encode())
    return fields
