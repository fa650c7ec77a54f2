"""What the file system of the checkpoints can do, and which ranks write to it.

A checkpoint becomes valid when its directory is renamed, so a store without rename is refused. On
NFS a machine reads and writes through its own cache, so two machines must not write parts of one
file. With several nodes on NFS, rank 0 therefore writes everything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from llmtrain import durable
from llmtrain.errors import Problem, UserError

_PROBE = ".probe"  # one name is enough while the run's lock is held; a kill leaves one directory
_MOUNTS = Path("/proc/self/mountinfo")
# Here a client sees what another one wrote only after a close and a new open, if at all. Lustre,
# GPFS and CephFS are coherent and so are not in this list.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})


def probe(root: Path) -> None:
    """Try what a commit does: create, write and rename a file and a directory.

    Only rank 0, which holds the run's lock, may call it. `root` must exist. Leaves nothing behind.
    Raises UserError with the error of the file system.
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
        # proc(5) writes a space as \040. A later mount hides earlier ones.
        mount = re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), before.split()[4])
        found[Path(mount)] = after.split()[0]
    return next((found[one] for one in (place, *place.parents) if one in found), "")


def network(path: Path) -> bool:
    """Whether a directory is on NFS or a similar network file system."""
    return kind(path) in _NETWORK


def choose_writers(writers: str, family: str, nodes: int, network: bool) -> str:
    """Return which ranks write, `rank0` or `all`: `writers` itself, or what `auto` means.

    family: of the strategy, `ddp`, `fsdp` or `zero`
    network: whether the checkpoints are on a network file system
    """
    if writers != "auto":
        return writers
    return "rank0" if family == "ddp" or (network and nodes > 1) else "all"
