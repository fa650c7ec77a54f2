"""What a start reports once the run is open: the `start` line, the summary, and changes."""

import logging
import math
import platform
import socket
import sys
from dataclasses import asdict

import psutil
import torch

from llmtrain.agreement import on_rank_zero
from llmtrain.config.binding import bind, changes
from llmtrain.config.checks import same_bits_in_words
from llmtrain.distributed.engines.state import ADAPTER
from llmtrain.text import plural
from llmtrain.training.optimizer import learning_rate
from llmtrain.training.run import Run
from llmtrain.training.saving import warn_of_grace
from llmtrain.training.start.claim import ClaimedRun
from llmtrain.training.start.data import few_steps
from llmtrain.types import JsonObject

_log = logging.getLogger(__name__)


def announce(run: Run) -> None:
    """Record the start of the run, and log a summary."""
    processes, journal, first = run.processes, run.journal, run.step
    on_rank_zero(run.ranks, processes.auto.save)
    journal.step = first
    values = bind(run.config).values  # computed again, since the length in steps is known now
    on_rank_zero(run.ranks, lambda: journal.track(run.config.logging.trackers, values))
    on_rank_zero(run.ranks, journal.keep_files)
    facts, sizes = _facts(run), processes.launched.cut.to_json()
    journal.write("start", first, **facts)
    strategy, resumed_from = processes.launched.strategy, facts["resumed_from"]
    journal.status(step=first, checkpoint=resumed_from, strategy=strategy, **sizes)
    for line in _summary(run, facts["trainable_parameters"]):
        _log.info(line)


def _facts(run: Run) -> JsonObject:
    """Return what the record says of the start."""
    processes, batch, reference = run.processes, run.config.training.batch, run.data.reference
    parameters, trainable = _sizes(run)
    cuda = run.device.type == "cuda"
    device = torch.cuda.get_device_name(run.device) if cuda else platform.processor()
    return {
        "run_id": processes.run_id,
        "world_size": run.ranks.world_size,
        "strategy": processes.launched.strategy,
        **processes.launched.cut.to_json(),
        "threads": processes.threads.count,
        "device": device or platform.machine(),
        "device_type": run.device.type,
        "micro_batch_size": run.built.micro_batch_size,
        "accumulation": _accumulation(run),
        **({"batch_sizes": batch.sizes} if batch.grows else {}),
        "parameters": parameters,
        "trainable_parameters": trainable,
        "resumed_from": run.found.name if run.found else None,
        "weights": run.data.manifest.weights,
        "steps": run.steps,
        "epochs": run.config.training.epochs,
        "versions": processes.versions,
        "plan": processes.planned.to_json(),
        "host": socket.gethostname(),
        "born": float(psutil.Process().create_time()),  # in Unix seconds
        "vocabulary": run.data.tokenizer.length,
        **({"reference": reference.to_json()} if reference else {}),
        "set": dict(run.config.origins),
    }


def ready(run: Run, seconds: float) -> None:
    """Log the last line of the start block. seconds: how long the start took."""
    step, steps = f"{run.step:,}", f"{run.steps:,}"
    _log.info("ready     step %s of %s after %.1f s of start-up", step, steps, seconds)
    if run.device.type == "cuda":
        run.journal.progress.device_gb = run.processes.planned.hardware.device_bytes / 2**30
    run.journal.progress.begin()


def report_changes(run: Run, place: ClaimedRun) -> None:
    """Report what has changed since earlier starts, or may be unexpected."""
    event, first = run.journal.event, run.step
    processes, saved = run.processes, run.found.state if run.found else None
    if place.lock and place.lock.takeover:
        event("lock_taken_over", first, reason=place.lock.takeover)
    if place.pace is not None:
        warn_of_grace(run, *place.pace)
    if run.found and "rng" in run.found.state:
        event("rng_ignored", first, checkpoint=run.found.name)
    if processes.decided_again:
        event("auto_decided_anew", first, **processes.auto.launch)
    threads = processes.threads
    if processes.threads_before not in (None, threads.count):
        before = processes.threads_before
        event("threads_changed", first, threads_before=before, threads=threads.count)
        _log.info("the last bits may differ: %s threads, not %s as before", threads.count, before)
    now, before = processes.versions, saved["versions"] if saved else {}
    if other := {key: now[key] for key in before if now.get(key) != before[key]}:
        event("other_versions", first, **other)
    bound = processes.bound.binding
    keys = [change.key for change in changes(saved["config"] if saved else bound, bound)]
    if keys or run.data.changed:
        event("changes_accepted", first, keys=keys, data=list(run.data.changed))
    if place.steps not in (None, run.steps):
        # Report that the length of the run has changed, on which most schedules depend.
        config, step = run.config.optimizer, run.step + 1
        old, new = (learning_rate(config, n, min(step, n)) for n in (place.steps, run.steps))
        rates = {"learning_rate_before": old, "learning_rate": new}
        lengths = {"steps_before": place.steps, "steps": run.steps}
        run.journal.event("length_changed", run.step, **lengths, **rates)
        _log.info(
            "the run is %s steps long, not %s: at step %s the learning rate is %.3g, not %.3g",
            *(f"{run.steps:,}", f"{place.steps:,}", f"{step:,}", new, old),
        )
    counted = run.processes.auto.epoch
    if first == 0 and counted is not None:
        few = few_steps(run.config.training, counted, run.data.manifest, run.layout.data_size)
        if few:
            _log.warning("%s", few)
            run.journal.write("event", first, event="few_steps", detail=asdict(few))
    if run.data.heldout is None:
        event("nothing_held_out", first)
    if run.config.checkpoint.background is True and run.checkpoints.writer is None:
        event("saving_in_line", first, reason="rank 0 writes what all ranks hold parts of")


