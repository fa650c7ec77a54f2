"""Names of files that somebody else wrote: do they mean a regular file inside their directory?

An index or a manifest may be made by anybody, and what opens the files it names follows `../x` and
symbolic links without a word.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath


def unsafe_name(name: str) -> str | None:
    """What is wrong with a file's name: None for a plain relative path."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and path.as_posix() == name
    if not plain or path.is_absolute() or not path.parts or ".." in path.parts:
        return f"{name!r} is no plain path inside the directory"
    return None


def unsafe_file(directory: Path, name: str, root: Path | None = None) -> str | None:
    """What is wrong with a file that a safe name leads to; None for a regular one inside.

    root: where it may lie in truth, `directory` itself where nothing is said. Raises OSError for a
    file that is not there.
    """
    real = Path(os.path.realpath(directory / name))
    allowed = Path(os.path.realpath(root or directory))
    if not real.is_relative_to(allowed):
        return f"{name} leads out of the directory, to {real}"
    if not stat.S_ISREG(real.stat().st_mode):
        return f"{name} is no regular file"
    return None
