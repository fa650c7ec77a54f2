"""A rank that repeats secrets wherever it can: in a log, a warning, an event and an error."""

from __future__ import annotations

import logging
import os
import warnings

from llmtrain.training import loop


def train(config: str) -> None:
    """Train; the rank of CANARY_RANK fails in its third update."""
    names = ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD", "LOOKS_LIKE")
    first, second, third, fourth = (os.environ[name] for name in names)
    text = f"look at {first}, {second}, {third} and {fourth}"
    update = loop.update

    def repeating(run, batch, factor):
        if os.environ["RANK"] == os.environ["CANARY_RANK"]:
            if run.step == 0:
                logging.getLogger("llmtrain.some").info("looked%s", text.removeprefix("look"))
                logging.getLogger("a.library").warning(text)
                warnings.warn(text, stacklevel=1)
            if run.step == 2:
                raise ValueError(f"cannot {text}")
        run.journal.event("repeated", run.step, text=text, nested={"inner": [text]})
        update(run, batch, factor)

    loop.update = repeating
    from llmtrain.cli.rank import train_here

    train_here(config, [])
