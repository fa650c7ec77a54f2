import io

import pyarrow.parquet as pq
import pytest
from helpers import corpus

from llmtrain.data.footers import column_spans, stored


@pytest.fixture
def path(tmp_path):
    return corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=7)


def test_a_footer_is_asked_for_once_a_run(tmp_path, path):
    asked = []

    def ask():
        asked.append(1)
        return pq.read_metadata(path)

    first = stored(tmp_path / "run", "abc", ask)
    again = stored(tmp_path / "run", "abc", ask)
    assert len(asked) == 1
    assert [p.name for p in (tmp_path / "run" / "footers").iterdir()] == ["abc"]
    assert again.num_row_groups == first.num_row_groups == 5
    assert again.schema.equals(first.schema)
    for group in range(5):
        assert again.row_group(group).to_dict() == first.row_group(group).to_dict()


def test_rows_can_be_read_with_a_stored_footer_alone(tmp_path, path):
    stored(tmp_path, "abc", lambda: pq.read_metadata(path))
    footer = stored(tmp_path, "abc", pytest.fail)
    with pq.ParquetFile(path, metadata=footer) as file:
        found = file.read_row_group(2, columns=["text"]).column("text").to_pylist()
    assert found == [row["text"] for row in corpus.articles(7, 14)]


def test_a_damaged_footer_is_asked_for_again(tmp_path, path, caplog):
    stored(tmp_path, "abc", lambda: pq.read_metadata(path))
    (tmp_path / "footers" / "abc").write_bytes(b"PAR1 nothing PAR1")
    assert stored(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "damaged" in caplog.text
    assert stored(tmp_path, "abc", pytest.fail).num_row_groups == 5


def test_a_directory_that_cannot_be_written_costs_only_the_footer(tmp_path, path, caplog):
    (tmp_path / "footers").write_text("a file in the way")
    assert stored(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "not kept" in caplog.text


def test_without_a_run_every_reader_asks(path):
    assert stored(None, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5


def test_spans_hold_all_that_the_columns_are_read_from(path):
    content = path.read_bytes()
    footer = pq.read_metadata(path)
    for group in range(footer.num_row_groups):
        blank = bytearray(len(content))
        for start, end in column_spans(footer.row_group(group), ["text", "id"]):
            blank[start:end] = content[start:end]
        with pq.ParquetFile(io.BytesIO(blank), metadata=footer) as file:
            table = file.read_row_group(group, columns=["text", "id"])
        expected = corpus.articles(30)[group * 7 : group * 7 + 7]
        assert table.column("text").to_pylist() == [row["text"] for row in expected]
        assert table.column("id").to_pylist() == [row["id"] for row in expected]


def test_columns_that_lie_far_apart_are_two_ranges(tmp_path):
    rows = corpus.articles(30)
    long = [{"id": row["id"], "far": f"{n}" * (1 << 17), **row} for n, row in enumerate(rows)]
    path = tmp_path / "b.parquet"
    import pyarrow as pa

    table = pa.Table.from_pylist(long).select(["id", "far", "text"])
    pq.write_table(table, path, compression="none", use_dictionary=False)
    group = pq.read_metadata(path).row_group(0)
    spans = column_spans(group, ["text", "id"])
    assert len(spans) == 2
    assert sum(end - start for start, end in spans) < 20_000
    assert len(column_spans(group, ["far", "text"])) == 1
