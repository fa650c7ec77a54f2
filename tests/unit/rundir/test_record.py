import errno
import json
import math
import os
import shutil
import tracemalloc
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from helpers import runs

from llmtrain.errors import RunError
from llmtrain.report.collect import collect, joined
from llmtrain.report.page import inline
from llmtrain.rundir import record as module
from llmtrain.rundir.contents import METRICS
from llmtrain.rundir.goodput import goodput
from llmtrain.rundir.record import Lines, Tail, read, record, short_record
from llmtrain.tools.watch import Watcher


def test_every_line_has_kind_time_and_step(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("event", 3, event="signal", detail={"name": "SIGTERM"})
    (line,) = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
    assert line["kind"] == "event"
    assert line["step"] == 3
    assert line["detail"] == {"name": "SIGTERM"}
    assert line["time"] > 1.7e9


def test_numbers_that_are_not_finite_are_null_at_any_depth(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("train", 1, loss=math.nan, sources={"a": math.inf}, list=[-math.inf, 1.5])
    assert "NaN" not in (tmp_path / METRICS).read_text()
    (line,) = read(tmp_path / METRICS)
    assert (line["loss"], line["sources"], line["list"]) == (None, {"a": None}, [None, 1.5])


def test_numpy_floats_are_written_as_numbers(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("train", 1, loss=np.float64(2.5))
    assert read(tmp_path / METRICS)[0]["loss"] == 2.5


def test_a_line_is_one_write_call(tmp_path, monkeypatch):
    calls = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: calls.append(data) or real(file, data))
    with closing(Lines(tmp_path)) as lines:
        lines.write("train", 1, loss=1.0)
        lines.write("sample", 1, text="two\nlines\u2028and more")
    assert [data.count(b"\n") for data in calls] == [1, 1]
    assert [line["kind"] for line in read(tmp_path / METRICS)] == ["train", "sample"]


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("torn", ["{", '{"kind": "train", "st', "x" * 200_000])
def test_a_torn_last_line_is_removed_when_the_run_goes_on(tmp_path, kept, torn):
    path = tmp_path / METRICS
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(kept)) + torn)
    assert len(read(path)) == kept
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 7)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [*range(kept), 7]


def test_a_file_that_is_complete_is_only_appended_to(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n')
    before = path.read_bytes()
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 1)
    assert path.read_bytes().startswith(before)


def test_a_line_of_zeros_is_left_out_and_named(tmp_path, caplog):
    path = tmp_path / METRICS
    path.write_bytes(b'{"step": 1}\n\0\0\0\0\n[1]\n{"step": 2}\n')
    assert [line["step"] for line in read(path)] == [1, 2]
    assert [record.args[0] for record in caplog.records] == [2, 3]


def test_no_file_means_no_lines(tmp_path):
    assert read(tmp_path / METRICS) == []


def test_a_disk_that_refuses_is_exit_code_74_with_the_path(tmp_path):
    with pytest.raises(RunError, match=METRICS) as caught:
        Lines(tmp_path / "missing")
    assert caught.value.exit_code == 74


def full_disk(monkeypatch, *takes):
    """`os.write` that takes so many bytes at each of the next calls (0: none), then all again."""
    real, left = os.write, list(takes)

    def write(file, data):
        if not left:
            return real(file, data)
        if size := left.pop(0):
            return real(file, data[:size])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)


def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(
    tmp_path, monkeypatch, caplog
):
    with closing(Lines(tmp_path)) as lines:
        lines.write("train", 1)
        full_disk(monkeypatch, 10, 0, 0)
        lines.write("train", 2)
        lines.write("train", 3)
        assert [line["step"] for line in read(tmp_path / METRICS)] == [1]
        lines.write("train", 4)
        assert [line["step"] for line in read(tmp_path / METRICS)] == [1, 2, 3, 4]
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


def test_who_insists_hears_that_the_disk_is_full(tmp_path, monkeypatch):
    lines = Lines(tmp_path)
    full_disk(monkeypatch, 0, 0)
    lines.write("train", 1)
    with pytest.raises(RunError, match="No space left") as caught:
        lines.sync()
    assert caught.value.exit_code == 74
    lines.sync()
    assert [line["step"] for line in read(tmp_path / METRICS)] == [1]
    lines.close()


def test_lines_that_are_lost_in_the_end_are_told(tmp_path, monkeypatch, caplog):
    with closing(Lines(tmp_path)) as lines:
        full_disk(monkeypatch, 0, 0)
        lines.write("train", 1)
    assert "the last lines are lost" in caplog.text


