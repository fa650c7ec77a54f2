"""Check whether this machine is ready for a run: everything that a start or a run relies on.

The checks are independent. One that fails unexpectedly gives an error line, and the others still
run. Nothing is written to the run's directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError
from llmtrain.tools.doctor import machine, run
from llmtrain.tools.doctor import machine as doctor_launch
from llmtrain.tools.doctor.case import Case, Verdict, attempt, ok
from llmtrain.tools.doctor.machine import describe_launch
from llmtrain.tools.launch.file import read_launch_file

CONFIG = "config"
LAUNCH = "launch"
# Cheap checks first.
OF_MACHINE: dict[str, Callable[[Case], Verdict]] = {
    "devices": machine.devices,
    "memory": machine.memory,
    "limits": machine.limits,
    "versions": machine.versions,
    "compiler": machine.compiler,
    "extensions": machine.extensions,
    "environment": doctor_launch.environment,
    "accelerate": doctor_launch.default_file,
    "rendezvous": doctor_launch.rendezvous,
    "clocks": run.clocks,
}
OF_CONFIG: dict[str, Callable[[Case], Verdict]] = {
    "directory": run.directory,
    "base": run.base,
    "model": run.model,
    "plan": run.plan,
    "disk": run.disk,
    "data": run.data,
}
ALL_REDUCE = "all-reduce"
NAMES = (CONFIG, LAUNCH, *OF_MACHINE, *OF_CONFIG, ALL_REDUCE)


def doctor(
    config_file: str | None = None,
    overrides: Sequence[str] = (),
    accelerate_file: Path | None = None,
    skip: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    told: Callable[[str], None] = lambda name: None,
) -> Iterator[tuple[str, Verdict]]:
    """Yield name and result of a check for everything that a start of this config relies on.

    config_file: None = only the machine is checked
    accelerate_file: the file that the run is to be launched with
    skip: names of checks that are left out
    env: the environment to check, in place of this process's
    told: called with the name of each check before it runs, as some take a while

    Raises UserError at the call, for an unknown name in `skip` and for overrides without a config.
    The iterator itself raises nothing.
    """
    unknown = [name for name in skip if name not in NAMES]
    if unknown:
        expected = f"a name of a check: {', '.join(NAMES)}"
        raise UserError(*(Problem("--skip", name, expected) for name in unknown))
    if config_file is None and overrides:
        raise UserError(Problem("overrides", ", ".join(overrides), "a config that they change"))
    read = None if config_file is None else partial(load_config, config_file, overrides)
    env = dict(os.environ if env is None else env)
    checks = _checks(read, accelerate_file, env, skip, told)
    return ((name, verdict) for name, verdict in checks if name not in skip)


def _checks(
    read: Callable[[], Config] | None,
    accelerate_file: Path | None,
    env: Mapping[str, str],
    skip: Collection[str],
    told: Callable[[str], None],
) -> Iterator[tuple[str, Verdict]]:
    """Yield all checks. What depends on a config or file that does not load is not checked."""
    config = launch = None
    if read is not None:
        loaded = attempt(read)
        if isinstance(loaded, Config):
            config, loaded = loaded, ok(f"loads; the run lives in {loaded.run.dir}")
        yield CONFIG, loaded
    if accelerate_file is not None:
        read_file = partial(read_launch_file, accelerate_file, None)
        yield LAUNCH, attempt(lambda: describe_launch(read_file(config)))
        file = attempt(read_file)  # without the config, which the file may contradict
        launch = None if isinstance(file, Verdict) else file
    wall, steady = time.time(), time.monotonic()  # noqa: TID251  # two clocks are compared
    case = Case(config, launch, env, wall, steady)
    looks = OF_MACHINE | (OF_CONFIG if config else {}) | {ALL_REDUCE: machine.all_reduce}
    for name, look in looks.items():
        if name not in skip:
            told(name)
            yield name, attempt(partial(look, case))
