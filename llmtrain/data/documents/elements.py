r"""Splits files whose rows may span lines: the elements of a JSON array, the rows of CSV and TSV.

    [{"text": "a"},        elements 1 … 14 and 16 … 29: a range of bytes holds whole ones, so it is
     {"text": "b"}]        read without the rest of the file, as a range of lines is

Where such a row ends is known only from the beginning of the file. So the file is read once, when a
run begins, and its units are ranges that begin and end with a row. Positions are bytes: what is
decoded as latin-1 has as many characters, and the signs of JSON and CSV are ASCII in UTF-8.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import PurePath

from llmtrain.data.documents.lines import BOM, DECODED_LIMIT, MIB, refuse_utf_16
from llmtrain.data.documents.skipped import UnreadableError
from llmtrain.errors import Problem

_BLANKS = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = json.JSONDecoder()
HEAD_BYTES = 4096  # of a JSON file, where an array is told from lines


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
    lines: Iterable[bytes], name: str, where: str, start: int = 0, width: int | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of CSV or TSV as (position of the first byte, cells); blank lines have none.

    lines: with their ends, from a row's begin on
    name: of the file, whose suffix says what separates cells
    start: position of the first line
    width: the most cells that a row may have; None = any number

    Raises UnreadableError for what is no CSV, and for a longer row.
    """
    position = start
    first = start
    width = DECODED_LIMIT if width is None else width

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
                yield (
                    first,
                    [cell.encode("latin-1").decode("utf-8", "surrogateescape") for cell in row],
                )
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
