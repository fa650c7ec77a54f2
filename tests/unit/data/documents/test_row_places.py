"""Where a row is, compared with the files themselves."""

import json

import pyarrow.parquet as pq
import pytest
from helpers import chats, corpus

from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.documents.reader import (
    Reader,
    Reading,
    bad_row,
    place_of_row,
    row_order,
    rows_of,
    unit_at,
    units_of,
)

ROWS = [row | {"id": f"row-{n}"} for n, row in enumerate(chats.rows_of(40))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same rows in three formats; those of lines with blank lines between them."""
    root = tmp_path_factory.mktemp("places")
    chats.make(root / "tokenizer", "chatml")
    lines = [part for row in ROWS for part in (json.dumps(row).encode(), b"")]
    corpus.write_lines(root / "a.jsonl", lines)
    corpus.write_lines(root / "a.jsonl.gz", lines)
    corpus.write_parquet(root / "a.parquet", ROWS, group=7)
    return root


def manifest_of(place, name, **data):
    return chats.data_of(place / "tokenizer", place / name, **data)[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", lambda n: f"line {2 * n + 1}"),
        ("a.jsonl.gz", lambda n: f"line {2 * n + 1}"),
        ("a.parquet", lambda n: f"row {n % 7} of row group {n // 7}"),
    ],
)
def test_a_row_is_named_by_its_line_or_its_row_group(place, name, expected):
    source, reader = manifest_of(place, name, lanes=2).sources[0], Reader(Reading(60))
    found = [
        (row.columns["id"], place_of_row(source, u, index, reader))
        for u, unit in enumerate(source.units)
        for index, row in enumerate(rows_of(reader, source, unit))
    ]
    assert sorted(found) == sorted((f"row-{n}", expected(n)) for n in range(len(ROWS)))
    problem = bad_row(source, 0, 0, reader, BadRowError("role", "no role"))
    assert problem.key == f"{place / name}, {expected(0)}"
    assert "no role" in problem.expected


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_unit_is_in_one_lane_and_every_row_read_once(place, epoch):
    manifest = manifest_of(place, "a.parquet", lanes=4)
    units = manifest.sources[0].units
    dealt = [units_of(manifest, 0, epoch, lane).tolist() for lane in range(4)]
    assert sorted(u for lane in dealt for u in lane) == list(range(len(units)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert [unit_at(manifest, 0, epoch, 1, n) for n in range(len(dealt[1]))] == dealt[1]
    order = row_order(manifest, 0, dealt[1][0], epoch, 50).tolist()
    assert sorted(order) == list(range(50))
    assert order != row_order(manifest, 0, dealt[1][0], epoch + 1, 50).tolist()


def test_the_first_byte_of_a_line_is_where_the_file_has_it(place):
    source, reader = manifest_of(place, "a.jsonl", lanes=2).sources[0], Reader(Reading(60))
    data = (place / "a.jsonl").read_bytes()
    for unit in source.units:
        for row in rows_of(reader, source, unit):
            assert json.loads(data[row.at :].split(b"\n")[0])["id"] == row.columns["id"]


def test_rows_of_a_group_have_the_columns_that_describe_them(place):
    source, reader = manifest_of(place, "a.parquet", lanes=2).sources[0], Reader(Reading(60))
    unit = source.units[0]
    group = pq.ParquetFile(place / "a.parquet").read_row_group(unit.group).to_pylist()
    found = rows_of(reader, source, unit)
    assert [row.columns for row in found] == [{"id": group[row.at]["id"]} for row in found]
