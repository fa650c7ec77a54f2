"""The start of a run, and its close. The stages of a start that fail cheaply come first.

    run directory → processes → checkpoint (its JSON alone) → data → model, discarded pass → state

All stages run on all ranks; only rank 0 claims the run directory, makes choices and writes. If one
rank refuses to start, all refuse together, so that none is left waiting in a collective.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from llmtrain.checkpoint.disk import Patience
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.binding import bind
from llmtrain.config.schema import Config
from llmtrain.data.state import roll
from llmtrain.distributed.plan.speed import seconds_at_peak
from llmtrain.metrics.logfile import LogFile
from llmtrain.metrics.memory import Profile
from llmtrain.metrics.meter import DataFailedError, Meter
from llmtrain.metrics.progress import Busy
from llmtrain.rundir import contents, failures
from llmtrain.training import ending, stop
from llmtrain.training.due import Due, agreed_stop
from llmtrain.training.guards import Guards
from llmtrain.training.journal import Journal, RunLog
from llmtrain.training.optimizer import learning_rate
from llmtrain.training.run import DataSide, Feed, ModelSide, Processes, Run
from llmtrain.training.saving import open_saves, reserve
from llmtrain.training.start.announce import announce, ready, report_changes
from llmtrain.training.start.claim import ClaimedRun, claim
from llmtrain.training.start.data import open_data, with_steps
from llmtrain.training.start.planning import compared_with_plan, work
from llmtrain.training.start.processes import start_processes
from llmtrain.training.start.reference import find_column, with_reference
from llmtrain.training.start.weights import build_model, find_checkpoint, load_state
from llmtrain.training.step import flags
from llmtrain.training.stop import Requests
from llmtrain.training.watchdog import Watchdog, watching
from llmtrain.types import JsonObject

# A wait for the network ends this long after a signal; a batch queue kills after about 30 s.
_PATIENCE_SECONDS = 10.0
_OPENING_SECONDS = 1.0  # shorter, since before the first step there is no progress to lose


@contextmanager
def start_run(config: Config) -> Iterator[Run]:
    """Open everything, resume the state, and close everything after the loop.

    Raises UserError or RunError, on all ranks as long as they can communicate, and writes the
    reason to `status.json`.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        here = _open_run_dir(config, stack)
        signals, journal = here.signals, here.journal
        bound = bind(config)
        with ending.record_end(journal, bound.digest), ExitStack() as recorded:
            alone = signals.alone(partial(ending.stop_alone, journal))
            processes = start_processes(config, bound, here.place, alone, stack)
            recorded.enter_context(compared_with_plan(config, processes))
            if journal.rank:
                _open_log(here, stack)
            stage = partial(ending.stoppable, processes.launched.ranks, signals, journal)
            patience = Patience(partial(ending.stop_reason_of, signals))
            stopping = threading.Event()
            signals.cut_short(_OPENING_SECONDS, stopping.set)
            with stage():
                resumed = find_checkpoint(config, processes, here.place, journal, patience)
            with stage():
                data = open_data(config, processes, resumed, stack, stopping)
                config = with_steps(config, processes, data, resumed)
            signals.cut_short(_PATIENCE_SECONDS, data.stream.interrupt)
            journal.progress.lasts(config.total_steps, config.training.batch)
            with stage():
                wanted = find_column(config, processes, data, resumed)
                begins = resumed is None or (wanted is not None and wanted.walks)
                model = build_model(config, processes, data.manifest, resumed, begins=begins)
            run = _assemble(config, here, processes, resumed, data, model)
            with stage():
                run = with_reference(run, wanted)
            if resumed:
                with stage():
                    load_state(processes, model, resumed, patience)
            here.watchdog.follow(run.guards.median_seconds)
            announce(run)
            report_changes(run, here.place)
            run.due.ask(agreed_stop(run.ranks, flags(run)))
            reserve(run)
            ready(run, time.perf_counter() - started)
            try:
                yield run
            except DataFailedError as failed:  # all ranks are here
                ending.end_without_data(run, failed.step)
                raise


@dataclass(frozen=True, slots=True)
class Here:
    """What a rank opens before it communicates with other ranks."""

    place: ClaimedRun
    signals: stop.Signals
    logfile: LogFile
    journal: Journal
    watchdog: Watchdog


