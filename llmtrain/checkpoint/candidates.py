"""Which checkpoint a start resumes from: rank 0 looks through the directory, and renames.

    step-00000400              complete; ordered by the number
    step-00000400.damaged      its bytes are not those written; `why.txt` in it has the reason
    step-00000400.superseded   newer than the one that `checkpoint.resume` named
    .trash-400                 to be deleted: never read, and gone at the next start at the latest

The search only renames; `retention.py` deletes.

The trap: a checkpoint of another run, or of another format, may be in the same directory. It is not
a candidate, and is not renamed: only what its own manifest gives to this run is.
Checkpoints are ordered by the number in the name, never by a time stamp of the disk. A symbolic
link counts as its target.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain import system
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.format import CheckpointManifest, DamagedError, OtherFormatError
from llmtrain.checkpoint.retention import by_loss, loss_in
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_few
from llmtrain.types import JsonObject

_log = logging.getLogger(__name__)

Event = tuple[str, dict[str, str]]  # the name of an event, its details

DAMAGED = ".damaged"
SUPERSEDED = ".superseded"
_EVENTS = {DAMAGED: "checkpoint_quarantined", SUPERSEDED: "checkpoint_superseded"}
WHY = "why.txt"
_SHOWN = 8  # names in a message
_AUTO = "checkpoint.resume=auto resumes from the newest valid one"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint whose sizes and headers are right.

    newer: checkpoints that must be renamed before it is used
    """

    name: str
    manifest: CheckpointManifest
    state: JsonObject
    newer: tuple[str, ...] = ()


def newest(root: Path, run_id: str | None, renamed: list[Event]) -> Candidate | None:
    """Return the newest candidate of a run, or None if it has no checkpoint. Rename damaged ones.

    run_id: None = of any run
    renamed: gets the event of each checkpoint that was renamed

    Raises UserError for a checkpoint of another format, and if all checkpoints are damaged.
    """
    for name in _of_run(root, run_id):
        try:
            return Candidate(name, *_outside(root / name))
        except DamagedError as error:
            renamed.append(rename(root, name, DAMAGED, str(error)))
    # Raise UserError if checkpoints of this run were renamed as damaged, when no other is left.
    expected = "at least one valid checkpoint; nothing was deleted"
    remedy = f"repair one and take {DAMAGED} off its name, or begin again in another run.dir"
    problems = [
        Problem(str(root / name), _reason(root / name), expected, remedy)
        for name in form.names(root)
        if form.step_of(name.partition(DAMAGED)[0]) is not None
        and DAMAGED in name
        and not is_foreign(root / name, run_id)
    ]
    raise_any(problems)
    return None


def best(root: Path, run_id: str | None) -> str | None:
    """Return the name of a run's best checkpoint: of lowest held-out loss, else the newest.

    None if it has no checkpoint that is whole, by sizes and headers. Damaged ones are passed over.
    run_id: as in `newest`.

    Raises UserError for a checkpoint of another format.
    """
    losses: dict[int, float | None] = {}
    for name in _of_run(root, run_id):
        try:
            manifest, state = _outside(root / name)
            losses[manifest.step] = loss_in(state)
        except DamagedError as error:
            _log.warning("passed over %s: %s", root / name, error)
    step = next(iter([*by_loss(losses), *losses]), None)
    return None if step is None else form.directory_name(step)


def find_named(root: Path, name: str, run_id: str | None, *, supersede: bool) -> Candidate:
    """Return the checkpoint that the config names. Nothing is renamed yet.

    Raises UserError if it does not exist, is damaged, is of another run or format, or if this run
    has newer ones and `supersede` is false.
    """
    of_run = list(_of_run(root, run_id))
    if not (root / name).is_dir():
        what = f"there are {first_few(of_run, _SHOWN)}" if of_run else "which has no checkpoint"
        raise _refusal(name, f"a checkpoint of this run; {name} is not in {root}, {what}", _AUTO)
    try:
        manifest, state = _outside(root / name)
    except DamagedError as error:
        raise unusable(name, str(error)) from error
    if run_id not in (None, manifest.run_id):
        expected = f"a checkpoint of this run ({run_id}); that one is of run {manifest.run_id}"
        remedy = f"model.from=…/{name} in another run.dir takes its weights alone"
        raise _refusal(name, expected, remedy)
    newer = tuple(one for one in of_run if (form.step_of(one) or 0) > manifest.step)
    if newer and not supersede:
        expected = f"the newest checkpoint of this run; newer are {first_few(newer, _SHOWN)}"
        remedy = f"checkpoint.supersede=true renames those and deletes nothing, or {_AUTO}"
        raise _refusal(name, expected, remedy)
    return Candidate(name, manifest, state, newer)


