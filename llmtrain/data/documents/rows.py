"""The decoded rows of a unit: texts and ids as bytes, and how text is made of them.

A text is decoded when its row is asked for; whether the unit is UTF-8 at all is checked at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from llmtrain.data.documents.lines import not_utf_8
from llmtrain.data.documents.skipped import UnreadableError

REPLACED_SHARE = 100  # a unit is not UTF-8 if more than 1 / 100 of its characters are wrong …
MIN_REPLACED = 8  # … and at least this many: a damaged word in a unit of a line or two is accepted


@dataclass(frozen=True, slots=True)
class Rows:
    """The decoded rows of one unit: texts and ids as bytes, null if a row has no value.

    skipped: how many parts of the file were left out, the unit itself or lines
    bad: lines without a document, as (first byte, reason); "" = it is already recorded as left out
    """

    texts: pa.Array
    ids: pa.Array | None
    skipped: int = 0
    bad: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the texts and ids."""
        return int(self.texts.nbytes) + (0 if self.ids is None else int(self.ids.nbytes))

    def text(self, row: int) -> tuple[str | None, bool]:
        """Return the document, and whether invalid UTF-8 in it was replaced.

        The document is None if the text is null, empty or blank.
        """
        raw = self.texts[row].as_py()
        if raw is None:
            return None, False
        try:
            text, replaced = raw.decode("utf-8"), False
        except UnicodeDecodeError:
            text, replaced = raw.decode("utf-8", "replace"), True
        return (None, False) if not text or text.isspace() else (text, replaced)

    def usable(self, row: int) -> bool:
        """Return whether a row has a document."""
        return self.text(row)[0] is not None

    def hash(self, row: int, seed: int) -> int:
        """Return xxh3_64 of the document's id, or of its text where it has no id."""
        name = None if self.ids is None else self.ids[row].as_py()
        if name is None:
            name = self.texts[row].as_py() or b""
        return xxhash.xxh3_64_intdigest(name, seed=seed & ((1 << 64) - 1))

    def slice(self, start: int, stop: int) -> Rows:
        """Return a range of the rows, without a copy."""
        ids = None if self.ids is None else self.ids.slice(start, stop - start)
        return Rows(self.texts.slice(start, stop - start), ids, self.skipped)

    def take(self, order: np.ndarray) -> Rows:
        """Return a copy of some rows in this order; the unit's other memory can then be freed."""
        # Without pandas, as `as_array`.
        places = np.ascontiguousarray(order, np.int64)
        rows = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])
        ids = None if self.ids is None else self.ids.take(rows)
        return Rows(self.texts.take(rows), ids, self.skipped)


def as_array(values: Iterable[bytes | None]) -> pa.Array:
    """Return an array of large_binary, null where a value is None.

    `pa.array` would import pandas, which takes a quarter of a second.
    """
    entries = list(values)
    offsets = np.zeros(len(entries) + 1, np.int64)
    np.cumsum([len(value or b"") for value in entries], dtype=np.int64, out=offsets[1:])
    known = np.array([value is not None for value in entries], np.bool_)
    validity = np.packbits(known, bitorder="little")
    parts = validity.tobytes(), offsets, b"".join(value or b"" for value in entries)
    return pa.Array.from_buffers(pa.large_binary(), len(entries), [*map(pa.py_buffer, parts)])


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be the text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def of_table(table: pa.Table, text_column: str, id_column: str | None) -> Rows:
    """Return the rows of a table that has these columns."""
    texts = _as_bytes(table.column(text_column))
    return Rows(texts, _as_bytes(table.column(id_column)) if id_column else None)


def _as_bytes(column: pa.ChunkedArray) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not is_text(kind):  # numbers and other ids: as Python writes them
        return as_array(None if v is None else str(v).encode() for v in column.to_pylist())
    chunks = column.cast(pa.large_string()).cast(pa.large_binary()).chunks
    return pa.concat_arrays(chunks) if len(chunks) != 1 else chunks[0]


def refuse_other_encoding(texts: pa.Array, where: str) -> None:
    """Raise UnreadableError if over 1 % of a unit's characters would be replaced, or are NUL.

    Latin-1 has bytes that are not UTF-8; UTF-16 without a byte order mark has a NUL beside each
    Latin letter. Units are checked, since a file is never read as a whole. Valid text costs only
    one check of its bytes.
    """
    try:
        valid = texts.cast(pa.large_string())
        data = valid.buffers()[2]
        if data is None or np.frombuffer(data, np.uint8).all():
            return
    except pa.ArrowInvalid:
        pass  # counted below
    characters = wrong = 0
    for raw in texts.to_pylist():
        text = (raw or b"").decode("utf-8", "replace")
        meant = (raw or b"").count(b"\xef\xbf\xbd")
        wrong += text.count("\ufffd") - meant + text.count("\0")
        characters += len(text)
    if wrong >= MIN_REPLACED and wrong * REPLACED_SHARE > characters:
        raise UnreadableError(not_utf_8(where, f"{wrong} of {characters} characters are none"))
