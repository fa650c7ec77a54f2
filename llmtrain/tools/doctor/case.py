"""What the doctor checks, and the result of a check: plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from llmtrain.config.schema import Config
from llmtrain.distributed.launch.named import named_strategy
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.tools.launch.file import LaunchFile

T = TypeVar("T")
State = Literal["ok", "warning", "error"]
_RANKS: tuple[State, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    found: what is there, in words
    remedy: what to do; "" for nothing
    """

    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be started, and when the look at it began.

    config: None = the machine alone is looked at
    launch: a config file of accelerate, if one was named
    wall, steady: seconds of the two clocks at the beginning
    """

    config: Config | None
    launch: LaunchFile | None
    env: Mapping[str, str]
    wall: float
    steady: float

    @property
    def run_dir(self) -> Path:
        """Where the run of the config would live."""
        assert self.config is not None
        return self.config.run_dir

    @property
    def machines(self) -> int:
        """Over how many machines the run would be spread."""
        return self.launch.machines if self.launch else 1

    @property
    def processes(self) -> int:
        """Ranks of the run, over all machines."""
        return self.launch.processes if self.launch else 1

    @property
    def strategy(self) -> str:
        """As the launch file names it, or the config asks for it; "" where neither does."""
        named = named_strategy(self.launch.environment) if self.launch else None
        return named or (self.config.distributed.strategy if self.config else "")


def ok(found: str, remedy: str = "") -> Verdict:
    """Nothing to do."""
    return Verdict("ok", found, remedy)


def warning(found: str, remedy: str) -> Verdict:
    """A run would start, but may meet a problem."""
    return Verdict("warning", found, remedy)


def error(found: str, remedy: str) -> Verdict:
    """A run would not start, or would fail."""
    return Verdict("error", found, remedy)


def refusal(problems: Iterable[Problem], where: str = "") -> Verdict:
    """What a start would say, in one line. where: what the problems are in, such as a file."""
    listed = list(problems)
    found = "; ".join(_in_a_line(problem) for problem in listed)
    found = f"{where}: {found}" if where else found
    remedies = dict.fromkeys(problem.remedy for problem in listed if problem.remedy)
    return error(found, "; ".join(remedies) or "change it as expected")


def attempt(work: Callable[[], T]) -> tuple[T | None, Verdict | None]:
    """Run a check: its result, or the reason why it has none. No exception passes."""
    try:
        return work(), None
    except UserError as wrong:
        return None, refusal(wrong.problems, wrong.where)
    except RunError as failed:
        return None, error(str(failed.args[0]), failed.remedy)
    except Exception as broken:  # no look may keep the others from being made
        found = f"the look at it failed: {type(broken).__name__}: {broken}"
        return None, error(found, "correct what it names, or leave it out: --skip NAME")


def join(verdicts: Iterable[Verdict]) -> Verdict:
    """Several looks at one thing: the worst state counts."""
    listed = list(verdicts)
    state = max((one.state for one in listed), key=_RANKS.index)
    found = "; ".join(one.found for one in listed if one.found)
    return Verdict(state, found, "; ".join(one.remedy for one in listed if one.remedy))


def _in_a_line(problem: Problem) -> str:
    head = problem.key if problem.value is None else f"{problem.key} = {problem.value}"
    return f"{head} ({problem.reason})"
