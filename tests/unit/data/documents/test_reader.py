import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from helpers import chats, corpus

from llmtrain.config.binding import data_settings
from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.documents import lines, units
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
from llmtrain.data.manifest import Unit
from llmtrain.data.survey import survey
from llmtrain.errors import UserError


def source_of(path, **data):
    return survey(
        data_settings(corpus.config(path, lanes=data.pop("lanes", 1), **data)), 1
    ).sources[0]


def documents(source, reader=None):
    """Every row's text (None: not usable) and whether it was repaired."""
    reader = reader or Reader(Reading(60))
    found = []
    for unit in source.units:
        rows = reader.rows(source, unit)
        found += [rows.text(row) for row in range(len(rows))]
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines_of_every_kind_equal_parquet(tmp_path, name):
    rows = corpus.articles(200)
    text_lines = source_of(corpus.write_jsonl(tmp_path / name, rows))
    table = source_of(corpus.write_parquet(tmp_path / "a.parquet", rows))
    assert documents(text_lines) == documents(table)
    one, two = (
        Reader(Reading(60)).rows(text_lines, text_lines.units[0]),
        Reader(Reading(60)).rows(table, table.units[0]),
    )
    assert [one.hash(i, 5) for i in range(5)] == [two.hash(i, 5) for i in range(5)]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_text_is_one_document_a_line(tmp_path, name, end):
    texts = [row["text"].replace("\n", " ") for row in corpus.articles(200)]
    path = corpus.write_lines(tmp_path / name, [text.encode() for text in texts], end)
    assert [text for text, _ in documents(source_of(path))] == texts


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize(
    "data",
    [
        b"first\nsecond\n\nthird",
        b"one\r\ntwo\r\nthree\r\n",
        b"\r\n\r\r\n\n\r",
        b"a\rb\nc\r\nd",
        b"\n",
        b"long " * 40 + b"\nx\n",
    ],
)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_ranges_own_each_line_once(tmp_path, data, kind, step, monkeypatch):
    monkeypatch.setattr(lines, "LINE_MARGIN", 2)
    name = "a.txt" if kind == "text" else "a.jsonl"
    (tmp_path / name).write_bytes(data)
    whole = source_of_raw(tmp_path, name, len(data))
    reader = Reader(Reading(60))
    found = []
    for start in range(0, len(data), step):
        unit = Unit(0, -1, start, min(start + step, len(data)))
        found += [line for _, line in reader.units.lines(whole, unit)]
    expected = data.splitlines() if kind == "text" else data.removesuffix(b"\n").split(b"\n")
    assert found == expected


def source_of_raw(root, name, size):
    base = corpus.write_jsonl(root / "base" / "base.jsonl", [{"text": "x"}])
    source = source_of(base)
    file = source.files[0]._replace(name=name, size=size)
    return replace(source, root=str(root), files=(file,))


def test_null_empty_and_blank_texts_are_no_documents(tmp_path):
    texts = [None, "", " \n\t\u00a0 ", "words"]
    table = corpus.write_parquet(tmp_path / "a.parquet", [{"text": text} for text in texts])
    lines = corpus.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    expected = [(None, False)] * 3 + [("words", False)]
    assert documents(source_of(table)) == documents(source_of(lines)) == expected


