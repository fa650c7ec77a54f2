"""Why a rank failed: `logs/rank-R.failed`, for those who only see that it is gone.

A rank that loses a peer cannot ask it any more, and a launcher tells neither the ranks nor its
caller which code came first. So a rank that fails leaves its code and its reason before it cleans
up anything; a cause (1, 2, 74) outranks what merely follows from it (75).

    rank 1  a row is bad ──► rank-1.failed {2, …} ──► exit 2
    rank 0  peer gone, 75 ──► looks there for 2 s ──► status.json {failed, 2, …} ──► exit 2

The trap: marks of an earlier start may still lie there. On one host a mark belongs to this start if
the same process started both ranks, for the same attempt. Nothing heavy is imported.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llmtrain.config import secrets
from llmtrain.errors import DISK_FAILED, RESTARTABLE, UserError
from llmtrain.rundir.contents import LOGS
from llmtrain.rundir.lock import start_time

LOOK_SECONDS = 2.0
_LOOKS = 20
_ORDER = {UserError.exit_code: 0, DISK_FAILED: 1, 1: 2, RESTARTABLE: 3}
_NAME = re.compile(r"rank-(\d+)\.failed")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank left behind. code: 0 for one that was asked to stop before ranks could talk.

    lost_peer: it failed since another rank was gone · launcher: the process that started it, on its
    host · attempt: of that launcher, counted from 0 · config: digest of its config, "" if unknown.
    """

    rank: int
    code: int
    reason: str
    lost_peer: bool
    host: str
    launcher: str
    attempt: int
    config: str = ""

    @property
    def is_cause(self) -> bool:
        """Whether this rank's failure is its own, and one that a restart does not cure."""
        return self.code not in (0, RESTARTABLE)


