"""llmtrain: train causal language models, exactly, on any number of devices.

The names in `__all__` are public; everything else may change. They are loaded on first use, so that
help and config errors do not wait for torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.config.load import load_config
    from llmtrain.config.schema import Config
    from llmtrain.errors import RunError, UserError
    from llmtrain.report.run import Run, open_run
    from llmtrain.rundir.status import Result
    from llmtrain.tools.data.inspect import open_stream
    from llmtrain.tools.plan import plan
    from llmtrain.tools.use.evaluate import evaluate
    from llmtrain.tools.use.export import export
    from llmtrain.tools.use.generate import generate

__all__ = [
    "Config",
    "Result",
    "Run",
    "RunError",
    "UserError",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "open_run",
    "open_stream",
    "plan",
    "train",
]

_HOMES = {
    "Config": "llmtrain.config.schema",
    "Result": "llmtrain.rundir.status",
    "Run": "llmtrain.report.run",
    "RunError": "llmtrain.errors",
    "UserError": "llmtrain.errors",
    "evaluate": "llmtrain.tools.use.evaluate",
    "export": "llmtrain.tools.use.export",
    "generate": "llmtrain.tools.use.generate",
    "load_config": "llmtrain.config.load",
    "open_run": "llmtrain.report.run",
    "open_stream": "llmtrain.tools.data.inspect",
    "plan": "llmtrain.tools.plan",
}


def train(config: Config, processes: int | None = None) -> Result:
    """Train up to the last step; if `config.run.dir` has a run, resume it.

    processes: how many to start on this machine, by `accelerate launch`; this process waits for
        them. None = train in this process

    In a launch of several processes, every rank calls it, without `processes`. While it runs,
    SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask for a stop that all ranks agree on (only in the main
    thread).
    Raises UserError for what a person can correct, RunError for a failure of the machine.
    """
    from llmtrain.errors import NOT_ON_WINDOWS, Problem, RefusedError, raise_any

    if sys.platform == "win32":
        raise RefusedError(NOT_ON_WINDOWS)
    from llmtrain import faults
    from llmtrain.config.checks import check
    from llmtrain.distributed.launch.environment import check_environment
    from llmtrain.metrics.trackers import check_installed
    from llmtrain.system import set_variables_of_torch
    from llmtrain.training import stop

    problems = check(config)
    if config.run.dir is None:
        problems.append(Problem("run.dir", None, "a directory; load_config fills it in"))
    if processes is not None:
        from llmtrain.tools.launch.launch import train_in_processes

        raise_any(problems)
        return train_in_processes(config, processes)
    try:
        faults.install(os.environ)
    except ValueError as error:
        problems.append(Problem(faults.VARIABLE, str(error), faults.GRAMMAR))
    raise_any(problems)
    check_environment(os.environ, config.distributed, config.training)
    check_installed(config.logging.trackers)
    set_variables_of_torch(os.environ)
    with stop.catching():  # before torch is imported, which takes seconds
        from llmtrain.rundir.status import Result
        from llmtrain.training.ending import StoppedEarlyError
        from llmtrain.training.loop import train as run

        try:
            return run(config)
        except StoppedEarlyError as stopped:
            return Result(
                config.run_dir, "stopped", stopped.exit_code, stopped.reason, stopped.step
            )


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'llmtrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
