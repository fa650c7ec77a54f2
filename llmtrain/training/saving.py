"""Saving checkpoints: a save begins at one boundary and is complete at the same or a later one.

    begin     compare replicas, gather state, make files: in line, on all ranks
    write     each rank writes its ranges: in line, or from a copy while training continues
    commit    vote, write the manifest, rename, delete what the policy does not keep

A save in flight is committed at the first boundary at which every rank reports that it has written
its part, and at the latest before the next save or at an agreed end. An exception leaves it
unfinished. If the disk refuses a save, that is reported as an event and training continues. Three
failures in a row, or one at the last step, end the run.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.agreement import captured, from_rank_zero, gathered, on_rank_zero
from llmtrain.checkpoint import disk, retention, write
from llmtrain.checkpoint.background import CHUNK_BYTES, Writer
from llmtrain.checkpoint.format import complete_names
from llmtrain.config.schema import CheckpointConfig
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.state import bytes_of
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import DISK_FAILED, RunError
from llmtrain.metrics import memory
from llmtrain.rundir import contents
from llmtrain.training.run.guards import check_replicas
from llmtrain.training.run.run import Flight, Run, Saves, Written
from llmtrain.training.run_state import cursors_line, gather_parts, record_cursors, small_files
from llmtrain.training.stop import grace_warning
from llmtrain.types import Failure, JsonObject, Piece

_log = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 3
_SPARE = 1.1  # a copy needs this times its size in host memory, since training needs some too


def save(run: Run, step: int) -> None:
    """Complete the checkpoint in flight, then save the state after `step` if that is due."""
    commit(run)
    if run.due.begins(step):
        begin(run, step, run.due.reason(step), last=run.due.stop(step))


def begin(run: Run, step: int, reason: str, *, last: bool) -> None:
    """Begin to save the state after `step`. Collective.

    With a background writer the save may still be in flight when this returns.
    last: no step follows, so the save is complete on return, or RunError (74) is raised.
    """
    assert run.checkpoints.flight is None, "what is in flight is committed first"
    started = time.perf_counter()
    on_rank_zero(run.ranks, run.journal.check_directory)
    check_replicas(run.engine.unequal_replicas(), step, run.journal.event)
    run.due.begin_save(step)
    run.requests.begin_save()
    begun, cursors = _begin(run, step, gather_parts(run, step))
    if isinstance(begun, write.FailedSave):
        run.due.end_save(step, saved=False)
        _report_failure(run, step, begun.failures, last=last)
        return
    pieces = _pieces(run)
    writer = _choose_writer(run, step)
    written = None if writer else _write(run, begun, pieces)
    blocked = time.perf_counter() - started
    run.checkpoints.flight = Flight(step, reason, begun, cursors, last, blocked, written)
    if writer:
        # Unlike weights and moments, buffers may change before the next update.
        buffers = frozenset(name for name, _ in run.built.model.named_buffers())
        writer.submit(begun, pieces, buffers)
    if last or not writer:
        commit(run)


def commit(run: Run) -> None:
    """Complete the checkpoint in flight, if any; wait for ranks that still write. Collective."""
    saves = run.checkpoints
    flight, saves.flight = saves.flight, None
    if flight is None:
        return
    written, blocked = flight.written, flight.blocked
    if written is None:  # begun at an earlier step
        assert saves.writer is not None
        on_rank_zero(run.ranks, run.journal.check_directory)
        written = saves.writer.finish()
        blocked += saves.writer.release()
    error, extents = written
    started = time.perf_counter()
    done = write.commit(flight.begun, extents, error, run.ranks)
    run.due.end_save(flight.step, saved=isinstance(done, write.SavedCheckpoint))
    if isinstance(done, write.FailedSave):
        _report_failure(run, flight.step, done.failures, last=flight.last)
    else:
        saves.failed_in_a_row = 0
        run.requests.end_save(done.seconds)
        fields: dict[str, object] = {
            "name": done.name,
            "bytes": done.bytes,
            "seconds": done.seconds,
            "blocked_seconds": blocked + time.perf_counter() - started,
            "reason": flight.reason,
        }
        run.journal.write("checkpoint", flight.step, **fields)
        run.journal.status(checkpoint=done.name, step=run.journal.step)
        run.journal.progress.checkpoint({"step": flight.step, **fields})
        warn_of_grace(run, done.seconds, run.meter.step_seconds)
        if run.ranks.rank == 0:
            record_cursors(run, flight.step, flight.cursors)
            _retain(run, flight.step, done.name)


def open_saves(config: CheckpointConfig, launched: Launched, run_dir: Path) -> Saves:
    """Decide how a start writes checkpoints, from its config, its strategy and its file system."""
    kind, is_cut = family(launched.strategy), launched.cut.weights > 1
    nodes = launched.ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The machine that exports a network directory sees a local disk, but all ranks must agree.
    network = bool(launched.ranks.highest(int(disk.is_network(run_dir))))
    whole = kind == "ddp" and not is_cut  # rank 0 has all tensors
    writers = disk.choose_writers(config.writers, nodes, network, whole=whole)
    rank0_writes = writers == "rank0" and not whole
    on_gpu = launched.device.type == "cuda" and not is_cut
    wanted = on_gpu if config.background == "auto" else config.background
    writer = Writer() if wanted and not rank0_writes else None
    return Saves(config, writer, rank0_writes, replicas_shared=writers == "all")


def _begin(
    run: Run, step: int, rank_states: list[JsonObject]
) -> tuple[write.OpenSave | write.FailedSave, bytes]:
    """Write small files and headers and make room; if one rank fails, all return Failed.

    Also returns the line for `cursors.jsonl`, since by the commit the stream may have advanced.
    """

    def small() -> tuple[dict[str, bytes], bytes]:
        run.journal.sync()  # the lines up to this step must be on disk before the manifest is
        if not rank_states:
            return {}, b""
        return small_files(run, step, rank_states), cursors_line(run, step, rank_states)

    outcome = captured(small)
    if failures := run.ranks.vote(outcome.error).failures:
        return write.FailedSave(failures), b""
    files, cursors = outcome.result()
    root = run.run_dir / contents.CHECKPOINTS
    begun = write.begin(root, step, run.built.spec, files, run.ranks, run.processes.run_id)
    return begun, cursors


def _write(run: Run, begun: write.OpenSave, pieces: Iterator[Piece]) -> Written:
    """Write this rank's part in line."""
    tensor = run.processes.launched.cut.tensor
    share = bytes_of(run.built.spec) // tensor if tensor > 1 else None
    if run.checkpoints.rank0_writes:
        outcome = captured(lambda: write.collect_pieces(begun, pieces, run.ranks))
    else:
        outcome = captured(lambda: write.write_pieces(begun, pieces, share))
    if isinstance(outcome.error, RunError):  # in the middle of an exchange
        raise outcome.error
    for _ in pieces:  # if this rank has failed, others still wait for its columns
        continue
    return outcome.error, {} if outcome.error else outcome.result()


