"""The data of a start: chosen once by rank 0, checked on every rank, opened at the checkpoint."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmtrain import system
from llmtrain.agreement import agreed, from_rank_zero, on_rank_zero
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.binding import DataSettings, data_settings, worker_count
from llmtrain.config.schema import Config, TrainingConfig
from llmtrain.data import heldout, survey
from llmtrain.data.audit.count import epoch
from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.documents.reader import Reading, reading_of
from llmtrain.data.file_parts import UNITS_PER_LANE
from llmtrain.data.heldout import HeldOut
from llmtrain.data.manifest import DataManifest
from llmtrain.data.sources.fetch import Stopping
from llmtrain.data.state import DataState, carry_over, check, differing
from llmtrain.data.stream import discard_factor, open_stream
from llmtrain.data.tokens.encode import DocumentEncoder, open_encoder
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.rundir.contents import HELDOUT, TOKENIZER
from llmtrain.training.run import DataSide, Processes
from llmtrain.training.start import prepare
from llmtrain.types import JsonMapping, Ranks

_log = logging.getLogger(__name__)

FEW_STEPS = 50  # with fewer, a learning rate has hardly risen before it falls
_SMALL_BATCH = 4  # blocks: smaller ones are noisy, more epochs are better


def open_data(
    config: Config,
    processes: Processes,
    resume_point: ResumePoint | None,
    stack: ExitStack,
    stop: Stopping,
) -> DataSide:
    """Open the data, and start reading ahead.

    Rank 0 makes the choices that are made once for a run, and all ranks check them.
    stop: ends a wait for the Hub, on all ranks (RunError, 75)
    """
    system.beat("opening the data")
    ranks, run_dir, layout = processes.launched.ranks, config.run_dir, processes.launched.layout
    by_default = 1 if processes.launched.device.type == "cuda" else 0
    workers = worker_count(config.data, by_default)
    lanes_for = layout.data_size * max(1, workers)
    saved = DataState.from_json(resume_point.state["data"]) if resume_point else None
    base, settings = processes.base, data_settings(config)
    on_rank_zero(ranks, lambda: prepare.prepare(config, run_dir, lanes_for, base, saved, stop))
    manifest, encoder = agreed(ranks, lambda: _checked_data(config, settings, run_dir))
    before = saved or DataState.fresh(manifest)
    agreed(ranks, lambda: check(before, manifest, config.checkpoint.accept_changes))
    changed = tuple(differing(before, manifest))
    state = carry_over(before, manifest) if changed else before
    if resume_point:
        state = replace(state, next_block=config.training.batch.until(resume_point.step))
        if tuple(resume_point.state["weights"]) != manifest.weights:
            state = replace(state, weights_from=state.next_block)
    _warn_of_lanes(config, manifest, layout.data_size, workers)
    reading = reading_of(settings, run_dir, stop)
    held = _open_heldout(config, settings, manifest, encoder, ranks, reading)
    stream = open_stream(
        manifest,
        run_dir / TOKENIZER,
        batch=config.training.batch,
        rank=layout.data_rank,
        world_size=layout.data_size,
        workers=workers,
        next_block=state.next_block,
        cursors=state.cursors,
        reading=replace(reading, stop=None),
        encoder=encoder,
    )
    stack.enter_context(closing(stream))
    ended = bool(resume_point and resume_point.state["ended"] and not changed)
    return DataSide(
        manifest, encoder, reading, held, stream, state, changed, ended, manifest.answers
    )


def with_steps(
    config: Config,
    processes: Processes,
    data: DataSide,
    resume_point: ResumePoint | None,
) -> Config:
    """Return the config with `training.epochs`, if set, converted to `training.steps`.

    The size of an epoch is computed once and kept in `auto.json`, so that a later change of the
    number of epochs changes only the length of the run. Raises UserError if the run has already
    made more steps.
    """
    ranks, auto, training = processes.launched.ranks, processes.auto, config.training
    if training.epochs is not None:
        counted = auto.epoch
        if counted is None or counted.get("data") != data.manifest.fingerprint:
            parts = (data.manifest, data.encoder, data.reading, (), data.state)
            epoch_fields = from_rank_zero(ranks, lambda: asdict(epoch(*parts)))
            auto.epoch = counted = {"data": data.manifest.fingerprint, **epoch_fields}
        steps = _steps_of(training, counted)
        how = "exactly" if counted["exact"] else "estimated"
        _log.info("%g epochs are %s steps (%s)", training.epochs, f"{steps:,}", how)
        training = training.model_copy(update={"steps": steps})
        config = config.model_copy(update={"training": training})
    agreed(ranks, lambda: _check_length(config, auto.epoch or {}, resume_point))
    return config


def _steps_of(training: TrainingConfig, counted: JsonMapping) -> int:
    """Return the number of steps of `training.epochs`. counted: the fields of `Epoch`

    Whole epochs of conversations end with the data, where the last lane ends; a part of them has
    that part of their blocks. (A run that counted without `passes` began with another rule.)
    """
    epochs = training.epochs or 0.0
    until_end: int | None = counted.get("until_end")
    blocks: int = counted["blocks"]
    passes: int | None = counted.get("passes")
    if until_end is not None and passes is not None and epochs < passes:
        return max(1, round(training.batch.steps(epochs / passes * until_end)))
    if until_end is not None and (passes is not None or epochs.is_integer()):
        return math.ceil(training.batch.steps(until_end))
    return max(1, round(training.batch.steps(epochs * blocks)))


@dataclass(frozen=True, slots=True)
class FewSteps:
    """A run whose epochs are few steps.

    tokens: that are trained in all
    epochs: with which, and the batch of `remedy`, it has 50 or more
    remedy: what to set for that
    """

    steps: int
    tokens: int
    epochs: float
    remedy: str

    def __str__(self) -> str:
        return (
            f"this run is {self.steps} steps and {self.tokens:,} trained tokens; try {self.remedy}"
        )


def few_steps(
    training: TrainingConfig, counted: JsonMapping, manifest: DataManifest, processes: int = 1
) -> FewSteps | None:
    """Return what is known of a run whose epochs are few steps; None for every other run.

    counted: the fields of `Epoch`
    """
    if training.epochs is None or (steps := _steps_of(training, counted)) >= FEW_STEPS:
        return None
    micro = training.micro_batch_size
    unit = processes * (1 if micro == "auto" else micro)  # the global batch is a multiple of it
    least = -(-_SMALL_BATCH // unit) * unit
    # The least blocks of a pass: documents that share blocks may fill them better with each further
    # pass, at most up to the last token. A pass over little data can be a small part of a block.
    passes: int | None = counted.get("passes")
    a_pass: float = counted["until_end"] / passes if passes else counted["blocks"]
    if manifest.packing != "single":
        a_pass = min(a_pass, float(counted["tokens"]) / manifest.seq_len)
    some = math.floor(training.epochs * a_pass / FEW_STEPS)
    batch = min(training.batch.largest, max(least, some // unit * unit))
    changes = [f"training.global_batch_size={batch}"] * (batch < training.batch.largest)
    epochs, needed = training.epochs, math.ceil(FEW_STEPS * batch / a_pass)
    if needed > epochs or not changes:
        epochs = max(needed, math.floor(epochs) + 1)
        changes.append(f"training.epochs={epochs}")
    tokens = counted["tokens"] * training.epochs
    if (trained := counted.get("trained")) is not None:
        tokens = trained * min(1.0, training.epochs / counted["passes"])
    return FewSteps(steps, round(tokens), epochs, " ".join(changes))


def _check_length(config: Config, counted: JsonMapping, resume_point: ResumePoint | None) -> None:
    """Raise UserError for a run that has made more steps, or ends before its first document."""
    steps, epochs = config.total_steps, config.training.epochs
    if resume_point:
        if resume_point.step > steps:
            expected = (
                f"at least {resume_point.step} steps, as {resume_point.name} has done "
                f"(these are {steps})"
            )
            if epochs is None:
                raise UserError(Problem("training.steps", steps, expected))
            raise UserError(Problem("training.epochs", f"{epochs:g}", expected))
    elif epochs is not None and counted.get("passes"):
        first, blocks = counted["first"], config.training.batch.until(steps)
        if first is None:
            why, remedy = "no row has anything to train on", "llmtrain data inspect"
        elif first >= blocks:
            why = f"in these {blocks} blocks there is no document; the first is in block {first}"
            remedy = "data.lanes=1, or more epochs"
        else:
            return
        expected = f"a run that trains on something: {why}"
        raise UserError(Problem("training.epochs", f"{epochs:g} ({steps} steps)", expected, remedy))


def _checked_data(
    config: Config, settings: DataSettings, run_dir: Path
) -> tuple[DataManifest, DocumentEncoder]:
    manifest = prepare.load_manifest(config, run_dir)
    encoder = open_encoder(run_dir / TOKENIZER, manifest)
    survey.check(manifest, settings, encoder)
    raise_any(_unwritable(config.evaluation.prompts, encoder))
    return manifest, encoder


def _unwritable(prompts: Sequence[str], encoder: DocumentEncoder) -> Iterator[Problem]:
    """Yield each prompt that cannot be the message of a user."""
    if encoder.chat is None or not encoder.chat.has_template:
        return
    for prompt in prompts:
        try:
            encoder.chat.prompt_ids([{"role": "user", "content": prompt}])
        except BadRowError as error:
            yield Problem("evaluation.prompts", prompt, f"messages of a user; {error}")


def _warn_of_lanes(config: Config, manifest: DataManifest, world_size: int, workers: int) -> None:
    """Warn of blocks that are read in vain, and of last steps that are padding.

    The latter come where `max_epochs` ends lanes at very different steps.
    """
    lanes = manifest.lanes
    factor = discard_factor(world_size, workers, lanes)
    # A single lane, where it was not asked for, has few conversations.
    if factor > 1 and (config.data.lanes != "auto" or lanes > 1):
        _log.warning(
            "each process reads %d blocks for one that it uses: %d processes × %d workers do not "
            "divide the run's %d lanes",
            *(factor, world_size, max(1, workers), lanes),
        )
    for source in manifest.sources:
        count = len(source.units)
        few = lanes > 1 and count < UNITS_PER_LANE * lanes
        if source.max_epochs is not None and not source.cached and few:
            _log.warning(
                "%s has %d units for %d lanes: lanes reach its max_epochs far apart, and the last "
                "steps are mostly padding (data.lanes=%d would even that out)",
                *(source.label, count, lanes, max(1, count // UNITS_PER_LANE)),
            )


def _open_heldout(
    config: Config,
    settings: DataSettings,
    manifest: DataManifest,
    encoder: DocumentEncoder,
    ranks: Ranks,
    reading: Reading,
) -> HeldOut | None:
    """Make the held-out file on rank 0, load it on every rank, and check that all have the same."""
    from safetensors import SafetensorError

    path = config.run_dir / HELDOUT

    def make() -> None:
        try:
            if path.exists():
                heldout.load(path)
                return
        except SafetensorError:
            _log.warning("%s was damaged and is made again", path)
        sources = survey.evaluation_sources(settings, reading)
        limit = config.evaluation.max_documents
        heldout.prepare(manifest, encoder, path, limit, reading, sources)

    on_rank_zero(ranks, make)
    held = agreed(ranks, lambda: heldout.load(path))
    tokens = len(held.ids) if held else 0
    wanted = from_rank_zero(ranks, lambda: tokens)

    def compare() -> None:
        if tokens != wanted:  # evaluation is collective
            expected = "the same file on every rank: the run directory must be shared"
            raise UserError(Problem(str(path), None, expected))

    agreed(ranks, compare)
    return held
