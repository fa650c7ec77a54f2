import datetime
import gzip
import json
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import corpus

from llmtrain.data import repack as tables
from llmtrain.data.documents import lines, units
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.errors import UserError
from llmtrain.tools.data.tokenize import repack

KIB = 1 / 1024


def quiet(done, of, rows):
    pass


def repacked(path, out, **more):
    values = {"group_mb": 2 * KIB, "text_column": "text", "jobs": 1, "progress": quiet} | more
    return repack(str(path), out, **values)


def groups(file):
    metadata = pq.read_metadata(file)
    return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]


ROWS = corpus.articles(50)


@pytest.mark.parametrize("group", [1, 7, 50])
def test_parquet_keeps_its_columns_types_and_order(tmp_path, group):
    table = pa.table(
        {
            "text": [row["text"] for row in ROWS],
            "n": pa.array(range(50), pa.int16()),
            "when": pa.array([datetime.date(2020, 1, 1)] * 50),
            "tags": pa.array([[{"a": n, "b": None}] * (n % 3) for n in range(50)]),
            "kind": pa.array(["x", "y"] * 25).dictionary_encode(),
        },
        metadata={"who": "me"},
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    done = repacked(tmp_path / "a.parquet", tmp_path / "out")
    assert (done.files, done.rows) == (("a.parquet",), 50)
    found = pq.read_table(tmp_path / "out" / "a.parquet")
    assert found.equals(table)
    assert found.schema.metadata[b"who"] == b"me"
    sizes = groups(tmp_path / "out" / "a.parquet")
    assert len(sizes) > 3
    start = 0
    for size in sizes:
        assert table.slice(start, size).nbytes <= 2048 or size == 1
        start += size


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_keep_their_keys(tmp_path, suffix):
    rows = [
        {"text": "one", "n": 1, "deep": {"a": [1]}},
        {"text": "two\nlines", "n": 2.5, "late": True},
        {"text": None, "n": None},
        {"text": ""},
        {"text": "ü €", "deep": {"a": [], "b": "x"}, "nothing": None},
    ]
    corpus.write_jsonl(tmp_path / f"a.jsonl{suffix}", rows)
    repacked(tmp_path / f"a.jsonl{suffix}", tmp_path / "out", group_mb=8)
    found = pq.read_table(tmp_path / "out" / f"a.jsonl{suffix}.parquet").to_pylist()
    assert [row["text"] for row in found] == ["one", "two\nlines", None, "", "ü €"]
    assert [row["n"] for row in found] == [1.0, 2.5, None, None, None]
    assert [row["late"] for row in found] == [None, True, None, None, None]
    assert found[0]["deep"] == {"a": [1], "b": None}
    assert found[4]["deep"] == {"a": [], "b": "x"}
    assert {row["nothing"] for row in found} == {None}


@pytest.mark.parametrize("batch", [1, 1 << 22])
def test_a_key_may_appear_and_become_a_fraction_in_the_last_line(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(tables, "BATCH_BYTES", batch)
    rows = [{"text": "x", "n": 1}] * 5 + [{"n": 0.5, "text": "y", "z": [1]}]
    corpus.write_jsonl(tmp_path / "a.jsonl", rows)
    repacked(tmp_path / "a.jsonl", tmp_path / "out")
    found = pq.read_table(tmp_path / "out" / "a.jsonl.parquet").to_pylist()
    assert [row["n"] for row in found] == [1.0] * 5 + [0.5]
    assert [row["z"] for row in found] == [None] * 5 + [[1]]


@pytest.mark.parametrize("batch", [1, 1 << 22])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("many", 'key n = "many"|beside the int64'),
        ({"now": "an object"}, "line 3, key n"),
        ([1, "x"], "a value that a column"),
        (2**80, str(2**80)),
    ],
)
def test_a_key_of_values_of_two_types_is_refused(tmp_path, monkeypatch, batch, value, told):
    monkeypatch.setattr(tables, "BATCH_BYTES", batch)
    corpus.write_jsonl(tmp_path / "a.jsonl", [{"n": 1}, {"n": None}, {"n": value}, {"n": 2}])
    with pytest.raises(UserError, match=told) as error:
        repacked(tmp_path / "a.jsonl", tmp_path / "out")
    assert "line 3" in str(error.value)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    "data",
    [
        b"a\nb\r\nc\rd",
        b"a\r\n",
        b"\r\r\n\n\n",
        b"one\r",
        "ü\r\u2028\n".encode() + b"\xff\xfe",
        b"",
        b"x" * 8191 + b"\r\n" + b"y" * 8190 + b"\r\n" + b"z" * 9000,
    ],
)
def test_lines_of_text_are_those_that_training_reads(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    repacked(tmp_path / "a.txt", tmp_path / "out", text_column="line")
    found = pq.read_table(tmp_path / "out" / "a.txt.parquet")["line"].to_pylist()
    split = lines.TEXT_END.split(data)
    expected = split if split[-1] else split[:-1]
    assert found == [line.decode("utf-8", "replace") for line in expected]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt.gz"])
def test_training_reads_the_same_documents(tmp_path, name):
    if ".jsonl" in name:
        odd = [b'{"text": "half \\ud800 pair", "id": "x"}', b'{"text": "bad \xff byte"}', b"", b" "]
        content = [json.dumps(row).encode() for row in ROWS] + odd
    else:
        content = [row["text"].replace("\n", " ").encode() for row in ROWS] + [b"", b"\xff is bad"]
    corpus.write_lines(tmp_path / "in" / name, content)
    corpus.write_tokenizer(tmp_path / "tokenizer")
    repacked(tmp_path / "in", tmp_path / "out")
    texts = []
    for place in ("in", "out"):
        (source,) = corpus.manifest_of(tmp_path / "tokenizer", tmp_path / place).sources
        reader = Reader(Reading(60))
        rows = [reader.rows(source, unit) for unit in source.units]
        found = [one.text(row)[0] for one in rows for row in range(len(one))]
        texts.append([text for text in found if text is not None])
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 51


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")]
)
def test_csv_keeps_its_columns_as_strings(tmp_path, name, delimiter):
    head = delimiter.join(["id", "text"])
    body = delimiter.join(["007", '"two\nlines ""quoted"""'])
    data = f"{head}\n{body}\n".encode() + delimiter.join(["8", ""]).encode() + b"\n"
    data += b"9" + delimiter.encode() + b"\xff bad\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    repacked(tmp_path / name, tmp_path / "out")
    found = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
    assert found == [
        {"id": "007", "text": 'two\nlines "quoted"'},
        {"id": "8", "text": ""},
        {"id": "9", "text": "\ufffd bad"},
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_a_compressed_arrow_file_is_read_batch_by_batch(tmp_path, stream):
    """Decompressed batches are no part of the mapped file, so all of them might not fit."""
    table = pa.table({"text": ["ab" * 50_000] * 160})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=10)
    before = pa.total_allocated_bytes()
    schema, batches = units.map_arrow(str(tmp_path / "a.arrow"))
    sizes = [(pa.total_allocated_bytes() - before) / batch.nbytes for batch in batches]
    assert (schema, len(sizes)) == (table.schema, 16)
    assert max(sizes) < 4


