"""The run directory, claimed by rank 0 before anything else is built.

A directory belongs to the config that began it and to one live process at a time. What `auto`
became stands in `auto.json`: values frozen for the run, and values frozen for a launch of one kind.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.lock import RunLock, Takeover
from llmtrain.config.load import load_config
from llmtrain.config.meaning import differences, dump
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError
from llmtrain.metrics.status import read_status, start_status


@dataclass(frozen=True, slots=True)
class Place:
    """checkpoint: the newest that `status.json` names · takeover: whose stale lock was taken."""

    run_dir: Path
    run_id: str
    checkpoint: str | None
    takeover: Takeover | None


@contextmanager
def claim(config: Config, world_size: int, strategy: str) -> Iterator[Place]:
    """Make or reopen `run.dir`, take its lock, compare configs, say that the run is starting.

    For rank 0. Raises UserError when the directory cannot be written, is in use by a live process
    or belongs to another config; nothing of it is changed then.
    """
    run_dir = Path(str(config.run.dir))
    _make_writable(run_dir)
    known = read_status(run_dir)
    run_id = str(known.get("run_id") or uuid.uuid4().hex)
    with RunLock(run_dir, run_id) as lock:
        _belongs(run_dir, config)
        start_status(run_dir, run_id=run_id, strategy=strategy, world_size=world_size)
        yield Place(run_dir, run_id, known.get("checkpoint"), lock.takeover)


def _make_writable(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(Problem("run.dir", run_dir, "a directory; there is a file of that name"))
    probe = run_dir / f".probe-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        expected = "a disk with room on it" if full else "a directory that can be written"
        raise UserError(Problem("run.dir", run_dir, f"{expected} ({error.strerror})")) from error


def _belongs(run_dir: Path, config: Config) -> None:
    """Write the config that begins the run, or compare with the one that began it."""
    path = run_dir / "config.yaml"
    if not path.exists():
        write_atomically(path, dump(config).encode())
        return
    changed = differences(load_config(path), config)
    if changed:
        expected, remedy = f"with which {run_dir} began", "put it back, or set another run.dir"
        problems = [Problem(key, new, f"{old}, {expected}", remedy) for key, old, new in changed]
        raise UserError(*problems)


class Auto:
    """`auto.json`: read by every rank before the group exists, written by rank 0 once it does."""

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / "auto.json"
        self._launch = launch
        known: dict[str, Any] = {}
        if self._path.exists():
            known = json.loads(self._path.read_text("utf-8"))
        self.run: dict[str, Any] = known.get("run", {})
        self.launches: dict[str, dict[str, Any]] = known.get("launches", {})

    @property
    def launch(self) -> dict[str, Any]:
        """What is frozen while strategy, device type and world size stay."""
        return self.launches.setdefault(self._launch, {})

    def save(self) -> None:
        """Write it down (rank 0)."""
        write_atomically(self._path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """As JSON."""
        values = {"run": self.run, "launches": self.launches}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file: it is there as a whole or not at all, after a kill too."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
