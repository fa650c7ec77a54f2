"""A check that all processes of a run see the same run directory.

Rank 0 writes files there that the others read: manifest, tokenizer, checkpoints. If a machine had
a directory of its own with the same name, that would be noticed late, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from llmtrain.agreement import from_rank_zero, gathered, on_rank_zero
from llmtrain.errors import Problem, raise_any
from llmtrain.rundir.contents import SHARED, write_atomically
from llmtrain.types import Ranks

_LOOKS = 40
_BETWEEN_SECONDS = 0.25
_NOT_YET = (errno.ENOENT, errno.ESTALE)  # what a network file system may answer for a while


def check_shared(run_dir: Path, ranks: Ranks, wait: Callable[[float], object] = time.sleep) -> None:
    """Check that every rank can read a file that rank 0 writes to `run_dir`, and can write there.

    Collective. If a rank cannot, raises UserError on rank 0, which names the ranks and their hosts,
    and PeerError with the same code on the others.
    """
    if ranks.world_size == 1:
        return
    token = from_rank_zero(ranks, lambda: uuid.uuid4().hex)
    on_rank_zero(ranks, lambda: write_atomically(run_dir / SHARED, token.encode()))
    heard = gathered(ranks, [socket.gethostname(), _trouble(run_dir, token, wait)])
    on_rank_zero(ranks, lambda: _refuse_other(run_dir, heard))


def _trouble(run_dir: Path, token: str, wait: Callable[[float], object]) -> str | None:
    """Return why this rank cannot use rank 0's directory; None if it can."""
    said = None
    for _ in range(_LOOKS):
        try:
            if (run_dir / SHARED).read_bytes() == token.encode():
                writable = os.access(run_dir, os.W_OK | os.X_OK)
                return None if writable else "it cannot be written there"
            said = "another file of that name is there"
        except OSError as error:
            said = error.strerror or str(error)
            if error.errno not in _NOT_YET:
                return said
        _refresh(run_dir)
        wait(_BETWEEN_SECONDS)
    return said


def _refresh(run_dir: Path) -> None:
    """Open the directories, so that NFS asks its server; otherwise it asks every half minute."""
    for directory in (*reversed(run_dir.absolute().parents), run_dir):
        with contextlib.suppress(OSError):
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _refuse_other(run_dir: Path, heard: Sequence[tuple[str, str | None]]) -> None:
    """Raise UserError if any rank has trouble. heard: the host and the trouble of each rank."""
    (run_dir / SHARED).unlink(missing_ok=True)
    troubled: dict[tuple[str, str], list[str]] = {}
    for rank, (host, trouble) in enumerate(heard):
        if trouble:
            troubled.setdefault((host, trouble), []).append(str(rank))
    problems = [
        Problem(
            f"run.dir on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} (host {host})",
            run_dir.absolute(),
            f"the directory in which rank 0 (host {heard[0][0]}) writes: {trouble}",
            "a file system that all machines share, mounted at the same place on each",
        )
        for (host, trouble), ranks in troubled.items()
    ]
    raise_any(problems)
