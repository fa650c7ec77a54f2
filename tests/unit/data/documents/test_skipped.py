import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import corpus

from llmtrain.batch_size import BatchSize
from llmtrain.config.binding import data_settings
from llmtrain.data.documents import skipped
from llmtrain.data.documents.reader import Reader, Reading, reading_of
from llmtrain.data.documents.skipped import FILE_NAME, LeftOut, Skipped
from llmtrain.data.documents.units import Units
from llmtrain.data.lanes import Lane
from llmtrain.data.manifest import load
from llmtrain.data.stream import open_stream
from llmtrain.data.survey import check, freeze, survey, training_texts
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import RunError, UserError
from llmtrain.types import Cursor

PART = LeftOut("en", "a.parquet", "rows", 3, 0, 10, 0)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("skipped") / "tokenizer")


def other(n):
    return PART._replace(start=n)


def damage(path, group=None):
    """Overwrite the data pages of a parquet file's row group (None: of the first half)."""
    import pyarrow.parquet as pq

    body = bytearray(path.read_bytes())
    meta = pq.ParquetFile(path).metadata.row_group(group or 0).column(2)
    first = meta.dictionary_page_offset or meta.data_page_offset
    body[first : first + meta.total_compressed_size] = bytes(meta.total_compressed_size)
    path.write_bytes(body)


def records(run_dir):
    path = run_dir / FILE_NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_part_stands_in_the_file_with_its_reason_and_is_known_to_others(tmp_path):
    one, two = Skipped(tmp_path / FILE_NAME), Skipped(tmp_path / FILE_NAME)
    assert not two.holds(PART)
    one.add([(PART, "torn page")])
    assert two.holds(PART)
    assert not two.holds(PART._replace(epoch=1))
    (record,) = records(tmp_path)
    assert (record["source"], record["file"], record["group"]) == ("en", "a.parquet", 3)
    assert record["reason"] == "torn page"
    assert record["time"] > 1.7e9


def test_a_part_is_warned_of_once_however_many_epochs_want_it(tmp_path, caplog):
    record = Skipped(tmp_path / FILE_NAME)
    for epoch in range(3):
        record.add([(PART._replace(epoch=epoch), "torn page")])
    assert len(records(tmp_path)) == 3
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "rows 0 to 10 of row group 3" in caplog.text


