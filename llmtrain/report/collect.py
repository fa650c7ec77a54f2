"""Reads a run directory into tables: the final history of the run, without torch.

`metrics.jsonl` is only appended to. After a resume it has the lines of redone steps twice, and
lines of steps that were lost. Each start line has the step that the run went back to:

    start 0 · train 1 … train 178      killed
    start 100 · train 101 …            earlier lines of steps after 100 do not count, redone or not
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from llmtrain.config import secrets, yaml12
from llmtrain.rundir import contents, goodput, record, status
from llmtrain.rundir.record import as_number, is_of_all, require_record
from llmtrain.types import JsonMapping, JsonObject

Line = JsonMapping

MAX_BUCKETS = 1000


@dataclass(frozen=True, slots=True)
class Tables:
    """The content of a run's files. Lines are those of `metrics.jsonl`, in the order of steps.

    events are those of all starts, starts are those that have added something; the rest is the
    final history.

    steps: number of steps of the whole run; None if it is not known
    evaluations: those of all held-out documents, without those of single sources
    checkpoints: each with one field more, `kept`: whether it is still in the run directory
    sums: what the steps of the final history add up to
    redone: ranges of steps that were done again after a start went back
    stretches: where the time went
    changes: what each start after the first cost, and on how many processes it ran
    unread: number of whole lines of the record that could not be read
    settings: values of the config by dotted key, with the length that the run has now, which a
        later start may have changed; {} if it cannot be read
    chat: whether it trains conversations through a chat template
    auto: what was decided automatically, by key
    profile: operators of the profiled steps, as `metrics.memory.Profile` writes them; {} without
    """

    name: str
    status: JsonMapping
    config: str
    steps: int | None
    starts: tuple[Line, ...]
    train: tuple[Line, ...]
    evaluations: tuple[Line, ...]
    samples: tuple[Line, ...]
    checkpoints: tuple[Line, ...]
    events: tuple[Line, ...]
    sums: goodput.StepSums
    redone: tuple[tuple[int, int], ...]
    stretches: tuple[goodput.Stretch, ...]
    changes: tuple[goodput.Restart, ...]
    unread: int
    settings: Mapping[str, object]
    chat: bool
    auto: JsonMapping
    profile: JsonMapping
    _columns: dict[str, Points] = field(default_factory=dict, repr=False)

    def numbers(self, name: str) -> Points:
        """Return (step, value) of the `train` lines whose field `name` is a number."""
        if name not in self._columns:
            self._columns[name] = column(self.train, name)
        return self._columns[name]

    @property
    def kept_checkpoints(self) -> list[Line]:
        """The checkpoints that are still in the run directory, in the order of their steps."""
        return [one for one in self.checkpoints if one["kept"]]

    @property
    def pair_loss(self) -> str | None:
        """The loss of the run's pairs of answers; None of a run on texts or conversations."""
        loss = self.settings.get("preference.loss")
        return loss if isinstance(loss, str) and loss != "none" else None

    @property
    def wall_seconds(self) -> float:
        """Seconds from the beginning of the first start to the last line."""
        return self.stretches[-1].end - self.stretches[0].begin if self.stretches else 0.0

    @property
    def restarts(self) -> tuple[int, ...]:
        """The step from which each later start went on."""
        return tuple(start["step"] for start in self.starts[1:])

    @property
    def last_start(self) -> Line:
        """The line of the last start; empty before the first."""
        return self.starts[-1] if self.starts else {}


class Points(Sequence[tuple[int, float]]):
    """Pairs of a step and a number. A record has as many as a run has steps, so they are packed."""

    def __init__(self, pairs: Iterable[tuple[int, float]] = ()) -> None:
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")
        for step, value in pairs:
            self.steps.append(step)
            self.values.append(value)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def __getitem__(self, place: Any) -> Any:
        """Return a pair, or a list of those of a slice."""
        if isinstance(place, slice):
            return list(zip(self.steps[place], self.values[place], strict=True))
        return self.steps[place], self.values[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list


@dataclass(frozen=True, slots=True)
class Curve:
    """A column of numbers in buckets, with the middle step, low, mean and high of each bucket."""

    steps: tuple[int, ...]
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]
    thinned: bool

    @property
    def points(self) -> list[tuple[int, float]]:
        """The step and the mean of each bucket."""
        return list(zip(self.steps, self.mean, strict=True))


