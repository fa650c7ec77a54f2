"""Writes one checkpoint: partial directory → fsync → manifest → rename.

    begin            rank 0 makes `step-00000300.partial` with small files, headers and room; vote
    write_pieces     each rank hashes and writes its own ranges; no collective, any thread
    collect_pieces   instead: the others send their parts, and rank 0 writes everything
    commit           vote; rank 0 checks coverage, writes the manifest, renames; all learn the end

The final name exists only if the checkpoint is complete. The trap: an error of a rank is not raised
there but becomes its failed vote, so that all ranks end the save together and with the same result.

`collect_pieces` sends one tensor after another, some MiB at a time:

    round of 16 MiB, 2 ranks     rank 0: a[0, 8)   rank 1: a[20, 28)
                                 rank 0: a[8, 16)  rank 1: a[28, 36)  …

All ranks make the same number of exchanges, so a rank that fails continues with empty messages and
raises its error at the end. The files are the same as if every rank had written its own parts.
"""

import errno
import itertools
import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from xxhash import xxh3_128

from llmtrain import faults, system
from llmtrain.agreement import captured
from llmtrain.checkpoint import disk, format as form
from llmtrain.checkpoint.candidates import PARTIAL, kind_of
from llmtrain.checkpoint.format import CheckpointManifest, Entry, Extent, Extents, TensorLocation
from llmtrain.system import unsafe_name
from llmtrain.types import Failure, Piece, Ranks, Spec

BEAT_BYTES = 64 << 20  # written between two heartbeats

Error = TypeVar("Error", bound=BaseException)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenSave:
    """A checkpoint that is being written.

    places: tensor → where it is
    sizes: tensor file → its size in bytes
    extents: what `begin` wrote (rank 0's small files and headers)
    started: when `begin` was called, by `time.perf_counter`
    """

    root: Path
    step: int
    run_id: str
    places: Mapping[str, TensorLocation]
    sizes: Mapping[str, int]
    extents: Extents
    started: float

    @property
    def partial(self) -> Path:
        """The directory that is being written."""
        return self.root / form.partial_name(self.step)


class WriteChunk(NamedTuple):
    """Consecutive bytes of a file, on the host."""

    file: str
    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its name, its size on disk, seconds from begin to commit."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that failed, with the failures of the ranks. The partial directory was removed."""

    failures: tuple[Failure, ...]


def begin(
    root: Path, step: int, spec: Spec, small: Mapping[str, bytes], ranks: Ranks, run_id: str
) -> OpenSave | FailedSave:
    """Create the partial directory and everything in it except the tensors' bytes.

    root: directory of checkpoints
    small: file name → bytes of the other files; used on rank 0 only

    The tensor files get their space here, so a full disk is noticed now. Collective. An error of a
    rank is not raised: all ranks return FailedSave.
    """
    started = time.perf_counter()
    places: Mapping[str, TensorLocation] = {}
    extents: Extents = {}

    def create() -> None:
        nonlocal places, extents
        faults.hit("save.begin", step=step)
        places = form.places(spec)
        if ranks.rank == 0:
            extents = _create(root, step, spec, small)
        faults.hit("save.vote1", step=step)

    vote = ranks.vote(_log_error(captured(create).error, step))
    if vote.failures:
        return _give_up(root, step, vote.failures, ranks)
    sizes = {file: form.file_bytes(part) for file, part in spec.items()}
    return OpenSave(root, step, run_id, places, sizes, extents, started)


def write_pieces(begun: OpenSave, pieces: Iterable[Piece], share: int | None = None) -> Extents:
    """Write this rank's ranges and make them durable. Returns what was written, with digests.

    share: about how many bytes the pieces have, if each is made when it is asked for; None = they
        are views of memory that is held anyway, and are counted

    It may run in any thread, and does not wait for other ranks, unless making a piece does: then
    the caller takes all pieces that are left, also after an error. Raises OSError if the disk
    fails, ValueError for a piece that is not in the spec.
    """
    if share is None:
        pieces = list(pieces)
        share = sum(piece.data.nbytes for piece in pieces)
    return write_blocks(begun, _cut(begun, pieces), share)


