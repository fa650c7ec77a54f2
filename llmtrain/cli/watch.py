"""Draws a run in the terminal while it runs: one screen of 80 × 24, once a second."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.cli.options import show
from llmtrain.report import verdict
from llmtrain.rundir import contents
from llmtrain.rundir.words import strategy_in_words
from llmtrain.text import columns, count, duration, fit, fixed, harmless, percent, plural, short
from llmtrain.tools.watch import View, Watcher

_ROWS = 6
_NAME = 10  # columns that a long name of a run has at least
_LEFT_OUT = 0.03
_OVER = ("finished", "stopped", "failed", "killed")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille sign, by row


def watch(run_dir: Path, *, once: bool, as_json: bool) -> None:
    """Show a run until it ends or Ctrl-C is pressed; wait for one that is yet to start.

    once: look only once
    """
    if as_json:
        print(json.dumps(Watcher(run_dir).look().to_json()))
    elif once or not sys.stdout.isatty():
        show(frame(Watcher(run_dir).look(), *shutil.get_terminal_size()))
    else:
        try:
            _wait_for_start(run_dir)
            _live(Watcher(run_dir))
        except KeyboardInterrupt:
            return  # it is how one leaves


def _wait_for_start(run_dir: Path) -> None:
    """Wait until there is a record, where there is nothing yet or a run directory that is new."""
    announced = False
    while not (run_dir / contents.METRICS).is_file():
        if run_dir.exists() and not contents.is_begun(run_dir):
            return  # it is something else, which is refused
        if not announced:
            show([f"waiting for a run to start in {run_dir}; Ctrl-C leaves"])
        announced = True
        time.sleep(1)


def _live(watcher: Watcher) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view = watcher.look()
            drawn = "\n".join(frame(view, console.width, console.height))
            live.update(Text(drawn, no_wrap=True, overflow="crop"), refresh=True)
            if view.state in _OVER:
                return
            time.sleep(1)


def frame(view: View, width: int, height: int) -> list[str]:
    """Return the lines of the screen: at most `height`, none wider than `width` cells."""
    strategy = strategy_in_words(view.to_json()) if view.strategy else None
    size = plural(view.world_size, "process", "processes") if view.world_size else None
    where = " · ".join(filter(None, (strategy, size, view.device)))
    state = f"{view.state}   {where}".rstrip()
    name = fit(harmless(view.name), max(_NAME, width - 4 - columns(state)))
    lines = [f"{name}   {state}"]
    if view.silence:
        lines.append(f"! {view.silence}")
    lines += ["", _bar(view, width), "", _numbers(view), ""]
    lines += _braille(view.curve, width - 10) or ["no step has been logged yet"]
    if view.events:
        lines += ["", *(f"  {one}" for one in view.events)]
    lines += ["", _what_to_do(view)]
    return [fit(harmless(line), width - 1) for line in lines[: height - 1]]


def _bar(view: View, width: int) -> str:
    label = f"{count(view.step)} of {count(view.steps)} steps" if view.steps else count(view.step)
    if not view.steps:
        return f"step {label}"
    share = min(1.0, view.step / view.steps)
    room = max(5, width - len(label) - 10)
    done = round(room * share)
    return f"{'━' * done}{'─' * (room - done)} {percent(share)}  {label}"


def _numbers(view: View) -> str:
    lost = view.heldout is None and view.evaluated is not None
    heldout = verdict.NOT_FINITE if lost else fixed(view.heldout)
    parts = [f"loss {fixed(view.loss)}", f"held-out {heldout}"]
    if view.router_loss is not None:
        parts.insert(1, f"router {fixed(view.router_loss)}")
    if view.best is not None and view.best != view.heldout:
        parts.append(f"best {fixed(view.best)}")
    parts.append(f"{short(view.tokens_per_second)} tok/s")
    if view.wait is not None:
        parts.append(f"data wait {percent(view.wait)}")
    if view.left is not None:
        parts.append(f"{duration(view.left)} left")
    return "   ".join(parts)


def _braille(curve: Sequence[tuple[int, float]], width: int) -> list[str]:
    """Return the curve in six rows of braille signs; its first 3 % are left out."""
    if not curve:
        return []
    begin = curve[0][0] + _LEFT_OUT * (curve[-1][0] - curve[0][0])
    points = [point for point in curve if point[0] >= begin]
    dots = max(2, 2 * width)
    values = [loss for _, loss in points]
    low, high = min(values), max(values)
    first, span = points[0][0], max(1, points[-1][0] - points[0][0])
    signs = [[0] * (dots // 2) for _ in range(_ROWS)]
    before = None
    for column, loss in _by_column(points, first, span, dots):
        share = (high - loss) / (high - low) if high > low else 0.5
        now = int(share * (4 * _ROWS - 1) + 0.5)
        before = now if before is None else before
        for row in range(min(before, now), max(before, now) + 1):  # joined to the one before
            signs[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        before = now
    rows = ["".join(chr(0x2800 + sign) for sign in row) for row in signs]
    labels = [fixed(high), *[""] * (_ROWS - 2), fixed(low)]
    return [f"{label:>8} {row}" for label, row in zip(labels, rows, strict=True)]


def _by_column(
    points: Sequence[tuple[int, float]], first: int, span: int, columns: int
) -> Iterator[tuple[int, float]]:
    """Yield the loss at each column of dots, between two points that of a line through them."""
    place = 0
    for column in range(columns):
        step = first + span * column / (columns - 1)
        while place < len(points) - 1 and points[place + 1][0] <= step:
            place += 1
        (left, loss), (right, next_) = points[place], points[min(place + 1, len(points) - 1)]
        part = (step - left) / (right - left) if right > left else 0.0
        yield column, loss + min(1.0, part) * (next_ - loss)


def _what_to_do(view: View) -> str:
    return {
        "finished": "llmtrain report RUN shows all of it, and how to use the model.",
        "stopped": "The same command resumes the run.",
        "failed": "The end of logs/rank-0.log says why.",
        "killed": "The same command resumes the run.",
    }.get(view.state, "Ctrl-C leaves; the run goes on.")
