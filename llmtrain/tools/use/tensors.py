"""Tensors of safetensors files, read and written a piece at a time.

A file is read with system calls, never mapped: what is mapped counts as memory of this process.
Written files have the layout of a checkpoint's, so their headers come before the first tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain import durable
from llmtrain.checkpoint import check
from llmtrain.checkpoint import files as disk
from llmtrain.checkpoint import format as form
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, needed_on_disk
from llmtrain.types import DTYPES, Spec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 16 << 20  # of a tensor that is only copied


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors on disk, in one file or several.

    specs: name → dtype and shape
    files: name → file
    """

    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    @classmethod
    def of(cls, directory: Path, *names: str) -> Stored:
        """Return the tensors of these files. Raises UserError as `specs` does."""
        found = {name: specs(directory, name) for name in names}
        return cls(
            {key: spec for part in found.values() for key, spec in part.items()},
            {key: directory / name for name, part in found.items() for key in part},
        )

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises RunError 74 if the disk does not answer."""
        (whole,) = self._read(name, None)
        return whole

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Read one tensor in ranges of its first dimension. Raises as `read` does."""
        spec = self.specs[name]
        rows = spec.shape[0] if spec.shape else 0
        row_bytes = DTYPES[spec.dtype][0] * math.prod(spec.shape[1:])
        return self._read(name, max(1, CHUNK_BYTES // max(1, row_bytes)) if rows else None)

    def _read(self, name: str, rows: int | None) -> Iterator[Tensor]:
        """Yield a tensor whole, or so many rows of it at a time."""
        import safetensors

        path = self.files[name]
        try:
            with safetensors.safe_open(path, "pt", backend="pread") as opened:
                if rows is None:
                    yield opened.get_tensor(name)
                    return
                view = opened.get_slice(name)
                count = self.specs[name].shape[0]
                for first in range(0, count, rows):
                    yield view[first : min(first + rows, count)]
        except (OSError, safetensors.SafetensorError) as error:
            remedy = "see that the disk can be read, then give the same command again"
            raise RunError(f"cannot read {path}: {error}", DISK_FAILED, remedy) from error


def of_model(directory: Path) -> Stored:
    """Return the tensors of a model directory. Raises UserError if its files are not whole."""
    whole = directory / "model.safetensors"
    names = [whole.name] if whole.exists() else [p.name for p in directory.glob("model-*")]
    return Stored.of(directory, *sorted(one for one in names if one.endswith(form.TENSORS)))


def specs(directory: Path, name: str) -> dict[str, TensorSpec]:
    """Return dtype and shape of each tensor of a file.

    Raises UserError if the file is missing or has no valid header, RunError 74 if the disk does not
    answer.
    """
    try:
        return check.tensors(directory, name)
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
            with durable.close_on_error(opened):
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
        if since >= CHUNK_BYTES:
            since = 0
            _give_back()
    _give_back()


def _give_back() -> None:
    """Return freed memory to the system; otherwise glibc keeps blocks of several MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
