"""The marks of failed ranks, `logs/rank-R.failed`: they let other processes learn why a rank ended.

A rank that loses a peer cannot ask it why, and a launcher reports to neither the ranks nor its
caller which exit code came first. So a rank that fails writes its exit code and its reason to its
mark before it cleans up. A cause (1, 2, 74) outranks its consequence (75).

    rank 1  a row is bad ──► rank-1.failed {2, …} ──► exit 2
    rank 0  peer gone, 75 ──► looks there for 2 s ──► status.json {failed, 2, …} ──► exit 2

The trap: marks of an earlier start may still exist. On one host, a mark belongs to this start if
the same process started both ranks, for the same attempt. This module imports nothing heavy.
"""

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

from llmtrain import system
from llmtrain.config import secrets
from llmtrain.errors import RESTARTABLE, RunError, UserError, exit_code_of, precedence
from llmtrain.rundir.contents import LOGS

LOOK_SECONDS = 2.0
_LOOKS = 20
_NAME = re.compile(r"rank-(\d+)\.failed")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank wrote before it ended.

    code: its exit code; 0 if it was asked to stop before ranks could communicate
    lost_peer: whether it failed because another rank was gone
    launcher: the process that started it, on its host
    attempt: the launcher's attempt, counted from 0
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

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"

    @property
    def is_cause(self) -> bool:
        """Whether the rank failed by itself, for a reason that a restart does not cure."""
        return self.code not in (0, RESTARTABLE)


def write(
    run_dir: Path, rank: int, code: int, reason: str, *, lost_peer: bool = False, config: str = ""
) -> None:
    """Write the mark of this rank, replacing an older one, if the run directory exists.

    An error of the disk is only logged, so that the rank can still end.
    """
    host, launcher, attempt = _this_start()
    text = secrets.hider(os.environ)(reason)
    mark = Mark(rank, code, text, lost_peer, host, launcher, attempt, config)
    path = _path(run_dir, rank)
    try:
        # Without parents: a node that does not see the run directory must not make one.
        path.parent.mkdir(exist_ok=True)
        system.write_durably(path, (json.dumps(asdict(mark)) + "\n").encode(), sync=False)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("could not write %s: %s", path, error)


def leave(
    run_dir: Path, rank: int, error: BaseException, config: str, *, lost_peer: bool = False
) -> None:
    """Write the mark of a rank that fails with `error`. config: digest of the config."""
    expected = isinstance(error, UserError | RunError)
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    write(run_dir, rank, exit_code_of(error), text, lost_peer=lost_peer, config=config)


def clear(run_dir: Path, rank: int, world_size: int) -> None:
    """Remove the mark of this rank. Rank 0 also removes those of ranks ≥ `world_size`."""
    _launcher()
    ranks = [rank, *(one for one in _ranks(run_dir) if rank == 0 and one >= world_size)]
    for one in ranks:
        try:
            _path(run_dir, one).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", _path(run_dir, one), error)


def read(run_dir: Path) -> list[Mark]:
    """Return the marks of all ranks, of any start, in the order of ranks."""
    return _read_all(_path(run_dir, rank) for rank in sorted(_ranks(run_dir)))


def has(run_dir: Path, rank: int) -> bool:
    """Whether this rank has written its mark in this start."""
    return any(mark.rank == rank and _is_of_this_start(mark) for mark in read(run_dir))


def worst(marks: Iterable[Mark]) -> Mark | None:
    """Return the mark that explains the others, or None.

    That is a cause if there is one, else the mark of any failure other than a lost peer.
    """
    telling = [mark for mark in marks if mark.code and not mark.lost_peer]
    return min(telling, key=lambda mark: precedence(mark.code), default=None)


