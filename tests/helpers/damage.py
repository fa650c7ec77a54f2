"""What happens to files that lie on a disk for long, and checkpoints that belong to others."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from llmtrain.checkpoint import format as form


def flip(path: Path, position: int, bit: int = 0) -> None:
    """One bit of a file; a negative position counts from the end."""
    body = bytearray(path.read_bytes())
    body[position] ^= 1 << bit
    path.write_bytes(body)


def flip_the_middle(path: Path) -> None:
    """One bit in the middle of a file."""
    flip(path, path.stat().st_size // 2, 3)


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte appended": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


def files_of(checkpoint: Path) -> list[str]:
    """Every file of a checkpoint, the manifest too."""
    found = (path for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path.relative_to(checkpoint).as_posix() for path in found)


@contextmanager
def struck(path: Path, damage: Callable[[Path], object]) -> Iterator[None]:
    """The file is damaged inside the block, and whole again behind it."""
    body = path.read_bytes()
    damage(path)
    try:
        yield
    finally:
        path.write_bytes(body)


def sign(checkpoint: Path, **fields: object) -> None:
    """Other fields in an intact manifest."""
    path = checkpoint / form.MANIFEST
    rest = json.loads(path.read_bytes()) | fields
    del rest["self"]
    path.write_bytes(form.canonical({**rest, "self": xxh3_128_hexdigest(form.canonical(rest))}))


def copy_as(checkpoint: Path, step: int, run_id: str) -> Path:
    """A copy under the name of another step, intact, as one of another run."""
    target = checkpoint.with_name(form.directory_name(step))
    shutil.copytree(checkpoint, target)
    state = json.loads((target / form.STATE).read_bytes()) | {"run_id": run_id, "step": step}
    body = json.dumps(state).encode()
    (target / form.STATE).write_bytes(body)
    files = json.loads((target / form.MANIFEST).read_bytes())["files"]
    files[form.STATE] = {"size": len(body), "extents": form.extents_of(body)}
    sign(target, run_id=run_id, step=step, files=files)
    return target