@pytest.mark.parametrize("stream", [True, False])
def test_both_forms_of_arrow_files_are_read(tmp_path, stream):
    table = pa.table({"text": [row["text"] for row in ROWS], "n": range(50)})
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    repacked(tmp_path / "a.arrow", tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "a.arrow.parquet").equals(table)
    assert len(groups(tmp_path / "out" / "a.arrow.parquet")) > 1


@pytest.fixture
def mixed(tmp_path):
    corpus.write_parquet(tmp_path / "in" / "a.parquet", ROWS)
    corpus.write_jsonl(tmp_path / "in" / "deep" / "b.jsonl.gz", ROWS)
    (tmp_path / "in" / "README.md").touch()
    return tmp_path / "in"


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.launches
def test_several_processes_write_the_same_bytes(mixed, tmp_path):
    one = repacked(mixed, tmp_path / "one")
    assert (one.files, one.rows) == (("a.parquet", "deep/b.jsonl.gz.parquet"), 100)
    repacked(mixed, tmp_path / "two", jobs=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_what_is_complete_is_kept_and_what_changed_is_written_anew(mixed, tmp_path):
    out = tmp_path / "out"
    repacked(mixed, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    corpus.write_parquet(mixed / "a.parquet", ROWS[:20])
    assert repacked(mixed, out).rows == 70
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert {p.name for p in before if before[p] != after[p]} == {"a.parquet"}
    (out / "a.parquet").write_bytes((out / "a.parquet").read_bytes()[:-10])
    with pytest.raises(UserError, match="nothing but files that this command wrote"):
        repacked(mixed, out)
    repacked(mixed, tmp_path / "other", group_mb=1)
    shutil.copytree(tmp_path / "other", tmp_path / "third")
    repacked(mixed, tmp_path / "third")
    assert len(groups(tmp_path / "third" / "a.parquet")) > 1


@pytest.mark.launches
def test_killed_at_any_point_the_same_command_ends_with_the_same_bytes(mixed, tmp_path, server):
    repacked(mixed, tmp_path / "straight", group_mb=8)
    point = 0
    while True:
        out = tmp_path / str(point)
        arguments = ["data", "repack", str(mixed), "--out", str(out), "--jobs", "1"]
        call = ["call", "helpers.killing", "killed", str(point), *arguments]
        if server.run(call, 1, tmp_path) != [-signal.SIGKILL]:
            break
        again = ["call", "helpers.killing", "command", *arguments]
        assert server.run(again, 1, tmp_path) == [0]
        assert contents(out) == contents(tmp_path / "straight")
        point += 1
    assert point >= 4


@pytest.mark.launches
def test_a_full_disk_is_one_message_and_code_74(mixed, tmp_path, server):
    out = tmp_path / "out"
    arguments = ["data", "repack", str(mixed), "--out", str(out), "--jobs", "1"]
    full = ["call", "helpers.killing", "on_a_full_disk", "1000", *arguments]
    assert server.run(full, 1, tmp_path) == [74]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("error:") == 1
    assert "cannot write" in said
    assert "Traceback" not in said
    assert contents(out) == {}


@pytest.mark.launches
def test_it_needs_no_torch_and_neither_do_the_processes_that_tokenize():
    code = (
        "import sys, llmtrain.tools.data.tokenize\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.launches
def test_the_command_tells_scripts_what_it_wrote(mixed, tmp_path):
    command = [sys.executable, "-m", "llmtrain", "data", "repack", str(mixed)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["files"] == ["a.parquet", "deep/b.jsonl.gz.parquet"]
    assert said["rows"] == 100
    assert said["seconds"] > 0


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.parquet", b"PAR1 no more PAR1", "a.parquet"),
        ("a.jsonl", b'{"text": 1}\n[1]\n', "line 2"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', "line 3"),
        ("a.jsonl.gz", gzip.compress(mtime=0, data=b'{"text": "x"}\n' * 999)[:-9], "a.jsonl.gz"),
        ("a.txt.zst", zstandard.compress(b"abc\n" * 9999)[:-9], "Truncated compressed stream"),
        ("a.arrow", b"ARROW1", "a.arrow"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv"),
        ("a.xlsx", b"PK", "a data file|.parquet, .arrow"),
    ],
)
def test_bad_files_are_one_problem_of_the_user(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        repacked(tmp_path / name, tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))


def test_a_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "DECODED_LIMIT", 1000)
    (tmp_path / "a.txt").write_bytes(b"short\n" + b"x" * 2000)
    with pytest.raises(UserError, match="line 2"):
        repacked(tmp_path / "a.txt", tmp_path / "out")


def test_places_that_are_not_for_the_result_are_refused(mixed, tmp_path):
    for out in (mixed, mixed / "deep", mixed / "new"):
        with pytest.raises(UserError, match="--out"):
            repacked(mixed, out)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex"):
        repacked(mixed, tmp_path / "out")
    with pytest.raises(UserError, match="a directory; there is a file"):
        repacked(mixed, tmp_path / "out" / "thesis.tex")
    pq.write_table(pa.table({"text": ["mine"]}), tmp_path / "a.parquet")
    (tmp_path / "taken").mkdir()
    shutil.copy(tmp_path / "a.parquet", tmp_path / "taken")
    with pytest.raises(UserError, match="nothing but files"):
        repacked(mixed, tmp_path / "taken")


def test_two_files_of_one_target_are_refused(mixed, tmp_path):
    corpus.write_parquet(mixed / "deep" / "b.jsonl.gz.parquet", ROWS)
    with pytest.raises(UserError, match="rename one of the two"):
        repacked(mixed, tmp_path / "out")


def test_a_data_set_of_the_hub_is_told_how_to_download(tmp_path):
    with pytest.raises(UserError, match="hf download wikimedia/wikipedia --repo-type dataset"):
        repacked("wikimedia/wikipedia", tmp_path / "out")


@pytest.mark.launches
def test_memory_does_not_grow_with_a_row_group(tmp_path):
    """A group of 192 MB is rewritten by a process that never holds a third of it."""
    texts = [f"{n:06d} " + "abcdefgh" * 1500 for n in range(16_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=16_000)
    assert groups(tmp_path / "a.parquet") == [16_000]
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from llmtrain.tools.data.tokenize import repack\n"
        "import llmtrain.data.repack\n"
        "quiet = lambda *counts: None\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "repack(sys.argv[1], Path(sys.argv[2]), 8, 'text', 1, quiet)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.parquet"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 64e6
    assert len(groups(tmp_path / "out" / "a.parquet")) > 20
