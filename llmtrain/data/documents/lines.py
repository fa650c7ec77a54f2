r"""Lines of files of JSON lines and of text: split, parsed, decompressed, and found on the Hub.

A range [a, b) of a plain file owns the lines that *begin* in it, so that neighbours neither share
nor lose a line:

    bytes   0        a=8       b=16
            first\n|second\n|third\n        [8, 16) owns what begins at 8 … 15
                     ^ searched from a − 1: a line begins after the end of the line before

JSON lines end with `\n` only; lines of text with `\n`, `\r\n` or `\r`.

Of a file on the Hub only these bytes are read for a unit:

    row group     the chunks of the text and id columns; close ones are one range
    lines         the unit's own bytes, one byte before them and a margin after them
    rows of CSV, elements of an array    the unit's own bytes
    compressed    the whole file
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain.data.chat.rows import columns_of_form
from llmtrain.data.documents.skipped import UnreadableError
from llmtrain.data.manifest import ELEMENTS, Source, Unit
from llmtrain.data.remote.cache import KEPT_BYTES
from llmtrain.data.remote.fetch import HubFile, web_url
from llmtrain.errors import Problem
from llmtrain.types import JsonMapping, JsonObject

T = TypeVar("T")

MIB = 1 << 20
DECODED_LIMIT = 64 * MIB  # of a compressed file when decoded, and of a line
LINE_MARGIN = 64 * 1024
TEXT_END = re.compile(rb"\r\n|\n|\r")
JSON_END = re.compile(rb"\n")
GZIP_MAGIC = b"\x1f\x8b"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
A_LIST = "a JSON list, no object"
BOM = b"\xef\xbb\xbf"  # some editors begin a UTF-8 file with it


def end_of_line(kind: str) -> re.Pattern[bytes]:
    """Return the pattern that ends a line in this kind of file, jsonl or text."""
    return JSON_END if kind == "jsonl" else TEXT_END


def decode_line(line: bytes) -> JsonObject:
    """Return the object of one JSON line. Raises ValueError that says what is wrong."""
    if line.lstrip(BOM + b" \t\r").startswith(b"["):
        raise ValueError(A_LIST)
    try:
        row = json.loads(line.removeprefix(BOM).decode("utf-8", "surrogateescape"))
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"{_kind(row)}, no object")
    return row


def fields(
    row: JsonMapping, text_column: str, id_column: str | None
) -> tuple[bytes | None, bytes | None]:
    """Return text and id of a decoded line, as bytes. Raises ValueError that says what is wrong."""
    if text_column not in row:
        raise ValueError(f"its keys are {', '.join(map(repr, row)) or 'none'}")
    text = row[text_column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{text_column!r} holds {_kind(text)}, not a string")
    name = row.get(id_column) if id_column is not None else None
    return (None if text is None else to_bytes(text), None if name is None else to_bytes(str(name)))


def _kind(value: object) -> str:
    """Describe the kind of a JSON value, for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    words: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return words.get(type(value), "a number")


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8; half a surrogate pair becomes bytes that are not valid UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def reach(unit: Unit, size: int, margin: int = LINE_MARGIN) -> tuple[int, int]:
    """Return the bytes with a range's lines, if the last line is no longer than the margin."""
    return max(unit.start - 1, 0), min(unit.stop + margin, size)


def refuse_utf_16(data: bytes, where: str) -> None:
    """Raise UnreadableError if a file begins with the bytes of UTF-16 or UTF-32."""
    if data.startswith(UTF_16):
        raise UnreadableError(not_utf_8(where, "its first bytes are those of UTF-16"))


def not_utf_8(where: str, reason: str) -> Problem:
    """Return the problem of text in another encoding."""
    remedy = "convert the file, with iconv for example"
    return Problem(where, f"not UTF-8: {reason}", "text in UTF-8", remedy)


def read_owned(
    file: io.RawIOBase | io.BufferedReader, unit: Unit, size: int, kind: str, where: str
) -> tuple[bytes, int]:
    """Read the lines that begin in a unit's range. Return them, and where the first begins.

    A margin after the range is read for the last line; it is doubled until it is large enough.
    """
    end = end_of_line(kind)
    margin = LINE_MARGIN
    while True:
        base, stop = reach(unit, size, margin)
        file.seek(base)
        data = read_exactly(file, stop - base)
        first = 0 if unit.start == 0 else _behind(end, data, 0, stop == size)
        last = _behind(end, data, unit.stop - 1 - base, stop == size)
        if first is not None and last is not None:
            return data[first:last], base + first
        if margin > DECODED_LIMIT:
            expected = f"lines of at most {DECODED_LIMIT // MIB} MiB"
            place = f"{where}, byte {unit.start}"
            raise UnreadableError(Problem(place, "a longer line", expected))
        margin *= 2


def _behind(end: re.Pattern[bytes], data: bytes, start: int, complete: bool) -> int | None:
    r"""Return where a line begins: after the first end of line from `start` on.

    Return None if that is not in `data`. An end of line at the very end of `data` may be half of
    `\r\n`, so it is not used.

    complete: `data` reaches to the end of the file, so its own end also counts
    """
    match = end.search(data, start)
    if complete:
        return match.end() if match else len(data)
    return match.end() if match and match.end() < len(data) else None


