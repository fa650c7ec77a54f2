"""What befalls a run that no failpoint brings about: done to its processes, not by its code.

`call helpers.striking train WHAT CONFIG …` is `llmtrain train CONFIG …` on a rank to which WHAT
happens, JSON of these:

    {"nan": [1], "step": 10}     the losses of these ranks are not finite in a step
    {"never": 10}                the update of a step is not made, on any rank
    {"flip": [1], "step": 6}     a bit of one weight of these ranks is another in front of a step;
                                 with "of": of the first whose name has this in it
    {"unsent": [1]}              these ranks fail at the third piece of their first save
    {"hurried": true}            the watchdog looks often, once a failpoint hangs or `hung` is there
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers import flipping

if TYPE_CHECKING:
    from llmtrain.training.run import Run

HUNG = "hung"  # in the working directory of the run
_TICK_SECONDS = 0.03


def through(**what: Any) -> tuple[str, ...]:
    """For `FaultyRun.launch(through=…)`."""
    return ("call", "helpers.striking", "train", json.dumps(what))


def train(what: str, config: str, *overrides: str) -> None:
    """On one rank."""
    asked = json.loads(what)
    rank, step = int(os.environ.get("RANK", "0")), asked.get("step")
    if asked.get("hurried"):
        hurry()
    if rank in asked.get("nan", []):
        poison(step)
    if rank in asked.get("flip", []):
        flip(step, asked.get("of", ""))
    if rank in asked.get("unsent", []):
        unsent()
    if "never" in asked:
        leave_out(asked["never"])
    from llmtrain.cli.main import main

    main(["train", config, *overrides])


def poison(wanted: int) -> None:
    """Every loss of a step is NaN, and so are its gradients."""
    from llmtrain.model.loss import LossModule

    step, forward = _steps(), LossModule.forward

    def wrong(self: LossModule, *args: Any, **kwargs: Any) -> Any:
        loss = forward(self, *args, **kwargs)
        return loss * float("nan") if self.training and step[-1] == wanted else loss

    LossModule.forward = wrong


def leave_out(wanted: int) -> None:
    """The optimizer never hears of a step."""
    from llmtrain.distributed.engines.engine import TorchEngine

    step, made = _steps(), TorchEngine.step

    def never(self: TorchEngine, *args: Any) -> None:
        if step[-1] == wanted:
            return self.clear()
        return made(self, *args)

    TorchEngine.step = never


def unsent() -> None:
    """One of the pieces that rank 0 is to write cannot be read."""
    from llmtrain.checkpoint import write

    made, seen = write.flat, list[None]()

    def failing(*args: Any) -> Any:
        seen.append(None)
        if len(seen) == 3:
            raise OSError("this piece cannot be read")
        return made(*args)

    write.flat = failing


def flip(wanted: int, of: str) -> None:
    """A bit of the mantissa, high enough that no rounding takes it back."""
    from llmtrain.training import loop

    begin = loop.begin

    def flipped(run: Run, step: int) -> None:
        if step == wanted:
            named = run.built.model.named_parameters()
            flipping.flip(next(weight for name, weight in named if of in name), bit=18)
        begin(run, step)

    loop.begin = flipped


def hurry() -> None:
    """Twenty minutes of the watchdog are half a minute, which begins when there is a hang."""
    from llmtrain import faults
    from llmtrain.training import watchdog

    look, strike = watchdog.Watchdog.look, faults._strike

    def when_hung(self: watchdog.Watchdog) -> None:
        if Path(HUNG).exists():
            look(self)

    def told(fault: faults.Fault, path: Path | None) -> str | None:
        if fault.action == "hang":
            Path(HUNG).touch()
        return strike(fault, path)

    watchdog._TICK_SECONDS = _TICK_SECONDS
    watchdog.Watchdog.look = when_hung
    faults._strike = told


def _steps() -> list[int]:
    """The last is the step that has begun."""
    from llmtrain.training.run import Feed

    seen, begin = [0], Feed.begin

    def noted(self: Feed, step: int) -> None:
        seen.append(step)
        begin(self, step)

    Feed.begin = noted
    return seen
