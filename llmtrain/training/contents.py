"""What lies in a run directory, and of which kind each name must be.

A directory in place of a file, or the other way round, would end a start with an error of the
operating system, or let it train what it can never save. So a start looks at all names first.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmtrain.errors import Problem, UserError

# Folder, names in it, whether they are directories. Where nothing lies there is nothing to say.
# `footers` is not here: data is read without it, if need be.
_KINDS = (
    ("", r"checkpoints|logs|tokenizer|anew(\.partial)?", True),
    ("", r"(config\.yaml|(auto|manifest|status|trackers)\.json)(\.partial)?", False),
    ("", r"(metrics|cursors|skipped-units)\.jsonl|eval\.safetensors(\.partial)?", False),
    ("", r"report\.html|lock|\.shared|STOP|SAVE", False),
    ("logs", r"rank-\d+\.(log|failed|partial)", False),
    ("checkpoints", r"step-\d{8,18}(\.partial|(\.damaged|\.superseded)(-\d+)?)?", True),
    ("checkpoints", r"\.trash-.+", True),
)


def check(run_dir: Path) -> None:
    """Raise UserError for what is of the wrong kind, all of it at once. Changes nothing.

    A link counts as what it leads to. OSError for what cannot be looked at.
    """
    if problems := [_problem(path, is_folder=kind) for path, kind in _wrong(run_dir)]:
        raise UserError(*problems)


def _wrong(run_dir: Path) -> list[tuple[Path, bool]]:
    """Names that are taken by something else, and whether each is one of a directory."""
    return [
        (path, is_folder)
        for folder, names, is_folder in _KINDS
        if (run_dir / folder).is_dir()
        for path in sorted((run_dir / folder).iterdir())
        if re.fullmatch(names, path.name)
        if not (path.is_dir() if is_folder else path.is_file())
    ]


def _problem(path: Path, *, is_folder: bool) -> Problem:
    kind = "directory" if is_folder else "regular file"
    expected = f"a {kind}, or nothing of that name; it is {_what(path)}"
    return Problem(str(path), None, expected, "move it away, or set run.dir to another directory")


def _what(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link that leads to nothing"
    if path.is_dir():
        return "a directory"
    return "a file" if path.is_file() else "no regular file (a pipe, a device or the like)"
