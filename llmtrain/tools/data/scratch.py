"""Temporary copies of a run's directory, for commands that must not write to the run.

Reading data writes notes into the run directory: footers of the Hub's files, and units that were
skipped. A command that only inspects a run reads in a temporary directory instead, which begins
with copies of the run's manifest, tokenizer and notes. Nothing here imports torch.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from llmtrain.config.binding import DataSettings
from llmtrain.data.manifest import has_other_sources
from llmtrain.rundir import contents

FILES = (contents.MANIFEST, "skipped-units.jsonl")


@contextmanager
def scratch_copy(run_dir: Path | None) -> Iterator[Path]:
    """Yield a temporary directory with the manifest, tokenizer and notes of a run, if any."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if run_dir is not None:
            _copy(run_dir.absolute(), Path(folder))
        yield Path(folder)


def scratch_copy_unless_other(
    run_dir: Path, settings: DataSettings
) -> AbstractContextManager[Path]:
    """Return what `scratch_copy` does for this run; empty if the run has other sources.

    Looking at data is no part of a run, so an existing run does not limit which data can be seen.
    """
    manifest = run_dir / contents.MANIFEST
    other = manifest.exists() and has_other_sources(manifest, settings)
    return scratch_copy(None if other else run_dir)


def _copy(run_dir: Path, folder: Path) -> None:
    for name in FILES:
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, folder / name)
    if (run_dir / contents.TOKENIZER).is_dir():
        shutil.copytree(run_dir / contents.TOKENIZER, folder / contents.TOKENIZER)
    (folder / "footers").mkdir()
    for footer in (run_dir / "footers").glob("*"):
        (folder / "footers" / footer.name).symlink_to(footer)
