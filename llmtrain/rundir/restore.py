"""Restoring the files that a later start needs, if somebody deletes them during a run.

They are kept open, and an open file can still be read after it was removed. So even if the whole
run directory is deleted, the next save writes it again:

    rm -r RUN  ──next save──►  RUN/lock, config.yaml, auto.json, tokenizer/, … as they were
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from llmtrain import durable
from llmtrain.rundir import contents

# In the order in which they are written; the manifest is last, since it depends on the others.
_NEEDED = (
    contents.CONFIG,
    contents.AUTO,
    contents.TRACKERS,
    contents.TOKENIZER,
    contents.HELDOUT,
    contents.MANIFEST,
)


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
        missing = [path for path in self._files if durable.is_gone(path)]
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path].seek(0)
            durable.write(path, self._files[path].read())
        return missing

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