def collect(run_dir: Path) -> Tables:
    """Read a run directory. Raises UserError if it has no `metrics.jsonl`."""
    require_record(run_dir)
    (lines, unread), text = record.short_record(run_dir), run_dir / contents.CONFIG
    config = text.read_text(encoding="utf-8", errors="replace") if text.is_file() else ""
    config = secrets.hider(os.environ)(config)
    history, starts = final_history(lines), _of("start", goodput.without_idle_starts(lines))
    chat = _json(run_dir / contents.MANIFEST).get("chat")
    sums = goodput.StepSums()
    for line in history:
        if line["kind"] in ("start", "train"):
            sums.add(line)
    return Tables(
        name=run_dir.resolve().name,
        status=status.read_status(run_dir),
        config=config,
        steps=starts[-1].get("steps") if starts else None,  # `training.steps` may change
        starts=starts,
        train=_of("train", history),
        evaluations=tuple(line for line in history if is_of_all(line)),
        samples=_of("sample", history),
        checkpoints=tuple(
            {**line, "kept": (run_dir / contents.CHECKPOINTS / str(line.get("name"))).is_dir()}
            for line in _of("checkpoint", history)
        ),
        # A plan beside resident memory, much of which is not planned, is recorded for measurements
        # and is of no use to the reader of a report.
        events=tuple(
            event
            for event in _of("event", lines)
            if (event.get("event"), event.get("device")) != ("memory_compared", "cpu")
        ),
        sums=sums,
        redone=tuple(_redone(lines)),
        stretches=tuple(goodput.stretches(lines)),
        changes=tuple(goodput.changes(goodput.without_idle_starts(lines))),
        unread=unread,
        settings=with_length(_settings(config), starts),
        chat=isinstance(chat, dict) and bool(chat.get("template")),
        auto=_json(run_dir / contents.AUTO),
        profile=_json(run_dir / contents.PROFILE / contents.OPERATORS),
    )


def final_history(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of the final history, sorted by step.

    Of several lines about the same thing at the same step the last one counts. A start removes the
    lines of later steps.
    """
    latest: dict[object, Line] = {}
    for line in lines:
        if line["kind"] == "start":
            latest = {what: old for what, old in latest.items() if old["step"] <= line["step"]}
        # Removed first, so that the order is that of the last lines.
        latest.pop(what := _what(line), None)
        latest[what] = line
    return sorted(latest.values(), key=itemgetter("step"))


def column(lines: Sequence[Line], name: str) -> Points:
    """Return (step, value) of the lines whose field `name` is a number.

    Numbers so large that a sum of them would overflow are left out, as those that are not finite.
    """
    return Points(
        (line["step"], value) for line in lines if (value := as_number(line.get(name))) is not None
    )


def joined(one: Points, other: Points) -> Iterator[tuple[int, float, float]]:
    """Yield the steps that two columns of the same lines have, with both numbers."""
    others = iter(other)
    step, value = next(others, (None, 0.0))
    for target, number in one:
        while step is not None and step < target:
            step, value = next(others, (None, 0.0))
        if step == target:
            yield target, number, value


def thin(points: Sequence[tuple[int, float]], buckets: int = MAX_BUCKETS) -> Curve:
    """Reduce points to at most `buckets` of equal size; up to that many points stay as they are."""
    size = -(-len(points) // buckets) if points else 1
    values = array("d", (value for _, value in points))
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    middles = (size * place + len(group) // 2 for place, group in enumerate(groups))
    return Curve(
        steps=tuple(points[middle][0] for middle in middles),
        low=tuple(map(min, groups)),
        mean=tuple(sum(group) / len(group) for group in groups),
        high=tuple(map(max, groups)),
        thinned=size > 1,
    )


def _settings(text: str) -> dict[str, object]:
    """Return the values of a config by `section.key`; {} for a text that is no config."""
    tree = yaml12.parse(text).value
    if not isinstance(tree, dict):
        return {}
    return {
        f"{section}.{key}": value
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def with_length(settings: Mapping[str, object], starts: Sequence[Line]) -> dict[str, object]:
    """Return the values of a config with the length that the last start gave the run.

    The config of a run is the one that began it; only its length changes afterwards.
    """
    last = starts[-1] if starts else {}
    # A start before this key was recorded has the one of the config.
    epochs = last.get("epochs", settings.get("training.epochs"))
    steps = last.get("steps") if epochs is None else None
    if epochs is not None or steps is not None:
        length = {"training.steps": steps, "training.epochs": epochs}
        return {**settings, **{key: one for key, one in length.items() if settings.get(key) != one}}
    return dict(settings)


def _json(path: Path) -> JsonObject:
    """Return the JSON object of a file; {} if there is none."""
    return (record.parse(path.read_bytes()) or {}) if path.is_file() else {}


def _redone(lines: Sequence[Line]) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each range that a start went back behind."""
    last = 0
    for line in lines:
        if line["kind"] == "start":
            if last > line["step"]:
                yield line["step"] + 1, last
            last = line["step"]
        elif line["kind"] == "train":
            last = max(last, line["step"])


def _what(line: Line) -> object:
    """Return a key that is equal for two lines about the same thing at the same step."""
    if line["kind"] == "train":
        return line["step"]
    named = (str(line[key]) for key in ("split", "prompt", "name") if key in line)
    return (line["kind"], line["step"], *named)


def _of(kind: str, lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line["kind"] == kind)
