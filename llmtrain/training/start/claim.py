"""The claim of the run directory, which rank 0 makes before anything else is opened.

A directory belongs to the config that began it, and to one live process at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.checkpoint import filesystem
from llmtrain.checkpoint import format as form
from llmtrain.config.binding import bind, changes, dump, refusals
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError
from llmtrain.rundir import contents, failures
from llmtrain.rundir import record as jsonl
from llmtrain.rundir.lock import RunLock
from llmtrain.rundir.status import read_status, start_status

# Set for the processes of a restart: by torch's launcher and by `llmtrain supervise`.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "LLMTRAIN_RESTARTS")


@dataclass(frozen=True, slots=True)
class Place:
    """The claimed run directory, and what it records about earlier starts.

    step: the last step that is known to be finished
    checkpoint: the newest checkpoint that the record names
    lock: held until the run is closed
    begun: whether an earlier start wrote its `start` line, just before its first step
    steps: the length of the run, as the last start recorded it
    pace: seconds of the last save and of the last step, None unless both are recorded
    """

    run_dir: Path
    run_id: str
    step: int
    checkpoint: str | None
    lock: RunLock
    begun: bool = False
    steps: int | None = None
    pace: tuple[float, float] | None = None


@contextmanager
def claim(config: Config, world_size: int, strategy: str | None) -> Iterator[Place]:
    """Make or reopen `run.dir`, take its lock, compare configs, record that the run is starting.

    For rank 0. Raises UserError if the directory cannot be written, has a file or directory of the
    wrong kind in it, is in use by a live process or belongs to another config. It is not changed
    then.
    """
    run_dir = config.run_dir
    _make_writable(run_dir)
    known, run_id = read_status(run_dir), _find_run(run_dir) or uuid.uuid4().hex
    with RunLock(run_dir, run_id) as lock:
        filesystem.probe(run_dir)
        record = jsonl.record(run_dir)
        started = [line for line in record if line["kind"] == "start"]
        newest = known.get("checkpoint") or _last_saved(record)
        stored = _list_checkpoints(run_dir)
        if asked_resume(config.checkpoint.resume, os.environ) == "never":
            _refuse_used(run_dir, bool(started), newest, stored)
        _settle_config(run_dir, config, begun=_has_begun(run_dir, record))
        failures.clear(run_dir, 0, world_size)
        start_status(run_dir, run_id=run_id, strategy=strategy, world_size=world_size)
        steps = started[-1].get("steps") if started else None
        steps = steps if isinstance(steps, int) else None
        step, pace = known.get("step", 0), _pace(record)
        yield Place(run_dir, run_id, step, newest, lock, bool(started), steps, pace)


def asked_resume(asked: str, environ: Mapping[str, str]) -> str:
    """Return what to resume from: `asked` at the first start of a launch, then `auto`.

    After a crash, a supervisor or the launcher repeats the same command. Such a restart continues
    from the newest checkpoint, since returning to an older one each time would lose the steps
    trained since. asked: `checkpoint.resume`.
    """
    restarts = (environ.get(name, "0") for name in _RESTARTS)
    return asked if all(count == "0" for count in restarts) else "auto"


def _find_run(run_dir: Path) -> str | None:
    """Return the run's id from its status, its record or a checkpoint; None if none has it."""
    if known := read_status(run_dir).get("run_id"):
        return str(known)
    for line in reversed(jsonl.record(run_dir)):
        if line["kind"] == "start" and line.get("run_id"):
            return str(line["run_id"])
    return _find_saved_run(run_dir)


def _last_saved(record: list[dict[str, Any]]) -> str | None:
    names = [line.get("name") for line in record if line["kind"] == "checkpoint"]
    return next((name for name in reversed(names) if isinstance(name, str)), None)


