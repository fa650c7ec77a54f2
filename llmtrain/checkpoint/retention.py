"""Which checkpoints of a run are kept, and how the others are deleted, on rank 0.

    newest `keep_last` · each `keep_every` steps · best `keep_best` by held-out loss
    the one that this start resumed from, until there are two newer ones

A checkpoint is deleted in three steps: rename to `.trash-…`, fsync the parent, delete; so a kill in
between leaves no half of a checkpoint under a name that is read.

The trap: a checkpoint of another run, or of another format, may be in the same directory. Only what
its own manifest gives to this run is deleted.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llmtrain import faults, system
from llmtrain.checkpoint import format as form
from llmtrain.config.schema import CheckpointConfig
from llmtrain.types import JsonMapping

COMPLETE, PARTIAL, TRASH = "complete", "partial", "trash"
_KIND = re.compile(
    rf"step-\d{{8,18}}\.(?:({PARTIAL})|(damaged|superseded)(?:-\d+)?)|\.({TRASH})-.+"
)
_log = logging.getLogger(__name__)


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
