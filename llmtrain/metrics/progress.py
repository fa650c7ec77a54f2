"""Shows the progress of a run: one moving line on a terminal, plain lines elsewhere.

    1,240/5,000 ━━━╺────── 25 %  loss 3.412 ↓  held-out 3.51  12.4 k tok/s  6.1/24 GiB  9 min left

Elsewhere (a batch queue, CI) everything between `begin` and `close` is lines of a word and
`key=value`: one for each record of `metrics.jsonl`, and one for anything else that is reported.
They have no control characters; texts are in quotes, their newlines as JSON has them. The trap: the
loop calls `training` at every step, so a call that draws nothing must cost almost nothing: it reads
the clock and returns.

While nothing else is shown, what takes long is told in the words of the heartbeat, in a plain log,
too:

    reading a unit of the data (41), 3 s
    reading a unit of the data (96), 6 s
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from llmtrain import system
from llmtrain.batch_size import BatchSize
from llmtrain.config import secrets
from llmtrain.text import duration, fit, percent, short

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from llmtrain.types import Numbers


_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_DRAWS = 0.25
_BAR = (5, 30)  # columns
_LINES = 6  # of a note, such as the first conversation of a run
_OF_PAIRS = ("pairs", "accuracy", "margin")
_WAITS = 0.05  # the share from which waiting for data is shown
# All control characters except the newline, and those that change the direction of writing: a
# sample or a path must not move the cursor of a terminal.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Progress:
    """Shows a run on `stream`; shows nothing if that is None (ranks > 0).

    steps: number of steps of the whole run; must be set before the first step is shown
    device_gb: GiB of memory of the device; None on a CPU

    If writing to the stream fails (its terminal was closed), it is not used again. The run
    continues.
    """

    def __init__(self, stream: TextIO | None, *, clock: Callable[[], float] = perf_counter) -> None:
        self.steps = 1
        self._growing: BatchSize | None = None
        self.device_gb: float | None = None
        self.written = 0  # how often something was shown
        self.begun = False  # whether the start block was shown
        self._stream = stream
        no_terminal = os.environ.get("TERM", "") in ("", "dumb", "unknown")
        self._moves = stream is not None and stream.isatty() and not no_terminal
        self._clock = clock
        self._hide = secrets.hider(os.environ)  # a prompt may hold one
        self._live: Live | None = None
        self._next_draw = 0.0
        self._first: tuple[int, float] | None = None  # step and clock of the first call
        self._shown_loss: float | None = None
        self._memory_gb: float | None = None
        self._heldout: float | None = None
        self._best: float | None = None
        self._records_only = False
        self._held: list[str] = []  # an evaluation and its samples, until it is known to be saved
        self._held_step = -1
        self._lock = threading.Lock()  # for `_held`: the thread of `Busy` calls `note`

    def lasts(self, steps: int, batch: BatchSize) -> None:
        """Set the number of steps of the whole run, and how many blocks these have."""
        self.steps, self._growing = steps, batch if batch.grows else None

    def begin(self) -> None:
        """Call this after the start block: a log then has lines of `word key=value` only."""
        self.begun, self._records_only = True, not self._moves

    def training(
        self, numbers: Numbers, *, line: bool = True, memory_gb: float | None = None
    ) -> None:
        """Show a finished step. line: whether `metrics.jsonl` and a plain log get a line for it."""
        if self._stream is None or not (self._moves or line):
            return
        now = self._clock()
        if self._first is None:
            self._first = (numbers.step, now)
        if memory_gb is not None:
            self._memory_gb = memory_gb
        self._flush()
        if not self._moves:
            self._print(plain_line("train", self._facts(numbers, now)))
        elif now >= self._next_draw or numbers.step >= self.steps:
            self._next_draw = now + _SECONDS_BETWEEN_DRAWS
            self._draw(numbers, now)

    def evaluation(self, fields: Mapping[str, object]) -> None:
        """Show an `eval` line: on a terminal only that of all held-out documents."""
        if not self._moves:
            measures = ("loss", "perplexity", "bits_per_byte", *_OF_PAIRS)
            shown = ("step", "split", *measures, "documents")
            self._print(plain_line("eval", {key: fields[key] for key in shown if key in fields}))
            return
        loss, split, step = fields.get("loss"), fields.get("split", "heldout"), fields.get("step")
        if split == "heldout" and isinstance(loss, float) and isinstance(step, int):
            self._flush()
            right = fields.get("accuracy")
            suffix = f"   accuracy {percent(right)}" if isinstance(right, float) else ""
            self._held, self._held_step = [self._evaluated(step, loss) + suffix], step

    def _evaluated(self, step: int, loss: float) -> str:
        """Describe an evaluation, compared with the one before and with the best one."""
        if not isfinite(loss):
            return f"{_step(step)}held-out {loss}"
        change = "" if self._heldout is None else f" ({loss - self._heldout:+.3f})"
        lower = self._best is not None and loss < self._best
        self._heldout = loss
        self._best = loss if self._best is None else min(self._best, loss)
        best = "   best so far" if lower else ""
        return f"{_step(step)}held-out {loss:.3f}{change.replace('-', '−')}{best}"

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show what the model has written; on a terminal its first line, and none at step 0."""
        if not self._moves:
            self._print(plain_line("sample", {"step": step, "prompt": prompt, "text": text}))
        elif step:
            first = f"  {prompt}{text}".strip("\n").partition("\n")[0]
            line = fit(first, shutil.get_terminal_size().columns - 1)
            with self._lock:
                alone = not self._held  # its evaluation was shown: a note came between them
                self._held.append(line)
            if alone:
                self._flush()

    def checkpoint(self, fields: Mapping[str, object]) -> None:
        """Show a `checkpoint` line; on a terminal only that its evaluation's step is saved.

        A save that goes on beside the training is shown as a line of its own, once it is complete.
        """
        if not self._moves:
            shown = ("step", "name", "bytes", "seconds", "reason")
            known = {key: fields[key] for key in shown if key in fields}
            self._print(plain_line("checkpoint", known))
        elif fields.get("step") == self._held_step:
            if held := self._take_held():
                held[0] += "   saved"
            self._print("\n".join(held or [f"{_step(self._held_step)}saved"]))

    def note(self, text: str, plain: str | None = None) -> None:
        """Print lines of text, above the moving line; of a long text the first ones.

        plain: the same as `plain_line` returns it, for a log of records; None = `note text=…`
        """
        self._flush()
        lines = text.split("\n")
        if self._records_only:
            text = plain or plain_line("note", {"text": text})
        elif len(lines) > _LINES:
            text = "\n".join([*lines[: _LINES - 1], "… (the rest is in logs/rank-0.log)"])
        self._print(text)

    def close(self) -> None:
        """Remove the moving line, and print text as it is again. A second call does nothing."""
        self._flush()
        self._records_only = False
        live, self._live = self._live, None
        if live is not None:
            self._guard(live.stop)

    def _flush(self) -> None:
        """Print what waits to learn whether it is saved."""
        if held := self._take_held():
            self._print("\n".join(held))

    def _take_held(self) -> list[str]:
        with self._lock:
            held, self._held = self._held, []
        return held

    def _facts(self, numbers: Numbers, now: float) -> dict[str, object]:
        left = self._seconds_left(numbers.step, now)
        return {
            "step": f"{numbers.step}/{self.steps}",
            "loss": numbers.loss,
            "router_loss": numbers.router_loss,
            **{key: value for key, value in (numbers.pairs or {}).items() if key in _OF_PAIRS},
            "learning_rate": numbers.learning_rate,
            "grad_norm": numbers.grad_norm,
            "tokens": numbers.tokens,
            "tokens_per_second": round(numbers.tokens_per_second),
            "wait": f"{_wait_share(numbers):.1%}",
            "memory_gb": None if self._memory_gb is None else round(self._memory_gb, 2),
            "left": None if left is None else duration(left).replace(" ", ""),
        }

    def _moving_line(self, numbers: Numbers, now: float, width: int) -> Text:
        from rich.text import Text

        share = min(1.0, numbers.step / self.steps)
        count, percent = f"{numbers.step:,}/{self.steps:,} ", f" {share:.0%}".replace("%", " %")
        loss = f"  loss {numbers.loss:.3f}{self._trend(numbers.loss)}"
        parts = self._rest(numbers, now)
        fixed = len(count) + len(percent) + len(loss)
        # On a narrow terminal memory, speed and the rest are left out, in this order.
        for name in ("memory", "speed", "wait", "heldout", "accuracy"):
            rest = sum(2 + len(part) for part in parts.values())
            if fixed + rest + _BAR[0] > width:
                parts.pop(name, None)
        rest = sum(2 + len(part) for part in parts.values())
        bar = max(_BAR[0], min(_BAR[1], width - 1 - fixed - rest))
        done = int(bar * share)
        line = Text(count, no_wrap=True, overflow="ellipsis")
        line.append("━" * done, style="green")
        line.append(("╺" + "─" * (bar - done - 1)) if done < bar else "", style="bright_black")
        line.append(percent).append(loss, style="bold")
        return line.append("".join(f"  {part}" for part in parts.values()))

    def _rest(self, numbers: Numbers, now: float) -> dict[str, str]:
        parts = {}
        if numbers.pairs and (right := numbers.pairs["accuracy"]) is not None:
            parts["accuracy"] = f"accuracy {percent(right)}"
        if self._heldout is not None:
            parts["heldout"] = f"held-out {self._heldout:.3f}"
        parts["speed"] = f"{short(numbers.tokens_per_second)} tok/s"
        if _wait_share(numbers) > _WAITS:
            parts["wait"] = f"wait {_wait_share(numbers):.0%}".replace("%", " %")
        if self._memory_gb is not None:
            whole = "" if self.device_gb is None else f"/{self.device_gb:.0f}"
            parts["memory"] = f"{self._memory_gb:.1f}{whole} GiB"
        if (left := self._seconds_left(numbers.step, now)) is not None:
            parts["left"] = f"{duration(left)} left"
        return parts

    def _trend(self, loss: float) -> str:
        """Return an arrow that compares the loss with a slow mean of the losses shown before."""
        before = self._shown_loss
        if loss != loss:
            return ""
        self._shown_loss = loss if before is None else 0.9 * before + 0.1 * loss
        if before is None or loss == before:
            return ""
        return " ↓" if loss < before else " ↑"

    def _seconds_left(self, step: int, now: float) -> float | None:
        """Estimate the remaining time from the speed of this start, with evaluations and saves."""
        if self._first is None or step <= self._first[0]:
            return None
        first, last = self._first[0], self.steps
        if self._growing is not None:  # what is made and left is counted in blocks
            first, step, last = map(self._growing.until, (first, step, last))
        return (now - self._first[1]) / (step - first) * max(0, last - step)

    def _draw(self, numbers: Numbers, now: float) -> None:
        if self._live is None:
            self._live = self._guard(lambda: _open_live(self._stream))
        if (live := self._live) is not None:
            line = self._moving_line(numbers, now, live.console.width)
            self._guard(lambda: live.update(line, refresh=True))

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        live, text = self._live, _CONTROL.sub(" ", self._hide(text))
        if live is not None:
            self._guard(lambda: live.console.print(text, markup=False, highlight=False))
        else:
            # At once, as the thread of `Busy` writes too.
            self._guard(lambda: print(f"{text}\n", end="", file=self._stream, flush=True))

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Call a function that writes. If the terminal is gone, nothing more is written to it."""
        self.written += 1
        try:
            return call()
        except (OSError, ValueError) as error:  # ValueError: the file object was closed
            self._stream, self._live = None, None
            _log.warning("the terminal is gone (%s); the run continues without it", error)
            return None


def _open_live(stream: TextIO | None) -> Live:
    from rich.console import Console
    from rich.live import Live

    # There is no refresh thread, since `_draw` decides when to draw, and stdout and stderr are not
    # replaced. The console itself reads NO_COLOR.
    console = Console(file=stream, force_terminal=True)
    live = Live(
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
    live.start()
    return live


def plain_line(word: str, facts: Mapping[str, object]) -> str:
    """Return the facts that are known; numbers with four significant digits, for the eye."""
    parts = (f"{key}={_value(value)}" for key, value in facts.items() if value is not None)
    return _CONTROL.sub(" ", " ".join((word, *parts)))


def _step(step: int) -> str:
    """Return a step in a column of its own."""
    return f"step {step:<8,}"


def _value(value: object) -> str:
    """Return a value without spaces, or in quotes with its newlines written as JSON has them."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    bare = text and not any(sign.isspace() or sign in '"\\=' for sign in text)
    return text if bare else json.dumps(text, ensure_ascii=False)


def _wait_share(numbers: Numbers) -> float:
    return numbers.data_wait_seconds / numbers.seconds if numbers.seconds > 0 else 0.0


# Seconds without a line after which one is due: at the start, and in the loop, where a step may
# take that long.
_FIRST = {False: 3, True: 60}
_MOST = 60  # between two lines


class Busy:
    """Counts the calls of `look`, one a second, since something was last shown.

    The first line comes after three seconds, in the loop after a minute; then each after twice as
    long as the one before, up to a minute.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen = progress.written
        self._quiet = 0
        self._next = 0  # 0: no line was shown since

    def look(self) -> None:
        """Show a line if nothing was shown for long enough."""
        if self._progress.written != self._seen:
            self._seen, self._quiet, self._next = self._progress.written, 0, 0
        self._quiet += 1
        due = self._next or _FIRST[self._progress.begun]
        if self._quiet < due:
            return
        self._next = min(2 * due, due + _MOST)
        self._progress.note(f"{system.beat_in_words()}, {duration(self._quiet)}")
        self._seen = self._progress.written
