"""Records of long runs: what is read of them takes little memory, and is what stands in them."""

import json
import tracemalloc
from typing import Any

import pytest
from helpers import runs

from llmtrain.report.collect import collect, joined
from llmtrain.report.page import inline
from llmtrain.rundir import record
from llmtrain.rundir.goodput import goodput
from llmtrain.rundir.record import Lines, Tail, short_record
from llmtrain.tools.watch import Watcher

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
    assert record.record(tmp_path) == LINES
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


@pytest.mark.parametrize("torn", ["", "x", "x" * 3_000_000])
@pytest.mark.parametrize("whole", ["", '{"a": 1}\n', '{"a": "' + "y" * 3_000_000 + '"}\n'])
def test_a_torn_last_line_of_any_length_is_removed(tmp_path, whole, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + torn)
    Lines(tmp_path).close()
    assert path.read_text() == whole


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
