"""Where the time of a run went, from `metrics.jsonl` alone.

Each second has one owner. The record is cut into stretches, from one `train` line to the next:

    born ── start ──── train 10 ──────── train 20 ─── (killed)        born ── start ─ …
    └─ starting ┴ training ┴ training, saving ┴ other  ┴──── down ────┴─ starting ┴ …

A `train` line says how long its steps took and how long they waited for data; an `eval`, `sample`
or `checkpoint` line says how long it held up the loop. The trap: numbers arrive a step late, so
that a line's seconds may lie partly in a neighbouring stretch. What does not fit into a stretch is
carried to the next one, not cut off.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from llmtrain.rundir import record
from llmtrain.types import JsonMapping

OWNERS = (
    "training", "waiting", "evaluating", "saving", "starting", "redone", "down", "other"
)  # fmt: skip

MOST_STRETCHES = 1000
_MOST = 1e15  # seconds: no run takes longer

_Seconds = defaultdict[str, float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run's time.

    begin, end: Unix seconds
    seconds: owner → its seconds, which add up to end − begin; owners without time are missing
    """

    begin: float
    end: float
    seconds: Mapping[str, float]


def goodput(run_dir: Path) -> float | None:
    """Return the share of a run's time in which steps ran that were not redone.

    The time begins when the first start was launched, lasts until now, and includes the time
    between starts. Returns None before the first step.
    """
    lines, _ = record.short_record(run_dir)
    if not any(line["kind"] == "train" for line in lines):
        return None
    now = time.time()  # noqa: TID251  # compared with time stamps of earlier processes
    return share_of_steps(stretches(lines, until=now))


def share_of_steps(found: Iterable[Stretch]) -> float | None:
    """Return the share of the time in which steps ran that were not redone; None without time."""
    seconds = totals(found)
    wall = sum(seconds.values())
    return (seconds["training"] + seconds["waiting"]) / wall if wall > 0 else None


def totals(found: Iterable[Stretch]) -> dict[str, float]:
    """Return the seconds of every owner, in the order of OWNERS; 0 for those without any."""
    total = dict.fromkeys(OWNERS, 0.0)
    for stretch in found:
        for owner, seconds in stretch.seconds.items():
            total[owner] += seconds
    return total


