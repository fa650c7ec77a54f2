"""Delete the checkpoints that the policy of a run does not keep.

Without `yes` they are only listed; with it they are deleted while the run's lock is held. The rule
is that of `checkpoint/retention.py`, which a run applies after each save. Before anything is
deleted, every byte of the checkpoints to keep is verified: otherwise three damaged ones could be
kept and an intact one deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.checkpoint import format as form, retention
from llmtrain.checkpoint.retention import COMPLETE
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, raise_any
from llmtrain.rundir.lock import RunLock
from llmtrain.tools.checkpoints import look
from llmtrain.types import JsonObject

_LEAST_KEPT = 2


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune deletes and what it keeps.

    goes: to be deleted
    stays: to be kept
    deleted: whether `goes` has been deleted already
    """

    goes: tuple[look.CheckpointRow, ...]
    stays: tuple[look.CheckpointRow, ...]
    deleted: bool

    @property
    def lost(self) -> bool:
        """Whether a start would find checkpoints of the run, but no valid one.

        Judged by manifests and sizes; before a deletion every byte is verified as well.
        """
        if any(row.kind == COMPLETE and row.valid for row in self.stays):
            return False
        return any(
            row.kind in (look.UNREADABLE, *look.SET_ASIDE) for row in (*self.stays, *self.goes)
        )

    @property
    def bytes(self) -> int:
        """The size of everything that is deleted."""
        return sum(row.bytes for row in self.goes)

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain checkpoints prune --json` prints."""
        stays = [{"name": row.name, "kind": row.kind, "kept": row.kept} for row in self.stays]
        goes = [{"name": row.name, "kind": row.kind, "bytes": row.bytes} for row in self.goes]
        head = {"deleted": self.deleted, "lost": self.lost, "bytes": self.bytes}
        return {**head, "goes": goes, "stays": stays}


def prune(
    path: Path,
    keep_last: int | None = None,
    *,
    yes: bool = False,
    set_aside: bool = False,
    on_progress: look.OnProgress = lambda name, size, done: None,
) -> Pruned:
    """Find checkpoints that a run's policy does not keep, and the left-overs of earlier starts.

    keep_last: in place of the config's value
    yes: delete what was found
    set_aside: damaged and superseded checkpoints are deleted too, if a valid one is left. Those of
        other runs and directories of an unknown kind are always kept

    Raises UserError, and deletes nothing, if the run is alive or a checkpoint to keep is not valid;
    RunError 74 if the disk fails.
    """
    place = look.place_of(path)
    if place.run_dir is None or place.only is not None:
        raise UserError(Problem("RUN", path, "a run directory: its config says what is kept"))
    policy = look.policy_of(place.run_dir)
    if keep_last is not None:
        if keep_last < _LEAST_KEPT:
            expected = f"at least {_LEAST_KEPT}: a damaged one must not be the last"
            raise UserError(Problem("--keep-last", keep_last, expected))
        policy = policy.model_copy(update={"keep_last": keep_last})
    lock = RunLock(place.run_dir, look.run_id_of(place) or "")
    if not yes:
        lock.check()
        return _plan(look.listing(place, policy), set_aside)
    with lock:
        listing = look.listing(place, policy)
        plan = _plan(listing, set_aside)
        if plan.goes:
            stays = [row.name for row in plan.stays if row.kind == COMPLETE]
            verified = look.verify_each(listing.root, stays, on_progress)  # every byte
            _refuse((one.name, [f"{p.key}: {p.value}" for p in one.problems]) for one in verified)
            _delete(listing, plan.goes)
    return replace(plan, deleted=True)


def _plan(listing: look.Listing, set_aside: bool) -> Pruned:
    """Decide what is deleted. Raises UserError if the sizes of one to keep are wrong."""
    valid = any(row.kind == COMPLETE and row.valid for row in listing.rows)
    kinds = (COMPLETE, *look.LEFT_OVER, *(look.SET_ASIDE if set_aside and valid else ()))
    goes = tuple(row for row in listing.rows if not row.kept and row.kind in kinds)
    stays = tuple(row for row in listing.rows if row not in goes)
    _refuse((row.name, row.wrong or ()) for row in stays if row.kind == COMPLETE)
    return Pruned(goes, stays, deleted=False)


def _refuse(looked_at: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise UserError if there are problems for any of these names."""
    expected = "valid, since it is to stay; nothing was deleted"
    raise_any(
        Problem(name, "; ".join(wrong), expected, f"rename it to {name}.damaged, then prune again")
        for name, wrong in looked_at
        if wrong
    )


def _delete(listing: look.Listing, goes: Sequence[look.CheckpointRow]) -> None:
    """Delete as retention does. Raises RunError if anything of it is still there afterwards."""
    assert listing.policy is not None
    retention.prune(listing.root, listing.policy, listing.run_id or "", listing.resumed_from)
    retention.clean_up(listing.root)
    for row in goes:
        if row.kind in look.SET_ASIDE:
            shutil.rmtree(listing.root / row.name, ignore_errors=True)  # checked below
    planned = {row.name for row in goes}
    left = [one for one in form.names(listing.root) if one in planned or one.startswith(".trash-")]
    if left:
        raise RunError(
            f"could not delete {', '.join(left)} in {listing.root}",
            DISK_FAILED,
            "see who owns it and whether the disk can be written, then give the same command again",
        )
