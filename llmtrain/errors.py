"""The errors that a person reads when something went wrong.

A `UserError` is for what a person can correct (exit code 2): it collects every problem, so that one
start reports them all. A `RunError` is for a failure of the machine: it has an exit code and a
remedy. Any other exception is a defect: its traceback is shown and the exit code is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain.text import first_line, harmless

UNKNOWN_KEY = "unknown key"
DISK_FAILED = 74
RESTARTABLE = 75

# Exit code → what it means, and what to do; for the reference pages.
EXIT_CODES = {
    0: (
        "finished, or stopped on request after a complete checkpoint",
        "to continue a stopped run, give the same command again",
    ),
    2: (
        "bad input: a config, a row of the data, an option, a run directory that is in use, a "
        "device without enough memory",
        "change what the message says; all problems are listed at once",
    ),
    DISK_FAILED: (
        "the disk failed permanently: three saves in a row, or the last one",
        "make room or repair the disk, then give the same command again",
    ),
    RESTARTABLE: (
        "a failure that a restart may cure: a process died, the network was away for 15 minutes, "
        "a rank did not answer; under `--nodes MIN:MAX` also a stop that the launcher caused",
        "give the same command again, or let `llmtrain supervise` do it",
    ),
    1: (
        "anything else: training that diverged, a defect of llmtrain or of a library",
        "read the traceback; it is in `logs/rank-N.log`, too",
    ),
}

NOT_ON_WINDOWS = "llmtrain runs on Linux, not on Windows: install it in WSL (`wsl --install`)"

_LINES = "\n"  # not escaped in messages of several lines


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct.

    key: the config key, file or flag
    value: what was found; None = nothing worth showing
    expected: what would be right, or only that the key is unknown
    remedy: what to do, if `expected` does not say it already
    """

    key: str
    value: object
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        head = self.key if self.value is None else f"{self.key} = {self.value}"
        lines = [f"  {harmless(head)}", f"    {harmless(self.reason, keep=_LINES)}"]
        if self.remedy:
            lines.append(f"    try:      {harmless(self.remedy, keep=_LINES)}")
        return "\n".join(lines)

    @property
    def reason(self) -> str:
        """What is wrong, as the message has it: `expected: …`, or `unknown key …`."""
        unknown = self.expected.startswith(UNKNOWN_KEY)
        return self.expected if unknown else f"expected: {self.expected}"


class UserError(Exception):
    """Bad input: exit code 2, one message, no traceback."""

    exit_code = 2

    def __init__(self, *problems: Problem, where: str = "") -> None:
        super().__init__(*problems)
        self.problems = problems
        self.where = where

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        title = f"{count} in {harmless(self.where)}" if self.where else count
        return "\n".join([title, *(str(problem) for problem in self.problems)])


class RefusedError(UserError):
    """Bad input that the processes of a launched run have reported, with their message."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return harmless(self.text, keep=_LINES)


def raise_any(problems: Iterable[Problem], where: str = "") -> None:
    """Raise UserError with every problem, if there is any. where: as its title names it."""
    if all_problems := tuple(problems):
        raise UserError(*all_problems, where=where)


class RunError(Exception):
    """A failure of the machine: disk, network, a lost peer.

    exit_code: 74 (the disk failed permanently), 75 (a restart may help) or 1
    remedy: what to do
    """

    def __init__(self, message: str, exit_code: int, remedy: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RunError], tuple[object, ...]]:
        return RunError, (self.args[0], self.exit_code, self.remedy)  # to send it to a process

    def __str__(self) -> str:
        return harmless(f"{self.args[0]}\n    next:     {self.remedy}", keep=_LINES)


@contextmanager
def needed_on_disk(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into RunError (74): a run cannot continue without this write."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        remedy = "make room or repair the disk, then give the same command again"
        raise RunError(message, DISK_FAILED, remedy) from error


@contextmanager
def usable(key: str, value: object, expected: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError in the block into UserError, which says why behind what was expected."""
    try:
        yield
    except OSError as error:
        why = f"{expected} ({error.strerror or error})"
        raise UserError(Problem(key, value, why, remedy)) from error


def explained(error: BaseException) -> BaseException:
    """Return a UserError for an error of torch that a person can correct, any other as it is.

    They are a device that ran out of memory, and an operation without a deterministic kernel. They
    are known by their names and words, since nothing here imports torch.
    """
    operation, without, _ = first_line(error).partition(" does not have a deterministic")
    if without and isinstance(error, RuntimeError):
        expected = f"false for this model on this device: {operation} has no deterministic kernel"
        remedy = "training.deterministic=false, or another model"
        return UserError(Problem("training.deterministic", True, expected, remedy))
    if type(error).__name__ != "OutOfMemoryError":
        return error
    why, _, _ = first_line(error).partition(" Including ")  # how torch divided the memory it has
    remedy = (
        "a smaller training.micro_batch_size, model.activation_checkpointing=full, or what "
        "`llmtrain plan` proposes for this device"
    )
    return UserError(Problem("device memory", None, f"room for this run ({why})", remedy))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error: 1 for a defect."""
    known = explained(error)
    return known.exit_code if isinstance(known, UserError | RunError) else 1


def precedence(exit_code: int) -> int:
    """Return a number that is lower for a cause than for its consequences.

    Bad input (2) comes first, then the disk (74), then a defect or any other code, and last a lost
    peer (75).
    """
    return {UserError.exit_code: 0, DISK_FAILED: 1, RESTARTABLE: 3}.get(exit_code, 2)


class PeerError(RunError):
    """The failure of another rank, raised on this one with the other's message and exit code."""

    def __init__(self, text: str, exit_code: int, rank: int) -> None:
        super().__init__(text, exit_code, f"the details are in logs/rank-{rank}.log")
        self.rank = rank

    def __str__(self) -> str:
        return harmless(str(self.args[0]), keep=_LINES)
