"""What the steps that are left of a run take in hours and money, at a price by the hour.

The speed is the plan's, unless the run has made `LEAST_STEPS` steps on the planned devices: then it
is theirs. What an evaluation, a save and a start take is known from such a run alone.

    hours       (seconds of the steps left + evaluations left · seconds of one + saves left · …)
    lost        (half the steps between two checkpoints + a start) · all devices, which wait for it
"""

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.errors import Problem
from llmtrain.rundir import contents, goodput, record
from llmtrain.types import JsonMapping, JsonObject

LEAST_STEPS = 20
_MOST = 1e9  # EUR an hour
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Price:
    """EUR an hour for each device, and for each node besides."""

    device: float | None
    node: float | None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each price that is none."""
        for key, asked in (("--price", self.device), ("--price-node", self.node)):
            if asked is not None and not 0 < asked < _MOST:
                yield Problem(key, asked, "a number of EUR above 0, for an hour")

    def of(self, hardware: Hardware) -> float:
        """Return EUR an hour for all devices and nodes."""
        return hardware.devices * (self.device or 0.0) + hardware.nodes * (self.node or 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the starts of a run took on the planned devices.

    steps: made without the first one of each start, whose seconds are not counted
    blocks, seconds: of these steps
    evaluation, save, start: seconds of one on average; None where there was none
    """

    steps: int = 0
    blocks: int = 0
    seconds: float = 0.0
    evaluation: float | None = None
    save: float | None = None
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The hours and the price of what is left of a run.

    hourly: EUR an hour of all devices
    speed: measured or computed; None = not known, and then neither are the hours
    measured: steps that the measured speed is of
    done, steps: that the run has made, and in all; None = not known
    step_seconds: of a step on average; None = not known
    evaluations, saves: that are left
    evaluation_seconds, save_seconds: of all of these; None = none was measured, and they are left
        out of the hours
    interval: seconds between two checkpoints
    restart: seconds of a start; None = none was measured, and it is left out
    needs: what is to be done for what is not known; "" = the hours are known
    """

    hourly: float
    speed: str | None
    measured: int
    done: int
    steps: int | None
    step_seconds: float | None
    evaluations: int
    saves: int
    evaluation_seconds: float | None
    save_seconds: float | None
    interval: float | None
    restart: float | None
    needs: str

    @property
    def hours(self) -> float | None:
        """Hours up to the last step."""
        if self.steps is None or self.step_seconds is None:
            return None
        of_steps = (self.steps - self.done) * self.step_seconds
        return (of_steps + (self.evaluation_seconds or 0) + (self.save_seconds or 0)) / _HOUR

    @property
    def lost_hours(self) -> float | None:
        """Hours that a lost machine is expected to cost all devices; None = not known."""
        if self.interval is None:
            return None
        return (self.interval / 2 + (self.restart or 0.0)) / _HOUR

    def share(self, seconds: float | None) -> float | None:
        """Return the part of the hours that these seconds are."""
        return seconds / (self.hours * _HOUR) if seconds is not None and self.hours else None

    def to_json(self) -> JsonObject:
        """Return the object `cost` of `llmtrain plan --price --json`, in EUR; null = not known."""
        hours, lost = self.hours, self.lost_hours
        return {
            "eur_per_hour": self.hourly,
            "speed": self.speed,
            "measured_steps": self.measured,
            "steps_done": self.done,
            "steps": self.steps,
            "seconds_per_step": self.step_seconds,
            "hours": hours,
            "eur": None if hours is None else hours * self.hourly,
            "evaluations": self.evaluations,
            "evaluation_share": self.share(self.evaluation_seconds),
            "saves": self.saves,
            "save_share": self.share(self.save_seconds),
            "lost_machine": {
                "seconds_between_saves": self.interval,
                "start_seconds": self.restart,
                "hours": lost,
                "eur": None if lost is None else lost * self.hourly,
            },
            "needs": self.needs or None,
        }


def cost(config: Config, price: Price, hardware: Hardware, seconds: float | None) -> Cost:
    """Return what is left of the run of a config, and what it costs.

    seconds: of all its steps, as planned; None = not known
    """
    lines = record_of(config)
    measured = measure(lines, config, hardware)
    batch, steps, epochs = config.training.batch, config.training.steps, config.training.epochs
    if steps is None:
        starts = (one for one in reversed(lines) if one["kind"] == "start")
        steps = next((one["steps"] for one in starts if one.get("epochs") == epochs), None)
    last = steps or 0
    done = min(lines[-1]["step"] if lines else 0, last)
    left, speed, of_step, needs = last - done, None, None, ""
    blocks = (batch.until(last) - batch.until(done)) / left if left else batch.of(last)  # of a step
    if measured.steps >= LEAST_STEPS:
        speed, of_step = "measured", measured.seconds / measured.blocks * blocks
    elif seconds is not None and last:
        speed, of_step = "computed", seconds / batch.until(last) * blocks
    else:
        needs = f"{LEAST_STEPS} steps of this config on these devices, in its run directory"
    if steps is None:
        needs = "training.steps, or a start, which counts the steps of training.epochs"
    evaluations, saved = due_after(config, done, last)
    saves = len(saved)
    minutes = config.checkpoint.every_minutes
    interval = None
    if of_step is not None:
        interval = config.checkpoint.every_steps * of_step
        if minutes is not None:
            interval = min(interval, 60 * minutes)
            # Each save restarts the minutes.
            gaps = (after - before for before, after in pairwise([done, *saved]))
            saves += sum(max(0, math.ceil(gap * of_step / (60 * minutes)) - 1) for gap in gaps)
    return Cost(
        hourly=price.of(hardware),
        speed=speed,
        measured=measured.steps if speed == "measured" else 0,
        done=done,
        steps=steps,
        step_seconds=of_step,
        evaluations=evaluations,
        saves=saves,
        evaluation_seconds=_all(evaluations, measured.evaluation),
        save_seconds=_all(saves, measured.save),
        interval=interval,
        restart=measured.start,
        needs=needs,
    )


def _all(count: int, seconds: float | None) -> float | None:
    """Return the seconds of several; 0 of none, even if one was never measured."""
    return 0.0 if not count else None if seconds is None else count * seconds


def due_after(config: Config, done: int, steps: int) -> tuple[int, list[int]]:
    """Return how many evaluations come after `done` steps, and the steps that are saved.

    Each evaluation may be the best so far, and then it is saved.
    """
    ends = range(done + 1, steps + 1)[-1:]
    evaluations: set[int] = set()
    if config.data.heldout or config.evaluation.sources:
        every = config.evaluation.every_steps
        first = 0 if not done else (done // every + 1) * every  # before the first step, too
        evaluations = {*range(first, steps + 1, every), *ends} if steps > done else set()
    every = config.checkpoint.every_steps
    saves = {*range((done // every + 1) * every, steps + 1, every), *ends}
    if config.checkpoint.keep_best:
        saves |= evaluations - {0}
    return len(evaluations), sorted(saves)


def record_of(config: Config) -> Sequence[JsonMapping]:
    """Return the record of the config's run; () if there is none, or it is of other steps."""
    config_file = config.run_dir / contents.CONFIG
    if not config_file.is_file() or not (config.run_dir / contents.METRICS).is_file():
        return ()
    now, began = (
        (one.model, one.adapter, one.preference, one.data.seq_len, one.training.batch)
        for one in (config, load_config(config_file))
    )
    return record.record(config.run_dir) if now == began else ()


