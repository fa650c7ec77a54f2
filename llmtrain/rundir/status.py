"""The file `status.json`: what a run is doing, for people and other programs.

It is replaced atomically (temporary file, fsync, rename), so that a reader never sees half of it.
Only rank 0, which holds the lock of the run directory, writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Result:
    """How a start of a run ended."""

    run_dir: Path
    state: str
    exit_code: int
    reason: str | None
    step: int


def start_status(
    run_dir: Path, *, run_id: str, strategy: str | None, world_size: int
) -> dict[str, Any]:
    """Write the status of a start that begins. Returns what was written.

    run_id: used only by the first start
    strategy: None until it is chosen

    A later start keeps the `run_id`, `step` and `checkpoint` of the start before it, and adds 1 to
    `restarts`. Raises RunError (74).
    """
    before = read_status(run_dir)
    kept = {key: before[key] for key in _CARRIED if before.get(key) is not None}
    restarts = before["restarts"] + 1 if "restarts" in before else 0
    started = {"strategy": strategy, "world_size": world_size, "restarts": restarts}
    return _replace(run_dir, _EMPTY | {"run_id": run_id} | kept | started)


def write_status(
    run_dir: Path, before: Mapping[str, Any] | None = None, **fields: object
) -> dict[str, Any]:
    """Replace some fields, keep the others and set `updated`. Returns what was written.

    before: what was written last; used if the file has been deleted since then

    Raises RunError (74) if the disk refuses, ValueError for a field that does not exist.
    """
    if unknown := fields.keys() - _EMPTY.keys():
        raise ValueError(f"status.json has no field {', '.join(sorted(unknown))}")
    return _replace(run_dir, _EMPTY | (read_status(run_dir) or dict(before or {})) | fields)


def kept_status(run_dir: Path) -> bytes | None:
    """Return the file of a run that finished or was stopped, which a refused start puts back."""
    if read_status(run_dir).get("state") not in ("finished", "stopped"):
        return None
    return (run_dir / STATUS).read_bytes()


def put_back_status(run_dir: Path, kept: bytes) -> None:
    """Replace the file by what `kept_status` returned. Raises RunError (74)."""
    write_atomically(run_dir / STATUS, kept)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the fields of a run directory's status; an empty dict if no file can be read.

    A field with a wrong type is left out. The file only describes the run, which does not depend
    on it.
    """
    try:
        value = json.loads((run_dir / STATUS).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return {}
    found = value if isinstance(value, dict) else {}
    return {name: field for name, field in found.items() if _can_be(name, field)}


def _can_be(name: str, field: object) -> bool:
    """Whether the value has the type with which this field is written."""
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