def reserve(run: Run) -> None:
    """On CUDA, begin to pin the memory of the first save, beside the first steps. Collective.

    If a host lacks the memory, this start saves in line. On a CPU nothing is pinned.
    """
    if run.device.type != "cuda" or run.due.stop(run.step):
        return
    writer = _choose_writer(run, run.step)
    if writer is not None:
        writer.reserve(sum(piece.data.nbytes for piece in _pieces(run) if piece.data.is_cuda))


def _pieces(run: Run) -> Iterator[Piece]:
    """Yield what this rank writes of weights and moments."""
    shared = run.checkpoints.replicas_shared
    return run.engine.pieces(run.built.spec, writing=True, replicas_shared=shared)


def _choose_writer(run: Run, step: int) -> Writer | None:
    """Return the background writer; None if it is not wanted or a host lacks the memory for it."""
    saves = run.checkpoints
    if saves.writer is None or saves.has_room:  # the writer uses its buffers again
        return saves.writer
    size = sum(piece.data.nbytes for piece in _pieces(run))
    needed = math.ceil(size / CHUNK_BYTES) * CHUNK_BYTES
    mine = {"host": socket.gethostname(), "needed": needed, "free": memory.free_host_bytes()}
    of_ranks = gathered(run.ranks, mine)
    if hosts := from_rank_zero(run.ranks, lambda: short_of_memory(of_ranks)):
        saves.writer = None
        run.journal.event("saving_in_line", step, reason="no memory for a copy", hosts=hosts)
    saves.has_room = not hosts
    return saves.writer


def short_of_memory(reports: list[JsonObject]) -> list[str]:
    """Return the hosts with too little free memory for the copies of all their ranks."""
    hosts = {one["host"] for one in reports}
    needed = {host: sum(one["needed"] for one in reports if one["host"] == host) for host in hosts}
    free = {host: min(one["free"] for one in reports if one["host"] == host) for host in hosts}
    return sorted(host for host in hosts if needed[host] * _SPARE > free[host])


def _retain(run: Run, step: int, new: str) -> None:
    """Delete checkpoints that the policy does not keep; report those that somebody else deleted."""
    saves, root = run.checkpoints, run.run_dir / contents.CHECKPOINTS
    resumed_from = run.found.name if run.found else None
    try:
        for name in sorted(saves.kept - set(complete_names(root))):
            run.journal.event("checkpoint_missing", step, checkpoint=name)
        gone = retention.prune(root, saves.policy, run.processes.run_id, resumed_from)
        saves.kept = {*complete_names(root), new} - {*gone}
    except OSError as error:  # the new checkpoint is complete; the next commit tries again
        run.journal.event("retention_failed", step, reason=str(error))


def _report_failure(run: Run, step: int, failures: tuple[Failure, ...], *, last: bool) -> None:
    """Report a failed save; raise RunError (74) if it was the third in a row or the last one."""
    run.checkpoints.failed_in_a_row += 1
    texts = "; ".join(str(failure) for failure in failures)
    run.journal.event("save_failed", step, failures=texts)
    if last or run.checkpoints.failed_in_a_row >= _FAILURES_IN_A_ROW:
        blocked = any(failure.errno == errno.EEXIST for failure in failures)
        first = "move away what has that name" if blocked else "make room or repair the disk"
        raise RunError(
            f"step {step} could not be saved: {texts}",
            DISK_FAILED,
            f"{first}, then give the same command again: it resumes from the newest checkpoint",
        )


def warn_of_grace(run: Run, save_seconds: float, step_seconds: float) -> None:
    """Warn once, on rank 0, if a stop and its save may take longer than the launcher waits."""
    text = grace_warning(save_seconds, step_seconds, os.environ)
    if text is not None and run.ranks.rank == 0 and not run.checkpoints.grace_told:
        run.checkpoints.grace_told = True
        _log.warning(text)