def write_blocks(begun: OpenSave, blocks: Iterable[WriteChunk], share: int) -> Extents:
    """Do the same as `write_pieces` for data in blocks. share: bytes of all blocks together."""
    extents: dict[str, tuple[Extent, ...]] = {}
    counted = _count(begun, blocks, share)
    before: Future[None] | None = None
    for file, group in itertools.groupby(counted, key=lambda block: block.file):
        descriptor, written = _write_ranges(begun.partial / file, group)
        extents[file] = extents.get(file, ()) + written
        disk.still_writing(f"fsync of {file} of step {begun.step}")
        if before:  # the previous file was synced while this one was written
            before.result()
        before = system.begin_in_thread(partial(_sync, begun, file, descriptor), "fsync")
    if before:
        before.result()
    return extents


def commit(
    begun: OpenSave, extents: Extents, error: BaseException | None, ranks: Ranks
) -> SavedCheckpoint | FailedSave:
    """Make the checkpoint valid if every rank has written its part.

    error: why this rank has not written its part, or None

    Collective. An error of a rank is not raised: all ranks return FailedSave. That is also the
    result if only the last fsync fails, that of `root`: the complete checkpoint stays, and so do
    the older ones.
    """
    error = error or captured(partial(faults.hit, "save.vote2", step=begun.step)).error
    vote = ranks.vote(_log_error(error, begun.step), form.canonical(extents))
    if vote.failures:
        return _give_up(begun.root, begun.step, vote.failures, ranks)
    published = captured(lambda: _publish(begun, vote.bodies) if ranks.rank == 0 else 0)
    outcome = ranks.vote(_log_error(published.error, begun.step))
    if outcome.failures:
        return _give_up(begun.root, begun.step, outcome.failures, ranks)
    size = int(ranks.broadcast(b"%d" % (published.result())))
    seconds = time.perf_counter() - begun.started
    faults.hit("save.done", step=begun.step)
    return SavedCheckpoint(form.directory_name(begun.step), size, seconds)


def _create(root: Path, step: int, spec: Spec, small: Mapping[str, bytes]) -> Extents:
    """Create the partial directory: small files, headers and room for the tensors, all synced."""
    wrong = [text for file in [*spec, *small] if (text := unsafe_name(file))]  # reading refuses it
    if twice := (spec.keys() | {form.MANIFEST}) & small.keys():
        wrong.append(f"{min(twice)} is written twice")
    if wrong:
        raise ValueError("; ".join(wrong))
    if not root.is_dir():
        root.mkdir(parents=True)
        system.sync_directory(root.parent)
    for name in form.names(root):
        if kind_of(name) == PARTIAL:
            shutil.rmtree(root / name)
    final = root / form.directory_name(step)
    if os.path.lexists(final):  # renaming onto it would fail, after all the writing
        text = "something has this checkpoint's name, and it is not overwritten"
        raise FileExistsError(errno.EEXIST, text, str(final))
    partial = root / form.partial_name(step)
    partial.mkdir()
    faults.hit("save.mkdir", step=step, path=partial)
    headers = {file: form.header(part) for file, part in spec.items()}
    sizes = {file: form.file_bytes(part) for file, part in spec.items()}
    with disk.sync_together() as sync:
        for file, head in headers.items():
            sync(disk.new(partial / file, head, sizes[file]))
            faults.hit("save.create", step=step, path=partial / file)
        for file, body in small.items():
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            sync(disk.new(partial / file, body, len(body)))
            faults.hit("save.small", step=step, path=partial / file)
    extents = {file: form.extents_of(body) for file, body in (*headers.items(), *small.items())}
    system.sync_directory(*form.parents(partial, extents))
    return extents


def flat(begun: OpenSave, piece: Piece) -> tuple[int, torch.Tensor]:
    """Return where a piece begins in its file, and a view of its memory as bytes (uint8).

    Raises ValueError if it is not in the spec.
    """
    place = begun.places.get(piece.name)
    if place is None:
        raise ValueError(f"{piece.name} is not in the spec")
    item, dtype = form.DTYPES[place.tensor.dtype]
    end = (piece.start + piece.data.numel()) * item
    within = piece.start >= 0 and end <= form.tensor_bytes(place.tensor)
    if str(piece.data.dtype) != dtype or not within:
        raise ValueError(f"{piece.name}: {piece.data.dtype} up to byte {end} is not {place.tensor}")
    return place.offset + piece.start * item, piece.data.detach().view(torch.uint8)


