"""Every name in a run directory; whether the directory is one for all, and what is restored in it.

If a directory has the name of a file, or the other way round, a start would fail with an error of
the operating system, or train a model that it cannot save. So a start checks all names first.

Rank 0 writes files there that the others read: manifest, tokenizer, checkpoints. If a machine had
a directory of its own with the same name, that would be noticed late, or not at all. So all
processes check that they see the same one.

Files that a later start needs are restored if somebody deletes them during a run. They are kept
open, and an open file can still be read after it was removed. So even if the whole run directory is
deleted, the next save writes it again:

    rm -r RUN  ──next save──►  RUN/lock, config.yaml, auto.json, tokenizer/, … as they were
"""

import contextlib
import errno
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from llmtrain import system
from llmtrain.agreement import from_rank_zero, gathered, on_rank_zero
from llmtrain.errors import Problem, UserError, needed_on_disk, raise_any
from llmtrain.types import Ranks

CONFIG = "config.yaml"
AUTO = "auto.json"
MANIFEST = "manifest.json"
STATUS = "status.json"
TRACKERS = "trackers.json"
METRICS = "metrics.jsonl"
CURSORS = "cursors.jsonl"
HELDOUT = "eval.safetensors"
REFERENCE, REFERENCE_PARTS = "reference.safetensors", "reference"
REPORT = "report.html"
LOCK = "lock"
SHARED = ".shared"  # one name, so that a killed start leaves at most one file
STOP, SAVE = "STOP", "SAVE"
TOKENIZER, CHECKPOINTS, LOGS = "tokenizer", "checkpoints", "logs"
RENDEZVOUS = "rendezvous"
PROFILE, OPERATORS = "profile", "operators.json"
STAGED = "staged"  # a new tokenizer and manifest, until they replace those of the run

# What each of them holds, for the reference pages. N is the number of a rank.
WORDS = {
    CONFIG: "the config that began the run, without secrets",
    AUTO: "what `auto` became, by number of processes, strategy and type of device",
    MANIFEST: "sources, revisions and units: what the order of the data is made of",
    METRICS: "the record of the run, one JSON object a line; it is only appended to",
    STATUS: "what the run is doing now; replaced as a whole",
    REPORT: "the report, one file; written at the end of each start and by `llmtrain report`",
    f"{CHECKPOINTS}/step-00000300/": "a complete checkpoint, which is a model directory",
    f"{CHECKPOINTS}/step-00000300.partial/": "one that is being written or was interrupted; "
    "it is never read",
    f"{CHECKPOINTS}/step-00000300.damaged/": "one that did not match its digests, renamed",
    f"{CHECKPOINTS}/step-00000300.superseded/": "one of steps that a resume has undone",
    f"{TOKENIZER}/": "the tokenizer of the run, as `save_pretrained` writes it",
    f"{LOGS}/rank-N.log": "the log of a process, with warnings of libraries, tracebacks and stacks",
    f"{LOGS}/launcher.log": "what the launcher of several processes reported about itself",
    f"{LOGS}/rank-N.failed": "exit code and reason of a process that failed in the last start",
    CURSORS: "the position in the data at every save",
    HELDOUT: "the held-out documents as tokens",
    REFERENCE: "log-probabilities of the run's pairs of answers by the weights that it began with",
    f"{REFERENCE_PARTS}/": "what of them is computed so far, until the file is whole",
    "skipped-units.jsonl": "units of the data that `data.on_bad_unit: skip` left out",
    TRACKERS: "the run's ids in its trackers",
    f"{PROFILE}/": "traces of the steps of `logging.profile_steps`, one for each rank, and the "
    "operators that took longest",
    LOCK: "names the process that uses the directory; it changes every 5 s while that one lives",
    STOP: "make it (`touch`) to stop the run with a checkpoint; it is deleted at the end",
    SAVE: "make it (`touch`) for a checkpoint now; it is deleted when the save begins",
    f"{RENDEZVOUS}/": "where the machines of `--nodes MIN:MAX` meet; it is removed at the end",
    f"{STAGED}/": "a new tokenizer and manifest, until they replace those of the run",
}

_FOLDER, _FILE = "a directory", "a regular file"
# For each row: a folder, a pattern of names in it, and what they must be if they exist.
# `footers` is missing here, since data can be read without it.
_KINDS = (
    ("", r"checkpoints|logs|tokenizer|profile|reference|rendezvous|staged(\.partial)?", _FOLDER),
    ("", r"(config\.yaml|(auto|manifest|status|trackers)\.json)(\.partial)?", _FILE),
    (
        "",
        r"(metrics|cursors|skipped-units)\.jsonl|(eval|reference)\.safetensors(\.partial)?",
        _FILE,
    ),
    ("", r"report\.html|lock|\.shared|STOP|SAVE", _FILE),
    ("logs", r"rank-\d+\.(log|failed(\.partial)?)|launcher\.log", _FILE),
    ("checkpoints", r"step-\d{8,18}(\.partial|(\.damaged|\.superseded)(-\d+)?)?", _FOLDER),
    ("checkpoints", r"\.trash-.+", _FOLDER),
)


