"""Which checkpoints are kept, and what is deleted.

A checkpoint is deleted in three steps: rename to `.trash-300`, fsync the parent, delete. A kill in
between leaves a name that is never read and that the next start deletes. The trap: only checkpoints
whose own manifest names this run are deleted, and they are ordered by the number in the name, never
by a time stamp of the disk.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain import durable, faults, heartbeat
from llmtrain.checkpoint import format as form
from llmtrain.config.schema import CheckpointConfig

_PARTIAL = re.compile(r"step-\d{8,}\.partial")
_TRASH = re.compile(r"\.trash-.+")
_log = logging.getLogger(__name__)


def clean(root: Path) -> list[str]:
    """Delete what an earlier process left unfinished. Returns the names.

    Called by rank 0 at the start, while it holds the run's lock. What cannot be deleted is logged.
    """
    left = [one for one in form.names(root) if _PARTIAL.fullmatch(one) or _TRASH.fullmatch(one)]
    return _delete(root, left)


def remove_partials(root: Path) -> None:
    """Remove every partial checkpoint. Raises OSError if one cannot be removed."""
    for name in form.names(root):
        if _PARTIAL.fullmatch(name):
            shutil.rmtree(root / name)


def apply(root: Path, policy: CheckpointConfig, run_id: str, resumed_from: str | None) -> list[str]:
    """Delete what the policy does not keep. Returns the names. Called by rank 0 after a commit.

    resumed_from: name of the checkpoint that this start resumed from, or None; it is kept until two
        newer ones are committed

    What cannot be deleted is logged and tried again at the next call.
    """
    own = {
        step: name
        for name in form.complete_names(root)
        if (step := form.step_of(name)) is not None and is_of_run(root / name, run_id)
    }
    losses = {step: _loss(root / name) for step, name in own.items()}
    kept = reasons(losses, policy, resumed_from)
    gone = [name for step, name in sorted(own.items()) if not kept[step] and _to_trash(root, name)]
    if gone:
        durable.sync_directory(root)
    _delete(root, [name for name in form.names(root) if _TRASH.fullmatch(name)])
    return gone


def reasons(
    losses: Mapping[int, float | None], policy: CheckpointConfig, resumed_from: str | None
) -> dict[int, tuple[str, ...]]:
    """Return why each checkpoint of a run is kept; `apply` deletes those without a reason.

    losses: step → its held-out loss, for all checkpoints of the run
    resumed_from: as in `apply`
    """
    newest = sorted(losses, reverse=True)[: policy.keep_last]
    best = by_loss(losses)[: policy.keep_best]
    resumed = form.step_of(resumed_from) if resumed_from else None
    young = resumed is not None and sum(step > resumed for step in losses) < 2

    def why(step: int) -> Iterator[str]:
        if step in newest:
            yield "newest"
        if policy.keep_every and step % policy.keep_every == 0:
            yield f"every {policy.keep_every}"
        if step in best:
            yield "best"
        if young and step == resumed:
            yield "resumed from"

    return {step: tuple(why(step)) for step in losses}


def by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """Return the steps of the checkpoints that were evaluated, the lowest held-out loss first.

    Several may have the same evaluation; the oldest of them has the weights that were evaluated.
    """
    measured: dict[float, int] = {}
    for step, loss in sorted(losses.items()):
        if loss is not None:
            measured.setdefault(loss, step)
    return [step for _, step in sorted(measured.items())]


def loss_in(state: Mapping[str, Any]) -> float | None:
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


def _delete(root: Path, found: Iterable[str]) -> list[str]:
    """Delete directories. Returns the names of those that were deleted."""
    gone = []
    for name in found:
        try:
            heartbeat.beat("deleting an old checkpoint")
            faults.hit("retain.delete", path=root / name)
            shutil.rmtree(root / name)
            gone.append(name)
        except OSError as error:
            _log.warning("could not delete %s: %s", name, error)
    return gone
