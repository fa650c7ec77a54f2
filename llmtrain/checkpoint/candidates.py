"""The checkpoints of a run: which are kept, how others are deleted, and which one a start resumes.

    step-00000400              complete; ordered by the number
    step-00000400.damaged      its bytes are not those written; `why.txt` in it has the reason
    step-00000400.superseded   newer than the one that `checkpoint.resume` named
    .trash-400                 to be deleted: never read, and gone at the next start at the latest

Rank 0 alone does all of this. After each save it keeps the newest `keep_last`, each `keep_every`
steps, the best `keep_best` by held-out loss, and the one that this start resumed from, until there
are two newer ones. The others are deleted in three steps: rename to `.trash-…`, fsync the parent,
delete; so a kill in between leaves no half of a checkpoint under a name that is read. The search of
a start only renames.

The trap: a checkpoint of another run, or of another format, may be in the same directory. It is
neither deleted nor renamed nor a candidate: only what its own manifest gives to this run is.
Checkpoints are ordered by the number in the name, never by a time stamp of the disk. A symbolic
link counts as its target.
"""

import itertools
import logging
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain import faults, system
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.format import CheckpointManifest, DamagedError, OtherFormatError
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_few
from llmtrain.types import JsonMapping, JsonObject

COMPLETE, PARTIAL, TRASH = "complete", "partial", "trash"
_KIND = re.compile(
    rf"step-\d{{8,18}}\.(?:({PARTIAL})|(damaged|superseded)(?:-\d+)?)|\.({TRASH})-.+"
)
_log = logging.getLogger(__name__)
Event = tuple[str, dict[str, str]]  # the name of an event, its details

DAMAGED = ".damaged"
SUPERSEDED = ".superseded"
_EVENTS = {DAMAGED: "checkpoint_quarantined", SUPERSEDED: "checkpoint_superseded"}
WHY = "why.txt"
_SHOWN = 8  # names in a message
_AUTO = "checkpoint.resume=auto resumes from the newest valid one"


def kind_of(name: str) -> str | None:
    """Return what a name in the directory of checkpoints stands for; None for an unknown name.

    complete, partial, damaged, superseded or trash
    """
    if form.step_of(name) is not None:
        return COMPLETE
    match = _KIND.fullmatch(name)
    return match and match[match.lastindex or 0]


def clean_up(root: Path) -> list[str]:
    """Delete what an earlier process left unfinished. Returns the names.

    Called by rank 0 at the start, while it holds the run's lock. What cannot be deleted is logged.
    """
    return _delete(root, [one for one in form.names(root) if kind_of(one) in (PARTIAL, TRASH)])


def prune(root: Path, policy: CheckpointConfig, run_id: str, resumed_from: str | None) -> list[str]:
    """Delete what the policy does not keep. Returns the names. Called by rank 0 after a commit.

    resumed_from: name of the checkpoint that this start resumed from, or None; it is kept until two
        newer ones are committed

    What cannot be deleted is logged and tried again at the next call.
    """
    of_run = {
        step: name
        for name in form.complete_names(root)
        if (step := form.step_of(name)) is not None and is_of_run(root / name, run_id)
    }
    losses = {step: _loss(root / name) for step, name in of_run.items()}
    why = reasons_to_keep(losses, policy, resumed_from)
    gone = [
        name for step, name in sorted(of_run.items()) if not why[step] and _to_trash(root, name)
    ]
    if gone:
        system.sync_directory(root)
    _delete(root, [name for name in form.names(root) if kind_of(name) == TRASH])
    return gone


def reasons_to_keep(
    losses: Mapping[int, float | None], policy: CheckpointConfig, resumed_from: str | None
) -> dict[int, tuple[str, ...]]:
    """Return why each checkpoint of a run is kept; `prune` deletes those without a reason.

    losses: step → its held-out loss, for all checkpoints of the run
    resumed_from: as in `prune`
    """
    resumed, every = form.step_of(resumed_from or ""), policy.keep_every
    young = resumed is not None and sum(step > resumed for step in losses) < 2
    reasons: Mapping[str, Sequence[int | None]] = {
        "newest": sorted(losses, reverse=True)[: policy.keep_last],
        f"every {every}": [step for step in losses if every and step % every == 0],
        "best": by_loss(losses)[: policy.keep_best],
        "resumed from": [resumed] if young else [],
    }
    return {step: tuple(why for why in reasons if step in reasons[why]) for step in losses}


def by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """Return the steps of the checkpoints that were evaluated, the lowest held-out loss first.

    Several may have the same evaluation; the oldest of them has the weights that were evaluated.
    """
    newest_first = sorted(losses.items(), reverse=True)
    measured = {loss: step for step, loss in newest_first if loss is not None}  # the last one stays
    return [step for _, step in sorted(measured.items())]


def loss_in(state: JsonMapping) -> float | None:
    """Return the held-out loss in a `trainer_state.json`; None if it has no finite one."""
    evaluation = state.get("evaluation")
    loss = evaluation.get("loss") if isinstance(evaluation, dict) else None
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def is_of_run(path: Path, run_id: str) -> bool:
    """Whether an intact manifest names this run. Retention must not delete anything else."""
    try:
        return not path.is_symlink() and form.load(path).run_id == run_id
    except (form.DamagedError, form.OtherFormatError, OSError) as error:
        _log.warning("retention leaves %s alone: %s", path.name, error)
        return False


def _loss(path: Path) -> float | None:
    """Return the held-out loss of a checkpoint; None if it has none or cannot be read."""
    try:
        return loss_in(form.state(path))
    except (form.DamagedError, OSError) as error:
        _log.warning("retention found no held-out loss in %s: %s", path.name, error)
        return None


def _to_trash(root: Path, name: str) -> bool:
    """Rename a checkpoint to its trash name. Returns whether that worked."""
    trash = f".trash-{form.step_of(name)}"
    _delete(root, [trash] if (root / trash).exists() else [])
    try:
        faults.hit("retain.trash", step=form.step_of(name), path=root / name)
        (root / name).rename(root / trash)
    except OSError as error:
        _log.warning("could not delete %s: %s", name, error)
        return False
    return True


def _delete(root: Path, names: Iterable[str]) -> list[str]:
    """Delete directories. Returns the names of those that were deleted."""
    gone = []
    for name in names:
        try:
            system.beat("deleting an old checkpoint")
            faults.hit("retain.delete", path=root / name)
            shutil.rmtree(root / name)
            gone.append(name)
        except OSError as error:
            _log.warning("could not delete %s: %s", name, error)
    return gone


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
        found = f"format {error.found}" + (f", written by llmtrain {wrote}" if wrote else "")
        expected = f"format {form.FORMAT}, {what} that this llmtrain reads"
        use = f"use llmtrain {wrote or 'as it was then'}"
        remedy = f"{use}, or move it away to resume from an older one"
        raise UserError(Problem(str(path), found, expected, remedy)) from error


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