def write(
    run_dir: Path, rank: int, code: int, reason: str, *, lost_peer: bool = False, config: str = ""
) -> None:
    """Leave the mark of this rank, in place of an older one, where there is a run directory.

    A disk that refuses is logged: the end of the rank goes on.
    """
    host, launcher, attempt = _this_start()
    said = secrets.hider(os.environ)(reason)
    mark = Mark(rank, code, said, lost_peer, host, launcher, attempt, config)
    path = _path(run_dir, rank)
    partial = path.with_suffix(".partial")
    try:
        # Not its parents: where a node does not see the run directory, none may appear.
        path.parent.mkdir(exist_ok=True)
        partial.write_text(json.dumps(asdict(mark)) + "\n", encoding="utf-8")
        partial.replace(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("could not leave %s: %s", path, error)


def leave(
    run_dir: Path, rank: int, error: Exception, config: str, *, lost_peer: bool = False
) -> None:
    """Leave the mark of an error. config: its digest."""
    code = getattr(error, "exit_code", 1)
    said = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
    write(run_dir, rank, code, said, lost_peer=lost_peer, config=config)


def clear(run_dir: Path, rank: int, world_size: int) -> None:
    """Remove the mark of this rank; rank 0, with the lock held, those of ranks that are no more."""
    _launcher()
    ranks = [rank, *(one for one in _ranks(run_dir) if rank == 0 and one >= world_size)]
    for one in ranks:
        try:
            _path(run_dir, one).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", _path(run_dir, one), error)


def read(run_dir: Path) -> list[Mark]:
    """Every mark that lies there, of whatever start, by rank."""
    found = (_read(_path(run_dir, rank)) for rank in sorted(_ranks(run_dir)))
    return [mark for mark in found if mark is not None]


def has(run_dir: Path, rank: int) -> bool:
    """Whether this start of this rank has left its mark."""
    return any(mark.rank == rank and _is_of_this_start(mark) for mark in read(run_dir))


def worst(marks: Iterable[Mark]) -> Mark | None:
    """The one that explains the others: a cause, else one that is no lost peer; None if neither."""
    telling = [mark for mark in marks if mark.code and not mark.lost_peer]
    return min(telling, key=lambda mark: _ORDER.get(mark.code, 2), default=None)


def outranking(
    run_dir: Path,
    world_size: int,
    seconds: float = LOOK_SECONDS,
    wait: Callable[[float], object] = time.sleep,
) -> Mark | None:
    """For rank 0 that has lost a peer: the mark of another rank of this start which says more.

    Looks for so many seconds, until a cause is there.
    """
    found = _others(run_dir, world_size)
    for _ in range(_LOOKS):
        if found is not None and found.is_cause:
            break
        wait(seconds / _LOOKS)
        found = _others(run_dir, world_size)
    return found


def refused_before(run_dir: Path, config: str) -> Mark | None:
    """In a rank that its launcher started again: the mark of an attempt that this config ended.

    Torch's launcher starts anew after any code; bad input (2) would only be refused again.
    """
    host, launcher, attempt = _this_start()
    for mark in read(run_dir):
        mine = (mark.host, mark.launcher, mark.config) == (host, launcher, config)
        if mine and mark.attempt < attempt and mark.code == UserError.exit_code:
            return mark
    return None


def silent(run_dir: Path, environ: Mapping[str, str]) -> list[int]:
    """Ranks of this launch and host that are gone and left no mark; [] where it cannot be told.

    A launcher ends all ranks with the signal that it gets from a person, whether it got one or lost
    a rank. A rank that ends for the signal leaves a mark of code 0.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return []
    rank, local = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    first = rank - local
    there = _alive()  # before the marks are read: a rank leaves its own and ends then
    if rank not in there:
        return []
    there |= {mark.rank for mark in read(run_dir) if _is_of_this_start(mark)}
    here = range(first, first + int(environ["LOCAL_WORLD_SIZE"]))
    return [one for one in here if one not in there]


def seen(run_dir: Path) -> dict[Path, tuple[int, int]]:
    """Which marks lie there now, so that new ones can be told from them."""
    found = {}
    for rank in _ranks(run_dir):
        path = _path(run_dir, rank)
        try:
            stat = path.stat()
        except FileNotFoundError:  # its rank has begun anew
            continue
        found[path] = (stat.st_ino, stat.st_mtime_ns)
    return found


def new_since(run_dir: Path, before: Mapping[Path, tuple[int, int]]) -> list[Mark]:
    """The marks that `seen` did not find, by rank."""
    changed = [path for path, version in seen(run_dir).items() if before.get(path) != version]
    found = (_read(path) for path in sorted(changed))
    return [mark for mark in found if mark is not None]


def _others(run_dir: Path, world_size: int) -> Mark | None:
    marks = (mark for mark in read(run_dir) if 0 < mark.rank < world_size)
    return worst(mark for mark in marks if _is_of_this_start(mark))


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank-{rank}.failed"


def _ranks(run_dir: Path) -> list[int]:
    names = [path.name for path in (run_dir / LOGS).glob("rank-*.failed")]
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _read(path: Path) -> Mark | None:
    """None if it is gone, or no mark of ours."""
    try:
        mark = Mark(**json.loads(path.read_bytes()))
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError):
        return None
    return mark if isinstance(mark.code, int) and isinstance(mark.rank, int) else None


def _this_start() -> tuple[str, str, int]:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return socket.gethostname(), _launcher(), int(attempt) if attempt.isdigit() else 0


@functools.cache
def _launcher() -> str:
    """As it was when this rank first asked: a launcher that dies is no parent any more."""
    parent = os.getppid()
    return f"{parent}:{start_time(parent) or ''}"


def _is_of_this_start(mark: Mark) -> bool:
    host, launcher, attempt = _this_start()
    return mark.host != host or (mark.launcher, mark.attempt) == (launcher, attempt)


def _alive() -> set[int]:
    """The ranks that the parent of this process has started and that have not ended."""
    found = set()
    for listing in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in _text(listing).split():
            stat = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            said = re.search(r"(?:^|\0)RANK=(\d+)\0", _text(Path(f"/proc/{pid}/environ")))
            if said and stat and stat[0] not in ("Z", "X"):
                found.add(int(said[1]))
    return found


def _text(path: Path) -> str:
    """What a file of /proc says; "" if its process is gone, or somebody else's."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