def outranking(
    run_dir: Path, seconds: float = LOOK_SECONDS, wait: Callable[[float], object] = time.sleep
) -> Mark | None:
    """Return the mark of another rank of this start that explains why rank 0 has lost a peer.

    Looks repeatedly for `seconds`, or until it finds a cause.
    """
    worst_mark, world_size = None, int(os.environ.get("WORLD_SIZE", "1"))
    for look in range(_LOOKS + 1):
        if look:
            wait(seconds / _LOOKS)
        marks = (mark for mark in read(run_dir) if 0 < mark.rank < world_size)
        worst_mark = worst(mark for mark in marks if _is_of_this_start(mark))
        if worst_mark is not None and worst_mark.is_cause:
            break
    return worst_mark


def refused_before(run_dir: Path, config: str) -> Mark | None:
    """Return the mark of an earlier attempt of this launcher that refused this config, or None.

    Torch's launcher restarts ranks after any exit code, but bad input (2) would be refused again.
    """
    host, launcher, attempt = _this_start()
    for mark in read(run_dir):
        mine = (mark.host, mark.launcher, mark.config) == (host, launcher, config)
        if mine and mark.attempt < attempt and mark.code == UserError.exit_code:
            return mark
    return None


def silent(run_dir: Path, environ: Mapping[str, str]) -> list[int]:
    """Return the ranks of this launch on this host that ended without a mark; [] if unknown.

    When a launcher has lost a rank, it sends the others the same signal as when a person stops it.
    A rank that ends because of the signal writes a mark with code 0.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return []
    rank, local = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    first = rank - local
    known = _alive()  # before the marks are read: a rank writes its mark and then ends
    if rank not in known:
        return []
    known |= {mark.rank for mark in read(run_dir) if _is_of_this_start(mark)}
    here = range(first, first + int(environ["LOCAL_WORLD_SIZE"]))
    return [one for one in here if one not in known]


def versions(run_dir: Path) -> dict[Path, tuple[int, int]]:
    """Return path → (inode, modification time) of the marks that exist now, for `new_since`."""
    stamps = {}
    for rank in _ranks(run_dir):
        path = _path(run_dir, rank)
        with suppress(FileNotFoundError):  # its rank has started again and removed it
            stat = path.stat()
            stamps[path] = (stat.st_ino, stat.st_mtime_ns)
    return stamps


def new_since(run_dir: Path, before: Mapping[Path, tuple[int, int]]) -> list[Mark]:
    """Return the marks that are new or changed since `versions` returned `before`, by path."""
    changed = [path for path, version in versions(run_dir).items() if before.get(path) != version]
    return _read_all(sorted(changed))


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank-{rank}.failed"


def _ranks(run_dir: Path) -> list[int]:
    names = [path.name for path in (run_dir / LOGS).glob("rank-*.failed")]
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _read_all(paths: Iterable[Path]) -> list[Mark]:
    """Return the marks in these files, without files that are gone or are not marks."""
    marks = []
    for path in paths:
        with suppress(FileNotFoundError, IsADirectoryError, ValueError, TypeError):
            mark = Mark(**json.loads(path.read_bytes()))
            if isinstance(mark.code, int) and isinstance(mark.rank, int):
                marks.append(mark)
    return marks


def _this_start() -> tuple[str, str, int]:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return socket.gethostname(), _launcher(), int(attempt) if attempt.isdigit() else 0


@functools.cache
def _launcher() -> str:
    """Return the parent process at the first call: when a launcher dies, the parent changes."""
    parent = os.getppid()
    return f"{parent}:{system.start_time(parent) or ''}"


def _is_of_this_start(mark: Mark) -> bool:
    host, launcher, attempt = _this_start()
    return mark.host != host or (mark.launcher, mark.attempt) == (launcher, attempt)


def _alive() -> set[int]:
    """Return the ranks that the parent of this process has started and that have not ended."""
    ranks = set()
    for listing in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in _text(listing).split():
            match = re.search(r"(?:^|\0)RANK=(\d+)\0", _text(Path(f"/proc/{pid}/environ")))
            if match and system.is_alive(int(pid)):
                ranks.add(int(match[1]))
    return ranks


def _text(path: Path) -> str:
    """Return the text of a file in /proc; "" if its process is gone or belongs to another user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
