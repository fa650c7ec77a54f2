r"""A token cache as a source: its training documents are one stream of tokens, read at any place.

    documents    0 | 1 | 2 | 3 | 4 |          in order of files; 2 is held out
    stream       0 0 0 1 3 3 3 3 4 4 …        without 2: there is no gap
    blocks       |---0---|---1---|---2---|    of stride seq_len; the last continues with document 0

An epoch deals all blocks to the lanes in an order of its own. To open the stream at a block only
that block is read. The trap: with packing bestfit there is no such stream; documents are walked
like those of other sources, in slices of a file.

The files are Megatron's, in pairs: `.bin` (tokens) and `.idx` (where documents are).

    .idx   MMIDIDX\0\0   version 1 (u64)   dtype code (u8)   S sequences (u64)   D (u64)
           S lengths in tokens (i32)   S byte offsets into .bin (i64)   D sequence numbers (i64)
    .bin   the tokens, nothing else; all numbers are little-endian

Document d consists of the sequences from the d-th of these D numbers up to the (d + 1)-th, so there
are D − 1 documents. llmtrain writes one sequence per document. Both files are mapped into memory,
never read whole. The trap: the arrays after the header of 34 bytes are not aligned, and many
functions of numpy would copy such an array as a whole; so only single entries and slices are used.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from llmtrain.data.manifest import DataManifest, Source, Unit
from llmtrain.data.packing import Packed, Span
from llmtrain.data.sources.local import bounded, is_index
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SHORT_VOCABULARY = 65_500  # below it tokens are stored in two bytes, as Megatron does
CHECKED_AT_ONCE = 1 << 20
_log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1


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
        return bisect_right(range(self.documents), position, lo=1, key=self.begin) - 1

    def ids(self, start: int, stop: int, length: int) -> np.ndarray:
        """Return tokens [start, stop), int32 (n,). Raises UserError for ids outside [0, length)."""
        ids = self.tokens[start:stop]
        if ids.size and (ids.max() >= length or ids.min() < 0):
            first = int(np.flatnonzero((ids >= length) | (ids < 0))[0])
            where = f"{binary(self.index)}, token {start + first}"
            expected = f"an id of the run's tokenizer, which has {length} entries"
            remedy = "set model.tokenizer to the one that wrote the token cache"
            raise UserError(Problem(where, int(ids[first]), expected, remedy))
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


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """All documents of a cached source, numbered in order of its files.

    first: number of each file's first document, then the number of all documents
    base: position of each file's first token, then the number of all tokens
    """

    files: tuple[TokenFile, ...]
    first: tuple[int, ...]
    base: tuple[int, ...]

    def span(self, document: int) -> tuple[TokenFile, int, int]:
        """Return the file that has a document, and the document's tokens [start, stop) in it."""
        number = bisect_right(self.first, document) - 1
        file, within = self.files[number], document - self.first[number]
        return file, file.begin(within), file.begin(within + 1)

    def at(self, position: int) -> tuple[int, int]:
        """Return the document of a token, and the token's place in it."""
        number = bisect_right(self.base, position) - 1
        file, within = self.files[number], position - self.base[number]
        document = file.at(within)
        return self.first[number] + document, within - file.begin(document)

    def begin(self, document: int) -> int:
        """Return the position of a document's first token."""
        number = bisect_right(self.first, document) - 1
        return self.base[number] + self.files[number].begin(document - self.first[number])


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """The documents of a unit, with the methods of `documents.rows.Rows`.

    numbers (n,): the documents' numbers in their source
    skipped: nothing is ever left out
    """

    documents: Documents
    numbers: np.ndarray
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def size(self, row: int) -> int:
        """Return the number of tokens of a document."""
        _, start, stop = self.documents.span(int(self.numbers[row]))
        return stop - start

    def usable(self, row: int) -> bool:
        """Return whether a document has any token."""
        return self.size(row) > 0

    def hash(self, row: int, seed: int) -> int:
        """Return xxh3_64 of the document's number in the source, as decimal digits."""
        return xxhash.xxh3_64_intdigest(str(int(self.numbers[row])).encode(), seed=seed & _MASK)

    def ids(self, row: int, vocabulary: int) -> np.ndarray:
        """Return a document's tokens, int32 (n,). Raises UserError for ids from `vocabulary` on."""
        file, start, stop = self.documents.span(int(self.numbers[row]))
        return file.ids(start, stop, vocabulary)

    def take(self, order: np.ndarray) -> CachedRows:
        """Return the same documents in another order."""
        return CachedRows(self.documents, self.numbers[order])


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStream:
    """The tokens of all documents that are not held out, one after the other.

    heldout (h,): numbers of the held-out documents, ascending; their hashes decide, since the
        format has no ids
    gaps (h,): for each of them, the position in the stream at which it is left out
    removed (h + 1,): number of tokens in the first 0, 1, … h of them
    tokens: length of the stream
    """

    documents: Documents
    heldout: np.ndarray
    gaps: np.ndarray
    removed: np.ndarray
    tokens: int

    @property
    def num_documents(self) -> int:
        """The number of documents, empty ones included."""
        return self.documents.first[-1] - len(self.heldout)

    def cut(
        self, position: int, size: int, vocabulary: int
    ) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
        """Return `size` ids (int32) from `position` on, and their (document, start, stop, at).

        The first document follows the last. Raises UserError for an id outside the vocabulary.
        """
        left_out = int(np.searchsorted(self.gaps, position, "right"))
        document, start = self.documents.at(position + int(self.removed[left_out]))
        ids = np.empty(size, np.int32)
        pieces: list[tuple[int, int, int, int]] = []
        filled = 0
        while filled < size:
            if document == self.documents.first[-1]:
                document = left_out = 0
            if left_out < len(self.heldout) and self.heldout[left_out] == document:
                document, left_out = document + 1, left_out + 1
                continue
            file, begin, end = self.documents.span(document)
            stop = min(end - begin, start + size - filled)
            if stop > start:
                part = file.ids(begin + start, begin + stop, vocabulary)
                ids[filled : filled + stop - start] = part
                pieces.append((document, start, stop, filled))
                filled += stop - start
            document, start = document + 1, 0
        return ids, pieces


