"""The files that a later start of the run needs, written again if somebody deletes them.

A start keeps them open. The content of an open file stays readable after the file is removed, so
that a run directory can be deleted under a run, and the next checkpoint still has a directory to
which it belongs:

    rm -r RUN  ──next save──►  RUN/lock, config.yaml, auto.json, tokenizer/, … as they were
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llmtrain import durable
from llmtrain.rundir import contents

# In the order in which they are written: the manifest is the last, since it rests on the others.
_NEEDED = (
    contents.CONFIG,
    contents.AUTO,
    contents.TRACKERS,
    contents.TOKENIZER,
    contents.HELDOUT,
    contents.MANIFEST,
)
_CHUNK_BYTES = 1 << 24


class Originals:
    """The needed files of a run directory as they are now, open until `close`."""

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError."""
        self._files: dict[Path, int] = {}
        for name in _NEEDED:
            for path in _files(run_dir / name):
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def restore(self) -> list[Path]:
        """Write what was deleted again, with its directories; returns those files. Raises OSError.

        Also when the content cannot be read any more: another client of a network file system has
        deleted it.
        """
        missing = [path for path in self._files if durable.is_gone(path)]
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write(path, _content(self._files[path]))
        return missing

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _files(path: Path) -> Iterator[Path]:
    """A file itself, or every file below a directory; nothing if the path does not exist."""
    if path.is_dir():
        yield from (inner for inner in sorted(path.rglob("*")) if inner.is_file())
    elif path.exists():
        yield path


def _content(descriptor: int) -> bytes:
    content = bytearray()
    while chunk := os.pread(descriptor, _CHUNK_BYTES, len(content)):
        content += chunk
    return bytes(content)
