"""The format of a checkpoint on disk: names, safetensors layout, manifest, digests, and checks.

A checkpoint is a directory: named, whole tensors in safetensors files, small files (JSON,
tokenizer), and a manifest with each file's length and the digests of its bytes. Layout of a
tensor file:

    8 bytes little-endian N │ N bytes of JSON, padded with spaces to a multiple of 8 │ tensors

Every rank knows names, dtypes and shapes, and so each tensor's place, before a byte is written. The
trap: tensors follow one another in the order of the spec without gaps. Wide dtypes must therefore
come before narrow ones, or a reader could not map them.

The checks of sizes, headers and digests need neither torch nor other ranks: `read.find` divides
them among the ranks, and `read.verify` does all of them in one process. A difference raises
DamagedError. An OSError means that the disk did not answer, which proves nothing about the
checkpoint.
"""

import errno
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import safetensors
from xxhash import xxh3_128, xxh3_128_hexdigest

from llmtrain import faults
from llmtrain.system import unsafe_name
from llmtrain.types import (
    DTYPES as DTYPES,
    JsonObject,
    Spec,
    TensorSpec,
    tensor_bytes as tensor_bytes,
)

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
TENSORS = ".safetensors"
EXTENT_BYTES = 64 << 20
BLOCK_BYTES = 4 << 20  # hashed and written at a time: fits into the processor's cache
MAX_FILES = 10_000
MAX_JSON_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 256 << 20

# What each file of a checkpoint holds, for the reference pages.
WORDS = {
    "model.safetensors": "the weights; large ones in shards, with `model.safetensors.index.json`",
    "config.json, generation_config.json": "the model's config",
    "adapter_model.safetensors, adapter_config.json": "instead of them, in a run of adapters",
    "adapter.json": "the base of the adapters: where it is, and its digest",
    "tokenizer files": "as `save_pretrained` writes them",
    "optimizer-00001-of-0000N.safetensors": "the optimizer's state, by parameter",
    STATE: "step, positions in the data, resolved `auto` values, config, versions",
    MANIFEST: "size and digests of every file; written last",
}

_NAME = re.compile(r"step-(\d{8,18})")


class DamagedError(Exception):
    """A file of a checkpoint is not what was written."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


class OtherFormatError(Exception):
    """A checkpoint is intact, but of another format. found: that format."""

    def __init__(self, found: object, run_id: object) -> None:
        super().__init__(f"format {found}")
        self.found = found
        self.run_id = run_id


class Extent(NamedTuple):
    """Consecutive bytes of one file, written by one rank.

    length: at most EXTENT_BYTES
    digest: xxh3_128 as hex
    """

    offset: int
    length: int
    digest: str


class TensorLocation(NamedTuple):
    """Where a tensor is: its file, and the offset of its first byte in that file."""

    file: str
    offset: int
    tensor: TensorSpec


Extents = Mapping[str, tuple[Extent, ...]]  # file → the extents that were written


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the manifest: its size in bytes and the extents that cover it."""

    size: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a checkpoint consists of."""

    run_id: str
    step: int
    files: Mapping[str, Entry]


def directory_name(step: int) -> str:
    """Return the name of the complete checkpoint of `step`."""
    return f"step-{step:08d}"


def partial_name(step: int) -> str:
    """Return the name of the checkpoint of `step` while it is being written."""
    return f"{directory_name(step)}.partial"


def step_of(name: str) -> int | None:
    """Return the step in the name of a complete checkpoint; None for any other name."""
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and directory_name(step) == name else None


def header(part: Mapping[str, TensorSpec]) -> bytes:
    """Build the bytes in front of a file's tensors, which are in the order of `part`.

    Raises ValueError if a tensor would not be aligned to its own element size.
    """
    entries: JsonObject = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in part.items():
        if offset % DTYPES[tensor.dtype][0]:
            raise ValueError(f"{name} ({tensor.dtype}) is not aligned: wide dtypes come first")
        end = offset + tensor_bytes(tensor)
        shape = list(tensor.shape)
        entries[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def file_bytes(part: Mapping[str, TensorSpec]) -> int:
    """Return the size of a tensor file."""
    return len(header(part)) + sum(map(tensor_bytes, part.values()))


def places_in(file: str, part: Mapping[str, TensorSpec], start: int) -> dict[str, TensorLocation]:
    """Return where the tensors of one file are; `start` is the length of its header in bytes."""
    places = {}
    for name, tensor in part.items():
        places[name] = TensorLocation(file, start, tensor)
        start += tensor_bytes(tensor)
    return places


def places(spec: Spec) -> dict[str, TensorLocation]:
    """Return where every tensor of a spec is.

    Raises ValueError if a name is in two files.
    """
    locations: dict[str, TensorLocation] = {}
    for file, part in spec.items():
        here = places_in(file, part, len(header(part)))
        if twice := locations.keys() & here.keys():
            raise ValueError(f"{file}: {min(twice)} is in another file too")
        locations |= here
    return locations


def canonical(value: object) -> bytes:
    """Encode a value as canonical JSON: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def extents_of(body: bytes) -> tuple[Extent, ...]:
    """Return the extents of bytes that one rank writes to the start of a file."""
    view = memoryview(body)
    return tuple(
        Extent(offset, len(block), xxh3_128_hexdigest(block))
        for offset in range(0, len(body), EXTENT_BYTES)
        for block in (view[offset : offset + EXTENT_BYTES],)
    )


