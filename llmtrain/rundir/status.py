"""The small files that a run replaces as a whole: `status.json` and `auto.json`.

`status.json` is what a run is doing, for people and other programs. `auto.json` has the values that
were chosen for `auto`, frozen for a run, a device type or a launch.

Both are replaced atomically (temporary file, fsync, rename), so that a reader never sees half of
one. Only rank 0, which holds the lock of the run directory, writes them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Literal, TypeVar

from llmtrain.config import secrets
from llmtrain.errors import Problem, UserError
from llmtrain.rundir.contents import AUTO, STATUS, write_atomically
from llmtrain.rundir.record import parse
from llmtrain.types import Compiled, JsonMapping, JsonObject

T = TypeVar("T")

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
    "tensor_parallel": None,
    "pipeline_parallel": None,
    "sequence_parallel": None,
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
) -> JsonObject:
    """Write the status of a start that begins. Returns what was written.

    run_id: used only by the first start
    strategy: None until it is chosen

    A later start keeps the `run_id`, `step` and `checkpoint` of the start before it, and adds 1 to
    `restarts`. Raises RunError (74).
    """
    before = read_status(run_dir)
    carried = {key: before[key] for key in _CARRIED if before.get(key) is not None}
    restarts = before["restarts"] + 1 if "restarts" in before else 0
    started = {"strategy": strategy, "world_size": world_size, "restarts": restarts}
    return _replace(run_dir, _EMPTY | {"run_id": run_id} | carried | started)


def write_status(run_dir: Path, before: JsonMapping | None = None, **fields: object) -> JsonObject:
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


def read_status(run_dir: Path) -> JsonObject:
    """Return the fields of a run directory's status; an empty dict if no file can be read.

    A field with a wrong type is left out. The file only describes the run, which does not depend
    on it.
    """
    try:
        fields = parse((run_dir / STATUS).read_bytes()) or {}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {}
    return {
        name: field
        for name, field in fields.items()
        if (
            _EMPTY.get(name) is None
            if field is None
            else name not in _EMPTY or type(field) is (str if name in _TEXT else int)
        )
    }


def _replace(run_dir: Path, fields: dict[str, object]) -> JsonObject:
    fields = {
        **secrets.hidden(fields, secrets.hider(os.environ)),
        "updated": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    path = run_dir / STATUS
    write_atomically(path, (json.dumps(fields, indent=2) + "\n").encode())
    return fields


class _Choice(Generic[T]):
    """A value of `auto.json` under the name of the attribute; None until it is chosen."""

    def __init__(self, section: str) -> None:
        self._section = section

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, choices: FrozenChoices, owner: type) -> T | None:
        value: T | None = getattr(choices, self._section).get(self._name)
        return value

    def __set__(self, choices: FrozenChoices, value: T) -> None:
        getattr(choices, self._section)[self._name] = value


class FrozenChoices:
    """What a start chose where the config says `auto`, in `auto.json`: later starts keep it.

    A key that the config sets takes precedence; else what is frozen here; else it is chosen, and
    put here. Every rank reads the file before the process group exists; rank 0 writes it
    afterwards.

    launch: `launch_kind` of this start; "" if only `run` is asked for

    precision: fp32 or bf16
    loss_kernel: chunked, torch or logits
    adapter_targets: names of the layers that have adapters
    base: what the run begins with, and the keys that named it
    epoch: what was counted of an epoch, and of which data
    attention_backend, compile: as the config's keys
    micro_batch_size, threads: as the config's keys. The rest of `launch` is the layout of the plan.
    """

    precision = _Choice[str]("run")
    loss_kernel = _Choice[str]("run")
    adapter_targets = _Choice[list[str]]("run")
    base = _Choice[JsonObject]("run")
    epoch = _Choice[JsonObject]("run")
    attention_backend = _Choice[str]("device")
    compile = _Choice[Compiled]("device")
    micro_batch_size = _Choice[int]("launch")
    threads = _Choice[int]("launch")

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / AUTO
        self._launch = launch
        known = _read(self._path) if self._path.exists() else {}
        self.run: JsonObject = known.get("run", {})
        self.devices: dict[str, JsonObject] = known.get("devices", {})
        self.launches: dict[str, JsonObject] = known.get("launches", {})

    @property
    def launch(self) -> JsonObject:
        """The values frozen for launches of the same strategy, device type, world size and cut."""
        return self.launches.setdefault(self._launch, {})

    @property
    def device(self) -> JsonObject:
        """The values frozen for launches with the same device type."""
        return self.devices.setdefault(self._launch.split("/")[1], {})  # of `ddp/cuda/8`

    def save(self) -> None:
        """Write the file (rank 0)."""
        write_atomically(self._path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        values = {"run": self.run, "devices": self.devices, "launches": self.launches}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _read(path: Path) -> JsonObject:
    remedy = "restore it, or begin again in another run.dir"
    try:
        value: JsonObject = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(Problem(str(path), None, f"JSON ({error})", remedy)) from error
    # The form that `FrozenChoices.to_bytes` writes: an object, of objects, two of objects again.
    level = [value]
    if isinstance(value, dict):
        level += [value.get(key, {}) for key in ("run", "devices", "launches")]
        level += [one for kinds in level[2:] if isinstance(kinds, dict) for one in kinds.values()]
    if not all(isinstance(one, dict) for one in level):
        raise UserError(Problem(str(path), None, "what this program has written there", remedy))
    return value
