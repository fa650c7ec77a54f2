import pyarrow.parquet as pq
import pytest
from helpers import corpus

from llmtrain.data.remote.cache import load_footer


@pytest.fixture
def path(tmp_path):
    return corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=7)


def test_a_footer_is_asked_for_once_a_run(tmp_path, path):
    asked = []

    def ask():
        asked.append(1)
        return pq.read_metadata(path)

    first = load_footer(tmp_path / "run", "abc", ask)
    again = load_footer(tmp_path / "run", "abc", ask)
    assert len(asked) == 1
    assert [p.name for p in (tmp_path / "run" / "footers").iterdir()] == ["abc"]
    assert again.num_row_groups == first.num_row_groups == 5
    assert again.schema.equals(first.schema)
    for group in range(5):
        assert again.row_group(group).to_dict() == first.row_group(group).to_dict()


def test_rows_can_be_read_with_a_stored_footer_alone(tmp_path, path):
    load_footer(tmp_path, "abc", lambda: pq.read_metadata(path))
    footer = load_footer(tmp_path, "abc", pytest.fail)
    with pq.ParquetFile(path, metadata=footer) as file:
        found = file.read_row_group(2, columns=["text"]).column("text").to_pylist()
    assert found == [row["text"] for row in corpus.articles(7, 14)]


def test_a_damaged_footer_is_asked_for_again(tmp_path, path, caplog):
    load_footer(tmp_path, "abc", lambda: pq.read_metadata(path))
    (tmp_path / "footers" / "abc").write_bytes(b"PAR1 nothing PAR1")
    assert load_footer(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "damaged" in caplog.text
    assert load_footer(tmp_path, "abc", pytest.fail).num_row_groups == 5


def test_a_directory_that_cannot_be_written_costs_only_the_footer(tmp_path, path, caplog):
    (tmp_path / "footers").write_text("a file in the way")
    assert load_footer(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "not kept" in caplog.text


def test_without_a_run_every_reader_asks(path):
    assert load_footer(None, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