def check(run_dir: Path) -> None:
    """Raise UserError that lists every path of the wrong kind. Changes nothing.

    Links are followed. Raises OSError if the disk does not answer.
    """
    remedy = "move it away, or set run.dir to another directory"
    problems = []
    for folder, names, wanted in _KINDS:
        entries = sorted((run_dir / folder).iterdir()) if (run_dir / folder).is_dir() else []
        for path in entries:
            kind = _what(path) if re.fullmatch(names, path.name) else None
            if kind not in (wanted, None):
                expected = f"{wanted}, or nothing of that name; it is {kind}"
                problems.append(Problem(str(path), None, expected, remedy))
    raise_any(problems)


def _what(path: Path) -> str | None:
    """Return the kind of a path, or None if it is gone, as another rank may have deleted it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            return "a link that leads to nothing"
        if isinstance(error, FileNotFoundError):
            return None
        raise
    if stat.S_ISDIR(mode):
        return _FOLDER
    return _FILE if stat.S_ISREG(mode) else "neither: a pipe, a device or the like"


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run, not that of a model."""
    begun = (path / STATUS).is_file() or (path / CHECKPOINTS).is_dir()
    return begun and not (path / "config.json").exists()


def is_begun(path: Path) -> bool:
    """Whether a directory is that of a run, or of a start that has made nothing but its lock."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {""}
    return is_run(path) or names <= {LOCK, SHARED, LOGS, CONFIG, RENDEZVOUS}


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return run_dir / LOGS / f"rank-{rank}.log"


def launcher_log(run_dir: Path) -> Path:
    """Return the path of what the launcher of a run reports about itself."""
    return run_dir / LOGS / "launcher.log"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: a kill leaves either the old content or the new.

    Raises RunError (74) if the disk refuses.
    """
    with needed_on_disk(path):
        system.write_durably(path, data)


def write_output(key: str, path: Path, data: bytes) -> bool:
    """Write a file that a person names for output; return whether it replaced another one.

    A device, a pipe, a link or a directory is never replaced. Raises UserError, which names the
    option `key`, for such a path and for one that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "a link" if path.is_symlink() else _what(path)
        if kind not in (_FILE, None):
            expected = f"{_FILE}, or a name that does not exist yet; it is {kind}"
            raise UserError(Problem(key, path, expected, f"another {key}"))
        system.write_durably(path, data, sync=False)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(Problem(key, path, f"a file that can be written ({why})")) from error
    return kind is not None


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
    reports = gathered(ranks, [socket.gethostname(), _trouble(run_dir, token, wait)])
    on_rank_zero(ranks, lambda: _refuse_other(run_dir, reports))


def _trouble(run_dir: Path, token: str, wait: Callable[[float], object]) -> str | None:
    """Return why this rank cannot use rank 0's directory; None if it can."""
    reason = None
    for _ in range(_LOOKS):
        try:
            if (run_dir / SHARED).read_bytes() == token.encode():
                writable = os.access(run_dir, os.W_OK | os.X_OK)
                return None if writable else "it cannot be written there"
            reason = "another file of that name is there"
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno not in _NOT_YET:
                return reason
        # Open the directories, so that NFS asks its server; otherwise it asks every half minute.
        for directory in (*reversed(run_dir.absolute().parents), run_dir):
            with contextlib.suppress(OSError):
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
        wait(_BETWEEN_SECONDS)
    return reason


def _refuse_other(run_dir: Path, reports: Sequence[tuple[str, str | None]]) -> None:
    """Raise UserError if any rank has trouble. reports: the host and the trouble of each rank."""
    (run_dir / SHARED).unlink(missing_ok=True)
    troubled: dict[tuple[str, str], list[str]] = {}
    for rank, (host, trouble) in enumerate(reports):
        if trouble:
            troubled.setdefault((host, trouble), []).append(str(rank))
    raise_any(
        Problem(
            f"run.dir on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} (host {host})",
            run_dir.absolute(),
            f"the directory in which rank 0 (host {reports[0][0]}) writes: {trouble}",
            "a file system that all machines share, mounted at the same place on each",
        )
        for (host, trouble), ranks in troubled.items()
    )


# In the order in which they are written; the manifest is last, since it depends on the others.
_NEEDED = (CONFIG, AUTO, TRACKERS, TOKENIZER, HELDOUT, MANIFEST)


class Originals:
    """The files of a run directory that a later start needs, open until `close`."""

    def __init__(self, run_dir: Path) -> None:
        """Open the files. Raises OSError."""
        self._files: dict[Path, BinaryIO] = {}
        for name in _NEEDED:
            for path in (run_dir / name, *sorted((run_dir / name).rglob("*"))):
                if path.is_file():
                    self._files[path] = path.open("rb")

    def restore(self) -> list[Path]:
        """Write deleted files again, with their directories. Returns their paths.

        Raises OSError. One cause is a network file system on which another client has deleted the
        file, so that its content cannot be read any more.
        """
        missing = [path for path in self._files if system.is_gone(path)]
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path].seek(0)
            system.write_durably(path, self._files[path].read())
        return missing

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
