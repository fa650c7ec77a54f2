"""Writes a token cache: a part per unit, in any order and by any number of processes, then joined.

    unit u   ─►  part-u    tokens ‖ lengths (i32) ‖ counts ‖ digest
    parts    ─►  NAME.bin  the tokens of all parts in order of the manifest
                 NAME.idx  comes last: a pair that has its .idx is complete

A part is complete once it has its name, so a writer that is killed loses only the units that it was
writing. What is written depends on the data and the tokenizer alone. The trap: joining needs as
much disk space again as the parts.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import xxhash

from llmtrain import system
from llmtrain.data.documents.lines import in_batches
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.manifest import Source, Unit
from llmtrain.data.sources.token_cache import DTYPES, HEADER, MAGIC, VERSION
from llmtrain.data.tokens.tokenizer import Backend, Tokenizer, open_tokenizer
from llmtrain.errors import RESTARTABLE, RunError, needed_on_disk

BATCH_DOCUMENTS = 64  # documents tokenized in one call
BATCH_CHARACTERS = 1 << 18
CHUNK_BYTES = 1 << 22
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
COUNTS = struct.Struct("<5Q")
DIGEST_BYTES = 8
TRAILER_BYTES = COUNTS.size + DIGEST_BYTES


class Counts(NamedTuple):
    """The content of a part or a whole source in numbers, and how much was left out.

    dropped: documents that are null, empty or blank
    replaced: documents with invalid UTF-8, which are kept
    skipped: units and lines that cannot be read, if the config lets them be skipped
    """

    documents: int = 0
    tokens: int = 0
    dropped: int = 0
    replaced: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """The task to write unit `unit` of a source to `path`, with ids of dtype code `code`.

    tokenizer: its directory
    backend: the library that encodes
    reading: how the unit is read
    """

    source: Source
    unit: Unit
    path: Path
    code: int
    tokenizer: Path
    backend: Backend
    reading: Reading


def write_part(task: Task) -> Counts:
    """Tokenize the usable documents of a unit in file order. The part appears as a whole.

    Raises UserError for a bad unit, RunError if it cannot be read or the disk fails.
    """
    tokenizer, reader = _open(task.tokenizer, task.backend, task.reading)
    dtype = np.dtype(DTYPES[task.code])
    rows = reader.rows(task.source, task.unit)
    read = [rows.text(row) for row in range(len(rows))]
    texts = [text for text, _ in read if text is not None]
    dropped, replaced = len(read) - len(texts), sum(was_replaced for _, was_replaced in read)
    # In batches, so that long documents are not in memory twice.
    batches = in_batches(texts, len, BATCH_CHARACTERS, BATCH_DOCUMENTS)
    documents = [ids for batch in batches for ids in tokenizer.documents(batch)]
    tokens = sum(map(len, documents))
    counts = Counts(len(documents), tokens, dropped, replaced, rows.skipped)
    lengths = np.array([len(ids) for ids in documents], "<i4")
    data = [*(ids.astype(dtype).tobytes() for ids in documents), lengths.tobytes()]
    digest = xxhash.xxh3_64()
    with replacing(task.path) as file:
        for piece in (*data, COUNTS.pack(*counts)):
            digest.update(piece)
            file.write(piece)
        file.write(digest.intdigest().to_bytes(DIGEST_BYTES, "little"))
    return counts


@lru_cache(maxsize=1)
def _open(directory: Path, backend: Backend, reading: Reading) -> tuple[Tokenizer, Reader]:
    """Open tokenizer and reader once in each process."""
    return open_tokenizer(directory, backend), Reader(reading)


def counts_of(path: Path, code: int) -> Counts | None:
    """Return the counts that a part records; None if it does not exist or is not complete.

    Raises RunError if the disk fails.
    """
    with needed_on_disk(path):
        if not path.exists():
            return None
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - TRAILER_BYTES))
            trailer = file.read(COUNTS.size)
    if len(trailer) < COUNTS.size:
        return None
    counts = Counts(*COUNTS.unpack(trailer))
    expected = np.dtype(DTYPES[code]).itemsize * counts.tokens + 4 * counts.documents
    return counts if size == expected + TRAILER_BYTES else None


def total(parts: Sequence[Path], code: int) -> Counts:
    """Return the counts of all parts of a source together. Raises RunError if one is missing."""
    counts = [counts_of(part, code) or _refuse_changed(part) for part in parts]
    return Counts(*(sum(values) for values in zip(*counts, strict=True)))


def join(parts: Sequence[Path], index: Path, code: int) -> None:
    """Join the parts of a source into its pair of files. The parts stay; memory does not grow.

    Raises RunError if the disk fails, or if a part does not have its digest any more. Such a part
    is removed, so that the same command writes it again.
    """
    documents = total(parts, code).documents
    with replacing(index) as indices:
        indices.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        with replacing(index.with_suffix(".bin")) as tokens:
            for part in parts:
                _append(part, code, tokens, indices)
        # Write, after the lengths, the byte of the `.bin` at which each document begins.
        itemsize = np.dtype(DTYPES[code]).itemsize
        position = 0
        for start in range(0, documents, CHUNK_BYTES // 8):
            count = min(documents - start, CHUNK_BYTES // 8)
            indices.seek(HEADER.size + 4 * start)
            lengths = np.frombuffer(indices.read(4 * count), "<i4").astype("<i8") * itemsize
            ends = position + np.cumsum(lengths)
            indices.seek(0, os.SEEK_END)
            indices.write((ends - lengths).astype("<i8").tobytes())
            position = int(ends[-1])
        # Each document is one sequence: the numbers 0, 1, … documents.
        for start in range(0, documents + 1, CHUNK_BYTES // 8):
            stop = min(start + CHUNK_BYTES // 8, documents + 1)
            indices.write(np.arange(start, stop, dtype="<i8").tobytes())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file as `system.replacing` does. Raises RunError (74) if the disk fails."""
    with needed_on_disk(path), system.replacing(path, shared=True) as file:
        yield file


@contextmanager
def room_needed() -> Iterator[None]:
    """Raise RunError (74) instead of an OSError of a full or failing disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        with needed_on_disk(Path(error.filename or "a file")):
            raise error


def _append(part: Path, code: int, tokens: BinaryIO, indices: BinaryIO) -> None:
    counts = counts_of(part, code) or _refuse_changed(part)
    digest = xxhash.xxh3_64()
    with part.open("rb") as file:
        size = part.stat().st_size - TRAILER_BYTES
        lengths = 4 * counts.documents
        for target, left in ((tokens, size - lengths), (indices, lengths)):
            while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
                digest.update(chunk)
                target.write(chunk)
                left -= len(chunk)
        digest.update(file.read(COUNTS.size))
        whole = file.read(DIGEST_BYTES) == digest.intdigest().to_bytes(DIGEST_BYTES, "little")
    if not whole:
        _refuse_changed(part)


def _refuse_changed(part: Path) -> NoReturn:
    part.unlink(missing_ok=True)
    message = f"{part} is not what was written: the disk, or another program, changed it"
    raise RunError(message, RESTARTABLE, "give the same command again: it writes that part again")
