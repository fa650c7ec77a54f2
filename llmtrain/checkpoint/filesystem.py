"""What the file system of the checkpoints can do, and which ranks write to it.

A checkpoint is valid because its directory was renamed, so a store without rename is refused. On
NFS a machine reads and writes through its own cache, so two machines must not write parts of one
file: there, with several nodes, rank 0 writes everything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal

from llmtrain import durable
from llmtrain.errors import Problem, UserError

_PROBE = ".probe"  # the lock is held, so one name is enough, and a kill leaves one directory
_MOUNTS = Path("/proc/self/mountinfo")
# Coherent between close and open alone, if at all; Lustre, GPFS and CephFS are coherent.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})


def probe(root: Path) -> None:
    """Try what a commit does: make, write and rename a file and a directory.

    For rank 0, which holds the lock; `root` must exist. Leaves nothing behind. Raises UserError
    with the store's own error.
    """
    place = root / _PROBE
    try:
        shutil.rmtree(place, ignore_errors=True)
        partial, final = place / "a.partial", place / "a"
        partial.mkdir(parents=True)
        durable.write(partial / "file", b"x")
        partial.rename(final)
        durable.sync_directory(place)
        if not (final / "file").is_file() or partial.exists():
            raise OSError("a directory was renamed, and still has its old name or no content")
    except OSError as error:
        why = error.strerror or str(error)
        expected = f"a store where files and directories can be written and renamed ({why})"
        remedy = "a file system with room; object stores mounted as one often cannot rename"
        raise UserError(Problem("run.dir", root, expected, remedy)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def kind(path: Path) -> str:
    """Return the type of the file system of a directory; "" if it is not known (not Linux)."""
    if not _MOUNTS.is_file():
        return ""
    place = path.resolve()
    found: dict[Path, str] = {}
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        found[Path(_unescape(before.split()[4]))] = after.split()[0]  # the later one covers
    above = [mount for mount in found if place.is_relative_to(mount)]
    return found[max(above, key=lambda mount: len(mount.parts))] if above else ""


def network(path: Path) -> bool:
    """Whether a directory is on NFS or its like."""
    return kind(path) in _NETWORK


def _unescape(text: str) -> str:
    r"""Decode a mount point: proc(5) writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), text)


def choose_writers(
    writers: Literal["auto", "rank0", "all"],
    family: Literal["ddp", "fsdp", "zero"],
    nodes: int,
    network: bool,
) -> Literal["rank0", "all"]:
    """Return what `checkpoint.writers` means here. network: of the directory of checkpoints."""
    if writers != "auto":
        return writers
    return "rank0" if family == "ddp" or (network and nodes > 1) else "all"