def stretches(
    lines: Sequence[JsonMapping], *, until: float = 0.0, most: int = MOST_STRETCHES
) -> list[Stretch]:
    """Divide the time of a run among OWNERS.

    lines: the record, oldest first. A clock that goes back makes no negative time.
    until: Unix seconds at which the last stretch ends, if that is later than the last line
    most: of a longer record, neighbours are joined, so that there are about this many stretches

    A start that added nothing, as `without_idle_starts` defines it, has no time.
    """
    every, lines = lines, without_idle_starts(lines)
    until = until if lines and lines[-1] is every[-1] else 0.0
    size = max(1, -(-sum(line["kind"] == "train" for line in lines) // most))
    # Whether each line is of a step that a later start went back behind.
    redone, resumed = [], float("inf")
    for line in reversed(lines):
        redone.append(line["step"] > resumed)
        if line["kind"] == "start":
            resumed = min(resumed, line["step"])
    redone.reverse()
    every_stretch: list[Stretch] = []
    now = 0.0
    for first, after in _starts(lines):
        # When its process began; without a `start` line, when the first line was written.
        begin = float(lines[first]["time"])
        begin = min(begin, _positive(lines[first].get("born")) or begin)
        if every_stretch and begin > now:
            every_stretch.append(Stretch(now, begin, {"down": begin - now}))
        now = max(now, begin)
        last = until if after == len(lines) else 0.0
        every_stretch += _of_start(lines[first:after], redone[first:after], now, last, size)
        now = every_stretch[-1].end if every_stretch else now
    return every_stretch


@dataclass(frozen=True, slots=True)
class Restart:
    """What a start that went on with a run cost, and on how many processes it ran.

    time: Unix seconds at which it was ready
    step: from which it went on
    before, processes: processes of the start before, and of this one; 0 = not recorded
    again: steps that it trained a second time
    seconds: from the last step of the start before to the first new one; None = there is none yet
    """

    time: float
    step: int
    before: int
    processes: int
    again: int
    seconds: float | None


def changes(lines: Iterable[JsonMapping]) -> list[Restart]:
    """Return the changes between the starts of a run. lines: the record, oldest first"""
    restarts: list[Restart] = []
    before: int | None = None  # processes of the start before
    farthest, at = 0, 0.0  # the last new step, and when it was recorded
    for line in lines:
        if line["kind"] == "start":
            size, again = int(line.get("world_size") or 0), max(0, farthest - line["step"])
            if before is not None:
                restarts.append(Restart(line["time"], line["step"], before, size, again, None))
            before = size
        elif line["kind"] == "train" and line["step"] > farthest:
            if restarts and restarts[-1].seconds is None and at:
                restarts[-1] = replace(restarts[-1], seconds=max(0.0, line["time"] - at))
            farthest, at = line["step"], line["time"]
    return restarts


def without_idle_starts(lines: Sequence[JsonMapping]) -> list[JsonMapping]:
    """Return the lines without those of starts that have added nothing to a run.

    They are a start that found the run finished and has no `train` line, and one that was refused.
    What is written between an `end` line and the next `start` line belongs to neither.
    """
    added: list[JsonMapping] = []
    finished = False
    for first, after in _starts(lines):
        start = [line for line in lines[first:after] if not _is_refusal(line)]
        if finished and not any(line["kind"] == "train" for line in start):
            continue
        end = next((place for place, line in enumerate(start) if line["kind"] == "end"), None)
        added += start if end is None else start[: end + 1]
        finished = end is not None and start[end].get("state") == "finished"
    return added


def _is_refusal(line: JsonMapping) -> bool:
    # The kind first: a step has no event, and would be looked up in the file.
    return bool(line["kind"] == "event" and line.get("event") == record.REFUSED)


def _starts(lines: Sequence[JsonMapping]) -> Iterable[tuple[int, int]]:
    """Yield the range of lines of each start; lines before the first one are a range, too."""
    edges = [0, *(n for n, line in enumerate(lines) if line["kind"] == "start" and n), len(lines)]
    return [(one, other) for one, other in pairwise(edges) if one < other]


def _of_start(
    lines: Sequence[JsonMapping], redone: Sequence[bool], begin: float, until: float, size: int
) -> list[Stretch]:
    """Return the stretches of one start, whose time begins at `begin`.

    The first stretch has one `train` line, each later one `size` of them. What nobody claims of the
    first is "starting".
    """
    edges, claims = [begin], [_Seconds(float)]
    left = 1  # `train` lines until the next edge
    for line, again in zip(lines, redone, strict=True):
        kind, seconds = line["kind"], claims[-1]
        if kind == "train":
            span = _positive(line.get("span_seconds"))
            wait = min(span, _positive(line.get("span_wait_seconds")))
            if again:
                seconds["redone"] += span
            else:
                seconds["training"] += span - wait
                seconds["waiting"] += wait
        elif kind in ("eval", "sample"):
            seconds["evaluating"] += _positive(line.get("seconds"))
        elif kind == "checkpoint":
            seconds["saving"] += _positive(line.get("blocked_seconds"))
        left -= kind == "train"
        if not left:
            edges.append(max(edges[-1], float(line["time"])))
            claims.append(_Seconds(float))
            left = size
    edges.append(max(edges[-1], until, float(lines[-1]["time"])))
    lengths = [end - start for start, end in pairwise(edges)]
    _fit(claims, lengths)
    parts = []
    for place, (start, length, seconds) in enumerate(zip(edges, lengths, claims, strict=False)):
        rest = "other" if place else "starting"
        seconds[rest] += max(0.0, length - sum(seconds.values()))
        owned = {owner: each for owner, each in seconds.items() if each}
        parts += [Stretch(start, start + length, owned)] if length > 0 else []
    return parts


def _fit(claims: Sequence[_Seconds], lengths: Sequence[float]) -> None:
    """Fit the claims into stretches of these lengths, in place.

    What does not fit is carried to later stretches, then to earlier ones, a like part of each
    owner's. If all claims together are longer than the start, which only a changed clock can cause,
    the rest is dropped.
    """
    each, carried = list(zip(claims, lengths, strict=True)), _Seconds(float)
    for seconds, length in (*each, *reversed(each)):
        for owner, claimed in seconds.items():
            carried[owner] += claimed
        wanted = sum(carried.values())
        part = min(1.0, length / wanted) if wanted else 1.0
        for owner, claimed in carried.items():
            seconds[owner], carried[owner] = claimed * part, claimed * (1 - part)


def _positive(value: object) -> float:
    """Return a number of seconds; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and 0 < value < _MOST else 0.0


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of a run, line by line; each start's first step opens the stream.

    That takes long, so it is left out.

    seconds, waited: of the steps, and how much of it they waited for data
    steps, gained: how many there were, and the tokens that they trained
    speed: tokens a second of the last line; None before the second one
    """

    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0
    gained: float = 0.0
    speed: float | None = None
    _first: int = 1  # the first step of this start
    _step: int = 0
    _tokens: float | None = None

    def add(self, line: JsonMapping) -> None:
        """Add a `start` or a `train` line, in the order of the record."""
        if line["kind"] == "start":
            self._first = line["step"] + 1
            return
        step, tokens = line["step"], record.as_number(line.get("tokens"))
        seconds = record.as_number(line.get("span_seconds")) or 0.0
        if seconds > 0 and step != self._first:
            self.seconds += seconds
            self.waited += record.as_number(line.get("span_wait_seconds")) or 0.0
            self.steps += max(0, step - self._step)
            if tokens is not None and self._tokens is not None and tokens > self._tokens:
                self.gained += tokens - self._tokens
                self.speed = (tokens - self._tokens) / seconds
        self._step, self._tokens = step, tokens