def test_closing_twice_is_harmless(tmp_path):
    lines = Lines(tmp_path)
    lines.close()
    lines.close()


def test_a_line_without_kind_time_or_step_is_no_line_of_a_record(tmp_path, caplog):
    good = [{"kind": "start", "time": 1, "step": 0}, {"kind": "end", "time": 2.5, "step": 4}]
    bad = [{}, {"kind": "train", "time": 1.0}, good[0] | {"step": 1.5}, good[0] | {"kind": None}]
    lines = [good[0], *bad, good[1]]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert record(tmp_path) == good
    assert [str(line) in caplog.text for line in bad] == [True] * 4


@pytest.mark.parametrize("replaced", [False, True])
def test_a_record_that_was_deleted_begins_again_with_the_line_of_this_start(tmp_path, replaced):
    path = tmp_path / METRICS
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 0, run_id="one")
        lines.write("train", 1, loss=1.0)
        assert not lines.begin_again()
        before = path.read_text().splitlines()
        path.rename(tmp_path / "moved") if replaced else path.unlink()
        lines.write("train", 2, loss=1.0)  # nobody has noticed yet
        if replaced:
            path.write_text('{"torn')
        assert lines.begin_again()
        assert not lines.begin_again()
        lines.write("train", 3, loss=1.0)
    assert path.read_text().splitlines()[0] == before[0]
    assert [line["step"] for line in read(path)] == [0, 3]


def test_a_record_that_cannot_begin_again_is_a_failure_of_the_disk(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 0)
        (tmp_path / METRICS).unlink()
        (tmp_path / METRICS).mkdir()
        with pytest.raises(RunError) as caught:
            lines.begin_again()
    assert caught.value.exit_code == 74


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def steps(found):
    return [line["step"] for line in found]


def test_each_line_is_read_once_and_a_torn_one_when_it_is_whole(tmp_path):
    path = runs.write_run(tmp_path, [runs.train_line(1)]) / "metrics.jsonl"
    tail = Tail(tmp_path)
    found, again = tail.lines()
    assert (steps(found), again) == ([1], True)
    text = json.dumps(runs.train_line(2))
    append(path, text[:50])
    assert tail.lines() == ([], False)
    append(path, text[50:] + "\n\0\n[1]\n")
    found, again = tail.lines()
    assert (steps(found), again) == ([2], False)
    assert tail.unread == 2


def test_a_file_that_shrank_was_replaced_or_copied_over_is_read_again(tmp_path):
    path = runs.write_run(tmp_path, [runs.train_line(n) for n in (1, 2, 3)]) / "metrics.jsonl"
    tail = Tail(tmp_path)
    tail.lines()
    path.write_text(json.dumps(runs.train_line(1)) + "\n")  # the same file, shorter
    assert (steps((read := tail.lines())[0]), read[1]) == ([1], True)
    other = tmp_path / "other"
    other.write_text("".join(json.dumps(runs.train_line(n)) + "\n" for n in (1, 2, 3, 4)))
    other.replace(path)
    assert (steps((read := tail.lines())[0]), read[1]) == ([1, 2, 3, 4], True)
    copy = tmp_path / "copy"
    copy.write_text("".join(json.dumps(runs.train_line(n)) + "\n" for n in (7, 8, 9, 10, 11)))
    shutil.copyfile(copy, path)  # keeps the inode, and is longer
    assert (steps((read := tail.lines())[0]), read[1]) == ([7, 8, 9, 10, 11], True)


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert Tail(tmp_path).lines() == ([], False)


# Records of long runs: what is read of them takes little memory, and is what stands in them.
COUNT = 12_000  # 5.5 MB


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "run"
    runs.write_run(folder, [runs.train_line(step) for step in range(1, COUNT + 1)])
    return folder


def peak_bytes(work):
    work()  # what is imported and cached
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_report_of_a_long_run_takes_a_few_hundred_bytes_a_line(long_run):
    """A line of 460 characters is 3,000 bytes as a dict: 150 MB would be a gigabyte."""
    assert peak_bytes(lambda: inline(collect(long_run))) < 600 * COUNT
    assert peak_bytes(lambda: goodput(long_run)) < 400 * COUNT


def test_to_watch_a_long_run_takes_no_more_than_a_short_one(long_run):
    assert peak_bytes(lambda: Watcher(long_run).look()) < 10 * 2**20
    assert Watcher(long_run).look().step == COUNT