def _pace(record: list[dict[str, Any]]) -> tuple[float, float] | None:
    told = [line for line in record if isinstance(line.get("seconds"), int | float)]
    last = {line["kind"]: line["seconds"] for line in told}
    found = last.get("checkpoint"), last.get("train")
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def check(config: Config) -> None:
    """Raise UserError if `run.dir` belongs to another config or has a path of the wrong kind.

    For a command that starts the ranks of a run.
    """
    run_dir = config.run_dir
    contents.check(run_dir)
    record = jsonl.record(run_dir)
    if (run_dir / contents.CONFIG).exists() and _has_begun(run_dir, record):
        _compare(run_dir, config)


def _has_begun(run_dir: Path, record: list[dict[str, Any]]) -> bool:
    return any(line["kind"] == "start" for line in record) or bool(_find_saved_run(run_dir))


def _find_saved_run(run_dir: Path) -> str | None:
    """Return the id of the run in the newest intact checkpoint, for when `status.json` is lost."""
    root = run_dir / contents.CHECKPOINTS
    for name in form.complete_names(root):
        try:
            return form.load(root / name).run_id
        except (form.DamagedError, form.OtherFormatError):
            continue  # the search for a checkpoint reports what is wrong with it
    return None


def _list_checkpoints(run_dir: Path) -> list[str]:
    """Return the names of all checkpoints, including quarantined ones."""
    return [name for name in form.names(run_dir / contents.CHECKPOINTS) if name.startswith("step-")]


def _refuse_used(run_dir: Path, begun: bool, newest: str | None, stored: list[str]) -> None:
    """Refuse `checkpoint.resume: never` in a directory in which something was trained."""
    there = newest or (stored[-1] if stored else "its metrics.jsonl" if begun else None)
    if there:
        expected = f"a run.dir in which no run has begun; {run_dir} holds {there}"
        remedy = "checkpoint.resume=auto to go on from there, or another run.dir"
        raise UserError(Problem("checkpoint.resume", "never", expected, remedy))


def _make_writable(run_dir: Path) -> None:
    """Make the directory if needed, check its content and that files can be written there.

    Raises UserError.
    """
    probe = run_dir / f".probe-{os.getpid()}"
    try:
        if run_dir.exists() and not run_dir.is_dir():
            expected = "a directory; there is a file of that name"
            raise UserError(Problem("run.dir", run_dir, expected, "move it, or use another"))
        contents.check(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(_unwritable(run_dir, error)) from error


def _unwritable(run_dir: Path, error: OSError) -> Problem:
    said = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some, or put run.dir on another disk"
        return Problem("run.dir", run_dir, f"a disk with room on it ({said})", remedy)
    parents = reversed(run_dir.absolute().parents)
    above = [path for path in parents if not os.path.isdir(path)]  # noqa: PTH112  # never raises
    if above:  # the first of them is the cause
        path = above[0]
        expected = f"a directory that can be made; {path} is not one and cannot be made ({said})"
        return Problem("run.dir", run_dir, expected, "make it, or set run.dir to another place")
    remedy = "change its permissions, or set run.dir to another directory"
    return Problem("run.dir", run_dir, f"a directory that can be written ({said})", remedy)


def _settle_config(run_dir: Path, config: Config, *, begun: bool) -> None:
    """Write the config of a new run, or compare it with the config that began the run.

    A start that was refused has not begun the run: its config is replaced, and the choices made for
    it are deleted.
    """
    path = run_dir / contents.CONFIG
    if not begun:
        _delete_decisions(run_dir)
    if not (begun and path.exists()):
        contents.write_atomically(path, dump(config).encode())
    if begun:
        _compare(run_dir, config)


def _compare(run_dir: Path, config: Config) -> None:
    began_with = load_config(run_dir / contents.CONFIG)
    changed = changes(bind(began_with).binding, bind(config).binding)
    if problems := refusals(
        changed, config.checkpoint.accept_changes, f"with which {run_dir} began"
    ):
        raise UserError(*problems)


def _delete_decisions(run_dir: Path) -> None:
    for name in (contents.TOKENIZER, contents.STAGED):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (contents.MANIFEST, contents.HELDOUT, contents.AUTO):
        (run_dir / name).unlink(missing_ok=True)
