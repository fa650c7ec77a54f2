import errno
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus

from llmtrain.config.binding import data_settings
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.units import Units
from llmtrain.data.file_parts import FilePart, cut, missing_column
from llmtrain.data.manifest import Unit
from llmtrain.data.survey import survey
from llmtrain.errors import RESTARTABLE, RunError, UserError


def groups(*rows, nbytes=1000):
    return [FilePart(Unit(0, g, 0, count), nbytes) for g, count in enumerate(rows)]


def message(*sources, **data):
    with pytest.raises(UserError) as raised:
        survey(data_settings(corpus.config(*sources, **data)), 1)
    return str(raised.value)


@pytest.mark.parametrize("lanes", [1, 2, 7, 48, 1000])
def test_uneven_groups_are_cut_into_near_equal_slices_that_hold_each_row_once(lanes):
    parts = groups(1000, 1, 22, 1000, 378)
    units = list(cut(parts, lanes))
    assert len(units) >= min(4 * lanes, 1 + 22)
    for group, (unit, _) in enumerate(parts):
        mine = [(u.start, u.stop) for u in units if u.group == group]
        assert [a for a, _ in mine] == [0, *(b for _, b in mine[:-1])]
        assert mine[-1][1] == unit.stop
        sizes = [b - a for a, b in mine]
        assert 1 <= min(sizes) >= max(sizes) - 1


def test_enough_groups_are_left_whole():
    parts = groups(*[10] * 100)
    assert list(cut(parts, 25)) == [part.unit for part in parts]


def test_a_large_group_is_cut_into_slices_of_16_mib():
    (part,) = groups(100_000, nbytes=320 * MIB)
    assert len(list(cut([*[part] * 40], 1))) == 40 * 20


def test_ranges_and_whole_files_are_never_sliced():
    parts = [FilePart(Unit(0, -1, 0, 1 << 30), 1 << 30)]
    assert list(cut(parts, 48)) == [parts[0].unit]


