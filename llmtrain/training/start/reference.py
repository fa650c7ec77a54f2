"""The reference of a run on pairs: found, or computed before the first step by the same forward.

The run's own stream is read once more, from where the run stands, and each pair that is new is
scored in its block, in the micro-batches of training. So policy and reference are one kernel on one
layout, and the margin of the first step is exactly 0. Each process writes what it has scored from
time to time, and a pass that was killed goes on from there:

    reference/part-1-0-of-2.safetensors, part-1-1-of-2.safetensors, …  ──►  reference.safetensors

The column is found by content, so that it serves any number of processes and other runs with the
same base. A resumed run reads it. If it is longer than it was, or its data has changed, the missing
pairs are scored first, with the weights that it began with.
"""

import logging
import math
import re
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llmtrain import faults, system
from llmtrain.agreement import agreed, on_rank_zero
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.disk import StoppedError
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.binding import is_accepted, way_out
from llmtrain.config.schema import Config
from llmtrain.data.stream import open_stream
from llmtrain.errors import Problem, UserError
from llmtrain.rundir import contents, reference
from llmtrain.rundir.reference import KEY, Column, DamagedColumnError
from llmtrain.training.due import agreed_stop
from llmtrain.training.evaluate import heldout_batch, rounds_of
from llmtrain.training.run import DataSide, Processes, Run
from llmtrain.training.step import flags, group_order, in_groups, micro_batches
from llmtrain.types import Batch, JsonMapping

_log = logging.getLogger(__name__)

