"""How all ranks make one decision together, with any implementation of `Ranks`.

Each rank does its part, and then all learn who failed. Either all continue or all raise: a rank
that raised alone would leave the others waiting in the next collective. Every function here except
`captured`, `refuse` and `failure` is collective. Values are sent as JSON; nothing is pickled.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from llmtrain import system
from llmtrain.errors import PeerError, exit_code_of, explained, precedence
from llmtrain.types import Failure, Ranks, Vote

T = TypeVar("T")


class Alone:
    """`Ranks` of a single process."""

    rank = 0
    world_size = 1

    def gather(self, body: bytes) -> list[bytes]:
        """Return the only body."""
        return [body]

    def broadcast(self, body: bytes) -> bytes:
        """Return the only body."""
        return body

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        """Return the only vote."""
        return Vote(() if error is None else (failure(0, error),), (body,))

    def highest(self, value: int) -> int:
        """Return the only number."""
        return value


class Gathering:
    """What `Ranks` that can gather and broadcast have in common."""

    def vote(self: Ranks, error: BaseException | None, body: bytes = b"") -> Vote:
        """Send this rank's error to all ranks and return theirs."""
        return count_votes(self, error, body)

    def highest(self: Ranks, value: int) -> int:
        """Return the largest number that any rank gives, on every rank."""
        values = self.gather(b"%d" % value)
        return int(self.broadcast(b"%d" % max(map(int, values), default=0)))


def failure(rank: int, error: BaseException) -> Failure:
    """Describe an exception as the failed vote of a rank."""
    error = explained(error)
    number = error.errno if isinstance(error, OSError) else None
    file = str(error.filename) if isinstance(error, OSError) and error.filename else None
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Failure(rank, type(error).__name__, text, exit_code_of(error), number, file)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a piece of work returned, or the exception that ended it."""

    returned: tuple[T, ...] = ()
    error: Exception | None = None

    def result(self) -> T:
        """Return the value, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.returned[0]


def captured(work: Callable[[], T]) -> Outcome[T]:
    """Do `work` and keep its result or exception, so that other ranks can first learn of it."""
    try:
        return Outcome((work(),))
    except Exception as caught:  # a vote reports any exception
        return Outcome(error=caught)


def agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work` on every rank; if it fails on any, raise on all.

    The failing rank raises its own error, the others a `PeerError` with its text and exit code.
    """
    outcome = captured(work)
    refuse(ranks.vote(outcome.error), outcome.error)
    return outcome.result()


def refuse(vote: Vote, error: BaseException | None) -> None:
    """Raise if any rank failed: this rank's own `error`, else a PeerError with the first cause."""
    if error is not None:
        raise error
    if vote.failures:
        first = min(vote.failures, key=lambda one: precedence(one.exit_code))
        raise PeerError(first.text, first.exit_code, first.rank)


def on_rank_zero(ranks: Ranks, work: Callable[[], object]) -> None:
    """Do `work` on rank 0 alone while the others wait; raise on all if it fails."""
    agreed(ranks, lambda: work() if ranks.rank == 0 else None)


def from_rank_zero(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone and return its value, sent as JSON, on every rank."""
    body = agreed(ranks, lambda: json.dumps(work()).encode() if ranks.rank == 0 else b"")
    value: T = json.loads(ranks.broadcast(body))
    return value


def gathered(ranks: Ranks, value: object) -> list[Any]:
    """Return every rank's value at rank 0, in the order of ranks, and an empty list elsewhere."""
    return [json.loads(body) for body in ranks.gather(json.dumps(value).encode())]


def count_votes(ranks: Ranks, error: BaseException | None, body: bytes) -> Vote:
    """Implement `Ranks.vote` for ranks that can gather and broadcast."""
    _, phase = system.last_beat()
    system.beat(f"a vote of all processes ({phase})")
    own_failure = b"" if error is None else json.dumps(asdict(failure(ranks.rank, error))).encode()
    messages = ranks.gather(len(own_failure).to_bytes(8, "little") + own_failure + body)
    ballots = [_split(ballot) for ballot in messages]
    failed = [json.loads(error) for error, _ in ballots if error]
    failed = json.loads(ranks.broadcast(json.dumps(failed).encode()))
    system.beat(phase)
    return Vote(tuple(Failure(**one) for one in failed), tuple(body for _, body in ballots))


def _split(ballot: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(ballot[:8], "little")
    return ballot[8 : 8 + size], ballot[8 + size :]
