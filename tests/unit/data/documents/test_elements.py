"""Rows that may span lines, against the json and csv modules, wherever the file is cut."""

import csv
import io
import json

import pytest
from hypothesis import given, strategies as st

from llmtrain.data.documents import lines
from llmtrain.data.documents.lines import (
    array_elements,
    csv_header,
    csv_objects,
    csv_rows,
    elements_of,
    is_array,
    ranges,
)
from llmtrain.data.documents.skipped import UnreadableError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    st.lists(VALUES, max_size=12),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
)
def test_every_element_of_an_array_is_found_with_its_place(rows, indent, mark, escaped, step):
    data = json.dumps(rows, indent=indent, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    data = b"\xef\xbb\xbf" * mark + data + b"\n"
    file = io.BytesIO(data)
    found = list(array_elements(lambda size: file.read(step), "a.json"))  # a few bytes at a time
    decoded = [json.loads(one.decode("utf-8", "surrogatepass")) for _, one in found]
    assert decoded == rows
    assert all(data[at : at + len(one)] == one for at, one in found)
    for begin, end in ranges([(at, at + len(one)) for at, one in found], 20):
        inside = [one for one in found if begin <= one[0] < end]
        assert list(elements_of(data[begin:end], begin, "a.json")) == inside


def test_memory_is_that_of_a_part_of_the_file(monkeypatch):
    monkeypatch.setattr(lines, "MIB", 100)
    rows = [{"text": f"{n} " * 10} for n in range(300)]
    data = io.BytesIO(json.dumps(rows).encode())
    asked = []

    def read(size):
        asked.append(size)
        return data.read(size)

    assert [json.loads(one) for _, one in array_elements(read, "a.json")] == rows
    assert max(asked) < 400


def test_an_element_without_end_is_refused_at_a_limit(monkeypatch):
    monkeypatch.setattr(lines, "DECODED_LIMIT", 1000)
    monkeypatch.setattr(lines, "MIB", 100)
    file = io.BytesIO(b'[{"text": "' + b"x" * 100_000)
    with pytest.raises(UnreadableError, match="Unterminated string"):
        list(array_elements(file.read, "a.json"))
    assert file.tell() < 5000


@pytest.mark.parametrize(
    ("head", "whole"),
    [
        (b'[{"a"', True),
        (b'\xef\xbb\xbf \n[\n {"a"', True),
        (b"[]", True),
        (b"[1, 2]", False),
        (b'["x"]', False),
        (b'{"a": [', False),
        (b"", False),
    ],
)
def test_an_array_of_objects_is_told_from_a_line_that_is_a_list(head, whole):
    assert is_array(head) is whole


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=6)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=8), st.sampled_from([",", "\t"]))
def test_rows_of_csv_are_those_of_the_csv_module_wherever_they_are_cut(rows, delimiter):
    name = {",": "a.CSV.gz", "\t": "a.tsv"}[delimiter]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([["x", "y"], *rows])
    data = text.getvalue().encode()
    found = list(csv_rows(io.BytesIO(data), name, name))
    assert [cells for _, cells in found] == [["x", "y"], *rows]
    header = csv_header(io.BytesIO(data), name, name)
    objects = [json.loads(one) for _, one in csv_objects(found[1:], header)]
    assert objects == [{"x": x or None, "y": y or None} for x, y in rows]
    for at, cells in found:  # from any row on, the rest is read as it is
        assert next(csv_rows(io.BytesIO(data[at:]), name, name, at)) == (at, cells)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"text;id\n", "a comma between cells; this file has ';' there"),
        (b"text\tid\n", "a comma between cells"),
        ("text,id\n".encode("utf-16"), "its first bytes are those of UTF-16"),
    ],
)
def test_a_header_of_another_kind_is_named(first, expected):
    with pytest.raises(UnreadableError) as caught:
        csv_header([first], "my.tsv-export.csv", "a.csv")
    assert expected in str(caught.value)


def test_a_mark_before_a_quoted_header_is_no_part_of_it():
    lines = [b'\xef\xbb\xbf"text, or so",id\n', b"a,b\n"]
    assert csv_header(lines, "a.csv", "a.csv") == ["text, or so", "id"]
    assert [cells for _, cells in csv_rows(lines, "a.csv", "a.csv")][1] == ["a", "b"]


def test_a_short_row_has_nulls_and_a_blank_line_is_no_row():
    lines = [b"\xef\xbb\xbfa,b\r\n", b"\r\n", b"1\r\n", b"2,3\r\n"]
    header = csv_header(lines, "a.csv", "a.csv")
    rows = list(csv_rows(lines, "a.csv", "a.csv"))[1:]
    found = [json.loads(one) for _, one in csv_objects(rows, header)]
    assert found == [{"a": "1", "b": None}, {"a": "2", "b": "3"}]
