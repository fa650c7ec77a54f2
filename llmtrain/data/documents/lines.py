r"""Rows of text files: lines that are split, parsed, decompressed; elements of a JSON array; CSV.

A range [a, b) of a plain file owns the lines that *begin* in it, so that neighbours neither share
nor lose a line:

    bytes   0        a=8       b=16
            first\n|second\n|third\n        [8, 16) owns what begins at 8 … 15
                     ^ searched from a − 1: a line begins after the end of the line before

JSON lines end with `\n` only; lines of text with `\n`, `\r\n` or `\r`.

Rows of CSV and TSV and the elements of a JSON array may span lines, and where one ends is known
only from the beginning of the file. So the file is read once, when a run begins, and its units are
ranges that begin and end with a row. Positions are bytes: what is decoded as latin-1 has as many
characters, and the signs of JSON and CSV are ASCII in UTF-8.

Of a file on the Hub only these bytes are read for a unit:

    row group     the chunks of the text and id columns; close ones are one range
    lines         the unit's own bytes, one byte before them and a margin after them
    rows of CSV, elements of an array    the unit's own bytes
    compressed    the whole file
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import PurePath
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain.data.chat.rows import columns_of_form
from llmtrain.data.documents.skipped import UnreadableError
from llmtrain.data.manifest import ELEMENTS, Source, Unit
from llmtrain.data.sources.cache import KEPT_BYTES
from llmtrain.data.sources.fetch import HubFile, web_url
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
_BLANKS = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = json.JSONDecoder()
HEAD_BYTES = 4096  # of a JSON file, where an array is told from lines


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


def is_array(head: bytes) -> bool:
    """Return whether a JSON file that begins with these bytes is one array of objects.

    A line of JSON lines that is a list of something else is no array, but a bad line.
    """
    text = head.removeprefix(BOM).lstrip()
    return text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]", b"")


_WHOLE = "one whole JSON array of objects, or an object on each line"


def array_elements(read: Callable[[int], bytes], where: str) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a JSON array as (position of the first byte, its bytes).

    read: as `io.RawIOBase.read`. Raises UnreadableError for what is no whole array, or an element
    of over 64 MiB.
    """
    text, base = "", 0  # what was read from byte `base` on

    def read_more() -> bool:
        nonlocal text
        text += (more := read(max(MIB, len(text)))).decode("latin-1")
        return bool(more)

    def skip_blanks(at: int) -> int:
        while (end := _BLANKS.match(text, at).end()) == len(text) and read_more():  # type: ignore[union-attr]
            pass
        return end

    def fail(why: str, at: int) -> UnreadableError:
        return UnreadableError(Problem(f"{where}, byte {base + at}", None, f"{_WHOLE} ({why})"))

    while len(text) < len(BOM) and read_more():
        pass
    at = skip_blanks(len(BOM) if text.startswith(BOM.decode("latin-1")) else 0)
    if text[at : at + 1] != "[":
        raise fail("it does not begin with [", at)
    at = skip_blanks(at + 1)
    while text[at : at + 1] != "]":
        end, why = 0, ""
        while not end:
            try:
                end = _JSON.raw_decode(text, at)[1]
            except (ValueError, RecursionError) as error:
                why = getattr(error, "msg", "JSON that is nested too deeply")
            whole = 0 < end < len(text)  # at the end of the text a number may have more digits
            if not whole and len(text) - at <= DECODED_LIMIT and read_more():
                end = 0
            elif not end:
                raise fail(why, at)
        yield base + at, text[at:end].encode("latin-1")
        at = skip_blanks(end)
        if (sign := text[at : at + 1]) == ",":
            at = skip_blanks(at + 1)
        if sign not in (",", "]") or (sign == "," and text[at : at + 1] == "]"):
            raise fail("the file ends inside it" if at == len(text) else "a comma is wrong", at)
        if at > MIB:
            text, base, at = text[at:], base + at, 0
    at = skip_blanks(at + 1)
    if at < len(text):
        raise fail("something follows its end", at)


def elements_of(data: bytes, start: int, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield the elements in a range of an array that begins and ends with one.

    start: position of the range in the file
    """
    whole = iter([b"[" + data + b"]"])
    for position, element in array_elements(lambda size: next(whole, b""), where):
        yield start + position - 1, element


def csv_rows(
    lines: Iterable[bytes], name: str, where: str, start: int = 0, width: int = DECODED_LIMIT
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of CSV or TSV as (position of the first byte, cells); blank lines have none.

    lines: with their ends, from a row's begin on
    name: of the file, whose suffix says what separates cells
    start: position of the first line
    width: the most cells that a row may have; by default more than there can be

    Raises UnreadableError for what is no CSV, and for a longer row.
    """
    position = first = start

    def decoded() -> Iterator[str]:
        nonlocal position
        for line in lines:
            text = line.removeprefix(BOM) if position == 0 else line
            position += len(line)
            yield text.decode("latin-1")

    csv.field_size_limit(DECODED_LIMIT)
    rows = csv.reader(decoded(), delimiter=_delimiter(name), strict=True)
    try:
        for row in rows:
            if len(row) > width:
                expected = f"at most {width} cells, as the header has"
                problem = Problem(f"{where}, byte {first}", f"{len(row)} cells", expected)
                raise UnreadableError(problem)
            if row:
                cells = [cell.encode("latin-1").decode("utf-8", "surrogateescape") for cell in row]
                yield first, cells
            first = position
    except csv.Error as error:
        expected = f"rows of CSV, with cells in double quotes where they need it ({error})"
        raise UnreadableError(Problem(f"{where}, byte {first}", None, expected)) from error


def _delimiter(name: str) -> str:
    suffixes = (suffix.lower() for suffix in reversed(PurePath(name).suffixes))
    return next(_DELIMITERS[suffix] for suffix in suffixes if suffix in _DELIMITERS)


def csv_header(lines: Iterable[bytes], name: str, where: str) -> list[str]:
    """Return the names of the columns, from the first row; [] if there is none.

    Raises UnreadableError for names that are equal, and for other signs between cells.
    """
    first = next(lines := iter(lines), b"")
    refuse_utf_16(first, where)
    rows = csv_rows(chain([first], lines), name, where)
    names = next((cells for _, cells in rows), [])
    if len(names) == 1 and (other := next((one for one in ";\t|" if one in names[0]), None)):
        comma = {",": "a comma", "\t": "a tab"}[_delimiter(name)]
        expected = f"{comma} between cells; this file has {other!r} there"
        raise UnreadableError(Problem(where, names[0], expected, "convert the file"))
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise UnreadableError(Problem(where, twice, "columns with names that differ"))
    return names


def csv_objects(
    rows: Iterable[tuple[int, Sequence[str]]], header: Sequence[str]
) -> Iterator[tuple[int, bytes]]:
    """Yield rows of CSV as JSON objects, an empty or missing cell as null: (position, bytes)."""
    for position, cells in rows:
        padded = [*cells, *[""] * (len(header) - len(cells))]
        row = {name: cell or None for name, cell in zip(header, padded, strict=True)}
        yield position, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape")


def ranges(rows: Iterable[tuple[int, int]], least: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole rows, each of at least `least` bytes but the last.

    rows: where each begins and ends
    """
    begin, end = None, 0
    for start, end in rows:
        begin = start if begin is None else begin
        if end - begin >= least:
            yield begin, end
            begin = None
    if begin is not None:
        yield begin, end
