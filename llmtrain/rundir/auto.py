"""What `auto` became, in `auto.json`: values frozen for the run, and for a launch of one kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError
from llmtrain.rundir.contents import AUTO, write_atomically


class Auto:
    """`auto.json`: read by every rank before the group exists, written by rank 0 once it does."""

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / AUTO
        self._launch = launch
        known: dict[str, Any] = {}
        if self._path.exists():
            known = _read(self._path)
        self.run: dict[str, Any] = known.get("run", {})
        self.launches: dict[str, dict[str, Any]] = known.get("launches", {})

    @property
    def launch(self) -> dict[str, Any]:
        """What is frozen while strategy, device type and world size stay."""
        return self.launches.setdefault(self._launch, {})

    def save(self) -> None:
        """Write the file (rank 0)."""
        write_atomically(self._path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        values = {"run": self.run, "launches": self.launches}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


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
    """Whether it is of the form that `Auto.to_bytes` writes."""
    if not isinstance(value, dict):
        return False
    run, launches = value.get("run", {}), value.get("launches", {})
    if not (isinstance(run, dict) and isinstance(launches, dict)):
        return False
    return all(isinstance(one, dict) for one in launches.values())