def _open_run_dir(config: Config, stack: ExitStack) -> Here:
    """Catch signals, claim the run directory (rank 0), and open everything that reports."""
    rank = int(os.environ.get("RANK", "0"))  # from the environment, as there is no group yet
    signals = stop.install()
    logfile = stack.enter_context(closing(LogFile()))
    place, run_dir = ClaimedRun(), config.run_dir
    if rank == 0:
        asked, processes = config.distributed.strategy, int(os.environ.get("WORLD_SIZE", "1"))
        strategy = None if asked == "auto" else asked  # chosen later, see `plan_start`
        place = stack.enter_context(claim(config, processes, strategy, signals.wait))
    else:  # rank 0's own mark is removed in `claim`, which holds the lock
        failures.clear(run_dir, rank, int(os.environ["WORLD_SIZE"]))
    signals.before_exit = partial(failures.write, run_dir, rank)
    journal = stack.enter_context(
        closing(Journal(run_dir, rank, place.lock, begun=place.begun, ended=place.ended))
    )
    show = Busy(journal.progress).look
    watchdog = stack.enter_context(watching(journal, config.distributed.timeout_minutes, show))
    here = Here(place, signals, logfile, journal, watchdog)
    if rank == 0:
        journal.step = place.step
        _open_log(here, stack)
        logfile.show(journal.progress.note)
    return here


def _open_log(here: Here, stack: ExitStack) -> None:
    here.logfile.open(contents.log_file(here.journal.run_dir, here.journal.rank))
    stack.enter_context(here.signals.stacks_in(here.logfile.descriptor))


def _assemble(
    config: Config,
    here: Here,
    processes: Processes,
    resume_point: ResumePoint | None,
    data: DataSide,
    model: ModelSide,
) -> Run:
    saved, first = (resume_point.state, resume_point.step) if resume_point else ({}, 0)
    launched, journal, evaluation = processes.launched, here.journal, saved.get("evaluation")
    due = Due(
        steps=config.total_steps,
        evaluate_every=config.evaluation.every_steps,
        save_every=config.checkpoint.every_steps,
        log_every=config.logging.every_steps,
        first=first,
        last_evaluation=evaluation["step"] if evaluation else None,
        heldout=data.heldout is not None,
        data_ended=data.ended,
        keep_best=config.checkpoint.keep_best > 0,
        patience=config.evaluation.patience,
        without_gain=saved.get("patience") or 0,
    )
    rank, started = launched.ranks.rank, here.signals.started
    of_a_step = config.training.batch, launched.layout.data_size
    return Run(
        config=config,
        found=resume_point,
        processes=processes,
        data=data,
        built=model,
        feed=Feed(data.stream, first, *of_a_step, config.data.seq_len),
        meter=Meter(
            *(launched.device, data.manifest.labels),
            *(partial(learning_rate, config.optimizer, config.total_steps), roll),
            layout=launched.layout,
            pairs=data.answers is not None,
            sources=saved.get("sources", {}),
            stream_digest=data.state.stream_digest,
        ),
        journal=journal,
        log=_open_log_of_run(config, processes, journal, due, evaluation, model.held_before),
        guards=Guards(config.training, saved.get("skipped_in_a_row", 0), journal.event),
        due=due,
        signals=here.signals,
        requests=Requests(config.run_dir, config.checkpoint, rank, started),
        checkpoints=open_saves(config.checkpoint, launched, config.run_dir),
    )


def _open_log_of_run(
    config: Config,
    processes: Processes,
    journal: Journal,
    due: Due,
    evaluation: JsonObject | None,
    held_before: int,
) -> RunLog:
    launched, planned = processes.launched, processes.planned
    asked = work(config, processes.auto.run["precision"], cpu=planned.hardware.cpu)
    tokens = asked.seq_len * asked.global_batch_size
    chunked = processes.auto.loss_kernel == "chunked"

    def seconds(trained: int, real: int) -> float | None:
        # Where the loss is computed from all logits, or by torch, the head is computed for every
        # token.
        shares = (trained / tokens if chunked else real / tokens, real / tokens)
        return seconds_at_peak(planned.shape, asked, planned.hardware, *shares)

    profile = None
    if (steps := config.logging.profile_steps) is not None:
        operators = config.run_dir / contents.PROFILE / contents.OPERATORS
        rank, device = launched.ranks.rank, launched.device
        profile = Profile(operators, rank, device, steps, journal.event)
    known = (launched.device, evaluation, planned.memory, held_before)
    return RunLog(journal, due, *known, seconds, profile)