def test_a_part_is_durable_when_add_returns(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def noted(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Skipped(tmp_path / FILE_NAME).add([(PART, "x")])
    assert synced == [tmp_path / FILE_NAME, tmp_path]


def test_the_same_part_twice_counts_once(tmp_path):
    one, two = Skipped(tmp_path / FILE_NAME), Skipped(tmp_path / FILE_NAME)
    one.add([(PART, "x")])
    one.add([(PART, "x")])
    line = (tmp_path / FILE_NAME).read_bytes()
    assert line.count(b"\n") == 1
    (tmp_path / FILE_NAME).write_bytes(line * 2)
    assert skipped.read(tmp_path / FILE_NAME) == [PART]
    assert two.holds(PART)


def test_a_line_that_a_kill_cut_off_costs_no_record_before_or_after_it(tmp_path):
    path = tmp_path / FILE_NAME
    Skipped(path).add([(other(1), "x")])
    Skipped(path).add([(other(2), "x")])
    path.write_bytes(path.read_bytes()[:-20])
    late = Skipped(path)
    assert late.holds(other(1))
    assert not late.holds(other(2))
    Skipped(path).add([(other(3), "x")])
    assert late.holds(other(3))
    assert skipped.read(path) == [other(1), other(3)]


WRITER = """
import pathlib, sys
from llmtrain.data.documents.skipped import LeftOut, Skipped
record = Skipped(pathlib.Path(sys.argv[1]))
for n in range(100):
    record.add([(LeftOut("en", "a.parquet", "rows", int(sys.argv[2]), n, 10, 0), "x" * 200)])
"""


@pytest.mark.launches
def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / FILE_NAME
    commands = [[sys.executable, "-c", WRITER, str(path), str(n)] for n in range(3)]
    writers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(skipped.read(path)) == 300


def test_a_disk_that_takes_no_record_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        Skipped(tmp_path / "missing" / FILE_NAME).add([(PART, "x")])


def damaged_run(root, tokenizer_dir, *, lanes=2):
    """A run directory, its manifest on 12 groups, and then damage to group 5."""
    path = corpus.write_parquet(root / "a.parquet", corpus.articles(120), group=10)
    manifest = corpus.manifest_of(tokenizer_dir, path, lanes=lanes, seq_len=32)
    whole = path.read_bytes()
    damage(path, 5)
    run_dir = root / "run"
    run_dir.mkdir()
    return manifest, run_dir, path, whole


def take(manifest, tokenizer_dir, run_dir, blocks, *, world_size=1, workers=0, next_block=0):
    reading = Reading(60, run_dir, skip_bad_units=True)
    found = []
    for rank in range(world_size):
        stream = open_stream(
            manifest,
            tokenizer_dir,
            batch=BatchSize.constant(world_size),
            rank=rank,
            world_size=world_size,
            workers=workers,
            next_block=next_block,
            reading=reading,
        )
        found.append([next(stream).ids[0].tolist() for _ in range(blocks // world_size)])
        stream.close()
    return [ids for step in zip(*found, strict=True) for ids in step]


def test_a_bad_unit_is_an_error_by_default(tmp_path, tokenizer_dir):
    manifest, run_dir, _, _ = damaged_run(tmp_path, tokenizer_dir)
    reader = Reader(Reading(60, run_dir))
    with pytest.raises(UserError, match=r"a\.parquet, row group 5"):
        reader.rows(manifest.sources[0], manifest.sources[0].units[5], 0)
    assert records(run_dir) == []


def test_a_skipped_unit_leaves_every_other_document_in_its_place(tmp_path, tokenizer_dir):
    manifest, run_dir, _, _ = damaged_run(tmp_path, tokenizer_dir, lanes=1)
    tokenizer = open_tokenizer(tokenizer_dir)
    reader = Reader(Reading(60, run_dir, skip_bad_units=True))
    lane = Lane(manifest, DocumentEncoder(tokenizer), reader, 0, 0, [Cursor(0, 0, 0, 0)])
    ids, met = [], 0
    while lane.cursors[0].epoch < 1:
        block = lane.take()
        ids += block.ids[:-1].tolist()
        met += block.counts.get(0, {}).get("skipped", 0)
    found = tokenizer.decode(ids).split("<|endoftext|>")[:-1]
    kept = [row["text"] for n, row in enumerate(corpus.articles(120)) if n // 10 != 5]
    assert set(found[: len(kept)]) == set(kept)
    assert met == 1
    assert [(r["group"], r["epoch"]) for r in records(run_dir)] == [(5, 0)]


@pytest.mark.parametrize(
    ("world_size", "workers"),
    [(1, 0), (2, 0), (3, 0), pytest.param(1, 1, marks=pytest.mark.launches)],
)
def test_a_replay_leaves_out_the_same_though_the_error_has_passed(
    tmp_path, tokenizer_dir, world_size, workers
):
    manifest, run_dir, path, whole = damaged_run(tmp_path, tokenizer_dir)
    first = take(manifest, tokenizer_dir, run_dir, 960)
    assert {r["epoch"] for r in records(run_dir)} >= {0, 1}
    path.write_bytes(whole)
    again = take(manifest, tokenizer_dir, run_dir, 960, world_size=world_size, workers=workers)
    assert again == first
    assert take(manifest, tokenizer_dir, tmp_path, 960) != first


def test_what_was_skipped_stays_out_when_errors_count_again(tmp_path, tokenizer_dir):
    manifest, run_dir, _, _ = damaged_run(tmp_path, tokenizer_dir)
    source = manifest.sources[0]
    Reader(Reading(60, run_dir, skip_bad_units=True)).rows(source, source.units[5], 0)
    strict = Reader(Reading(60, run_dir))
    assert len(strict.rows(source, source.units[5], 0)) == 0
    with pytest.raises(UserError):
        strict.rows(source, source.units[5], 1)


def test_an_epoch_that_could_be_read_is_read_again_in_a_replay(tmp_path, tokenizer_dir):
    """Unit 5 was good in epoch 0 and bad in epoch 1: a replay from epoch 0 must read it."""
    manifest, run_dir, path, whole = damaged_run(tmp_path, tokenizer_dir)
    source = manifest.sources[0]
    path.write_bytes(whole)
    reader = Reader(Reading(60, run_dir, skip_bad_units=True))
    assert len(reader.rows(source, source.units[5], 0)) == 10
    damage(path, 5)
    late = Reader(Reading(60, run_dir, skip_bad_units=True))
    assert len(late.rows(source, source.units[5], 1)) == 0
    path.write_bytes(whole)
    replay = Reader(Reading(60, run_dir, skip_bad_units=True))
    assert len(replay.rows(source, source.units[5], 0)) == 10
    assert len(replay.rows(source, source.units[5], 1)) == 0


def test_a_unit_that_a_block_was_cut_in_is_never_skipped_on_resume(tmp_path, tokenizer_dir):
    manifest, run_dir, path, whole = damaged_run(tmp_path, tokenizer_dir, lanes=1)
    path.write_bytes(whole)
    tokenizer = open_tokenizer(tokenizer_dir)
    reading = Reading(60, run_dir, skip_bad_units=True)
    lane = Lane(manifest, DocumentEncoder(tokenizer), Reader(reading), 0, 0, [Cursor(0, 0, 0, 0)])
    lane.take()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    again = Lane(
        manifest, DocumentEncoder(tokenizer), Reader(reading), 0, lane.next_block, lane.cursors
    )
    with pytest.raises(UserError, match=r"a\.parquet, row group"):
        again.take()
    assert records(run_dir) == []


def test_trouble_of_the_machine_is_never_skipped(tmp_path, tokenizer_dir, monkeypatch):
    manifest, run_dir, path, _ = damaged_run(tmp_path, tokenizer_dir)
    source = manifest.sources[0]
    reader = Reader(Reading(60, run_dir, skip_bad_units=True))

    def fails(*_args, **_more):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Units, "_group", fails)
        with pytest.raises(RunError):
            reader.rows(source, source.units[0], 0)
    path.unlink()
    with pytest.raises(UserError):
        Reader(Reading(60, run_dir, skip_bad_units=True)).rows(source, source.units[0], 0)
    assert records(run_dir) == []


def test_other_rows_than_when_the_run_began_are_never_skipped(tmp_path, tokenizer_dir):
    manifest, run_dir, path, _ = damaged_run(tmp_path, tokenizer_dir)
    corpus.write_parquet(path, corpus.articles(115), group=10)
    source = manifest.sources[0]
    reader = Reader(Reading(60, run_dir, skip_bad_units=True))
    with pytest.raises(UserError, match="fewer rows"):
        reader.rows(source, source.units[11], 0)


BAD_LINES = [b"{half", b'{"title": 1}', b"[1]", b'{"text": 7}']


def lines_with_bad_ones():
    rows = corpus.articles(60)
    lines = [json.dumps(row).encode() for row in rows]
    return rows, [*lines[:20], *BAD_LINES[:2], *lines[20:], *BAD_LINES[2:]]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_bad_line_is_left_out_and_the_others_stay(tmp_path, suffix):
    rows, lines = lines_with_bad_ones()
    path = corpus.write_lines(tmp_path / f"a.jsonl{suffix}", lines)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    found = survey(data_settings(corpus.config(path, on_bad_unit="skip")), 1, run_dir)
    assert sorted(training_texts(found, 1 << 20)) == sorted(row["text"] for row in rows)
    data = b"".join(line + b"\n" for line in lines)
    said = {record["start"] for record in records(run_dir)}
    assert said == {data.index(line + b"\n") for line in BAD_LINES}
    assert {record["kind"] for record in records(run_dir)} == {"line"}


def test_the_parts_left_out_are_counted_where_they_are_met(tmp_path):
    _, lines = lines_with_bad_ones()
    path = corpus.write_lines(tmp_path / "a.jsonl", lines)
    config = corpus.config(path, on_bad_unit="skip", lanes=1)
    source = survey(data_settings(config), 1).sources[0]
    reader = Reader(reading_of(data_settings(config), None))
    assert sum(reader.rows(source, unit, 0).skipped for unit in source.units) == len(BAD_LINES)


def test_a_unit_without_one_good_line_is_one_record(tmp_path, tokenizer_dir):
    rows = [json.dumps(row).encode() for row in corpus.articles(2)]
    one = corpus.write_lines(tmp_path / "a" / "1.jsonl.gz", [b'{"body": "x"}'] * 500)
    corpus.write_lines(tmp_path / "a" / "2.jsonl.gz", rows)
    survey(data_settings(corpus.config(one.parent, on_bad_unit="skip")), 1, tmp_path)
    assert [(r["kind"], r["file"]) for r in records(tmp_path)] == [("bytes", "1.jsonl.gz")]


def test_bad_files_are_left_out_of_the_manifest_and_not_looked_at_again(tmp_path, tokenizer_dir):
    root = tmp_path / "a"
    corpus.write_parquet(root / "1.parquet", corpus.articles(30))
    corpus.write_parquet(root / "2.parquet", corpus.articles(30, 30))
    whole = (root / "2.parquet").read_bytes()
    (root / "2.parquet").write_bytes(whole[:-40] + bytes(40))
    (root / "3.jsonl.gz").write_bytes(b"never compressed")
    config = corpus.config(root, on_bad_unit="skip", heldout=0.1)
    found = survey(data_settings(config), 1, tmp_path)
    assert {unit.file for unit in found.sources[0].units} == {0}
    assert [r["file"] for r in records(tmp_path)] == ["2.parquet", "3.jsonl.gz"]
    (root / "2.parquet").write_bytes(whole)
    again = survey(data_settings(config), 1, tmp_path)
    assert again.sources[0].units == found.sources[0].units
    manifest = freeze(again, open_tokenizer(tokenizer_dir))
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    (root / "3.jsonl.gz").unlink()
    check(
        load(tmp_path / "manifest.json", config.data.sources),
        data_settings(config),
        DocumentEncoder(open_tokenizer(tokenizer_dir)),
    )


def test_a_source_of_which_nothing_can_be_read_is_refused(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(40))
    for group in range(4):
        damage(path, group)
    config = corpus.config(path, on_bad_unit="skip", heldout=0.05)
    with pytest.raises(UserError, match="no training document is left"):
        survey(data_settings(config), 1, tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="all are left out"):
        survey(
            data_settings(corpus.config(tmp_path / "b.parquet", on_bad_unit="skip")), 1, tmp_path
        )


def test_many_bad_units_in_a_row_end_the_run_before_all_are_read(tmp_path):
    path = corpus.write_lines(tmp_path / "a.jsonl", [b'{"body": "x y z"}'] * 400_000)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(UserError, match=r"64 parts in a row .*\n.*its keys are 'body'"):
        survey(data_settings(corpus.config(path, on_bad_unit="skip")), 1, run_dir)
    assert len(records(run_dir)) == 64


def test_slices_of_one_bad_group_are_one_bad_part(tmp_path, tokenizer_dir):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(200), group=100)
    damage(path, 0)
    config = corpus.config(path, on_bad_unit="skip", lanes=48)
    assert len(survey(data_settings(config), 1, tmp_path).sources[0].units) == 192


def test_a_lane_whose_source_turned_bad_ends_in_reasonable_time(tmp_path, tokenizer_dir):
    manifest, run_dir, path, _ = damaged_run(tmp_path, tokenizer_dir)
    for group in range(12):
        damage(path, group)
    with pytest.raises(UserError, match="64 parts in a row"):
        take(manifest, tokenizer_dir, run_dir, 10)


def test_without_a_run_directory_skips_are_remembered_in_the_process(tmp_path, tokenizer_dir):
    manifest, _, path, whole = damaged_run(tmp_path, tokenizer_dir)
    source = manifest.sources[0]
    reader = Reader(Reading(60, None, skip_bad_units=True))
    assert len(reader.rows(source, source.units[5], 0)) == 0
    path.write_bytes(whole)
    assert len(reader.rows(source, source.units[5], 0)) == 0


def test_a_file_with_a_line_end_in_its_name_takes_one_line_of_the_log(tmp_path, caplog):
    part = LeftOut("s", "a\nerror: all is lost", "file", -1, 0, 1, None)
    Skipped(tmp_path / FILE_NAME).add([(part, "it is damaged")])
    assert caplog.messages == [r"skipped a\nerror: all is lost of s: it is damaged"]
