"""What a run reports about itself: `metrics.jsonl`, `status.json`, trackers, the terminal.

Only rank 0 writes. On the other ranks the calls write nothing, so that callers need not check
their rank.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from llmtrain import system
from llmtrain.config.schema import TrackerName
from llmtrain.distributed.plan.memory import MemoryPlan
from llmtrain.errors import RESTARTABLE, RunError, UserError, needed_on_disk
from llmtrain.metrics import memory
from llmtrain.metrics.memory import Profile
from llmtrain.metrics.progress import Progress, plain_line
from llmtrain.metrics.trackers import Trackers, open_trackers
from llmtrain.model.compile import graphs
from llmtrain.rundir import contents
from llmtrain.rundir.contents import Originals
from llmtrain.rundir.goodput import goodput
from llmtrain.rundir.lock import RunLock
from llmtrain.rundir.record import Lines
from llmtrain.rundir.status import put_back_status, read_status, write_status
from llmtrain.training.due import Due
from llmtrain.training.stop import REGROUP
from llmtrain.types import Evaluation, JsonObject, Numbers, Sample

_log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
_WARM_AFTER = 1  # steps: when this one's numbers arrive, the next has run too
_COMPARE_AFTER = 3  # steps: by then the optimizer has run and everything was allocated once


class Journal:
    """Lines, status and progress of one start, from the claim of the run directory to its end."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        lock: RunLock | None = None,
        *,
        begun: bool = False,
        ended: bytes | None = None,
    ) -> None:
        """Open the record; begun and ended are as in `ClaimedRun`.

        lock: the lock of the run directory, at rank 0
        """
        self.run_dir = run_dir
        self.rank = rank
        self.step = 0
        self.exit_code: int | None = None  # set when the end has been recorded
        self._lock = lock
        self._begun_before = begun
        self._ended_before = ended
        self._has_started = False
        self._originals: Originals | None = None
        self._locks_made = 0  # the part of `lock.made_again` that was already reported
        self._lines = Lines(run_dir) if rank == 0 else None
        self.progress = Progress(sys.stderr if rank == 0 else None)
        self._trackers: Trackers | None = None
        self._started = time.perf_counter()
        self._told = 0.0
        self._untold: dict[str, object] = {}
        self._said: JsonObject = read_status(run_dir) if rank == 0 else {}

    def keep_files(self) -> None:
        """Open the files that a later start needs, so that `check_directory` can restore them.

        For rank 0. Raises RunError (74).
        """
        with needed_on_disk(self.run_dir):
            self._originals = Originals(self.run_dir)

    def track(self, names: Sequence[TrackerName], config: Mapping[str, object]) -> None:
        """Open the trackers with these names (rank 0). config: values by key, shown in them."""
        if names:
            self._trackers = open_trackers(
                names,
                self.run_dir / contents.TRACKERS,
                config,
                self.step,
                lambda event, detail: self.event(event, self.step, **detail),
            )

    def write(self, kind: str, step: int, **fields: object) -> None:
        """Write one line to `metrics.jsonl` and to the trackers."""
        self._has_started |= kind == "start"
        if self._lines is not None:
            self._lines.write(kind, step, **fields)
        if self._trackers is not None:
            self._trackers.log(kind, step, fields)

    def event(self, name: str, step: int, **detail: object) -> None:
        """Write an event, something that a person may want to know, to the record and the log."""
        self.write("event", step, event=name, detail=detail)
        facts = ", ".join(f"{key} {value}" for key, value in detail.items())
        named = {"step": step, "event": name}
        plain = plain_line("event", named | detail | named)
        suffix = f": {facts}" if facts else ""
        _log.info("%s at step %d%s", name.replace("_", " "), step, suffix, extra={"plain": plain})

    def check_lock(self) -> None:
        """Raise RunError (75) at rank 0 if another process has the run directory now."""
        if self._lock is None:
            return
        if self._is_lost:
            self.event("lock_lost", self.step, reason=self._lock.lost)
            raise RunError(
                f"the lock of {self.run_dir} was removed while this run was using it, and the "
                f"directory is {self._lock.lost}",
                RESTARTABLE,
                "stop one of the two, then give the same command again: it resumes; "
                "the lock of a live run must stay",
            )
        if self._lock.made_again > self._locks_made:
            self._locks_made = self._lock.made_again
            self.event("lock_made_again", self.step)

    def check_directory(self) -> None:
        """Before a save, write files of the run directory again if somebody has deleted them.

        Reports them as an event. Raises RunError at rank 0: 75 if another process has the directory
        now, 74 if the disk refuses.
        """
        if self._lock is None or self._lines is None:
            return
        with needed_on_disk(self.run_dir):
            self._lock.keep()
            if self._is_lost:
                self.check_lock()
            restored = self._originals.restore() if self._originals else []
        names = [path.relative_to(self.run_dir).as_posix() for path in restored]
        if system.is_gone(self.run_dir / contents.STATUS):
            self._said = write_status(self.run_dir, self._said, step=self.step)
            names.append(contents.STATUS)
        if self._lines.begin_again():
            names.append(contents.METRICS)
        self.check_lock()
        if names:
            self.event("files_restored", self.step, files=names)

    def status(self, **fields: object) -> None:
        """Replace fields of `status.json`.

        If the disk refuses, that is reported as an event, and the next call writes them too.
        """
        if self._lines is None or self._is_lost:
            return
        first = not self._untold
        self._untold |= fields
        try:
            self._said = write_status(self.run_dir, self._said, **self._untold)
        except RunError as error:
            if first:
                self.event("status_not_written", self.step, reason=str(error.args[0]))
        else:
            self._untold = {}

    def report_progress(self, step: int) -> None:
        """Write the step to `status.json`, at most once a second, since it costs two fsyncs."""
        now = time.perf_counter()
        if now - self._told >= _STATUS_SECONDS:
            self._told = now
            self.status(step=step)

    def sync(self) -> None:
        """Write every line so far to the disk and wait for it. Raises RunError (74)."""
        if self._lines is not None:
            self._lines.sync()

    def end(self, state: str, exit_code: int, reason: str | None) -> None:
        """Write the `end` line and the last status, unless another process has the directory.

        A start that was refused before its `start` line has added nothing to a run that has begun:
        it leaves an event instead of the line, and a run that finished or was stopped keeps its
        status. After that the terminal has no moving line, and a log has lines for people again.
        """
        if self._lines is not None and not self._is_lost:
            end = {"state": state, "exit_code": exit_code, "reason": reason}
            refused = exit_code == UserError.exit_code and not self._has_started
            if refused and self._begun_before:
                self._lines.refuse(self.step, str(reason))
            else:
                # Another group of ranks waits for the end of this one: no time for the record.
                goes_on = exit_code == RESTARTABLE and REGROUP in os.environ
                share = None if goes_on else goodput(self.run_dir)
                seconds = time.perf_counter() - self._started
                self.write("end", self.step, **end, seconds=seconds, goodput=share)
            try:
                self.sync()
            finally:  # a supervisor relies on the status, so it is written if there is room for it
                if refused and self._ended_before is not None:
                    put_back_status(self.run_dir, self._ended_before)
                else:
                    fields = self._untold | end | {"step": self.step}
                    write_status(self.run_dir, self._said, **fields)
        self.exit_code = exit_code
        self.progress.close()  # after the status is written: the terminal may take no output
        # Not in `close`: accelerate's trackers use its process state. Once our process group is
        # gone, that would make a new one, which waits for peers.
        if self._trackers is not None:
            self._trackers.close()

    @property
    def _is_lost(self) -> bool:
        """Whether another process has the run directory now."""
        return self._lock is not None and self._lock.lost is not None

    def close(self) -> None:
        """Close the files and the progress line in the terminal."""
        self.progress.close()
        if self._lines is not None:
            self._lines.close()
        if self._originals is not None:
            self._originals.close()