def measure(lines: Sequence[JsonMapping], config: Config, hardware: Hardware) -> Measured:
    """Return what the starts on these devices took. lines: the record of the run"""
    edges = [n for n, line in enumerate(lines) if line["kind"] == "start"]
    starts = [
        lines[first:after]
        for first, after in pairwise([*edges, len(lines)])
        if is_on(lines[first], hardware)
    ]
    batch, steps, blocks, seconds = config.training.batch, 0, 0, 0.0
    starting: list[tuple[bool, float]] = []  # whether it resumed, and its seconds
    evaluating = saving = 0.0
    for start in starts:
        trained = [line for line in start if line["kind"] == "train"]
        for before, line in pairwise(trained):
            steps += line["step"] - before["step"]
            blocks += batch.until(line["step"]) - batch.until(before["step"])
            seconds += record.as_number(line.get("span_seconds")) or 0.0
        took = goodput.totals(goodput.stretches(start))
        evaluating, saving = evaluating + took["evaluating"], saving + took["saving"]
        if trained:
            starting.append((start[0].get("resumed_from") is not None, took["starting"]))
    every = [line for start in starts for line in start]
    evaluations = sum(map(record.is_of_all, every))
    saves = sum(line["kind"] == "checkpoint" for line in every)
    # The first start of a run prepares its data; one that resumes is what a lost machine costs.
    begun = [one for resumed, one in starting if resumed] or [one for _, one in starting]
    return Measured(
        steps=steps,
        blocks=blocks,
        seconds=seconds,
        evaluation=evaluating / evaluations if evaluations else None,
        save=saving / saves if saves else None,
        start=sum(begun) / len(begun) if begun else None,
    )


def is_on(start: JsonMapping, hardware: Hardware) -> bool:
    """Whether a start was made on as many devices of this kind."""
    name = str(start.get("device"))
    if hardware.cpu:
        same = start.get("device_type") == "cpu"
        same = same and name == (platform.processor() or platform.machine())
    else:  # a plan for a device that is not here names it shortly
        same = hardware.device is not None and hardware.device.upper() in name.upper()
    return same and start.get("world_size") == hardware.devices
