"""The file `auto.json`: values chosen for `auto`, frozen for a run, a device type or a launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError
from llmtrain.rundir.contents import AUTO, write_atomically


class Auto:
    """The values in `auto.json`.

    Every rank reads the file before the process group exists; rank 0 writes it afterwards.
    """

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / AUTO
        self._launch = launch
        known = _read(self._path) if self._path.exists() else {}
        self.run: dict[str, Any] = known.get("run", {})
        self.devices: dict[str, dict[str, Any]] = known.get("devices", {})
        self.launches: dict[str, dict[str, Any]] = known.get("launches", {})

    @property
    def launch(self) -> dict[str, Any]:
        """The values frozen for launches with the same strategy, device type and world size."""
        return self.launches.setdefault(self._launch, {})

    @property
    def device(self) -> dict[str, Any]:
        """The values frozen for launches with the same device type."""
        return self.devices.setdefault(_device_of(self._launch), {})

    def has_run_here(self) -> bool:
        """Whether an earlier start has trained on this type of device."""
        return any(_device_of(one) == _device_of(self._launch) for one in self.launches)

    def save(self) -> None:
        """Write the file (rank 0)."""
        write_atomically(self._path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        values = {"run": self.run, "devices": self.devices, "launches": self.launches}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _device_of(launch: str) -> str:
    """Return the device type in the name of a launch, such as `ddp/cuda/8`."""
    return launch.split("/")[1]


def _read(path: Path) -> dict[str, Any]:
    remedy = "restore it, or begin again in another run.dir"
    try:
        value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(Problem(str(path), None, f"JSON ({error})", remedy)) from error
    if not _is_decided(value):
        raise UserError(Problem(str(path), None, "what this program has written there", remedy))
    return value


def _is_decided(value: object) -> bool:
    """Whether `value` has the form that `Auto.to_bytes` writes."""
    if not isinstance(value, dict):
        return False
    run, by_kind = value.get("run", {}), [value.get(key, {}) for key in ("devices", "launches")]
    if not all(isinstance(one, dict) for one in (run, *by_kind)):
        return False
    return all(isinstance(one, dict) for values in by_kind for one in values.values())
