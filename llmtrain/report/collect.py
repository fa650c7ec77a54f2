"""A run directory as tables: the history that counts, without torch.

`metrics.jsonl` is only appended to, so after a resume the lines of steps that were redone stand
twice, and lines of steps that were lost stand there too. A start goes back to its own step:

    start 0 · train 1 … train 178      killed
    start 100 · train 101 …            what came after step 100 before is void, redone or not
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError
from llmtrain.rundir import contents, record, status

Line = Mapping[str, Any]

MAX_BUCKETS = 1000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was committed. kept: it is still in the run directory."""

    line: Line
    kept: bool


@dataclass(frozen=True, slots=True)
class Tables:
    """What the files of a run say. Lines are those of `metrics.jsonl`, in the order of steps.

    events and starts are kept from all starts; the rest is the final history. steps: of the whole
    run, None if the config does not say · end: the line of the last start, None while it runs.
    """

    name: str
    status: Mapping[str, Any]
    config: str
    steps: int | None
    starts: tuple[Line, ...]
    train: tuple[Line, ...]
    evaluations: tuple[Line, ...]
    samples: tuple[Line, ...]
    checkpoints: tuple[Checkpoint, ...]
    events: tuple[Line, ...]
    end: Line | None
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A column in buckets along the steps: the middle step, low, mean and high of each."""

    steps: tuple[int, ...]
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]
    thinned: bool


def collect(run_dir: Path) -> Tables:
    """Read a run directory. Raises UserError if it holds no `metrics.jsonl`."""
    path = run_dir / contents.METRICS
    if not path.is_file():
        problem = Problem(
            "RUN",
            run_dir,
            f"a run directory, with {contents.METRICS} in it",
            "give the directory that the config names as run.dir",
        )
        raise UserError(problem)
    lines = record.record(run_dir)
    config = _text(run_dir / contents.CONFIG)
    history = final_history(lines)
    return Tables(
        name=run_dir.resolve().name,
        status=status.read_status(run_dir),
        config=config,
        steps=_steps(lines, config),
        starts=_of("start", lines),
        train=_of("train", history),
        evaluations=_of("eval", history),
        samples=_of("sample", history),
        checkpoints=_checkpoints(run_dir, _of("checkpoint", history)),
        events=tuple(event for event in _of("event", lines) if not _is_of_resident_memory(event)),
        end=_end(lines),
        wall_seconds=lines[-1]["time"] - lines[0]["time"] if lines else 0.0,
    )


def final_history(lines: Iterable[Line]) -> list[Line]:
    """The lines that count, by step: of each thing the last, nothing that a later start undid."""
    kept: dict[tuple[object, ...], Line] = {}
    for line in lines:
        if line["kind"] == "start":
            kept = {what: old for what, old in kept.items() if old["step"] <= line["step"]}
        # Taken out first, so that the order is that of the last writing.
        kept.pop(what := _what(line), None)
        kept[what] = line
    return sorted(kept.values(), key=lambda line: int(line["step"]))


def column(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """(step, value) of the lines that have a number there."""
    values = ((line["step"], line.get(name)) for line in lines)
    return [(step, float(value)) for step, value in values if isinstance(value, (int, float))]


def thin(points: Sequence[tuple[int, float]], buckets: int = MAX_BUCKETS) -> Curve:
    """A column in buckets of equally many points; a column that fits stays as it is."""
    size = -(-len(points) // buckets) if points else 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    values = [[value for _, value in group] for group in groups]
    return Curve(
        steps=tuple(group[len(group) // 2][0] for group in groups),
        low=tuple(min(group) for group in values),
        mean=tuple(sum(group) / len(group) for group in values),
        high=tuple(max(group) for group in values),
        thinned=size > 1,
    )


def _what(line: Line) -> tuple[object, ...]:
    """Two lines that say the same thing of the same step have this in common."""
    return (
        line["kind"],
        line["step"],
        *(str(line[key]) for key in ("split", "prompt", "name") if key in line),
    )


def _of(kind: str, lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line["kind"] == kind)


def _is_of_resident_memory(event: Line) -> bool:
    """Whether the plan was compared with what the process holds on a CPU, much of it not planned.

    That is in the record for whoever measures, and nothing that a person should look at.
    """
    return event.get("event") == "memory_compared" and event.get("device") == "cpu"


def _end(lines: Sequence[Line]) -> Line | None:
    """The last start's end, if it has come to one."""
    last = [line for line in lines if line["kind"] in ("start", "end")][-1:]
    return last[0] if last and last[0]["kind"] == "end" else None


def _checkpoints(run_dir: Path, lines: Sequence[Line]) -> tuple[Checkpoint, ...]:
    root = run_dir / contents.CHECKPOINTS
    return tuple(Checkpoint(line, (root / str(line.get("name"))).is_dir()) for line in lines)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _steps(lines: list[dict[str, Any]], config: str) -> int | None:
    """Of the whole run, as the last start had it: `training.steps` may change."""
    import yaml

    for line in reversed(lines):
        if line["kind"] == "start" and isinstance(line.get("steps"), int):
            return int(line["steps"])
    try:
        value = yaml.safe_load(config)["training"]["steps"]
    except (yaml.YAMLError, KeyError, TypeError):
        return None  # written by hand or damaged: the report does without
    return value if isinstance(value, int) else None


def compact(value: object) -> str:
    """A value of an event's detail as one short line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 500 else text[:499] + "…"
