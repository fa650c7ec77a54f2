"""Checks that file names from elsewhere lead to regular files inside their directory.

Anybody can write an index or a manifest. Opening the files that it names would silently follow
`../x` and symbolic links.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath


def unsafe_name(name: str) -> str | None:
    """Return what is wrong with a file's name; None for a plain relative path."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and path.as_posix() == name
    if not plain or path.is_absolute() or not path.parts or ".." in path.parts:
        return f"{name!r} is not a plain path inside the directory"
    return None


def unsafe_file(directory: Path, name: str, root: Path | None = None) -> str | None:
    """Return what is wrong with a file whose name is safe; None for a regular file inside.

    root: the directory in which the real path must be; None = `directory`

    Raises OSError for a file that does not exist.
    """
    real = Path(os.path.realpath(directory / name))
    allowed = Path(os.path.realpath(root or directory))
    if not real.is_relative_to(allowed):
        return f"{name} leads out of the directory, to {real}"
    if not stat.S_ISREG(real.stat().st_mode):
        return f"{name} is not a regular file"
    return None