def test_fewer_documents_than_lanes_still_give_a_unit_to_each_document(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(3))
    (source,) = survey(data_settings(corpus.config(path, lanes=48)), 1).sources
    assert [unit.stop - unit.start for unit in source.units] == [1, 1, 1]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_over_64_mib_is_refused_at_start_with_the_way_out(tmp_path, suffix):
    line = json.dumps({"text": "word " * 200_000}).encode()
    path = corpus.write_lines(tmp_path / f"a.jsonl.{suffix}", [line] * 70)
    assert path.stat().st_size < MIB
    told = message(path)
    assert "at most 64 MiB when decoded" in told
    assert "llmtrain data repack" in told


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_hides_its_size_is_refused_while_decoding(tmp_path, suffix):
    """gzip tells the last member's size alone; zstd frames need not tell theirs."""
    line = json.dumps({"text": "word " * 200_000}).encode()
    many = corpus.write_lines(tmp_path / f"many.jsonl.{suffix}", [line] * 70).read_bytes()
    if suffix == "gz":
        last = corpus.write_lines(tmp_path / "last.jsonl.gz", [b'{"text": "x"}']).read_bytes()
        hidden = many + last
    else:
        import zstandard

        whole = zstandard.ZstdDecompressor().decompress(many)
        hidden = zstandard.ZstdCompressor(write_content_size=False).compress(whole)
    (tmp_path / "hidden").mkdir()
    path = tmp_path / "hidden" / f"a.jsonl.{suffix}"
    path.write_bytes(hidden)
    told = message(path)
    assert "at most 64 MiB when decoded" in told
    assert "llmtrain data repack" in told


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.xlsx", b"PK", "a data file (.parquet, .arrow, .jsonl"),
        ("a.arrow", b"id,text\n1,words\n", "a complete Arrow file"),
        ("a.csv", b"id,body\n1,words\n", "a column of the header of"),
        ("a.csv", b"text,text\na,b\n", "columns with names that differ"),
        ("a.csv", b'text\n"one\n', "rows of CSV, with cells in double quotes"),
        ("a.csv", b"text\n" + 9000 * b"one\n" + b"two,three\n", "at most 1 cells"),
        ("a.json", b'[{"text": "a"}', "one whole JSON array of objects"),
        ("a.json", b'[{"text": "a"},]', "one whole JSON array of objects"),
        ("a.json", b'[{"text": "a"}] {}', "something follows its end"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "a comma is wrong"),
        ("a.json", b'[{"text": ' + 9000 * b"[", "JSON array of objects"),
        ("a.json", b'[{"text": "a"}, 5]', "a JSON object with the key 'text'"),
        ("a.json", b'[{"body": "a"}]', "a column of the first line of"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_the_reason(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    told = message(tmp_path / name)
    assert told.startswith("1 problem")
    assert expected in told


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path):
    column = pa.array(["a"])
    pq.write_table(pa.table([column, column], names=["text", "text"]), tmp_path / "a.parquet")
    assert "columns with names that differ, not text twice" in message(tmp_path / "a.parquet")


def test_the_message_for_a_table_without_text_names_its_columns_of_strings(tmp_path):
    rows = [{"id": 1, "body": "words", "summary": "word"}]
    told = message(corpus.write_parquet(tmp_path / "a.parquet", rows))
    assert "try:      data.sources.0.text_column=… (columns of strings: body, summary)" in told
    told = message(corpus.write_parquet(tmp_path / "b.parquet", [{"id": 1, "body": "words"}]))
    assert "try:      data.sources.0.text_column=body; for conversations" in told


READ_SLICES = """
import resource, sys
from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.survey import survey

described = {"data": {"sources": [{"path": sys.argv[1]}], "heldout": 0.0, "lanes": 2},
             "training": {"steps": 1}}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
source = survey(data_settings(Config.model_validate(described)), 1).sources[0]
before, reader = peak(), Reader(Reading(60))
for unit in source.units[::5]:
    assert len(reader.rows(source, unit)) == unit.stop - unit.start
print(len(source.units), peak() - before)
"""


@pytest.mark.launches
def test_a_row_group_of_hundreds_of_mib_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array([os.urandom(2000).hex() for _ in range(48_000)])
    table = pa.table({"text": texts})
    assert table.nbytes > 183 * MIB
    pq.write_table(table, path, row_group_size=48_000, use_dictionary=False, compression="lz4")
    command = [sys.executable, "-c", READ_SLICES, str(path)]
    found = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert int(found[0]) == 12
    assert float(found[1]) < 110


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_with_another_text_column_name_the_key_of_the_config(tmp_path, suffix):
    good = corpus.write_jsonl(tmp_path / "good.jsonl", corpus.articles(9))
    rows = [{"body": "x", "id": "1"}] * 3
    path = corpus.write_jsonl(tmp_path / f"a.jsonl{suffix}", rows)
    told = message(good, path)
    assert "data.sources.1.text_column = text" in told
    assert f"a column of the first line of {path}, which has: body, id" in told
    assert "repair" not in told


def test_where_only_a_later_line_lacks_the_text_column_that_line_is_named(tmp_path):
    rows = [*corpus.articles(9), {"body": "x"}]
    told = message(corpus.write_jsonl(tmp_path / "a.jsonl", rows))
    assert "a.jsonl, line 10 = its keys are 'body'" in told


def test_a_missing_column_names_file_and_columns_on_one_line():
    columns = ["text\nerror: all is lost", "id"]
    problem = missing_column("data.sources.0.text_column", "body", "x\x1b[2J\ny.parquet", columns)
    expected = r"a column of x\x1b[2J\ny.parquet, which has: text\nerror: all is lost, id"
    assert problem.expected == expected


@pytest.mark.parametrize("edge", ["parquet", "jsonl"])
def test_a_disk_that_fails_once_under_the_first_look_is_no_file_without_columns(
    tmp_path, monkeypatch, edge
):
    """Otherwise its conversations would be read as texts."""
    path = tmp_path / f"rows.{edge}"
    if edge == "parquet":
        pq.write_table(pa.table({"messages": [[{"role": "user", "content": "Hi?"}]]}), path)
    else:
        path.write_text('{"messages": []}\n')

    def fail(*_arguments):
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Units, "footer" if edge == "parquet" else "lines", fail)
    with pytest.raises(RunError, match="Input/output error") as raised:
        survey(data_settings(corpus.config({"path": str(path)})), 1)
    assert raised.value.exit_code == RESTARTABLE