def _sizes(run: Run) -> tuple[int, int]:
    """Return the number of all parameters and of those that are trained.

    They are the plan's, since a rank's own tensors may be only parts of the model's. But a plan may
    be made before the tokens are known that adapters train; their checkpoints have nothing else.
    """
    shape, adapter = run.processes.planned.shape, run.built.spec.get(ADAPTER)
    if adapter is None:
        return shape.count, shape.trainable
    trained = sum(math.prod(one.shape) for one in adapter.values())
    return shape.count - shape.trainable + trained, trained


def _accumulation(run: Run) -> int:
    """Return the number of micro-batches of the next step on one rank."""
    blocks = run.config.training.batch.of(run.step + 1)
    return blocks // run.layout.data_size // run.built.micro_batch_size


def _summary(run: Run, trainable: int) -> list[str]:
    manifest, training, threads = run.data.manifest, run.config.training, run.processes.threads
    count, cut = run.ranks.world_size, run.processes.launched.cut
    shared = {
        "matrices of a model": cut.tensor,
        "blocks of a model": cut.pipeline,
        "positions of a row": cut.sequence,
    }
    apart = [f"the {what} over {size}" for what, size in shared.items() if size > 1]
    words = ("model", "models") if apart else ("process", "processes")
    groups = plural(run.layout.data_size, *words)
    rows = f"{groups} × {run.built.micro_batch_size} × {_accumulation(run)}"
    devices = torch.cuda.device_count() if run.device.type == "cuda" else 0
    sources = ", ".join(f"{s.label} ({len(s.units):,} units)" for s in manifest.sources)
    strategy, why = run.processes.launched.strategy, run.processes.planned.reason
    for elsewhere in (f"{strategy}, ", f"micro-batch {run.built.micro_batch_size}, ", "is "):
        why = why.removeprefix(elsewhere)
    plan, device_bytes = run.processes.planned.memory, run.processes.planned.hardware.device_bytes
    column, size = run.data.reference, training.batch.of(run.step + 1)
    known = column is not None and column.pairs_a_block
    pairs = f" ≈ {known * size:.1f} pairs" if known else ""
    grows = training.batch.later(run.step + 1)
    memory = f"{plan.total_bytes / 2**30:.2f}" if plan else "an unknown part"
    memory += f" of {device_bytes / 2**30:.1f} GiB"
    recompute = run.processes.planned.layout.activation_checkpointing
    precision = f"{run.processes.precision} ({run.processes.why_precision})"
    place = ", ".join([f"{strategy} on {count} × {run.device.type}", *apart, precision])
    return [
        *_devices(devices, run.ranks.world_size),
        f"threads   {threads.count} a process ({threads.why})",
        f"model     {type(run.built.model).__name__}, {trainable:,} trainable parameters",
        f"strategy  {place}: {why}",
        f"batch     {size} blocks{pairs} = {rows}, of {manifest.seq_len} tokens{grows}",
        f"data      {sources}, {manifest.lanes} lanes, {run.data.tokenizer.length:,} tokens",
        f"memory    {memory} planned, activation checkpointing: {recompute}",
        *([f"bits      the same on {same_bits_in_words(training)}"] if training.same_bits else []),
    ]


def _devices(devices: int, processes: int) -> list[str]:
    """Return a line on the GPUs of this machine that the run leaves unused."""
    if sys.platform == "darwin":
        return [
            "devices   macOS: trains on the CPU, never on Apple's GPU; meant for trying things out"
        ]
    if processes > 1 or devices < 2:
        return []
    how = f"--processes {devices}, in Python train(config, processes={devices})"
    return [f"devices   1 of {devices} GPUs is used; all of them: {how}"]