@dataclass(slots=True)
class RunLog:
    """The loop's log: numbers, evaluations, samples. Every rank keeps the last evaluation.

    planned: planned memory of the device, None if it was not planned
    held_before: bytes that were in use before there was a model
    profile: records the steps that were asked for, if any were
    seconds_at_peak: returns the seconds of a step with so many trained tokens, and so many that
        are not padding, if all devices reached their peak; None if that is not known
    """

    journal: Journal
    due: Due
    device: torch.device
    last_evaluation: JsonObject | None
    planned: MemoryPlan | None
    held_before: int
    seconds_at_peak: Callable[[int, int], float | None] = lambda _trained, _real: None
    profile: Profile | None = None
    _span_seconds: float = 0.0
    _span_wait: float = 0.0
    _reported_end: bool = False
    _evaluated: bool = False
    _graphs: int = field(default_factory=graphs)  # compiled when this was last looked at

    def training(self, numbers: Numbers) -> None:
        """Log a step's numbers: a line if one is due, an event if the update was skipped.

        Raises RunError (75) at rank 0 if another process has the run directory now.
        """
        self.journal.step = numbers.step
        self.journal.check_lock()
        self._span_seconds += numbers.seconds
        self._span_wait += numbers.data_wait_seconds
        over = numbers.padding_only or (numbers.ended and not numbers.step_tokens)
        if over:
            self._report_no_data(numbers.step)
        elif numbers.skipped:
            self.journal.event(
                "update_skipped",
                numbers.step,
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                batch_digest=f"{numbers.batch_digest:016x}",
            )
        if numbers.step == self.due.first + _COMPARE_AFTER:
            # Report rank 0's peak memory since the model was built, and the plan without reserve.
            measured = memory.peak_bytes(self.device) - self.held_before
            plan = self.planned
            planned = plan.total_bytes - plan.parts["reserve"] if plan else None
            detail = {
                "planned_gb": None if planned is None else round(planned / 2**30, 3),
                "measured_gb": round(measured / 2**30, 3),
                "difference": round(measured / planned - 1, 3) if planned else None,
            }
            # Not logged on a CPU, whose resident memory includes much beside the model.
            if self.device.type == "cpu":
                self.journal.write(
                    "event", numbers.step, event="memory_compared", detail=detail, device="cpu"
                )
            else:
                self.journal.event("memory_compared", numbers.step, **detail)
        self._report_graphs(numbers.step, expected=numbers.step <= self.due.first + _WARM_AFTER)
        line = self.due.line(numbers.step) or (numbers.skipped and not over)
        held = memory_gb(self.device) if line else None
        self.journal.progress.training(numbers, line=line, memory_gb=held)
        if line:
            self.journal.write("train", numbers.step, **self._fields(numbers, held))
            self.journal.report_progress(numbers.step)
            self._span_seconds = self._span_wait = 0.0

    def _report_graphs(self, step: int, *, expected: bool) -> None:
        """Report graphs that were compiled since the last call, unless they were expected."""
        before, self._graphs = self._graphs, graphs()
        if self._graphs > before and not expected:
            self.journal.event("compiled_again", step, graphs=self._graphs - before)

    def _report_no_data(self, step: int) -> None:
        """Record that all lanes of a step's blocks have ended; log it only once."""
        if self._reported_end:
            self.journal.write("event", step, event="nothing_to_train", detail={})
        else:
            reason = "the lanes of its blocks have ended"
            self.journal.event("nothing_to_train", step, reason=reason)
        self._reported_end = True

    def evaluation(self, step: int, result: Evaluation | None) -> None:
        """Log an evaluation. result: None = a stop interrupted it, and it stays due."""
        if result is None:
            self.journal.event("evaluation_cut_off", step)
            return
        self._report_graphs(step, expected=not self._evaluated)
        self._evaluated = True
        loss = result.loss if math.isfinite(result.loss) else None
        before = self.last_evaluation["best"] if self.last_evaluation else None
        lower = loss is not None and (before is None or loss < before)
        self.due.record_evaluation(step, lower=lower)
        best = loss if lower else before
        self.last_evaluation = {"step": step, "loss": loss, "best": best}
        each = {f"heldout/{label}": one for label, one in result.sources.items()}
        for split, one in {"heldout": result, **each}.items():
            fields = {"split": split, **asdict(one)}
            del fields["sources"]  # they have lines of their own
            fields |= fields.pop("pairs") or {}
            self.journal.write("eval", step, **fields)
            self.journal.progress.evaluation({"step": step, **fields})

    def samples(self, step: int, samples: list[Sample]) -> None:
        """Log the texts that the model wrote."""
        for sample in samples:
            self.journal.write("sample", step, **asdict(sample))
            self.journal.progress.sample(step, sample.prompt, sample.text)

    def _fields(self, numbers: Numbers, memory: float | None) -> dict[str, object]:
        router = {} if numbers.router_loss is None else {"router_loss": numbers.router_loss}
        at_peak = self.seconds_at_peak(numbers.step_tokens, numbers.real_tokens)
        return {
            "loss": numbers.loss,
            **router,
            **(numbers.pairs or {}),
            "learning_rate": numbers.learning_rate,
            "grad_norm": numbers.grad_norm,
            "tokens": numbers.tokens,
            "step_tokens": numbers.step_tokens,
            "seconds": numbers.seconds,
            "tokens_per_second": numbers.tokens_per_second,
            "data_wait_seconds": numbers.data_wait_seconds,
            "batch_digest": f"{numbers.batch_digest:016x}",
            "skipped": numbers.skipped,
            "sources": dict(numbers.sources),
            "memory_gb": memory,
            "mfu": None if at_peak is None or numbers.seconds <= 0 else at_peak / numbers.seconds,
            "span_seconds": self._span_seconds,
            "span_wait_seconds": self._span_wait,
        }


def memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process on its device, on a CPU its resident memory; GiB."""
    held = memory.peak_bytes(device) if device.type == "cuda" else memory.resident_bytes()
    return held / 2**30
