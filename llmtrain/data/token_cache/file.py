r"""One pair of files of a token cache: Megatron's `.bin` (tokens) and `.idx` (where documents are).

    .idx   MMIDIDX\0\0   version 1 (u64)   dtype code (u8)   S sequences (u64)   D (u64)
           S lengths in tokens (i32)   S byte offsets into .bin (i64)   D sequence numbers (i64)
    .bin   the tokens, nothing else; all numbers are little-endian

Document d consists of the sequences from the d-th of these D numbers up to the (d + 1)-th, so there
are D − 1 documents. llmtrain writes one sequence per document. Both files are mapped into memory,
never read whole. The trap: the arrays after the header of 34 bytes are not aligned, and many
functions of numpy would copy such an array as a whole; so only single entries and slices are used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.errors import Problem, UserError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SHORT_VOCABULARY = 65_500  # below it tokens are stored in two bytes, as Megatron does
CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenFile:
    """A pair of files, mapped into memory.

    tokens (n,) of the file's dtype
    lengths (S,) int32
    offsets (S,) int64: bytes
    borders (D,) int64: sequence numbers
    """

    index: Path
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    borders: np.ndarray

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.borders) - 1

    def begin(self, document: int) -> int:
        """Return the position of a document's first token; for number `documents`, the end."""
        sequence = int(self.borders[document])
        if sequence == len(self.offsets):
            return len(self.tokens)
        return int(self.offsets[sequence]) // self.tokens.itemsize

    def at(self, position: int) -> int:
        """Return the document of a token, found by bisection in the file."""
        low, high = 0, self.documents
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.begin(middle) <= position else (low, middle)
        return low

    def ids(self, start: int, stop: int, length: int) -> np.ndarray:
        """Return tokens [start, stop), int32 (n,). Raises UserError for ids outside [0, length)."""
        ids = self.tokens[start:stop]
        if ids.size and (ids.max() >= length or ids.min() < 0):
            where = int(np.flatnonzero((ids >= length) | (ids < 0))[0])
            raise UserError(
                Problem(
                    f"{binary(self.index)}, token {start + where}",
                    int(ids[where]),
                    f"an id of the run's tokenizer, which has {length} entries",
                    "set model.tokenizer to the one that wrote the token cache",
                )
            )
        return ids.astype(np.int32)


def binary(index: Path) -> Path:
    """Return the `.bin` beside an `.idx`."""
    return index.with_suffix(".bin")


def dtype_code(vocabulary: int) -> int:
    """Return the dtype code for ids below `vocabulary`: two bytes an id, or four."""
    return 8 if vocabulary < SHORT_VOCABULARY else 4


def open_tokens(index: Path) -> TokenFile:
    """Map a pair. Raises UserError unless the header is right and the sizes fit it."""
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise _bad(index, f"{size} bytes, beginning {head[:9]!r}", f"a header beginning {MAGIC!r}")
    _, version, code, sequences, borders = HEADER.unpack(head)
    if version != VERSION:
        raise _bad(index, f"version {version}", f"version {VERSION}")
    if np.dtype(DTYPES.get(code, "<f4")).kind not in "ui":
        raise _bad(index, f"dtype code {code}", "a code of integers: 1 to 5, or 8")
    wanted = HEADER.size + 12 * sequences + 8 * borders
    if size != wanted or borders < 1:
        expected = f"{sequences} sequences and {borders} document indices make {wanted} bytes"
        raise _bad(index, f"{size} bytes", expected + ", without the modes of a multimodal file")
    tokens, dtype = binary(index), np.dtype(DTYPES[code])
    if not tokens.is_file():
        raise _bad(index, f"no {tokens.name} beside it", "both files of the pair")
    size = tokens.stat().st_size
    if size % dtype.itemsize:
        raise _bad(tokens, f"{size} bytes", f"tokens of {dtype.itemsize} bytes ({index.name})")
    at = HEADER.size
    pair = TokenFile(
        index,
        _map(tokens, dtype, 0, size // dtype.itemsize),
        _map(index, np.dtype("<i4"), at, sequences),
        _map(index, np.dtype("<i8"), at + 4 * sequences, sequences),
        _map(index, np.dtype("<i8"), at + 12 * sequences, borders),
    )
    if sequences:
        end = int(pair.offsets[-1]) + int(pair.lengths[-1]) * dtype.itemsize
        if end != size:
            raise _bad(tokens, f"{size} bytes", f"{end}, where the last document of {index} ends")
    return pair


def check_tokens(pair: TokenFile) -> None:
    """Raise UserError unless all lengths, offsets and document indices fit the `.bin`.

    The whole `.idx` is read, a few megabytes at a time.
    """
    position = 0
    for start in range(0, len(pair.lengths), CHECKED_AT_ONCE):
        part = slice(start, start + CHECKED_AT_ONCE)
        lengths = pair.lengths[part].astype(np.int64)
        ends = position + np.cumsum(lengths)
        begins = (ends - lengths) * pair.tokens.itemsize
        wrong = (lengths < 0) | (pair.offsets[part] != begins)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            expected = "documents that lie one behind the other"
            raise _bad(pair.index, f"sequence {start + first} does not", expected)
        position = int(ends[-1])
    if position != len(pair.tokens):
        held = f"{len(pair.tokens)} tokens in {binary(pair.index).name}"
        raise _bad(pair.index, held, f"{position}, the sum of its lengths")
    before = 0
    for start in range(0, len(pair.borders), CHECKED_AT_ONCE):
        numbers = pair.borders[start : start + CHECKED_AT_ONCE].astype(np.int64)
        if np.any(np.diff(numbers, prepend=before) < 0):
            raise _bad(pair.index, "document indices that go back", "indices in rising order")
        before = int(numbers[-1])
    if (int(pair.borders[0]), before) != (0, len(pair.lengths)):
        got = f"document indices from {int(pair.borders[0])} to {before}"
        raise _bad(pair.index, got, f"from 0 to {len(pair.lengths)}")


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    mapped = np.memmap(path, dtype, "r", offset, (count,))
    return mapped.view(np.ndarray)


def _bad(path: Path, value: str, expected: str) -> UserError:
    remedy = "copy it again, or write it again with `llmtrain data tokenize`"
    return UserError(Problem(str(path), value, expected, remedy))