LINES: list[dict[str, Any]] = [
    {"kind": "start", "time": 1.0, "step": 0, "steps": 5, "set": {"a": "b"}},
    {"kind": "train", "time": 2.5, "step": 1, "loss": 1.5, "tokens": 7, "skipped": False, "x": 1},
    {"kind": "train", "time": 3, "step": 2, "loss": None, "tokens": 9, "s": {"a": 1}, "x": 1.0},
    {"kind": "train", "time": 4.5, "step": 3, "loss": 0.0, "more": 3.25, "x": 2, "tokens": 10**19},
    {"kind": "train", "time": 5.5, "step": 2**62, "loss": 1e300, "skipped": True},
    {"kind": "eval", "time": 6.5, "step": 3, "split": "héldout", "loss": 2.5},
    {"kind": "event", "time": 7.5, "step": 3, "event": "a", "detail": {"b": [1, 2.0]}},
    {"kind": "train", "time": 8.5, "step": 4, **{f"n{n}": float(n) for n in range(60)}},
]  # fmt: skip


def test_a_short_line_has_every_field_as_it_was_written(tmp_path):
    path = runs.write_run(tmp_path, LINES) / "metrics.jsonl"
    found, unread = short_record(tmp_path)
    assert unread == 0
    assert found == LINES
    assert module.record(tmp_path) == LINES
    for line, written in zip(found, LINES, strict=True):
        assert list(line) == list(written)
        assert len(line) == len(written)
        assert {**line} == written
        for name, value in written.items():
            assert (line[name], type(line[name])) == (value, type(value))
            assert line.get(name, "none") == value
        assert line.get("missing", 3) == 3
        assert "missing" not in line
        with pytest.raises(KeyError):
            line["missing"]
    path.write_text("")  # someone has emptied it: the numbers are still there
    for name in ("kind", "time", "step"):
        assert [line[name] for line in found] == [line[name] for line in LINES]
    assert found[1]["loss"] == 1.5


def test_a_start_parses_no_steps_but_the_newest(tmp_path, monkeypatch):
    head = {"kind": "start", "time": 1.0, "step": 0}
    steps = [{"kind": "train", "time": 2.0 + n, "step": n, "seconds": 0.5} for n in range(50)]
    save = {"kind": "checkpoint", "time": 30.0, "step": 25}
    path = runs.write_run(tmp_path, [head, *steps[:26], save, *steps[26:]]) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "train", "time": 99.0, "ste')
    parsed, parse = [], module.parse
    monkeypatch.setattr(module, "parse", lambda line: parsed.append(line) or parse(line))
    found, unread = short_record(tmp_path, steps=False)
    assert len(parsed) == 3
    assert (found, unread) == ([head, save, steps[-1]], 0)
    assert short_record(tmp_path / "none", steps=False) == ([], 0)


def test_lines_that_are_none_are_counted_and_the_others_found_behind_them(tmp_path):
    path = runs.write_run(tmp_path, LINES[:2]) / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'\0\0\n[1]\n{"kind": "train"}\n\xff\n' + json.dumps(LINES[6]).encode() + b"\n")
        file.write(b'{"kind": "train", "time": 9.0, "step"')
    found, unread = short_record(tmp_path)
    assert (found, unread) == ([*LINES[:2], LINES[6]], 4)
    assert found[2]["detail"] == {"b": [1, 2.0]}


def test_columns_are_joined_by_step(tmp_path):
    steps = [{"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}, {"a": 5.0, "b": 6.0}]
    head = {"kind": "train", "time": 1.0}
    runs.write_run(tmp_path, [{**head, "step": n, **one} for n, one in enumerate(steps, 1)])
    tables = collect(tmp_path)
    both = list(joined(tables.numbers("a"), tables.numbers("b")))
    assert both == [(2, 2.0, 3.0), (4, 5.0, 6.0)]
    assert tables.numbers("a") == [(1, 1.0), (2, 2.0), (4, 5.0)]
    assert tables.numbers("a")[-2:] == [(2, 2.0), (4, 5.0)]


def test_a_long_record_is_followed_in_pieces(tmp_path):
    lines = [{"kind": "train", "time": 1.0, "step": n, "text": "z" * 200_000} for n in range(5)]
    lines.append({"kind": "train", "time": 1.0, "step": 5, "text": "z" * 900_000})
    runs.write_run(tmp_path, lines)
    tail, found, again = Tail(tmp_path), [], []
    while True:
        read, begins = tail.lines()
        found += [line["step"] for line in read]
        again.append(begins)
        if not tail.more:
            break
    assert found == list(range(6))
    assert again == [True] + [False] * (len(again) - 1)
    assert len(again) > 3
    assert tail.lines() == ([], False)
