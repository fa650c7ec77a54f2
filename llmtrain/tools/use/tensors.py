"""Tensors of safetensors files, read and written a piece at a time.

A file is read with system calls, never mapped: what is mapped counts as memory of this process.
Written files have the layout of a checkpoint's, so their headers come before the first tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain import system
from llmtrain.checkpoint import files as disk
from llmtrain.checkpoint import format as form
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, needed_on_disk
from llmtrain.types import DTYPES, Spec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 4 << 20  # of a tensor that is only copied
_FREED_BYTES = 4 << 20  # written before freed memory is given back


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors on disk, in one file or several.

    places: name → its file in the directory, its first byte there, dtype and shape
    """

    directory: Path
    places: Mapping[str, form.TensorLocation]

    @classmethod
    def of(cls, directory: Path, *names: str) -> Stored:
        """Return the tensors of these files. Raises UserError as `specs` does."""
        parts = [_places(directory, name) for name in names]
        return cls(directory, {name: place for part in parts for name, place in part.items()})

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Return dtype and shape by name."""
        return {name: place.tensor for name, place in self.places.items()}

    def rows(self, name: str) -> tuple[int, ...]:
        """Return the first dimension of a tensor; () if it has none."""
        return self.places[name].tensor.shape[:1]

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises RunError 74 if the disk does not answer."""
        place = self.places[name]
        return self._read(place, place.offset, place.tensor.shape)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Read one tensor in ranges of its first dimension. Raises as `read` does."""
        place = self.places[name]
        kind, shape = place.tensor.dtype, place.tensor.shape
        row_bytes = DTYPES[kind][0] * math.prod(shape[1:])
        if not shape or not row_bytes:
            yield self.read(name)
            return
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            rows = min(step, shape[0] - first)
            yield self._read(place, place.offset + first * row_bytes, (rows, *shape[1:]))

    def _read(self, place: form.TensorLocation, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Read some rows of a tensor. safetensors would read all of it for each range."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[place.tensor.dtype][1].removeprefix("torch."))
        found, path = torch.empty(shape, dtype=dtype), self.directory / place.file
        block = found.view(-1).view(torch.uint8).numpy().data
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                while block.nbytes:
                    count = file.readinto(block)
                    if not count:
                        raise OSError(f"it ended at byte {file.tell()}")
                    block = block[count:]
        except OSError as error:
            remedy = "see that the disk can be read, then give the same command again"
            raise RunError(f"cannot read {path}: {error}", DISK_FAILED, remedy) from error
        return found


def of_model(directory: Path, listed: Collection[str] | None = None) -> Stored:
    """Return the tensors of a model directory. Raises UserError if its files are not whole.

    listed: the files to choose from; None = all of the directory
    """
    files = listed if listed is not None else [path.name for path in directory.iterdir()]
    whole = "model.safetensors"
    names = [whole] if whole in files else [one for one in files if one.startswith("model-")]
    return Stored.of(directory, *sorted(one for one in names if one.endswith(form.TENSORS)))


def specs(directory: Path, name: str) -> dict[str, TensorSpec]:
    """Return dtype and shape of each tensor of a file.

    Raises UserError if the file is missing or has no valid header, RunError 74 if the disk does not
    answer.
    """
    return {key: place.tensor for key, place in _places(directory, name).items()}


def _places(directory: Path, name: str) -> dict[str, form.TensorLocation]:
    try:
        found = form.check_tensors(directory, name)
        with (directory / name).open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
        return form.places_in(name, found, start)
    except (form.DamagedError, FileNotFoundError) as error:
        expected = f"whole safetensors ({_reason(error)})"
        raise UserError(Problem(str(directory / name), None, expected)) from error
    except OSError as error:
        remedy = "see that the disk can be read, then give the same command again"
        raise RunError(f"cannot read {directory / name}: {error}", DISK_FAILED, remedy) from error


def _reason(error: Exception) -> str:
    """Return what an error of a file says, without the file's path."""
    return error.reason if isinstance(error, form.DamagedError) else "there is no such file"


def write(directory: Path, spec: Spec, read: Callable[[str], Iterable[Tensor]]) -> None:
    """Write and sync the files of a spec.

    read: returns a tensor in consecutive ranges, in the dtype of the spec; called in its order

    Raises RunError 74 if the disk refuses.
    """
    for file, part in spec.items():
        head = form.header(part)
        with needed_on_disk(directory / file):
            opened = disk.new(directory / file, head, form.file_bytes(part))
            with system.close_on_error(opened):
                _write_tensors(opened, len(head), part, read)
            disk.durable(opened)


def _write_tensors(
    descriptor: int,
    offset: int,
    part: Mapping[str, TensorSpec],
    read: Callable[[str], Iterable[Tensor]],
) -> None:
    import torch

    since = 0  # bytes written since freed memory was given back
    for name, (_, start, tensor) in form.places_in("", part, offset).items():
        end = start + form.tensor_bytes(tensor)
        for chunk in read(name):
            data = chunk.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            disk.write_at(descriptor, data, start)
            start += data.nbytes
        assert start == end, f"{name} has another size than planned"
        since += form.tensor_bytes(tensor)
        if since >= _FREED_BYTES:
            since = 0
            _give_back()
    _give_back()


def _give_back() -> None:
    """Return freed memory to the system; otherwise glibc keeps blocks of several MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