def _cut(begun: OpenSave, pieces: Iterable[Piece]) -> Iterator[WriteChunk]:
    """Yield pieces in chunks on the host, of BLOCK_BYTES at most."""
    for piece in pieces:
        start, data = flat(begun, piece)
        file = begun.places[piece.name].file
        for first in range(0, data.numel(), form.BLOCK_BYTES):
            block = data[first : first + form.BLOCK_BYTES].cpu()
            yield WriteChunk(file, start + first, block.numpy().data)


def _count(begun: OpenSave, blocks: Iterable[WriteChunk], share: int) -> Iterator[WriteChunk]:
    """Yield the same blocks, and beat now and then. The fault `short` cuts a block in half."""
    written = beaten = 0
    for block in blocks:
        written += block.data.nbytes
        path = begun.partial / block.file
        struck = faults.hit("save.write", step=begun.step, path=path, written=written, of=share)
        if written - beaten >= BEAT_BYTES:
            disk.still_writing(f"writing {block.file} of step {begun.step}")
            beaten = written
        yield block._replace(data=block.data[: block.data.nbytes // 2]) if struck else block


def _write_ranges(path: Path, blocks: Iterable[WriteChunk]) -> tuple[int, tuple[Extent, ...]]:
    """Write blocks into an existing file; consecutive ones become one extent.

    Returns the file, still open, and the extents.
    """
    extents: list[Extent] = []
    hasher, start, length = xxh3_128(), 0, 0
    with system.close_on_error(disk.open_when_visible(path)) as descriptor:
        for _, offset, block in blocks:
            if length and (offset != start + length or length + block.nbytes > form.EXTENT_BYTES):
                extents.append(Extent(start, length, hasher.hexdigest()))
                hasher, length = xxh3_128(), 0
            if not length:
                start = offset
            hasher.update(block)  # first: the write then reads it from the processor's cache
            disk.write_at(descriptor, block, offset)
            length += block.nbytes
    return descriptor, (*extents, Extent(start, length, hasher.hexdigest()))


def _sync(begun: OpenSave, file: str, descriptor: int) -> None:
    """Sync and close a file as `disk.durable` does, after the failpoint `save.fsync`."""
    with system.close_on_error(descriptor):
        faults.hit("save.fsync", step=begun.step, path=begun.partial / file)
    disk.durable(descriptor)


def _publish(begun: OpenSave, bodies: Iterable[bytes]) -> int:
    """Check that everything was written, write the manifest and rename the directory.

    Called on rank 0. Returns the size of the checkpoint in bytes.
    """
    files = _entries(begun, bodies)
    for name, entry in files.items():
        size = form.regular_size(begun.partial, name)
        if wrong := form.gap(entry):
            raise ValueError(f"{name}: {wrong}")
        if size != entry.size:
            raise ValueError(f"{name}: has {size} bytes instead of {entry.size}")
    manifest = form.build(CheckpointManifest(begun.run_id, begun.step, files))
    temporary = begun.partial / f"{form.MANIFEST}.tmp"
    disk.durable(disk.new(temporary, manifest, len(manifest)))
    faults.hit("save.manifest", step=begun.step, path=temporary)
    temporary.rename(begun.partial / form.MANIFEST)
    faults.hit("save.dirsync", step=begun.step, path=begun.partial)
    system.sync_directory(begun.partial)
    faults.hit("save.rename", step=begun.step, path=begun.partial)
    begun.partial.rename(begun.root / form.directory_name(begun.step))
    faults.hit("save.parentsync", step=begun.step, path=begun.root)
    system.sync_directory(begun.root)
    return len(manifest) + sum(entry.size for entry in files.values())


def _entries(begun: OpenSave, bodies: Iterable[bytes]) -> dict[str, Entry]:
    """Return the files of the checkpoint, with what `begin` and all ranks wrote of each."""
    written = {file: list(extents) for file, extents in begun.extents.items()}
    for body in bodies:
        for file, extents in json.loads(body).items():
            written[file] += [Extent(*extent) for extent in extents]
    return {
        file: Entry(
            begun.sizes.get(file, sum(extent.length for extent in extents)), tuple(sorted(extents))
        )
        for file, extents in written.items()
    }


def _give_up(root: Path, step: int, failures: tuple[Failure, ...], ranks: Ranks) -> FailedSave:
    """Remove the partial directory after a failed vote. A later save removes what is left."""
    if ranks.rank == 0:
        try:
            shutil.rmtree(root / form.partial_name(step))
        except FileNotFoundError:
            _log.debug("there was nothing to remove")
        except OSError as error:
            _log.warning("could not remove %s: %s", form.partial_name(step), error)
    return FailedSave(failures)


def _log_error(error: Error | None, step: int) -> Error | None:
    """Log an error with its traceback in this rank's log, and return it."""
    if error is not None:
        _log.warning("saving step %s failed on this rank", step, exc_info=error)
    return error


Part = tuple[int, torch.Tensor]  # offset in the file, bytes as uint8
ROUND_BYTES = 16 << 20  # of all ranks together; rank 0 needs about three times as much memory
_HEAD = struct.Struct("<QQ")  # offset in the file, number of bytes


def collect_pieces(begun: OpenSave, pieces: Iterable[Piece], ranks: Ranks) -> Extents:
    """Do the same as `write_pieces`, but rank 0 writes the pieces of all ranks.

    Collective; only rank 0 gets extents. An error of this rank is raised after the last exchange.
    """
    parts: dict[str, list[Part]] = {}
    pieces = iter(pieces)

    def collect() -> None:
        for piece in pieces:
            parts.setdefault(piece.name, []).append(flat(begun, piece))

    error = captured(collect).error
    for _ in pieces:  # another rank may wait for what this one exchanges to make them
        continue
    failed = [error] if error else []
    blocks = _exchange(begun, {} if error else parts, ranks, failed)
    total = sum(form.tensor_bytes(place.tensor) for place in begun.places.values())
    outcome = captured(lambda: write_blocks(begun, blocks, total) if ranks.rank == 0 else {})
    for _ in blocks:  # every rank takes part in every exchange, even if rank 0 has failed
        continue
    if failed:
        raise failed[0]
    return outcome.result()


def _exchange(
    begun: OpenSave, local_parts: dict[str, list[Part]], ranks: Ranks, failed: list[Exception]
) -> Iterator[WriteChunk]:
    """Send bytes to rank 0 in rounds. Rank 0 yields them, each round in the order of the file."""
    room = -(-ROUND_BYTES // ranks.world_size)
    for name, place in begun.places.items():
        system.beat(f"sending {name} to rank 0")
        mine = _messages(local_parts.get(name, []), room)
        # As many rounds as one rank alone would need for the whole tensor: a rank does not know
        # which parts the others have.
        for _ in range(-(-form.tensor_bytes(place.tensor) // room)):
            # An empty message after the last, or if it cannot be made: the error is raised later.
            message = captured(partial(next, mine, b""))
            failed += [message.error] if message.error else []
            bodies = ranks.gather(b"".join(message.returned))
            blocks = [WriteChunk(place.file, *part) for body in bodies for part in _parts(body)]
            yield from sorted(blocks, key=lambda block: block.offset)


def _messages(parts: Iterable[Part], room: int) -> Iterator[bytes]:
    """Yield the parts as messages with `room` bytes of data each; the last one may have fewer."""
    message: list[bytes] = []
    left = room
    for offset, data in parts:
        first = 0
        while first < data.numel():
            part = data[first : first + left]
            message += [_HEAD.pack(offset + first, part.numel()), part.cpu().numpy().tobytes()]
            first, left = first + part.numel(), left - part.numel()
            if not left:
                yield b"".join(message)
                message, left = [], room
    if message:
        yield b"".join(message)


def _parts(body: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the parts in a message: each one's offset in the file, and its bytes."""
    view = memoryview(body)
    while view.nbytes:
        offset, size = _HEAD.unpack_from(view)
        yield offset, view[_HEAD.size : _HEAD.size + size]
        view = view[_HEAD.size + size :]