def open_documents(source: Source) -> Documents:
    """Map the files of a cached source, once per process. Raises UserError for damaged files."""
    return _map_files(tuple(_indices(source)), tuple(file.etag for file in source.files))


def place_of(source: Source, number: int) -> tuple[str, int]:
    """Return the name of the `.idx` that holds a document, and its number in that file."""
    documents = open_documents(source)
    file = bisect_right(documents.first, number) - 1
    names = [file.name for file in source.files if is_index(file.name)]
    return names[file], number - documents.first[file]


def text_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return a document's ids without the begin token and the end of text that it may have."""
    begins = tokenizer.bos is not None and ids[:1].tolist() == [tokenizer.bos]
    ends = ids[-1:].tolist() == [tokenizer.eos]
    return ids[int(begins) : len(ids) - int(ends)]


def rows_of(source: Source, unit: Unit) -> CachedRows:
    """Return the documents of a unit of a cached source: [start, stop) of its file."""
    documents = open_documents(source)
    number = sum(is_index(file.name) for file in source.files[: unit.file])
    first = documents.first[number]
    return CachedRows(documents, np.arange(first + unit.start, first + unit.stop))


def num_tokens(source: Source, unit: Unit) -> int:
    """Return the number of tokens of a unit of a cached source."""
    rows = rows_of(source, unit)
    first, last = (rows.documents.span(int(rows.numbers[i])) for i in (0, -1))
    return last[2] - first[1]


@lru_cache(maxsize=8)
def training_stream(source: Source, seed: int) -> TrainingStream:
    """Return the part of a cached source that is trained on."""
    documents = open_documents(source)
    held: list[int] = []
    for u in source.heldout_units:
        rows = rows_of(source, source.units[u])
        for row in range(len(rows)):
            if rows.hash(row, seed) < source.threshold and rows.usable(row):
                held.append(int(rows.numbers[row]))
    heldout = np.array(sorted(held), np.int64)
    spans = [documents.span(int(document)) for document in heldout]
    removed = np.cumsum([0, *(stop - start for _, start, stop in spans)], dtype=np.int64)
    begins = np.array([documents.begin(int(document)) for document in heldout], np.int64)
    tokens = documents.base[-1] - int(removed[-1])
    return TrainingStream(documents, heldout, begins - removed[:-1], removed, tokens)


