"""The files of a checkpoint beside its tensors: `trainer_state.json`, configs, the tokenizer.

They hold all state that the rest of the run depends on and that is not a tensor. Rank 0 gathers it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmtrain.agreement import gathered
from llmtrain.checkpoint import format as form
from llmtrain.data.state import Counts, DataState, contribution, merge_cursors
from llmtrain.distributed.engines import state
from llmtrain.rundir import contents
from llmtrain.training.run.run import Run
from llmtrain.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def cursors_line(run: Run, step: int, rank_states: list[JsonObject]) -> bytes:
    """Return the stream's state as a line of `cursors.jsonl`."""
    where = {"step": step, "weights": run.data.manifest.weights}
    return _encode(where | data_state(run, step, rank_states).to_json())


def record_cursors(run: Run, step: int, line: bytes) -> None:
    """Append a line to `cursors.jsonl`, which keeps the states of deleted checkpoints too."""
    try:
        with (run.run_dir / contents.CURSORS).open("ab") as file:
            file.write(line)
    except OSError as error:  # the checkpoint itself is complete
        run.journal.event("cursors_not_noted", step, reason=str(error))


def small_files(run: Run, step: int, rank_states: list[JsonObject]) -> dict[str, bytes]:
    """Return name → content of every file of the checkpoint that is not a tensor file."""
    bound = run.processes.bound.binding
    trainer_state = {
        "format": form.FORMAT,
        "run_id": run.processes.run_id,
        "step": step,
        "tokens": run.meter.tokens,
        "sources": dict(run.meter.sources),
        "data": data_state(run, step, rank_states).to_json(),
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
