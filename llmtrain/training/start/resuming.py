"""Resuming: find the checkpoint, check that it belongs to this run, load its state.

    retention.clean_up → read.find → (the model is built) → read.load_tensors

Random states are none of it: each step seeds its own draws. The trap: only in a new run is it
correct to find no checkpoint. If the record names one and none is left, the start is refused, since
it would silently train the same steps again.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from llmtrain import system
from llmtrain.agreement import agreed, on_rank_zero
from llmtrain.checkpoint import format as form, read, retention
from llmtrain.checkpoint.disk import Patience
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.binding import Bound, changes, refusals
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.rundir import contents
from llmtrain.training.run.journal import Journal
from llmtrain.training.run.run import ModelSide, Processes
from llmtrain.training.start.claim import ClaimedRun, asked_resume

_log = logging.getLogger(__name__)


def find_checkpoint(
    config: Config, processes: Processes, place: ClaimedRun, journal: Journal, patience: Patience
) -> ResumePoint | None:
    """Return the checkpoint to resume from, the same on all ranks; None in a new run.

    Reports checkpoints that it quarantines or removes as events. Raises UserError if a person must
    decide, RunError (74) if the disk does not answer, StoppedError at a stop.
    """
    system.beat("looking for a checkpoint")
    root = config.run_dir / contents.CHECKPOINTS
    asked, ranks = config.checkpoint, processes.launched.ranks
    on_rank_zero(ranks, lambda: _clear_away(root, journal))
    resume = asked_resume(asked.resume, os.environ)
    if resume == "never":  # `claim` has checked that there is no checkpoint
        _log.info("run       %s: a new run, as checkpoint.resume = never asks", config.run_dir)
        return None
    start = time.perf_counter()
    resume_point = read.find(
        root,
        processes.run_id,
        ranks,
        resume=resume,
        verify=asked.verify,
        supersede=asked.supersede,
        log=lambda event, detail: journal.event(event, 0, **detail),
        patience=patience,
    )
    agreed(ranks, lambda: _refuse_other(resume_point, config, processes.bound, place))
    if resume_point is None:
        if place.begun:
            journal.event("begun_again", 0, reason="no checkpoint was committed before")
        _log.info("run       %s: a new run", config.run_dir)
        return None
    known = form.step_of(place.checkpoint) if place.checkpoint else None
    if known and known > resume_point.step and resume == "auto":  # older than the record names
        missing = {"checkpoint": place.checkpoint, "used": resume_point.name}
        journal.event("checkpoint_missing", resume_point.step, **missing)
    seconds = time.perf_counter() - start
    why = "the newest valid one" if resume == "auto" else f"as checkpoint.resume = {resume} asks"
    _log.info(
        "run       %s: resuming at step %s from %s, %s (verified in %.1f s)",
        *(config.run_dir, f"{resume_point.step:,}", resume_point.name, why, seconds),
    )
    return resume_point


def load_state(
    processes: Processes, model: ModelSide, resume_point: ResumePoint, patience: Patience
) -> None:
    """Load the weights and the optimizer state of the checkpoint.

    Raises UserError if the checkpoint's tensors are not those of the model, RunError (74) and
    StoppedError as `find_checkpoint` does.
    """
    system.beat("loading the checkpoint")
    engine = processes.launched.engine
    pieces = engine.pieces(model.spec, writing=False)
    read.load_tensors(resume_point, model.spec, pieces, processes.launched.ranks, patience=patience)
    engine.finish_loading(resume_point.state["optimizer_steps"])


def _clear_away(root: Path, journal: Journal) -> None:
    """Remove the unfinished saves and deletions of a killed start."""
    if gone := retention.clean_up(root):
        journal.event("leftovers_removed", 0, names=gone)


def _refuse_other(
    resume_point: ResumePoint | None, config: Config, bound: Bound, place: ClaimedRun
) -> None:
    """Refuse a checkpoint of another config, and none where the record of the run names one.

    The former even if config.yaml was lost or changed.
    """
    if resume_point is not None:
        changed = changes(resume_point.state["config"], bound.binding)
        raise_any(refusals(changed, config.checkpoint.accept_changes, f"as in {resume_point.name}"))
    elif place.checkpoint is not None:
        root = config.run_dir / contents.CHECKPOINTS
        expected = f"{place.checkpoint}, which the record of the run names"
        remedy = "put it back, or begin again in another run.dir"
        raise UserError(Problem(str(root), "no checkpoint", expected, remedy))
