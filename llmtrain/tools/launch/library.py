"""Train in several processes from Python: a program, a REPL or a notebook.

The processes cannot run what is typed there, so they run the command line instead, with a config
that is written to a temporary file. What the command line would print comes back as a `Result` or
an error. accelerate's `notebook_launcher` would fork this process instead, which fails once it has
used CUDA.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.config.binding import dump
from llmtrain.config.schema import Config
from llmtrain.errors import PeerError, Problem, RefusedError, UserError, raise_any
from llmtrain.rundir.status import Result, read_status
from llmtrain.tools.launch.launch import launch

_log = logging.getLogger(__name__)
_SHOWN = "the config"  # in messages, in place of the temporary file


def train_in_processes(config: Config, processes: int) -> Result:
    """Start `accelerate launch` on this machine, wait for the run, and return how it ended.

    config: a checked one; it is not changed

    Raises UserError or RunError by the exit code of the run.
    """
    raise_any(_problems(processes))
    values = config.model_dump(mode="json", by_alias=True)
    # What was set on a command line, so that the run records it as such.
    overrides = [
        f"{key}={json.dumps(_value(values, key), ensure_ascii=False)}"
        for key, origin in config.origins.items()
        if origin == "command line"
    ]
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        path = Path(folder) / "config.yaml"
        # Without the defaults: the run records for each key in the file that somebody has set it.
        path.write_text(dump(config, whole=False), encoding="utf-8")
        try:
            ended = launch(str(path), overrides, processes=processes)
        except UserError as error:
            where = _SHOWN if error.where == str(path) else error.where
            raise UserError(*error.problems, where=where) from None
    message = ended.message.replace(str(path), _SHOWN).removeprefix("error: ")
    if ended.exit_code == UserError.exit_code:
        raise RefusedError(message)
    if ended.exit_code:
        raise PeerError(message, ended.exit_code, rank=0)
    if message:
        _log.warning("%s", message)
    status = read_status(config.run_dir)
    state, reason = status.get("state"), status.get("reason")
    if not ended.began:  # it was asked to stop before there was a rank
        state, reason = "stopped", "signal"
    return Result(config.run_dir, str(state), 0, reason, int(status.get("step") or 0))


def _problems(processes: object) -> Iterator[Problem]:
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        yield Problem("processes", processes, "a whole number ≥ 1, or None for this process alone")


def _value(tree: Any, key: str) -> object:
    for part in key.split("."):
        tree = tree[int(part) if isinstance(tree, list) else part]
    return tree
