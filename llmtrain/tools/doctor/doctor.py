"""Check whether this machine is ready for a run: everything that a start or a run relies on.

The checks are independent. One that fails unexpectedly gives an error line, and the others still
run. Nothing is written to the run's directory.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError
from llmtrain.tools.doctor import launch as doctor_launch
from llmtrain.tools.doctor import machine, memory_plan, place, reduce, sources
from llmtrain.tools.doctor.case import Case, State, Verdict, attempt, ok
from llmtrain.tools.doctor.launch import describe_launch
from llmtrain.tools.launch.file import read_launch_file

Look = Callable[[], Verdict]

CONFIG = "config"
LAUNCH = "launch"
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
    "clocks": place.clocks,
}
OF_CONFIG = ("directory", "model", "plan", "disk", "data")
ALL_REDUCE = "all-reduce"
NAMES = (CONFIG, LAUNCH, *OF_MACHINE, *OF_CONFIG, ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis.

    found: what was found, in words
    remedy: what to do about it; "" if nothing needs to be done
    """

    name: str
    state: State
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All lines of the doctor, in the order of the checks."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        """Whether any line is an error."""
        return any(check.state == "error" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {"checks": [asdict(check) for check in self.checks]}


def doctor(
    config_file: str | None = None,
    overrides: Sequence[str] = (),
    accelerate_file: Path | None = None,
    skip: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    told: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Yield a check for everything that a start of this config relies on.

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
    read = None if config_file is None else functools.partial(load_config, config_file, overrides)
    env = dict(os.environ if env is None else env)
    checks = _checks(read, accelerate_file, env, frozenset(skip), told)
    return (check for check in checks if check.name not in skip)


def _checks(
    read: Callable[[], Config] | None,
    accelerate_file: Path | None,
    env: Mapping[str, str],
    skip: Collection[str],
    told: Callable[[str], None],
) -> Iterator[Check]:
    """Yield all checks. What depends on a config or file that does not load is not checked."""
    config = launch = None
    if read is not None:
        config, broken = attempt(read)
        yield _line(CONFIG, broken or ok(f"loads; the run lives in {config and config.run.dir}"))
    if accelerate_file is not None:
        read_file = functools.partial(read_launch_file, accelerate_file, None)
        yield _line(LAUNCH, _seen(lambda: describe_launch(read_file(config))))
        launch, _ = attempt(read_file)  # without the config, which the file may contradict
    wall, steady = time.time(), time.monotonic()  # noqa: TID251  # two clocks are compared
    for name, look in _looks(Case(config, launch, env, wall, steady)).items():
        if name not in skip:
            told(name)
            yield _line(name, _seen(look))


def _looks(case: Case) -> dict[str, Look]:
    """Return the checks to run by name, cheap ones first."""
    looks: dict[str, Look] = {
        name: functools.partial(look, case) for name, look in OF_MACHINE.items()
    }
    if case.config is not None:
        work = functools.partial(sources.describe, case.config, case.run_dir)
        describe = functools.cache(functools.partial(attempt, work))  # once, even if it fails
        looks["directory"] = functools.partial(place.directory, case)
        looks["model"] = functools.partial(sources.model, describe)
        looks["plan"] = functools.partial(memory_plan.plan, case)
        looks["disk"] = functools.partial(sources.disk, case, describe)
        looks["data"] = functools.partial(sources.data, case)
    looks[ALL_REDUCE] = functools.partial(reduce.all_reduce, case)
    return looks


def _seen(look: Look) -> Verdict:
    verdict, broken = attempt(look)
    return verdict or broken or ok("")


def _line(name: str, verdict: Verdict) -> Check:
    return Check(name, verdict.state, verdict.found, verdict.remedy)
