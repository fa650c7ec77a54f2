"""Plain values of the doctor: what it checks, and the result of a check."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from llmtrain.config.schema import Config
from llmtrain.distributed.launch.named import named_strategy
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.tools.launch.file import LaunchFile

T = TypeVar("T")
State = Literal["ok", "warning", "error"]  # from the best to the worst


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    found: what was found, in words
    remedy: what to do about it; "" if nothing needs to be done
    """

    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class DoctorContext:
    """The run that is to be started, and the time at which the doctor began.

    config: the run's config; None = only the machine is checked
    launch: what starts the ranks: a config file of accelerate, or several machines
    come_and_go: whether the machines are those of `--nodes MIN:MAX`
    wall: wall-clock time at the beginning, in seconds
    steady: monotonic time at the beginning, in seconds
    """

    config: Config | None
    launch: LaunchFile | None
    come_and_go: bool
    env: Mapping[str, str]
    wall: float
    steady: float

    @property
    def run(self) -> Config:
        """The config, for a check that runs only if there is one."""
        assert self.config is not None
        return self.config

    @property
    def machines(self) -> int:
        """The number of machines of the run."""
        return self.launch.machines if self.launch else 1

    @property
    def processes(self) -> int:
        """The number of ranks of the run, on all machines together."""
        return self.launch.processes if self.launch else 1

    @property
    def here(self) -> int:
        """The number of ranks of the run on this machine."""
        return max(1, self.processes // self.machines)

    @property
    def strategy(self) -> str:
        """The strategy of the launch file, else of the config; "" if neither is given."""
        named = named_strategy(self.launch.environment) if self.launch else None
        return named or (self.config.distributed.strategy if self.config else "")


def ok(found: str, remedy: str = "") -> Verdict:
    """Return a verdict that nothing needs to be done."""
    return Verdict("ok", found, remedy)


def warning(found: str, remedy: str) -> Verdict:
    """Return a verdict that a run would start, but may have a problem later."""
    return Verdict("warning", found, remedy)


def error(found: str, remedy: str) -> Verdict:
    """Return a verdict that a run would not start, or would fail."""
    return Verdict("error", found, remedy)


def refusal(problems: Sequence[Problem], where: str = "") -> Verdict:
    """Return an error with the problems that a start would report, on one line.

    where: what the problems are in, such as a file
    """
    heads = (one.key if one.value is None else f"{one.key} = {one.value}" for one in problems)
    finding = "; ".join(f"{head} ({one.reason})" for head, one in zip(heads, problems, strict=True))
    finding = " ".join(finding.split())  # the plan's table has a line for each strategy
    remedies = dict.fromkeys(problem.remedy for problem in problems if problem.remedy)
    remedy = "; ".join(remedies) or "change it as expected"
    return error(f"{where}: {finding}" if where else finding, remedy)


def run_check(work: Callable[[], T]) -> T | Verdict:
    """Run a check; return its result, or the verdict on why it failed. Raises nothing."""
    try:
        return work()
    except UserError as wrong:
        return refusal(wrong.problems, wrong.where)
    except RunError as failed:
        return error(str(failed.args[0]), failed.remedy)
    except Exception as broken:  # a check that fails must not prevent the others
        finding = f"the look at it failed: {type(broken).__name__}: {broken}"
        return error(finding, "correct what it names, or leave it out: --skip NAME")


def join(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine several verdicts on one thing; the worst state is that of the result."""
    listed = list(verdicts)
    state = max((one.state for one in listed), key=get_args(State).index)
    finding = "; ".join(one.found for one in listed if one.found)
    return Verdict(state, finding, "; ".join(one.remedy for one in listed if one.remedy))
