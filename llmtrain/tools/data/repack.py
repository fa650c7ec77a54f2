"""`llmtrain data repack`: rewrite data files of any format as parquet with small row groups.

Training reads a row group at a time, so small ones keep memory low and mix documents well. A
compressed file of lines can only be read as a whole; a parquet file can be read in parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtrain.config.schema import SourceConfig
from llmtrain.data.repack.rewrite import Rewrite, finished_rows, made_of, rewrite
from llmtrain.data.repack.tables import KINDS
from llmtrain.data.sources.local import bounded, file_format, is_local, list_files, locate
from llmtrain.errors import Problem, UserError
from llmtrain.tools.data.pool import Progress, each_left


@dataclass(frozen=True, slots=True)
class Repacked:
    """What is in DIR after the command.

    files: in order of their names
    rows: of all files together
    """

    files: tuple[str, ...]
    rows: int
    seconds: float


def repack(
    path: str, out: Path, group_mb: float, text_column: str, jobs: int, progress: Progress
) -> Repacked:
    """Rewrite each file of `path`, a directory, file or glob, to `out`; keep complete files there.

    group_mb: MiB of decoded data in a row group
    text_column: the column for the lines of text files
    jobs: processes, each with one file at a time

    Raises UserError for bad input and if `out` contains other files, RunError if the disk fails.
    """
    began = time.perf_counter()
    tasks = _tasks(path, out, int(group_mb * 2**20), text_column)
    _refuse_others(out, [task.target for task in tasks])
    known = [finished_rows(task) for task in tasks]
    rows = each_left(rewrite, tasks, known, jobs, int, progress)
    files = tuple(task.target.relative_to(out).as_posix() for task in tasks)
    return Repacked(files, rows, time.perf_counter() - began)


def _tasks(path: str, out: Path, group_bytes: int, text_column: str) -> list[Rewrite]:
    root, files = _files(path)
    if out.resolve() == root.resolve() or any(_inside(file, out) for file in files):
        raise UserError(Problem("--out", out, f"a directory of its own, not that of {path}"))
    if Path(path).is_dir() and _inside(out, root):
        raise UserError(Problem("--out", out, f"a directory outside {path}"))
    unknown = [file for file in files if file_format(file.name, KINDS) is None]
    if unknown:
        expected = ".parquet, .arrow, .jsonl, .json, .txt, .csv or .tsv; .gz or .zst after lines"
        remedy = "move it away, or name the files with a glob"
        raise UserError(
            *bounded([Problem("PATH", str(file), expected, remedy) for file in unknown], "PATH")
        )
    make = partial(Rewrite, group_bytes=group_bytes, text_column=text_column)
    tasks = [make(file, out / _target(file.relative_to(root))) for file in files]
    _refuse_doubles(tasks)
    return tasks


def _files(path: str) -> tuple[Path, list[Path]]:
    """Return the directory that the files' names are relative to, and the files."""
    if not is_local(path):
        expected = "a file, a directory or a glob on this machine"
        remedy = f"of the Hub: hf download {path} --repo-type dataset --local-dir DIR, then DIR"
        raise UserError(Problem("PATH", path, expected, remedy))
    root = Path(locate(SourceConfig(path=path), "PATH"))
    return root, sorted(list_files(path, root, "PATH"))


def _target(name: Path) -> Path:
    return name if name.suffix == ".parquet" else name.with_name(f"{name.name}.parquet")


def _inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def _refuse_doubles(tasks: Sequence[Rewrite]) -> None:
    first: dict[Path, Path] = {}
    for task in tasks:
        other = first.setdefault(task.target, task.source)
        if other != task.source:
            expected = f"a name that does not lead to {task.target}, as {other} does"
            raise UserError(Problem("PATH", str(task.source), expected, "rename one of the two"))


def _refuse_others(out: Path, targets: Sequence[Path]) -> None:
    """Raise UserError for files in `out` that this command did not write; delete partial ones."""
    if out.exists() and not out.is_dir():
        raise UserError(Problem("--out", out, "a directory; there is a file of that name"))
    ours, left_over = set(targets), set(out.rglob(".*.partial"))
    found = [file for file in sorted(out.rglob("*")) if file.is_file() and file not in left_over]
    others = [file for file in found if file not in ours or made_of(file) is None]
    if others:
        expected = "a directory with nothing but files that this command wrote from PATH"
        problems = [Problem("--out", str(file), expected) for file in others]
        raise UserError(*bounded(problems, "--out"))
    for file in left_over:
        file.unlink()
