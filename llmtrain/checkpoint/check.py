"""Checks that the files of a checkpoint are as they were written: sizes, headers, digests.

The checks need neither torch nor other ranks. `read.find` divides them among the ranks, and
`read.verify` does all of them in one process. A difference raises DamagedError. An OSError means
that the disk did not answer, which proves nothing about the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import safetensors
from xxhash import xxh3_128

from llmtrain import faults
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.format import DamagedError, Extent, Manifest
from llmtrain.types import TensorSpec

_MAX_HEADER_BYTES = 100 << 20  # safetensors refuses a longer one


def file(path: Path, name: str, manifest: Manifest) -> None:
    """Raise DamagedError if a file is missing, has another size or an invalid tensor header."""
    size = form.regular_size(path, name)
    if size != manifest.files[name].size:
        raise DamagedError(name, f"has {size} bytes instead of {manifest.files[name].size}")
    if name.endswith(form.TENSORS):
        tensors(path, name)


def extent(path: Path, name: str, extent: Extent) -> None:
    """Raise DamagedError if the bytes of an extent are not those that were written."""
    faults.hit("load.verify", step=form.step_of(path.name), path=path / name)
    hasher = xxh3_128()
    buffer = memoryview(bytearray(min(extent.length, form.BLOCK_BYTES)))
    left = extent.length
    with (path / name).open("rb", buffering=0) as opened:
        opened.seek(extent.offset)
        while left:
            count = opened.readinto(buffer[:left])
            if not count:
                raise DamagedError(name, f"ends before byte {extent.offset + extent.length}")
            hasher.update(buffer[:count])
            left -= count
    if hasher.hexdigest() != extent.digest:
        end = extent.offset + extent.length
        raise DamagedError(name, f"the digest of bytes {extent.offset} to {end} differs")


def tensors(path: Path, name: str) -> dict[str, TensorSpec]:
    """Return the tensors of a file, name → dtype and shape, in the order of their bytes.

    Raises DamagedError if its header is not valid.
    """
    _read_header(path / name)
    try:
        with safetensors.safe_open(path / name, "np") as opened:
            views = {key: opened.get_slice(key) for key in opened.offset_keys()}
            found = {
                key: TensorSpec(view.get_dtype(), tuple(view.get_shape()))
                for key, view in views.items()
            }
    except safetensors.SafetensorError as error:
        raise DamagedError(name, str(error)) from error
    if other := {tensor.dtype for tensor in found.values()} - form.DTYPES.keys():
        raise DamagedError(name, f"holds tensors of {min(other)}")
    return found


def _read_header(path: Path) -> None:
    """Read a header before safetensors maps it, so that a failing disk raises OSError.

    If the disk fails while mapped memory is read, the process is killed.
    """
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        opened.read(min(size, _MAX_HEADER_BYTES))
