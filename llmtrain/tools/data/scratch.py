"""A run's directory to read with, without writing to the run's own.

Reading writes down what it finds out: footers of the Hub's files, units that it had to skip. What
only looks at a run does so in a temporary directory that begins with what the run knows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.manifest import has_other_sources
from llmtrain.rundir import contents

FILES = (contents.MANIFEST, "skipped-units.jsonl")


@contextmanager
def aside(run_dir: Path) -> Iterator[Path]:
    """A directory with manifest, tokenizer and notes of a run, as far as there are any."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        _copy(run_dir.absolute(), Path(folder))
        yield Path(folder)


@contextmanager
def aside_unless_other(config: Config) -> Iterator[Path]:
    """As `aside` for the run directory of `config`, but empty if that run has other sources.

    A look at data is not part of a run, so a run that is there does not limit what it may look at.
    """
    run_dir = config.run_dir
    manifest = run_dir / contents.MANIFEST
    if manifest.exists() and has_other_sources(manifest, data_settings(config)):
        with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
            (Path(folder) / "footers").mkdir()
            yield Path(folder)
    else:
        with aside(run_dir) as directory:
            yield directory


def _copy(run_dir: Path, folder: Path) -> None:
    for name in FILES:
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, folder / name)
    if (run_dir / contents.TOKENIZER).is_dir():
        shutil.copytree(run_dir / contents.TOKENIZER, folder / contents.TOKENIZER)
    (folder / "footers").mkdir()
    for footer in (run_dir / "footers").glob("*"):
        (folder / "footers" / footer.name).symlink_to(footer)
