"""How a start ends: finished, stopped before or outside the loop, without data, or by an error.

Whatever ends it is recorded before the error is raised further.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmtrain import errors
from llmtrain.agreement import refuse
from llmtrain.checkpoint.disk import StoppedError
from llmtrain.data.batches import UNTRAINED_BLOCKS
from llmtrain.distributed.ranks import lost_peer, peer_lost
from llmtrain.rundir import failures
from llmtrain.rundir.status import Result
from llmtrain.training import saving
from llmtrain.training.due import agreed_stop
from llmtrain.training.journal import Journal
from llmtrain.training.run import Run
from llmtrain.training.saving import count_documents
from llmtrain.training.step import flags
from llmtrain.training.stop import LOST, Signals, asked, stop_code
from llmtrain.types import Ranks

_log = logging.getLogger(__name__)


class StoppedEarlyError(Exception):
    """A stop outside the loop on which all ranks agreed; everything is saved."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.step = step
        self.exit_code = stop_code(reason, os.environ)


def finish(run: Run) -> Result:
    """Record the end of a run, and return how it ended."""
    if run.log.profile is not None:
        run.log.profile.end(run.step)
    finished = run.due.finished(run.step)
    state = "finished" if finished else "stopped"
    reason = run.due.ended_by(run.step) if finished else run.due.stop_reason
    for label, met in count_documents(run).items():
        report_documents(run.journal, run.step, label, met)
    code = 0 if finished else stop_code(reason, os.environ)
    if not code:  # else a STOP is for the next start, which the launcher makes
        run.requests.end_stop()
    if finished and not run.meter.tokens:
        expected = "at least one trained token in the whole run; the weights are as they began"
        remedy = "look at the rows, and at the padding of each lane: llmtrain data inspect"
        raise errors.UserError(errors.Problem("training.steps", run.steps, expected, remedy))
    run.journal.end(state, code, reason)
    why = f" ({reason})" if reason else ""
    _log.info("%-10s step %s of %s%s", state, f"{run.step:,}", f"{run.steps:,}", why)
    return Result(run.run_dir, state, code, reason, run.step)


def report_documents(journal: Journal, step: int, label: str, met: Mapping[str, int]) -> None:
    """Report documents of a source that were left out, and those with bytes that are not UTF-8.

    The latter were trained on, with U+FFFD in place of these bytes. Blocks without a trained token
    are reported too. met: as in `Batch.counts`.
    """
    if any(met.get(name) for name in ("dropped", "skipped", "rejected", "too_long")):
        separate = ("replaced", UNTRAINED_BLOCKS)  # they have events of their own
        counts = {name: count for name, count in met.items() if name not in separate}
        journal.event("dropped_documents", step, source=label, **counts)
    if blocks := met.get(UNTRAINED_BLOCKS):
        journal.event(UNTRAINED_BLOCKS, step, source=label, blocks=blocks)
    if replaced := met.get("replaced"):
        journal.event("replaced_characters", step, source=label, documents=replaced)


def end_without_data(run: Run, step: int) -> None:
    """Raise on all ranks the error for which the data failed in `step`.

    If a restart may cure it (the network was away, a worker died), the run is saved first, so that
    no document is lost. If a stop was asked for, which may have ended the wait for data,
    StoppedEarlyError is raised in this case. After a bad unit or a defect the run is not saved.
    """
    vote = run.ranks.vote(run.feed.error)
    run.feed.put_back(step)
    run.journal.step = run.step
    curable = all(failure.exit_code == errors.RESTARTABLE for failure in vote.failures)
    stops = agreed_stop(run.ranks, flags(run))
    saving.commit(run)  # the save of an earlier step, which this failure cannot harm
    if curable and run.due.unsaved(run.step):
        saving.begin(run, run.step, stops[0] if stops else "data_failed", last=True)
    if curable and stops:
        stopped = StoppedEarlyError(stops[0], run.step)
        if not stopped.exit_code:
            run.requests.end_stop()
        raise stopped
    refuse(vote, run.feed.error)


def stop_reason_of(signals: Signals) -> str | None:
    """Return the name in the record for why this rank was asked to stop, or None."""
    reason = signals.reason
    return "launcher_lost" if reason in LOST else reason and "signal"


def _raise_if_stopped(ranks: Ranks, signals: Signals, journal: Journal) -> None:
    """Raise StoppedEarlyError if any rank was asked to stop."""
    if stops := agreed_stop(ranks, asked(signals.reason)):
        raise StoppedEarlyError(stops[0], journal.step)


@contextmanager
def stoppable(ranks: Ranks, signals: Signals, journal: Journal) -> Iterator[None]:
    """Run a stage of a start; raise StoppedEarlyError if any rank was asked to stop.

    A stop takes effect before the stage begins, while it waits for the Hub, or while it reads a
    checkpoint. Such a failure is raised on all ranks, so all can agree on whether it was a stop.
    """
    _raise_if_stopped(ranks, signals, journal)
    try:
        yield
    except StoppedError as stopped:
        _raise_if_stopped(ranks, signals, journal)  # the most important of several reasons
        raise StoppedEarlyError(str(stopped), journal.step) from stopped
    except errors.RunError as error:
        if error.exit_code == errors.RESTARTABLE:
            _raise_if_stopped(ranks, signals, journal)
        raise


def stop_alone(journal: Journal, reason: str) -> int:
    """Record a stop before ranks can communicate, and return the exit code.

    When a launcher has lost a rank, it stops the others just as it does when a person asks it to.
    So a rank that is stopped here writes a mark, and rank 0 looks for ranks that ended without one.
    """
    exit_code = stop_code(reason, os.environ)
    if journal.rank:
        text = f"stopped before the ranks met ({reason})"
        failures.write(journal.run_dir, journal.rank, exit_code, text, lost_peer=bool(exit_code))
        return exit_code
    lost = reason == "launcher_lost"
    dead = [] if lost else failures.silent(journal.run_dir, os.environ)
    failed = None if lost else failures.outranking(journal.run_dir, seconds=0)
    if failed is not None:
        code, why = failed.code, str(failed)
    elif dead:
        names = ", ".join(str(rank) for rank in dead)
        code, why = errors.RESTARTABLE, f"rank {names} died before the ranks met"
    elif reason == "rank_lost":
        code, why = errors.RESTARTABLE, "a rank on this machine died before the ranks met"
    else:
        journal.end("stopped", exit_code, reason)
        return exit_code
    failures.write(journal.run_dir, 0, code, why, lost_peer=True)
    _log.error("%s", why)
    journal.end("failed", code, why)
    return code


@contextmanager
def record_end(journal: Journal, config: str) -> Iterator[None]:
    """Write any error that ends the run to its log, record and status.

    config: digest of the config. A rank that fails writes its mark before anything else.
    """
    try:
        yield
    except StoppedEarlyError as stopped:
        journal.end("stopped", stopped.exit_code, stopped.reason)
        raise
    except Exception as error:
        lost = lost_peer(error)
        shown = peer_lost(error) if lost else errors.explained(error)
        failures.leave(journal.run_dir, journal.rank, shown, config, lost_peer=lost)
        error.add_note(f"after step {journal.step}")
        _log.error("the run failed", exc_info=True)
        if lost and journal.rank == 0 and (mark := failures.outranking(journal.run_dir)):
            shown = errors.PeerError(str(mark), mark.code, mark.rank)  # why that peer was lost
        try:
            journal.end("failed", errors.exit_code_of(shown), str(shown))
        except errors.RunError:  # the disk may be full; the error that ended the run is raised
            _log.error("the end could not be recorded", exc_info=True)
        if shown is not error:
            raise shown from error
        raise