_PART_SECONDS = 60.0  # of work that a killed process loses at most
_EVERYTHING = "all"
_PART = re.compile(rf"part-(\d+)-\d+-of-(\d+){re.escape(form.TENSORS)}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a start needs of the reference.

    column: what is known of it
    walks: whether the data must be read for pairs that it may lack
    """

    column: Column
    walks: bool


def find_column(
    config: Config, processes: Processes, data: DataSide, resume_point: ResumePoint | None
) -> Wanted | None:
    """Return what is known of the reference; None for a loss without one. Collective.

    Raises UserError for a column that a resumed run has lost, or that is not its own any more, and
    for one of another run that was made with something else.
    """
    if not config.preference.has_reference:
        return None
    ranks, path = processes.launched.ranks, config.run_dir / contents.REFERENCE
    made_with = _made_with(config, processes, data)
    on_rank_zero(ranks, lambda: _settle(config, path, made_with, resume_point))
    here = agreed(ranks, lambda: reference.load(path) if path.exists() else None)
    column = reference.empty(made_with) if here is None else here
    return Wanted(column, not _has_enough(column, config, data))


def _has_enough(column: Column, config: Config, data: DataSide) -> bool:
    """Whether a column has all pairs of this run, and those that are held out."""
    walked, held, seq_len = column.walked, data.heldout, data.manifest.seq_len
    steps = walked.get("steps", 0)
    if walked.get("data") != data.manifest.fingerprint:
        return False
    if steps != _EVERYTHING and steps < config.total_steps:
        return False
    if held is None:
        return True
    keys = held.pairs_of(range(held.num_blocks(seq_len)), seq_len).keys
    return bool((column.places(keys) >= 0).all())


def _made_with(config: Config, processes: Processes, data: DataSide) -> JsonMapping:
    """Return what log-probabilities depend on besides the ids of a pair."""
    base, manifest = processes.base, data.manifest
    model = processes.bound.values
    seeded = {key: value for key, value in model.items() if key.startswith("model.config")}
    weights = (base.revision or base.digest) if base else f"seed {config.run.seed}: {seeded}"
    kind, kernel = config.adapter.kind, config.training.loss_kernel
    held = "4 bits" if kind == "qlora" else "fp32" if kind == "none" else processes.precision
    return {
        "base": weights,
        "precision": f"{processes.precision}, weights in {held}",
        "template": manifest.chat.template if manifest.chat else "",
        "tokenizer": manifest.tokenizer.digest,
        "vocabulary": f"padded to {config.model.pad_vocab_to}",
        "kernel": f"attention {config.model.attention_backend}, loss {kernel}",
    }


def _settle(
    config: Config, path: Path, made_with: JsonMapping, resume_point: ResumePoint | None
) -> None:
    """Leave the column of this run at `path`, or nothing (rank 0)."""
    accepted = is_accepted(KEY, config.checkpoint.accept_changes)
    # A loss before may have had none.
    digest = resume_point.state.get("reference") if resume_point else None
    found = _fitting(path, made_with, digest) if (there := path.exists()) else "is gone"
    if isinstance(found, Column):
        return
    if digest is not None and not accepted:
        expected = f"the reference that this run began with; the file {found}"
        remedy = f"put it back, or {way_out(KEY)}: it is computed again"
        raise UserError(Problem(str(path), None, expected, remedy))
    if there:
        _log.warning("%s %s, and is made again", path, found)
        path.unlink()
    if config.preference.reference != "start":
        _of_other_run(Path(config.preference.reference), made_with).save(path)


def _fitting(path: Path, made_with: JsonMapping, digest: str | None = None) -> Column | str:
    """Return the column in a file, or why it is not one that was made with this.

    digest: of what it has grown out of; None = of anything
    """
    try:
        column = reference.load(path)
    except DamagedColumnError as error:
        return f"is damaged ({error})"
    if digest is not None and not column.continues(digest):
        return f"is another one: its digest is {column.digest}, not {digest}"
    for name, value in made_with.items():
        if (other := column.made_with.get(name)) != value:
            return f"was made with another {name}: {other}, not {value}"
    return column


def _of_other_run(place: Path, made_with: JsonMapping) -> Column:
    """Return the column of another run, which says nothing of the data of this one."""
    try:
        found = _fitting(place / contents.REFERENCE, made_with)
    except OSError:
        found = f"has no {contents.REFERENCE}"
    if isinstance(found, str):
        expected = f"start, or a run whose reference was made with the same weights; it {found}"
        raise UserError(Problem(KEY, str(place), expected, f"{KEY}=start, which computes one"))
    return replace(found, walked={})


def with_reference(run: Run, wanted: Wanted | None) -> Run:
    """Return the run with its reference, computed where it lacks pairs. Collective.

    The model must have the weights that the run began with. Raises StoppedError at a stop, behind
    which a later start goes on.
    """
    if wanted is None:
        return run
    if not wanted.walks:
        return replace(run, data=replace(run.data, reference=wanted.column))
    path, parts = run.run_dir / contents.REFERENCE, run.run_dir / contents.REFERENCE_PARTS
    on_rank_zero(run.ranks, lambda: parts.mkdir(exist_ok=True))
    before, number = agreed(run.ranks, lambda: _read_parts(parts, wanted.column))
    number = run.ranks.highest(number)  # a network disk may show a file to some ranks only
    known, began = wanted.column.plus(before), time.perf_counter()
    made = _Pass(run, known, parts, number)
    with run.engine.evaluating():
        steps = made.walk()
        made.score_heldout()
    agreed(run.ranks, made.write_part)

    def join() -> None:
        column = known.plus(_read_parts(parts, known)[0])
        walked: dict[str, object] = {"data": run.data.manifest.fingerprint, "steps": steps}
        if wanted.column.walked:  # checkpoints of this run name the column that it grew out of
            walked["earlier"] = [*wanted.column.walked.get("earlier", ()), wanted.column.digest]
        replace(column, walked=walked).save(path)
        shutil.rmtree(parts)

    on_rank_zero(run.ranks, join)
    column = agreed(run.ranks, lambda: reference.load(path))
    new, seconds = len(column) - len(wanted.column), time.perf_counter() - began
    summary = f"{len(column):,} pairs, {new:,} of them new"
    _log.info("reference %s: %d forwards on this process, %.1f s", summary, made.forwards, seconds)
    mean = made.pairs / made.blocks if made.blocks else 0.0
    column = replace(column, seconds=seconds, pairs_a_block=mean)
    return replace(run, data=replace(run.data, reference=column))


def _read_parts(parts: Path, column: Column) -> tuple[list[Column], int]:
    """Return what earlier passes have written, and how often they wrote.

    All processes write at the same step. If one of them was killed before it had, what the others
    wrote is left out: else which of two values of a pair is kept would depend on the kill. Left out
    is also what was made with something else.
    """
    written: dict[tuple[int, int], list[Path]] = {}
    for path in parts.iterdir():
        if name := _PART.fullmatch(path.name):
            written.setdefault((int(name[1]), int(name[2])), []).append(path)
    columns: list[Column] = []
    for (_, count), paths in sorted(written.items()):
        try:
            of_all = [reference.load(path) for path in sorted(paths)]
        except DamagedColumnError as error:
            _log.warning("a part of the reference is left out: %s", error)
            continue
        if len(of_all) == count and all(one.made_with == column.made_with for one in of_all):
            columns += of_all
    return columns, max((done for done, _ in written), default=0)


@dataclass(slots=True)
class _Pass:
    """One pass over the pairs of a run, on this rank.

    known: pairs that need no forward
    parts: the directory for what is scored
    number: how often something was written there
    forwards: of micro-batches, so far
    pairs, blocks: how many were read
    """

    run: Run
    known: Column
    parts: Path
    number: int
    forwards: int = 0
    pairs: int = 0
    blocks: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _new: list[Column] = field(default_factory=list)
    _written: float = field(default_factory=time.perf_counter)

    def walk(self) -> int | str:
        """Score the training pairs, and return how many steps that was; all = every pair there is.

        Ends with the run, or once every lane has been through all pairs: one that begins within an
        epoch reads all of the next one too, whose units are others. In feedback the second answer
        of a pair depends on the epoch, so only the end of the run ends it.
        """
        run, config, before = self.run, self.run.config, self.run.data.state
        manifest, layout = run.data.manifest, run.layout
        stream = open_stream(
            manifest,
            run.run_dir / contents.TOKENIZER,
            batch=config.training.batch,
            rank=layout.data_rank,
            world_size=layout.data_size,
            workers=0,
            next_block=before.next_block,
            cursors=before.cursors,
            reading=replace(run.data.reading, stop=None),
            encoder=run.data.encoder,
        )
        apart = math.gcd(layout.data_size, manifest.lanes)
        left = set(range(layout.data_rank % apart, manifest.lanes, apart))
        ends = before.cursors[..., 0] + np.where(before.cursors.any(-1), 2, 1)  # (L, sources)
        with closing(stream):
            for number in range(run.step + 1, run.steps + 1):
                faults.hit("reference.step", step=number)
                batch = agreed(run.ranks, lambda: next(stream))
                system.beat("a step of the reference", number, run.steps)
                self._score(batch)
                self.pairs += len(batch.pairs.rows) if batch.pairs else 0
                self.blocks += len(batch.ids)
                for lane, cursors in batch.cursors.items():
                    if all(one.epoch >= end for one, end in zip(cursors, ends[lane], strict=True)):
                        left.discard(lane)
                more = left and not batch.ended
                if run.data.answers == "pairs" and not run.ranks.highest(int(bool(more))):
                    return _EVERYTHING
        return run.steps

    def score_heldout(self) -> None:
        """Score the held-out pairs."""
        run, heldout = self.run, self.run.data.heldout
        place, size = (run.layout.data_rank, run.layout.data_size), run.built.micro_batch_size
        if heldout is not None:
            for blocks in rounds_of(heldout, run.config.data.seq_len, *place, size):
                self._score(heldout_batch(run, heldout, blocks), reference.BEHIND)

    def _score(self, batch: Batch, offset: int = 0) -> None:
        """Score the pairs of a batch if a rank has new ones among its own. Collective.

        offset: added to the numbers of its blocks
        """
        run, order = self.run, np.arange(len(batch.ids))
        if run.config.training.same_bits and not offset:  # a held-out batch is one micro-batch
            order = group_order(len(order), run.built.micro_batch_size)
            batch = in_groups(batch, order)
        pairs = batch.pairs
        if stops := agreed_stop(run.ranks, flags(run)):
            agreed(run.ranks, self.write_part)
            raise StoppedError(stops[0])
        assert pairs is not None, "the run is on pairs"
        keys = [tuple(key) for key in pairs.keys.tolist()]
        unknown = self.known.places(pairs.keys) < 0
        fresh = [n for n, key in enumerate(keys) if unknown[n] and key not in self._seen]
        if run.ranks.highest(len(fresh)):
            sums = []
            for forward in micro_batches(run, batch):
                sums.append(run.model(each=True, **forward).double().cpu().numpy())
                self.forwards += 1
            if run.layout.tells_pairs:
                size = run.layout.data_size
                blocks = (
                    offset + batch.first_block + run.layout.data_rank + size * order[pairs.rows]
                )
                values = np.concatenate(sums)[fresh]
                self._new.append(Column(pairs.keys[fresh], values, blocks[fresh]))
            self._seen.update(keys[n] for n in fresh)
        if run.ranks.highest(int(time.perf_counter() - self._written >= _PART_SECONDS)):
            agreed(run.ranks, self.write_part)

    def write_part(self) -> None:
        """Write what this rank has scored since it last did so. All ranks do so together."""
        self.number += 1
        name = f"part-{self.number}-{self.run.ranks.rank}-of-{self.run.ranks.world_size}"
        column = reference.empty(self.known.made_with).plus(self._new)
        column.save(self.parts / (name + form.TENSORS))
        self._written, self._new = time.perf_counter(), []