def test_invalid_utf_8_is_replaced_in_every_format(tmp_path):
    raw = b"caf\xe9 and \xff more"
    fixed = raw.decode("utf-8", "replace")
    text = corpus.write_lines(tmp_path / "a.txt", [raw])
    lines = corpus.write_lines(tmp_path / "a.jsonl", [b'{"text": "' + raw + b'"}'])
    column = pa.array([raw], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    for path in (text, lines, tmp_path / "a.parquet"):
        assert documents(source_of(path)) == [(fixed, True)]


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path):
    path = corpus.write_lines(tmp_path / "a.jsonl", [rb'{"text": "x \ud800 y"}'])
    ((text, replaced),) = documents(source_of(path))
    assert replaced
    assert text.startswith("x \ufffd")
    assert text.endswith(" y")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, suffix):
    rows = corpus.articles(50)
    texts = [json.dumps(row).encode() for row in rows]
    path = corpus.write_lines(
        tmp_path / f"a.jsonl{suffix}", [b"\xef\xbb\xbf" + texts[0], *texts[1:]]
    )
    source = source_of(path)
    assert source.id_column == "id"  # seen in the line that begins with the mark
    assert documents(source) == [(row["text"], False) for row in rows]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1, 2]", "a JSON list"),
        (b'{"body": "x"}', "its keys are 'body'"),
        (b'{"text": 5}', "'text' holds a number, not a string"),
        (b'{"text": ["x"]}', "'text' holds a list, not a string"),
        (b'{"text": true}', "'text' holds true, not a string"),
        (b"7", "a number, no object"),
        (b"null", "null, no object"),
        (b"{text: 1}", "Expecting property name"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, line, reason, suffix):
    lines = [b'{"text": "fine"}', b"", b'{"text": "fine"}', line]
    path = corpus.write_lines(tmp_path / f"a.jsonl{suffix}", lines)
    source = source_of(corpus.write_jsonl(tmp_path / "good.jsonl", [{"text": "x"}]))
    size = path.stat().st_size
    source = replace(source, files=(source.files[0]._replace(name=path.name, size=size),))
    with pytest.raises(UserError, match=rf"{path.name}, line 4 = .*{reason}"):
        Reader(Reading(60)).rows(source, Unit(0, -1, 0, size))


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_string_column_is_text(tmp_path, kind):
    table = pa.table({"id": pa.array([7, 8]), "text": pa.array(["one", "two"]).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    source = source_of(tmp_path / "a.parquet")
    assert [text for text, _ in documents(source)] == ["one", "two"]
    rows = Reader(Reading(60)).rows(source, source.units[0])
    assert rows.hash(0, 3) == xxhash.xxh3_64_intdigest(b"7", seed=3)


def test_without_an_id_the_text_is_hashed(tmp_path):
    source = source_of(corpus.write_parquet(tmp_path / "a.parquet", [{"text": "Anarchism"}]))
    assert Reader(Reading(60)).rows(source, source.units[0]).hash(0, 0) == 0xF95754A103EB7B50


def test_a_group_too_large_to_decode_at_once_gives_the_same_rows(tmp_path, monkeypatch):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(3000), group=3000)
    source = source_of(path, lanes=10)
    assert len(source.units) == 40
    expected = documents(source)
    monkeypatch.setattr(units, "GROUP_LIMIT", 1)
    assert documents(source) == expected


def test_slices_of_one_group_decode_it_once(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=30)
    source, reader = source_of(path, lanes=3), Reader(Reading(60))
    assert len(source.units) == 12
    documents(source, reader)
    assert reader.units.reads == 1


def test_decoded_groups_are_kept_within_a_bound(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(100), group=10)
    source, reader = source_of(path), Reader(Reading(60))
    documents(source, reader)
    documents(source, reader)
    assert reader.units.reads == 20
    assert len(reader.units._decoded) == units.CACHED_GROUPS


def test_a_file_with_fewer_rows_than_the_manifest_says_is_refused(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=30)
    source = source_of(path)
    corpus.write_parquet(path, corpus.articles(20), group=30)
    with pytest.raises(UserError, match="fewer rows"):
        Reader(Reading(60)).rows(source, source.units[-1])


def test_a_damaged_row_group_is_named(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(400), group=100)
    source = source_of(path)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet, row group 0"):
        Reader(Reading(60)).rows(source, source.units[0])


def test_a_line_longer_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "DECODED_LIMIT", 100)
    monkeypatch.setattr(lines, "LINE_MARGIN", 10)
    (tmp_path / "a.txt").write_bytes(b"x" * 5000)
    source = source_of_raw(tmp_path, "a.txt", 5000)
    with pytest.raises(UserError, match=r"a\.txt, byte 0 = a longer line"):
        Reader(Reading(60)).rows(source, Unit(0, -1, 0, 10))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path, suffix):
    path = corpus.write_jsonl(tmp_path / f"a.jsonl{suffix}", corpus.articles(50))
    source = source_of(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{path.name}, byte 0"):
        Reader(Reading(60)).rows(source, source.units[0])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_may_have_several_members(tmp_path, suffix):
    one = corpus.write_jsonl(tmp_path / f"one.jsonl{suffix}", corpus.articles(5))
    two = corpus.write_jsonl(tmp_path / f"two.jsonl{suffix}", corpus.articles(5, 5))
    (tmp_path / "both").mkdir()
    both = tmp_path / "both" / f"both.jsonl{suffix}"
    both.write_bytes(one.read_bytes() + two.read_bytes())
    texts = [text for text, _ in documents(source_of(both))]
    assert texts == [row["text"] for row in corpus.articles(10)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_over_the_limit_is_refused_while_decoding(tmp_path, monkeypatch, suffix):
    path = corpus.write_jsonl(tmp_path / f"a.jsonl{suffix}", corpus.articles(50))
    source = source_of(path)
    monkeypatch.setattr(lines, "DECODED_LIMIT", 1000)
    with pytest.raises(UserError, match="a larger one"):
        Reader(Reading(60)).rows(source, source.units[0])


def test_one_object_a_line_where_texts_hold_every_line_end(tmp_path):
    texts = ["a\rb", "c\u2028d", "e\r\nf\n", "g\x85h"]
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    assert b"\xe2\x80\xa8" in lines[1]
    path = corpus.write_lines(tmp_path / "a.jsonl", lines)
    assert [text for text, _ in documents(source_of(path))] == texts


# Where a row is, compared with the files themselves.
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