def gap(entry: Entry) -> str | None:
    """Return what is wrong with a file's extents; None if they cover each byte once."""
    end = 0
    for extent in sorted(entry.extents):
        if extent.offset != end or not 0 < extent.length <= EXTENT_BYTES:
            return f"bytes from {min(end, extent.offset)} on are not covered exactly once"
        end += extent.length
    return None if end == entry.size else f"{end} of {entry.size} bytes are covered"


def build(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest as canonical JSON, with the digest of its other fields under `self`."""
    rest = {
        "format": FORMAT,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "files": {
            name: {"size": entry.size, "extents": sorted(entry.extents)}
            for name, entry in manifest.files.items()
        },
    }
    return canonical({**rest, "self": xxh3_128_hexdigest(canonical(rest))})


def parse(body: bytes) -> CheckpointManifest:
    """Parse the bytes of a manifest.

    Raises DamagedError if any byte is not as `build` made it, OtherFormatError for an intact
    manifest of another format. Every format has the same rule for `self`, so a flipped bit in the
    number of the format counts as damage.
    """
    fields = _json_object(MANIFEST, body)
    rest = {key: value for key, value in fields.items() if key != "self"}
    if fields.get("self") != xxh3_128_hexdigest(canonical(rest)) or canonical(fields) != body:
        raise DamagedError(MANIFEST, "its own digest differs")
    if fields.get("format") != FORMAT:
        raise OtherFormatError(fields.get("format"), fields.get("run_id"))
    return _manifest(fields)


def _json_object(file: str, body: bytes) -> JsonObject:
    """Parse a JSON object that `canonical` can encode again; DamagedError for anything else."""
    try:
        value = json.loads(body)
        canonical(value)
    except (ValueError, RecursionError) as error:
        raise DamagedError(file, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedError(file, "not a JSON object")
    return value


def _manifest(fields: JsonObject) -> CheckpointManifest:
    """Read the fields of an intact manifest; DamagedError if one is missing or unsafe."""
    try:
        files = {
            str(name): Entry(
                int(entry["size"]),
                tuple(
                    Extent(int(start), int(size), str(xx)) for start, size, xx in entry["extents"]
                ),
            )
            for name, entry in fields["files"].items()
        }
        manifest = CheckpointManifest(str(fields["run_id"]), int(fields["step"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(MANIFEST, f"a field is missing or of another type ({error})") from error
    if not files:
        raise DamagedError(MANIFEST, "lists no file")
    if len(files) > MAX_FILES:
        raise DamagedError(MANIFEST, f"{len(files)} files, more than {MAX_FILES}")
    for name, entry in files.items():
        if wrong := unsafe_name(name) or gap(entry):
            raise DamagedError(MANIFEST, f"{name}: {wrong}")
    return manifest


def load(directory: Path) -> CheckpointManifest:
    """Load the manifest of a checkpoint directory. The other files are not checked.

    Raises DamagedError (also if it is missing), OtherFormatError, OSError if the disk does not
    answer.
    """
    manifest = parse(small_file(directory, MANIFEST, MAX_MANIFEST_BYTES))
    if step_of(directory.name) not in (None, manifest.step):
        raise DamagedError(MANIFEST, f"is of step {manifest.step}")
    return manifest


def regular_size(directory: Path, name: str) -> int:
    """Return the size of a regular file inside a checkpoint.

    Raises DamagedError if it is missing, not a regular file, or reached through a symbolic link.
    """
    try:
        status = (directory / name).lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise DamagedError(name, "is missing") from error
        raise
    inside = (directory / name).resolve().parent == (directory.resolve() / name).parent
    if not stat.S_ISREG(status.st_mode) or not inside:
        raise DamagedError(name, "is not a regular file of this directory")
    return status.st_size


def small_file(directory: Path, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """Read a small file of a checkpoint.

    Raises DamagedError if it is missing, irregular or larger than `limit` bytes.
    """
    if regular_size(directory, name) > limit:
        raise DamagedError(name, f"is larger than {limit} bytes")
    return (directory / name).read_bytes()


def state(directory: Path) -> JsonObject:
    """Read `trainer_state.json`; DamagedError if it is not a JSON object."""
    return _json_object(STATE, small_file(directory, STATE))


def complete_names(root: Path) -> list[str]:
    """List the names of all complete checkpoints, newest first by the number in the name."""
    numbered = [(step, name) for name in names(root) if (step := step_of(name)) is not None]
    return [name for _, name in sorted(numbered, reverse=True)]


def names(root: Path) -> list[str]:
    """List the directories in `root`, sorted; an empty list if `root` does not exist."""
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def parents(directory: Path, files: Iterable[str]) -> list[Path]:
    """List the directories of a checkpoint's files, deepest first, the checkpoint's own last."""
    directories = {parent for name in files for parent in PurePosixPath(name).parents}
    return [directory / parent for parent in sorted(directories, key=lambda path: -len(path.parts))]


_MAX_HEADER_BYTES = 100 << 20  # safetensors refuses a longer one


def check_file(path: Path, name: str, manifest: CheckpointManifest) -> None:
    """Raise DamagedError if a file is missing, has another size or an invalid tensor header."""
    size = regular_size(path, name)
    if size != manifest.files[name].size:
        raise DamagedError(name, f"has {size} bytes instead of {manifest.files[name].size}")
    if name.endswith(TENSORS):
        check_tensors(path, name)


def check_extent(path: Path, name: str, extent: Extent) -> None:
    """Raise DamagedError if the bytes of an extent are not those that were written."""
    faults.hit("load.verify", step=step_of(path.name), path=path / name)
    hasher = xxh3_128()
    buffer = memoryview(bytearray(min(extent.length, BLOCK_BYTES)))
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


def check_tensors(path: Path, name: str) -> dict[str, TensorSpec]:
    """Return the tensors of a file, name → dtype and shape, in the order of their bytes.

    Raises DamagedError if its header is not valid.
    """
    # The header is read before safetensors maps it, so that a failing disk raises OSError: if it
    # fails while mapped memory is read, the process is killed.
    with (path / name).open("rb") as file:
        file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
    try:
        with safetensors.safe_open(path / name, "np") as opened:
            views = {key: opened.get_slice(key) for key in opened.offset_keys()}
            tensors = {
                key: TensorSpec(view.get_dtype(), tuple(view.get_shape()))
                for key, view in views.items()
            }
    except safetensors.SafetensorError as error:
        raise DamagedError(name, str(error)) from error
    if other := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise DamagedError(name, f"holds tensors of {min(other)}")
    return tensors