def num_blocks(source: Source, seed: int, seq_len: int) -> int:
    """Return the number of blocks of an epoch, in which every training token is a target."""
    return math.ceil(training_stream(source, seed).tokens / seq_len)


def blocks(
    manifest: DataManifest, k: int, lane: int, cursor: Cursor
) -> Generator[Packed, None, Counter[str]]:
    """Yield the blocks of source k in a lane from `cursor` on.

    The cursor's `unit` counts the lane's blocks of an epoch. A span's `row` is the document's
    number in the source. Raises UserError as `TrainingStream.cut`.
    """
    source, seed, seq_len = manifest.sources[k], manifest.seed, manifest.seq_len
    stream = training_stream(source, seed)
    epoch, position = cursor.epoch, cursor.unit
    while source.max_epochs is None or epoch < source.max_epochs:
        order = _order(num_blocks(source, seed, seq_len), mix(seed, 5, k, epoch))
        dealt = order[(lane + mix(seed, 6, k, epoch)) % manifest.lanes :: manifest.lanes]
        for index in range(position, len(dealt)):
            first = int(dealt[index]) * seq_len
            ids, pieces = stream.cut(first, seq_len + 1, manifest.tokenizer.length)
            spans = tuple(Span(epoch, index, *piece) for piece in pieces)
            starts = np.array([span.at for span in spans], np.int32)
            yield Packed(ids, starts, None, spans, Cursor(epoch, index + 1, 0, 0), Counter())
        epoch, position = epoch + 1, 0
    return Counter()


@lru_cache(maxsize=8)
def _order(blocks: int, key: int) -> np.ndarray:
    return permutation(blocks, key).astype(np.uint32 if blocks < 1 << 32 else np.int64)


@lru_cache(maxsize=8)
def _map_files(indices: tuple[Path, ...], _content: tuple[str, ...]) -> Documents:
    files = tuple(open_tokens(index) for index in indices)
    first = tuple(accumulate((file.documents for file in files), initial=0))
    base = tuple(accumulate((len(file.tokens) for file in files), initial=0))
    return Documents(files, first, base)


def check_tokenizer(sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Raise UserError unless this tokenizer wrote the token caches among these sources.

    NAME.json records the tokenizer. Without it only the range of the ids is checked, with a
    warning.
    """
    problems: list[Problem] = []
    for source in sources:
        for index in _indices(source):
            record_file = index.with_suffix(".json")
            if record_file.is_file():
                problems += _other_tokenizer(record_file, tokenizer)
            else:
                _log.warning(
                    "%s has no %s beside it: which tokenizer wrote it cannot be checked, only that "
                    "its ids are below %d",
                    *(index, record_file.name, tokenizer.length),
                )
    raise_any(bounded(problems, "model.tokenizer"))


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, object]:
    """Return what NAME.json records: digest of the tokenizer's files, and what decides the ids."""
    return {
        "tokenizer": tokenizer.digest,
        "backend": tokenizer.backend,
        "probe": tokenizer.probe,
        "vocabulary": tokenizer.length,
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
    }


def _other_tokenizer(record_file: Path, tokenizer: Tokenizer) -> list[Problem]:
    """Return problems unless the tokenizer has the recorded files, or gives the recorded ids.

    Saving a tokenizer again may change its files, but not its ids.
    """
    now = describe_tokenizer(tokenizer)
    try:
        then = json.loads(record_file.read_text("utf-8"))
        differs = [name for name in now if then[name] != now[name]]
    except (ValueError, KeyError, TypeError) as error:
        expected = f"the description that `llmtrain data tokenize` wrote ({error})"
        return [Problem(str(record_file), None, expected, "copy it again, or remove it")]
    if "tokenizer" not in differs or {*differs} <= {"tokenizer", "backend"}:
        return []
    expected = f"the tokenizer that wrote {record_file.with_suffix('.idx')}"
    value = ", ".join(f"{name} {now[name]} (was {then[name]})" for name in differs)
    return [Problem("model.tokenizer", value, expected, str(record_file.parent / "tokenizer"))]


def _indices(source: Source) -> list[Path]:
    numbers = (n for n, file in enumerate(source.files) if is_index(file.name))
    return [Path(source.where(n)) for n in numbers]
