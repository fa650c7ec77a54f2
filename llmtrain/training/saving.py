"""Saving checkpoints: a save begins at one boundary and is complete at the same or a later one.

    begin     compare replicas, gather state, make files: in line, on all ranks
    write     each rank writes its ranges: in line, or from a copy while training continues
    commit    vote, write the manifest, rename, delete what the policy does not keep

A save in flight is committed at the first boundary at which every rank reports that it has written
its part, and at the latest before the next save or at an agreed end. An exception leaves it
unfinished. If the disk refuses a save, that is reported as an event and training continues. Three
failures in a row, or one at the last step, end the run.

The files beside the tensors (`trainer_state.json`, configs, the tokenizer) hold all state that the
rest of the run depends on and that is not a tensor. Rank 0 gathers it.
"""

import errno
import hashlib
import json
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from llmtrain.agreement import captured, from_rank_zero, gathered, on_rank_zero
from llmtrain.checkpoint import candidates, disk, format as form, write
from llmtrain.checkpoint.background import CHUNK_BYTES, Writer
from llmtrain.checkpoint.format import complete_names
from llmtrain.config.schema import CheckpointConfig
from llmtrain.data.state import Counts, DataState, contribution, merge_cursors
from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.state import bytes_of
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import DISK_FAILED, RunError
from llmtrain.metrics import memory
from llmtrain.rundir import contents
from llmtrain.training.guards import check_replicas
from llmtrain.training.run import Flight, Run, Saves, Written
from llmtrain.training.stop import grace_warning
from llmtrain.types import Failure, JsonObject, Piece

_log = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 3
_SPARE = 1.1  # a copy needs this times its size in host memory, since training needs some too


def gather_parts(run: Run, step: int) -> list[JsonObject]:
    """Gather the state of each data rank at rank 0; return an empty list on the other ranks.

    That is its cursors and its counts of documents.
    """
    before = run.data.state
    cursors = contribution(
        run.feed.cursors,
        before.cursors.shape[:2],
        first_block=before.next_block,
        next_block=run.config.training.batch.until(step),
        rank=run.layout.data_rank,
        world_size=run.layout.data_size,
    )
    mine = {"cursors": cursors.tolist(), "counts": run.feed.counts}
    return [one for one in gathered(run.ranks, mine if run.layout.leads else None) if one]


def data_state(run: Run, step: int, rank_states: list[JsonObject]) -> DataState:
    """Return the stream's state after the blocks of `step`. rank_states: from `gather_parts`."""
    before = run.data.state
    next_block = run.config.training.batch.until(step)
    parts = [np.array(one["cursors"], np.int64) for one in rank_states]
    first = before.next_block
    return replace(
        before,
        next_block=next_block,
        cursors=merge_cursors(before.cursors, parts, first_block=first, next_block=next_block),
        stream_digest=run.meter.stream_digest,
        counts=_add(before.counts, [one["counts"] for one in rank_states]),
    )


def record_cursors(run: Run, step: int, line: bytes) -> None:
    """Append a line to `cursors.jsonl`, which keeps the states of deleted checkpoints too."""
    try:
        with (run.run_dir / contents.CURSORS).open("ab") as file:
            file.write(line)
    except OSError as error:  # the checkpoint itself is complete
        run.journal.event("cursors_not_noted", step, reason=str(error))


def small_files(run: Run, step: int, data: JsonObject) -> dict[str, bytes]:
    """Return name → content of every file of the checkpoint that is not a tensor file.

    data: the stream's state
    """
    bound = run.processes.bound.binding
    trainer_state = {
        "format": form.FORMAT,
        "run_id": run.processes.run_id,
        "step": step,
        "tokens": run.meter.tokens,
        "sources": dict(run.meter.sources),
        "data": data,
        "weights": run.data.manifest.weights,
        "config_digest": hashlib.sha256(_encode(bound)).hexdigest(),
        "config": bound,
        "strategy": run.processes.launched.strategy,
        "world_size": run.ranks.world_size,
        "device": run.device.type,
        "optimizer_steps": run.engine.optimizer_steps(),
        "evaluation": run.log.last_evaluation,
        "skipped_in_a_row": run.guards.skipped_in_a_row,
        "patience": None if run.due.patience is None else run.due.without_gain,
        "ended": run.due.data_ended,
        **({"reference": run.data.reference.digest} if run.data.reference else {}),
        "auto": json.loads(run.processes.auto.to_bytes()),
        "versions": run.processes.versions,
    }
    directory = run.run_dir / contents.TOKENIZER
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        "trainer_state.json": _encode(trainer_state),
        **state.index(run.built.spec),
        **model_files(run.built.model, run.built.adapter),
        **{path.relative_to(directory).as_posix(): path.read_bytes() for path in files},
    }


def model_files(
    model: PreTrainedModel, adapter: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Return name → content of the files that `from_pretrained` needs beside the weights.

    adapter: those of an adapter, whose base has a config of its own
    """
    files = dict(adapter or {"config.json": model.config.to_json_string(use_diff=True).encode()})
    if model.can_generate() and model.generation_config is not None:
        text = model.generation_config.to_json_string(use_diff=True)
        files["generation_config.json"] = text.encode()
    return files


def _encode(value: object) -> bytes:
    return (json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n").encode()


def count_documents(run: Run) -> Counts:
    """Return source → event (dropped, replaced, …) → count for the whole run; {} on ranks > 0."""
    rank_counts = gathered(run.ranks, run.feed.counts if run.layout.leads else {})
    return _add(run.data.state.counts, rank_counts) if rank_counts else {}


def _add(start: Counts, parts: list[Counts]) -> Counts:
    total = {label: Counter(counts) for label, counts in start.items()}
    for label, counts in (one for part in parts for one in part.items()):
        total.setdefault(label, Counter()).update(counts)
    return total


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
        data = data_state(run, step, rank_states).to_json()
        where = {"step": step, "weights": run.data.manifest.weights}
        return small_files(run, step, data), _encode(where | data)

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
        gone = candidates.prune(root, saves.policy, run.processes.run_id, resumed_from)
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