def decoded_size(file: io.RawIOBase | io.BufferedReader, compression: str, size: int) -> int:
    """Return the decoded size that a gzip file records at the end (of its last member).

    −1: it is unknown, as for zstd, and seen when the file is read

    size: of the file in bytes
    """
    if compression != "gzip" or file.read(2) != GZIP_MAGIC:
        return -1
    file.seek(max(0, size - 4))
    recorded = int.from_bytes(file.read(4) or b"", "little")
    # Deflate makes at most 1,032 bytes of one: a file that claims more was cut off.
    return recorded if recorded <= 1032 * size else -1


def decompress(file: io.RawIOBase | io.BufferedReader, compression: str, where: str) -> bytes:
    """Return the whole decoded content.

    Raises UnreadableError over DECODED_LIMIT, OSError if the file is cut off.
    """
    data = bytes(pa.input_stream(file, compression).read(DECODED_LIMIT + 1))
    if len(data) > DECODED_LIMIT:
        raise UnreadableError(too_large(where))
    return data


def line_number(
    file: io.RawIOBase | io.BufferedReader, compression: str | None, where: str, position: int
) -> int:
    """Return the number, from 1, of the line that begins at byte `position` of the content."""
    if compression:
        return decompress(file, compression, where)[:position].count(b"\n") + 1
    count = 1
    while position > 0:
        chunk = read_exactly(file, min(MIB, position))
        count, position = count + chunk.count(b"\n"), position - len(chunk)
    return count


def too_large(where: str) -> Problem:
    """Return the problem of a compressed file that is too large: it can only be read whole."""
    expected = f"a compressed file of at most {DECODED_LIMIT // MIB} MiB when decoded"
    remedy = "rewrite it with `llmtrain data repack`, or split it"
    return Problem(where, "a larger one", expected, remedy)


def in_batches(
    items: Iterable[T], size_of: Callable[[T], int], size: int, count: int
) -> Iterator[list[T]]:
    """Yield batches of up to `count` items. One that reaches `size` in sum is ended there."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size_of(item)
        if total >= size or len(batch) == count:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def read_exactly(file: io.RawIOBase | io.BufferedReader, size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError if there are fewer."""
    parts = []
    while size > 0:
        part = file.read(size)
        if not part:
            raise EOFError("the file ends early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


MERGE_BYTES = 1 << 20  # two ranges that are closer than this are one request


def hub_file(source: Source, file: int) -> HubFile:
    """Return a file of a remote source."""
    known = source.files[file]
    return HubFile(web_url(source.where(file)), known.size, known.etag)


def columns_of(source: Source) -> list[str]:
    """Return the names of the columns that are read; files may lack optional ones of a form."""
    texts = [source.text_column]
    if source.form is not None:
        names = columns_of_form(source.form, source.reading)
        texts = [source.columns.get(name, name) for name in names]
    return [*texts, *([source.id_column] if source.id_column else [])]


def is_part_of(path_in_schema: str, column: str) -> bool:
    """Return whether a column of a parquet file is this one, or nested in it."""
    return path_in_schema == column or path_in_schema.startswith(f"{column}.")


def unit_spans(source: Source, unit: Unit, footer: pq.FileMetaData | None) -> list[tuple[int, int]]:
    """Return the byte ranges of a unit. footer: of its file if that is parquet, else None."""
    if footer is not None:
        return column_spans(footer.row_group(unit.group), columns_of(source))
    known = source.files[unit.file]
    if source.format(unit.file).compression is not None:
        return [(0, known.size)]
    return [(unit.start, unit.stop) if has_whole_rows(source, unit) else reach(unit, known.size)]


def has_whole_rows(source: Source, unit: Unit) -> bool:
    """Return whether the bytes of a unit begin and end with a row, not anywhere in a line."""
    kind = source.format(unit.file).kind
    return unit.group == ELEMENTS or kind == "csv" or source.whole_files


def column_spans(group: pq.RowGroupMetaData, wanted: list[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of these columns in a row group; close ones are merged."""
    spans: list[tuple[int, int]] = []
    for index in range(group.num_columns):
        column = group.column(index)
        if any(is_part_of(column.path_in_schema, name) for name in wanted):
            first = column.data_page_offset
            if column.dictionary_page_offset:
                first = min(first, column.dictionary_page_offset)
            spans.append((first, first + column.total_compressed_size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] < MERGE_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def refetch_warning(source: Source, cache_bytes: int) -> str | None:
    """Return a warning for a remote source whose row groups are fetched several times an epoch.

    Slices of one group are separate units, and lanes read them at different times. The result is
    None if there are no slices, or if they fit into memory or the disk cache, judging by the sizes
    of the files.
    """
    parts = Counter((unit.file, unit.group) for unit in source.units if unit.group >= 0)
    sliced = {file for (file, _), count in parts.items() if count > 1}
    size = sum(source.files[file].size for file in sliced)
    if not source.remote or size <= (cache_bytes or KEPT_BYTES):
        return None
    factor = parts.total() / len(parts)
    return (
        f"source {source.label}: its row groups are read in {factor:.1f} slices on average, and "
        f"fetched from the Hub up to {factor:.1f} times an epoch; with data.cache_gb of at least "
        f"{size / 2**30 + 0.05:.1f} once, on each machine"
    )
