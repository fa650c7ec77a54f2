"""Tensors of safetensors files, by name; the library reads and writes the files.

A file that is read is mapped while one of its tensors is in use. Only what is touched of it is in
memory, so an export holds one file that it writes, and of those that it reads no more than that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint import disk, format as form
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, needed_on_disk
from llmtrain.types import Spec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors on disk, in one file or several.

    files: name → its file in the directory
    specs: name → dtype and shape
    """

    directory: Path
    files: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, directory: Path, *names: str) -> Stored:
        """Return the tensors of these files. Raises as `specs` does."""
        parts = {file: specs(directory, file) for file in names}
        files = {name: file for file, part in parts.items() for name in part}
        return cls(directory, files, {name: parts[file][name] for name, file in files.items()})

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises RunError 74 if the disk does not answer."""
        from safetensors import SafetensorError, safe_open

        path = self.directory / self.files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _no_answer(path, error) from error
        return tensor


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
    try:
        return form.check_tensors(directory, name)
    except (form.DamagedError, FileNotFoundError) as error:
        why = error.reason if isinstance(error, form.DamagedError) else "there is no such file"
        problem = Problem(str(directory / name), None, f"whole safetensors ({why})")
        raise UserError(problem) from error
    except OSError as error:
        raise _no_answer(directory / name, error) from error


def _no_answer(path: Path, error: Exception) -> RunError:
    remedy = "see that the disk can be read, then give the same command again"
    return RunError(f"cannot read {path}: {error}", DISK_FAILED, remedy)


def write(directory: Path, spec: Spec, read: Callable[[str], Tensor]) -> None:
    """Write and sync the files of a spec, one after the other, with no more than one in memory.

    read: returns a tensor in the dtype of the spec; no two may share memory

    Raises RunError 74 if the disk refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for file, part in spec.items():
        path = directory / file
        with needed_on_disk(path):
            try:
                save_file({name: read(name).contiguous() for name in part}, path, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from error
            path.chmod(directory.stat().st_mode & 0o666)  # it is made for its owner alone
            disk.durable(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
