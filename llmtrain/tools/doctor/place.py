"""Check the run directory: its file system, its writes, renames and locks, and its clock.

No file of a run is changed. Test files are written in a temporary directory, inside the run
directory or its nearest existing parent, and deleted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain import durable
from llmtrain.checkpoint import filesystem
from llmtrain.config.binding import bind, changes, refusals
from llmtrain.config.load import load_config
from llmtrain.errors import UserError
from llmtrain.rundir import contents, lock
from llmtrain.tools.doctor.case import Case, Verdict, error, join, ok, refusal, warning

_FORGETFUL = {
    "tmpfs": "memory: gone when the machine restarts",
    "ramfs": "memory: gone when the machine restarts",
    "overlay": "a container's own: gone with it",
}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "exfat", "ntfs3"}
_SHARED = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs|ceph|glusterfs|cifs|smb\d?|9p|virtiofs|wekafs|panfs|afs|"
    r"orangefs|ocfs2|gfs2|fuse\..+"
)
_MOST_SKEW = 2.0  # seconds between this machine's clock and the file system's
_MOST_DRIFT = 1.0
_OLDEST = 1.76e9  # 2025-10: before this code was written, so an earlier date is wrong
_LOCK_SECONDS = 30
# Tries to take a lock that this process holds. Exit code 1: it is held; 0: it was granted.
_TAKE = """
import errno, fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    sys.exit(1 if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else str(error))
"""


def directory(case: Case) -> Verdict:
    """Check the type of the file system, and that write, fsync, rename and lock work."""
    place = existing(case.run_dir)
    if not place.is_dir():
        return error(f"{place} is a file, not a directory", "run.dir=DIR, elsewhere")
    system = filesystem.kind(place)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmtrain-doctor-", dir=place) as folder:
            probed = list(_probes(Path(folder)))
    except OSError as failed:
        found = f"{place} cannot be written: {failed.strerror or failed}"
        return error(found, "change its permissions, make room, or set another run.dir")
    return join([_kind(system, place, case), *probed, *_run_there(case)])


def existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _kind(system: str, place: Path, case: Case) -> Verdict:
    """Check whether the directory stays, and whether all machines share it.

    Rank 0 writes what the others read.
    """
    forgets, machines = _FORGETFUL.get(system), case.machines
    found = f"{place} on {system or 'a file system of unknown type'}"
    found += f" ({forgets})" if forgets else ""
    if machines == 1:
        return warning(found, "run.dir=DIR on a disk that stays") if forgets else ok(found)
    if _SHARED.fullmatch(system):
        return ok(f"{found}, which {machines} machines can share")
    remedy = f"run.dir=DIR on a file system that all {machines} machines mount (NFS, Lustre …)"
    if forgets or system in _LOCAL:
        return error(f"{found}: this machine's own, not shared by {machines}", remedy)
    return warning(f"{found}: whether {machines} machines share it is not known", remedy)


def _probes(folder: Path) -> Iterator[Verdict]:
    """Test write, rename and lock in an empty directory. Raises OSError if a write fails."""
    start = time.perf_counter()
    for content in (b"one", b"two"):
        durable.write(folder / "file", content)
    milliseconds = (time.perf_counter() - start) / 2 * 1000
    if (folder / "file").read_bytes() == b"two" and not (folder / "file.partial").exists():
        yield ok(f"a durable write and rename take {milliseconds:.1f} ms")
    else:
        yield error("a rename does not replace the file", "run.dir=DIR on another file system")
    yield _lock(folder / contents.LOCK)


def _lock(path: Path) -> Verdict:
    """Check that another process sees a lock of this one."""
    import fcntl

    remedy = "run.dir=DIR on a file system with locks (NFS: mount without nolock)"
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            found = f"no locks ({failed.strerror}): two starts at once could both run"
            return warning(found, remedy)
        command = [sys.executable, "-I", "-S", "-c", _TAKE, str(path)]
        taken = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False
        )
    if taken.returncode == 1 and not taken.stderr:
        return ok("locks hold")
    if taken.returncode == 0:
        return warning("a lock is granted twice: two starts at once could both run", remedy)
    return warning(f"a lock cannot be asked for: {taken.stderr.strip()}", remedy)


def _run_there(case: Case) -> Iterator[Verdict]:
    """Check the run in the directory, if any: whether it is alive, and has this config."""
    assert case.config is not None
    try:
        contents.check(case.run_dir)
    except UserError as strange:
        yield refusal(strange.problems)
        return
    holder = lock.read(case.run_dir / contents.LOCK)
    if holder and lock.lives_here(holder):
        found = f"a run is alive in it (pid {holder.pid} on {holder.host})"
        yield warning(found, "wait for it, or stop it: touch STOP in its directory")
    began, record = case.run_dir / contents.CONFIG, case.run_dir / contents.METRICS
    if began.is_file() and record.is_file():
        found_changes = changes(bind(load_config(began)).binding, bind(case.config).binding)
        accepted = case.config.checkpoint.accept_changes
        if problems := refusals(found_changes, accepted, f"with which {case.run_dir} began"):
            yield refusal(problems)
        else:
            yield ok("a run of this config began in it: it would be resumed")


def clocks(case: Case) -> Verdict:
    """Compare this machine's clocks with each other and with the run directory's file system."""
    drift = time.time() - case.wall - (time.monotonic() - case.steady)  # noqa: TID251  # compared with a time stamp
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(case.wall))
    verdicts = [ok(date), ok("no jump during this look")]
    if case.wall < _OLDEST:
        found = f"the date is {date}: certificates of the Hub are refused"
        verdicts[0] = error(found, "set the clock")
    if abs(drift) > _MOST_DRIFT:
        found = f"the clock was set by {drift:+.1f} s during this look"
        verdicts[1] = warning(found, "see that one service alone sets it (chrony or ntpd)")
    if case.config is not None:
        verdicts.append(_skew(existing(case.run_dir)))
    return join(verdicts)


def _skew(place: Path) -> Verdict:
    """Compare the clock with the time stamp that the file system gives to a new file."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".llmtrain-doctor-", dir=place) as file:
            before = time.time()  # noqa: TID251  # a time stamp
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()  # noqa: TID251  # a time stamp
            stamp = Path(file.name).stat().st_mtime
    except OSError as failed:
        return warning(f"no file can be written in {place}: {failed.strerror}", "see directory")
    skew = stamp - min(max(stamp, before), after)
    found = f"the clock of {place} differs by {abs(skew):.2f} s"
    if abs(skew) > _MOST_SKEW:
        return warning(found, "synchronise both machines (chrony or ntpd): logs would not match")
    return ok(found)
