"""What a run is doing, from its files alone: for people who look at it while it runs.

Only the new bytes of `metrics.jsonl` are read at each look, and what is kept does not grow with the
run: the loss is kept in at most 2,000 points. Nothing is written, and torch is not imported.
"""

import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from llmtrain.rundir import contents, lock, status
from llmtrain.rundir.goodput import StepSums
from llmtrain.rundir.record import Tail, as_number, is_of_all, require_record
from llmtrain.rundir.words import in_words
from llmtrain.types import JsonMapping, JsonObject, cut_of

_POINTS = 2000
_SILENT = 60.0  # seconds without a line after which a person should know
_EVENTS = 4


@dataclass(frozen=True, slots=True)
class View:
    """What there is to see of a run.

    state: finished, stopped, failed, running; `killed` if its process is gone without a word, and
        `silent` if that is not known but no line has come for a minute
    router_loss: of a mixture that trains one
    heldout: loss of the last evaluation; None before it, and if it is not finite
    evaluated: step of the last evaluation
    silence: what to know about a run that does not write; "" otherwise
    wait: share of the step time that was spent waiting for data
    left: estimated seconds to the last step
    curve: (step, training loss), thinned
    """

    name: str
    state: str
    silence: str
    step: int
    steps: int | None
    strategy: str | None
    world_size: int | None
    tensor_parallel: int
    pipeline_parallel: int
    sequence_parallel: int
    device: str | None
    loss: float | None
    router_loss: float | None
    heldout: float | None
    evaluated: int | None
    best: float | None
    tokens_per_second: float | None
    wait: float | None
    left: float | None
    unread: int
    events: tuple[str, ...]
    curve: tuple[tuple[int, float], ...]

    def to_json(self) -> JsonObject:
        """Return the view as JSON has it, without the curve."""
        return {key: value for key, value in asdict(self).items() if key != "curve"}


class Watcher:
    """Follows one run. Each `look` reads what is new."""

    def __init__(self, run_dir: Path) -> None:
        require_record(run_dir)
        self._run_dir = run_dir
        self._tail = Tail(run_dir)
        self._forget()

    def look(self) -> View:
        """Return what the run's files say now."""
        while True:
            lines, again = self._tail.lines()
            if again:
                self._forget()
            for line in lines:
                self._take(line)
            if not self._tail.more:
                break
        written = status.read_status(self._run_dir)
        state, silence = self._state(written)
        train, sums = self._train, self._sums
        return View(
            name=self._run_dir.resolve().name,
            state=state,
            silence=silence,
            step=max(_whole(written.get("step")), _whole(train.get("step"))),
            steps=_whole(self._start.get("steps")) or None,
            strategy=_text(self._start.get("strategy")),
            world_size=_whole(self._start.get("world_size")) or None,
            **cut_of(self._start).to_json(),
            device=_text(self._start.get("device")),
            loss=as_number(train.get("loss")),
            router_loss=as_number(train.get("router_loss")),
            heldout=self._heldout,
            evaluated=self._evaluated,
            best=self._best,
            tokens_per_second=sums.speed,
            wait=sums.waited / sums.seconds if sums.seconds else None,
            left=self._left(state),
            unread=self._tail.unread,
            events=tuple(self._events),
            curve=tuple(self._curve),
        )

    def _forget(self) -> None:
        self._start: JsonMapping = {}
        self._train: JsonMapping = {}
        self._last: float | None = None  # time of the last line
        self._heldout: float | None = None
        self._evaluated: int | None = None
        self._best: float | None = None
        self._sums = StepSums()  # of this start
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._curve: list[tuple[int, float]] = []

    def _take(self, line: JsonMapping) -> None:
        """Keep what a line adds to the picture."""
        kind, self._last = line["kind"], float(line["time"])
        if kind == "start":
            self._start, self._sums = line, StepSums()
            self._sums.add(line)
            self._curve = [point for point in self._curve if point[0] <= line["step"]]
        elif kind == "train":
            self._train = line
            self._sums.add(line)
            loss = as_number(line.get("loss"))
            if loss is not None:
                self._curve.append((line["step"], loss))
                if len(self._curve) > _POINTS:
                    pairs = zip(self._curve[::2], self._curve[1::2], strict=False)
                    self._curve = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]
        elif is_of_all(line):
            self._heldout, self._evaluated = as_number(line.get("loss")), line["step"]
            if self._heldout is not None:
                before = self._heldout if self._best is None else self._best
                self._best = min(self._heldout, before)
        elif kind == "event" and line.get("event") != "memory_compared":
            self._events.append(f"step {line['step']:,}: {in_words(line)}")

    def _left(self, state: str) -> float | None:
        steps, sums = _whole(self._start.get("steps")), self._sums
        if state not in ("running", "silent") or not (steps and sums.steps):
            return None
        return max(0, steps - _whole(self._train.get("step"))) * sums.seconds / sums.steps

    def _state(self, written: JsonMapping) -> tuple[str, str]:
        """Return the state of the run, and what to know about one that is silent."""
        state = str(written.get("state") or "running")
        if state != "running":
            return state, ""
        holder = lock.read(self._run_dir / contents.LOCK)
        now = time.time()  # noqa: TID251  # compared with a time stamp of another process
        quiet = now - self._last if self._last is not None else 0.0
        silence = f"no line for {quiet:,.0f} s" if quiet >= _SILENT else ""
        if holder and holder.host == socket.gethostname() and not lock.lives_here(holder):
            gone = f"process {holder.pid} on host {holder.host} is gone"
            return "killed", f"{silence}; {gone}" if silence else gone
        return ("silent" if silence else "running"), silence


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