def _of_run(root: Path, run_id: str | None) -> Iterator[str]:
    """Yield the names of a run's complete checkpoints, newest first. run_id: as in `newest`"""
    return (name for name in form.complete_names(root) if not is_foreign(root / name, run_id))


def rename(root: Path, name: str, suffix: str, reason: str) -> Event:
    """Append `suffix` to a checkpoint's name (then `-2`, `-3`, …) and write the reason into it.

    Returns the event to report.
    """
    taken = form.names(root)
    numbers = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))
    target = next(one for end in numbers if (one := f"{name}{suffix}{end}") not in taken)
    (root / name).rename(root / target)
    _log.warning("renamed %s to %s: %s", name, target, reason)
    system.sync_directory(root)
    try:
        if not (root / target).is_symlink():  # its target may be intact under its own name
            (root / target / WHY).write_text(f"{reason}\n", encoding="utf-8")
    except OSError as error:  # the new name is enough
        _log.warning("could not write into %s why it was renamed: %s", target, error)
    return _EVENTS[suffix], {"checkpoint": name, "now": target, "reason": reason}


def is_foreign(path: Path, run_id: str | None) -> bool:
    """Whether a checkpoint is of another run, according to its manifest or else to its state."""
    if run_id is None:
        return False
    try:
        owner: object = form.load(path).run_id
    except OtherFormatError as error:
        owner = error.run_id
    except DamagedError:
        try:
            owner = form.state(path).get("run_id", run_id)
        except DamagedError:
            return False
    return owner != run_id


def unusable(name: str, reason: str) -> UserError:
    """Return the error to raise when the checkpoint that the config names is damaged."""
    remedy = f"repair it, name another one, or {_AUTO}"
    return _refusal(name, f"a whole checkpoint; {reason}", remedy)


def _refusal(name: str, expected: str, remedy: str) -> UserError:
    return UserError(Problem("checkpoint.resume", name, expected, remedy))


@contextmanager
def of_our_format(path: Path) -> Iterator[None]:
    """Raise UserError if the block finds that a checkpoint was written in another format."""
    try:
        yield
    except OtherFormatError as error:
        wrote = _writer(path)
        is_newer = isinstance(error.found, int) and error.found > form.FORMAT
        what = "the newest" if is_newer else "the only one"
        problem = Problem(
            str(path),
            f"format {error.found}" + (f", written by llmtrain {wrote}" if wrote else ""),
            f"format {form.FORMAT}, {what} that this llmtrain reads",
            f"use llmtrain {wrote or 'as it was then'}, or move it away to resume from an older "
            "one",
        )
        raise UserError(problem) from error


def state_of(path: Path, manifest: CheckpointManifest) -> JsonObject:
    """Read the state of a checkpoint. Raises DamagedError or OtherFormatError."""
    state = form.state(path)
    if state.get("format") != form.FORMAT:
        raise OtherFormatError(state.get("format"), manifest.run_id)
    return state


def _outside(path: Path) -> tuple[CheckpointManifest, JsonObject]:
    """Read manifest and state, and check every file's size and header."""
    with of_our_format(path):
        manifest = form.load(path)
        for name in manifest.files:
            form.check_file(path, name, manifest)
        return manifest, state_of(path, manifest)


def _writer(path: Path) -> str | None:
    """Return the version of llmtrain that wrote a checkpoint, if its state can be read."""
    try:
        versions = form.state(path).get("versions")
    except DamagedError:
        return None
    return str(versions["llmtrain"]) if isinstance(versions, dict) and versions else None


def _reason(path: Path) -> str:
    """Read why a checkpoint was renamed."""
    try:
        return (path / WHY).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return "renamed as damaged (`llmtrain checkpoints verify` says why)"
