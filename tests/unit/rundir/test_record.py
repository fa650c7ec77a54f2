import errno
import json
import math
import os
from contextlib import closing

import numpy as np
import pytest

from llmtrain.errors import RunError
from llmtrain.rundir.contents import METRICS
from llmtrain.rundir.record import Lines, read, record


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


def test_no_file_means_no_record(tmp_path):
    assert record(tmp_path) == []


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
    found = path.read_text().splitlines()
    assert found[0] == before[0]
    assert [line["step"] for line in read(path)] == [0, 3]


def test_a_record_that_cannot_begin_again_is_a_failure_of_the_disk(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 0)
        (tmp_path / METRICS).unlink()
        (tmp_path / METRICS).mkdir()
        with pytest.raises(RunError) as caught:
            lines.begin_again()
    assert caught.value.exit_code == 74
