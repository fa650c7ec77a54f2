"""Why a rank failed: `logs/rank-R.failed`, for other processes, which only see that it is gone.

A rank that loses a peer cannot ask it any more, and a launcher reports neither to the ranks nor to
its caller which exit code came first. So a rank that fails writes its code and its reason before it
cleans up anything. A cause (1, 2, 74) outranks its consequence (75).

    rank 1  a row is bad ──► rank-1.failed {2, …} ──► exit 2
    rank 0  peer gone, 75 ──► looks there for 2 s ──► status.json {failed, 2, …} ──► exit 2

The trap: marks of an earlier start may still exist. On one host a mark belongs to this start if the
same process started both ranks, for the same attempt. Nothing heavy is imported.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llmtrain import durable
from llmtrain.config import secrets
from llmtrain.errors import RESTARTABLE, RunError, UserError, exit_code_of, precedence
from llmtrain.processes import is_alive, start_time
from llmtrain.rundir.contents import LOGS

LOOK_SECONDS = 2.0
_LOOKS = 20
_NAME = re.compile(r"rank-(\d+)\.failed")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank wrote before it ended.

    code: its exit code; 0 = it was asked to stop before ranks could talk
    lost_peer: it failed because another rank was gone
    launcher: the process that started it, on its host
    attempt: of that launcher, counted from 0
    config: digest of its config; "" = unknown
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
    """Write the mark of this rank, in place of an older one, if there is a run directory.

    An error of the disk is logged: it must not hinder the end of the rank.
    """
    host, launcher, attempt = _this_start()
    text = secrets.hider(os.environ)(reason)
    mark = Mark(rank, code, text, lost_peer, host, launcher, attempt, config)
    path = _path(run_dir, rank)
    try:
        # Not its parents: where a node does not see the run directory, it must not make one.
        path.parent.mkdir(exist_ok=True)
        durable.write(path, (json.dumps(asdict(mark)) + "\n").encode(), sync=False)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("could not write %s: %s", path, error)


def leave(
    run_dir: Path, rank: int, error: Exception, config: str, *, lost_peer: bool = False
) -> None:
    """Write the mark of an error. config: digest of the config."""
    expected = isinstance(error, UserError | RunError)
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    write(run_dir, rank, exit_code_of(error), text, lost_peer=lost_peer, config=config)


def clear(run_dir: Path, rank: int, world_size: int) -> None:
    """Remove the mark of this rank; rank 0, which holds the lock, also those of higher ranks."""
    _launcher()
    ranks = [rank, *(one for one in _ranks(run_dir) if rank == 0 and one >= world_size)]
    for one in ranks:
        try:
            _path(run_dir, one).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", _path(run_dir, one), error)


def read(run_dir: Path) -> list[Mark]:
    """Read every mark, of any start, in the order of ranks."""
    return _read_all(_path(run_dir, rank) for rank in sorted(_ranks(run_dir)))


def has(run_dir: Path, rank: int) -> bool:
    """Whether this rank has written its mark in this start."""
    return any(mark.rank == rank and _is_of_this_start(mark) for mark in read(run_dir))


def worst(marks: Iterable[Mark]) -> Mark | None:
    """Return the mark that explains the others: a cause, else any but a lost peer, else None."""
    telling = [mark for mark in marks if mark.code and not mark.lost_peer]
    return min(telling, key=lambda mark: precedence(mark.code), default=None)


def outranking(
    run_dir: Path,
    world_size: int,
    seconds: float = LOOK_SECONDS,
    wait: Callable[[float], object] = time.sleep,
) -> Mark | None:
    """Return the mark of another rank of this start that explains why rank 0 has lost a peer.

    Looks for it during that many seconds, until there is a cause.
    """
    found = _others(run_dir, world_size)
    for _ in range(_LOOKS):
        if found is None or not found.is_cause:
            wait(seconds / _LOOKS)
            found = _others(run_dir, world_size)
    return found


def refused_before(run_dir: Path, config: str) -> Mark | None:
    """Return the mark of an earlier attempt of this launcher that this config ended, or None.

    Torch's launcher starts ranks again after any code; bad input (2) would only be refused again.
    """
    host, launcher, attempt = _this_start()
    for mark in read(run_dir):
        mine = (mark.host, mark.launcher, mark.config) == (host, launcher, config)
        if mine and mark.attempt < attempt and mark.code == UserError.exit_code:
            return mark
    return None


def silent(run_dir: Path, environ: Mapping[str, str]) -> list[int]:
    """Return ranks of this launch and host that ended without a mark; [] where it is not known.

    A launcher sends all ranks the signal that a person would send it, also when it has lost a rank.
    A rank that ends because of the signal writes a mark with code 0.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return []
    rank, local = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    first = rank - local
    there = _alive()  # before the marks are read: a rank writes its mark and then ends
    if rank not in there:
        return []
    there |= {mark.rank for mark in read(run_dir) if _is_of_this_start(mark)}
    here = range(first, first + int(environ["LOCAL_WORLD_SIZE"]))
    return [one for one in here if one not in there]


def versions(run_dir: Path) -> dict[Path, tuple[int, int]]:
    """Return which marks exist now, so that `new_since` can tell new ones from them."""
    found = {}
    for rank in _ranks(run_dir):
        path = _path(run_dir, rank)
        with suppress(FileNotFoundError):  # its rank has begun again
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_mtime_ns)
    return found


def new_since(run_dir: Path, before: Mapping[Path, tuple[int, int]]) -> list[Mark]:
    """Read the marks that are not among these `versions`, in the order of their paths."""
    changed = [path for path, version in versions(run_dir).items() if before.get(path) != version]
    return _read_all(sorted(changed))


def _others(run_dir: Path, world_size: int) -> Mark | None:
    marks = (mark for mark in read(run_dir) if 0 < mark.rank < world_size)
    return worst(mark for mark in marks if _is_of_this_start(mark))


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank-{rank}.failed"


def _ranks(run_dir: Path) -> list[int]:
    names = [path.name for path in (run_dir / LOGS).glob("rank-*.failed")]
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _read_all(paths: Iterable[Path]) -> list[Mark]:
    """Read the marks in these files; leave out files that are gone or not marks."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError, IsADirectoryError, ValueError, TypeError):
            mark = Mark(**json.loads(path.read_bytes()))
            if isinstance(mark.code, int) and isinstance(mark.rank, int):
                found.append(mark)
    return found


def _this_start() -> tuple[str, str, int]:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return socket.gethostname(), _launcher(), int(attempt) if attempt.isdigit() else 0


@functools.cache
def _launcher() -> str:
    """Return the launcher as it was at the first call: when it dies, the parent is another."""
    parent = os.getppid()
    return f"{parent}:{start_time(parent) or ''}"


def _is_of_this_start(mark: Mark) -> bool:
    host, launcher, attempt = _this_start()
    return mark.host != host or (mark.launcher, mark.attempt) == (launcher, attempt)


def _alive() -> set[int]:
    """Return the ranks that the parent of this process has started and that have not ended."""
    found = set()
    for listing in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in _text(listing).split():
            found_rank = re.search(r"(?:^|\0)RANK=(\d+)\0", _text(Path(f"/proc/{pid}/environ")))
            if found_rank and is_alive(int(pid)):
                found.add(int(found_rank[1]))
    return found


def _text(path: Path) -> str:
    """Read a file of /proc; "" if its process is gone or belongs to somebody else."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
