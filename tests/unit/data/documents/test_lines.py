import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus

from llmtrain.data.documents.lines import column_spans, refetch_warning
from llmtrain.data.manifest import Source, Unit
from llmtrain.data.sources.local import File


@pytest.fixture
def path(tmp_path):
    return corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=7)


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
    table = pa.Table.from_pylist(long).select(["id", "far", "text"])
    pq.write_table(table, path, compression="none", use_dictionary=False)
    group = pq.read_metadata(path).row_group(0)
    spans = column_spans(group, ["text", "id"])
    assert len(spans) == 2
    assert sum(end - start for start, end in spans) < 20_000
    assert len(column_spans(group, ["far", "text"])) == 1


def remote(size, units):
    file = File("a.parquet", size, "e")
    return Source("wiki", "a/b", "hf://", True, None, (file,), "text", None, 1.0, None, units)


SLICES = tuple(Unit(0, group, 10 * part, 10 * part + 10) for group in range(3) for part in range(8))


def test_slices_that_nothing_keeps_are_said_with_their_cost():
    said = refetch_warning(remote(3 << 30, SLICES), 0)
    assert "source wiki" in said
    assert "up to 8.0 times an epoch" in said
    assert "data.cache_gb of at least 3.0" in said or "data.cache_gb of at least 3.1" in said
    assert refetch_warning(remote(3 << 30, SLICES), 1 << 30) is not None  # too small


def test_slices_that_are_kept_are_not_worth_a_word():
    assert refetch_warning(remote(3 << 30, SLICES), 4 << 30) is None
    assert refetch_warning(remote(200 << 20, SLICES), 0) is None
    whole = tuple(Unit(0, group, 0, 80) for group in range(3))
    assert refetch_warning(remote(3 << 30, whole), 0) is None
    lines = tuple(Unit(0, -1, start, start + 10) for start in range(0, 50, 10))
    assert refetch_warning(remote(3 << 30, lines), 0) is None
