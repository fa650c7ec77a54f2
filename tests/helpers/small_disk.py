"""Disks that are really full while some steps are saved, and free again behind them.

    room      a tmpfs with all but a few KiB taken by another file; everything: to the last byte
    inodes    a tmpfs that takes hardly any more files
    limit     no file may grow beyond some KiB (RLIMIT_FSIZE: EFBIG)
    read-only nothing can be made or opened to be written; what is open stays so

`mounted` makes the tmpfs in a mount namespace of its own, which needs no privilege where user
namespaces are allowed; ranks enter it by `train`, and tests look at it through `Disk.view`.
"""

import ctypes
import errno
import itertools
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LEFT_BYTES = 256 << 10  # for lines of the record; far less than a checkpoint
LEFT_INODES = 3
LIMIT_BYTES = 300 << 10
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000


@dataclass(frozen=True)
class Disk:
    """pid: of the process that keeps the mount · view: its root directory, seen from here."""

    pid: int
    view: Path


@contextmanager
def mounted(at: Path, options: str) -> Iterator[Disk]:
    """A tmpfs on `at`; skips the test where this machine forbids that."""
    at.mkdir(parents=True)
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && echo ready && exec sleep infinity'
    holder = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", script, "sh", options, str(at)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"no tmpfs in a mount namespace: {holder.communicate()[1].strip()}")
        yield Disk(holder.pid, Path(f"/proc/{holder.pid}/root"))
    finally:
        holder.kill()
        holder.communicate()


def through(kind: str, disk: Disk | None, first: int, last: int) -> tuple[str, ...]:
    """What `FaultyRun.launch(through=…)` takes: full for the saves of steps `first` to `last`."""
    pid = disk.pid if disk else 0
    return ("call", "helpers.small_disk", "train", kind, str(pid), str(first), str(last))


def train(kind: str, holder: str, first: str, last: str, *arguments: str) -> None:
    """In a rank: `llmtrain train ARGUMENTS` with such a disk."""
    if holder != "0":
        _enter(int(holder))
    from llmtrain.cli.main import main
    from llmtrain.training import saving

    gather_parts = saving.gather_parts

    def reached(run: Any, step: int) -> Any:
        if run.ranks.rank == 0:
            _use_up(kind, run.run_dir, full=int(first) <= step <= int(last))
        return gather_parts(run, step)

    saving.gather_parts = reached  # type: ignore[assignment]
    main(["train", *arguments])


def _use_up(kind: str, folder: Path, *, full: bool) -> None:
    match kind:
        case "room":
            _take_room(folder / "filler", LEFT_BYTES, full=full)
        case "everything":
            _take_room(folder / "filler", 0, full=full)
        case "inodes":
            _take_inodes(folder / "fillers", full=full)
        case "read-only":
            _take_writing(folder, full=full)
        case _:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES if full else hard, hard))


def _take_room(filler: Path, left: int, *, full: bool) -> None:
    filler.unlink(missing_ok=True)
    if full:
        disk = os.statvfs(filler.parent)
        filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - left))


def _take_inodes(folder: Path, *, full: bool) -> None:
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    if not full:
        return folder.rmdir()
    made = []
    with suppress(OSError):
        for number in itertools.count():
            made.append(folder / str(number))
            made[-1].touch()
    for file in made[-LEFT_INODES - 1 : -1]:  # the last one was not made
        file.unlink()
    return None


def _take_writing(folder: Path, *, full: bool) -> None:
    if full and os.access(folder, os.W_OK):
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    elif not full and not os.access(folder, os.W_OK):
        subprocess.run(["umount", str(folder)], check=True)


def _enter(pid: int) -> None:
    """Work in the mounts of that process. Its user too, unless this one may do without."""
    libc, folder = ctypes.CDLL(None, use_errno=True), Path.cwd()
    for name, kind in (("user", _CLONE_NEWUSER), ("mnt", _CLONE_NEWNS)):
        descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(descriptor, kind):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    os.chdir(folder)


def late(step: str, times: str, *arguments: str) -> None:
    """In a rank: files of that checkpoint are absent for rank 1, so many times, as NFS does it."""
    from llmtrain.cli.main import main

    left, real = [int(times)], os.open
    partial = f"step-{int(step):08d}.partial"

    def opened(path: object, *rest: object, **named: object) -> int:
        if partial in str(path) and left[0] and os.environ.get("RANK") == "1":
            left[0] -= 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *rest, **named)  # type: ignore[arg-type]

    os.open = opened  # type: ignore[assignment]
    main(["train", *arguments])
