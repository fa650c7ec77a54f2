import json

import pytest

from llmtrain.rundir import record
from llmtrain.rundir.goodput import Restart, changes, goodput, stretches, totals

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr("llmtrain.rundir.goodput.time.time", lambda: NOW)


def write(run_dir, *lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)


def train(step, ago, seconds):
    return {"kind": "train", "time": NOW - ago, "step": step, "span_seconds": seconds}


def start(step, ago):
    return {"kind": "start", "time": NOW - ago, "step": step}


def test_a_run_without_a_step_has_none(tmp_path):
    assert goodput(tmp_path) is None
    write(tmp_path, start(0, 10))
    assert goodput(tmp_path) is None


def test_it_is_step_seconds_over_wall_seconds(tmp_path):
    write(tmp_path, start(0, 1000), train(10, 700, 200.0), train(20, 300, 300.0))
    assert goodput(tmp_path) == pytest.approx(0.5)


def test_no_step_is_looked_up_in_the_file_again(tmp_path, monkeypatch):
    """A field that no step has would be: as many opens of the file as there are steps."""
    looked, whole = [], record._LinesOfKind.whole
    monkeypatch.setattr(
        record._LinesOfKind, "whole", lambda self, n: looked.append(self.name) or whole(self, n)
    )
    steps = [
        {**train(n, 900 - n, 1.0), "span_wait_seconds": 0.0, "span_steps": 1} for n in range(100)
    ]
    write(tmp_path, start(0, 1000), *steps)
    assert goodput(tmp_path) == pytest.approx(0.1)
    assert "train" not in looked


def test_redone_steps_and_gaps_are_lost_time(tmp_path):
    write(
        tmp_path,
        start(0, 1000),
        train(10, 800, 200.0),
        train(20, 600, 200.0),  # behind the checkpoint of step 10: done again
        start(10, 300),
        train(15, 200, 50.0),
        train(20, 100, 50.0),
    )
    assert goodput(tmp_path) == pytest.approx(0.3)


def test_every_second_has_one_owner_from_the_birth_of_the_first_process(tmp_path):
    lines = [
        start(0, 980) | {"born": NOW - 1000},
        train(10, 880, 60.0) | {"span_wait_seconds": 10.0},  # 100 s after the start line
        {"kind": "eval", "time": NOW - 860, "step": 10, "seconds": 15.0},
        {"kind": "sample", "time": NOW - 858, "step": 10, "seconds": 2.0},
        {"kind": "checkpoint", "time": NOW - 855, "step": 10, "blocked_seconds": 3.0},
        train(20, 800, 50.0) | {"span_wait_seconds": 1.0},
        start(10, 700) | {"born": NOW - 720},
        train(15, 650, 40.0),
    ]
    write(tmp_path, *lines)
    found = stretches(lines)
    assert totals(found) == pytest.approx({
        "training": 50.0 + 40.0,
        "waiting": 10.0,
        "redone": 50.0,
        "evaluating": 17.0,
        "saving": 3.0,
        "starting": (120.0 - 60.0) + (70.0 - 40.0),
        "down": 80.0,
        "other": 80.0 - 15.0 - 2.0 - 3.0 - 50.0,
    })  # fmt: skip
    assert sum(totals(found).values()) == pytest.approx(350.0)
    assert goodput(tmp_path) == pytest.approx(100.0 / 1000.0)


def test_seconds_that_overlap_into_the_next_line_are_not_lost():
    """Numbers arrive a step late, so the second line is written within the span of the third."""
    lines = [start(0, 100), train(1, 90, 10.0), train(2, 85, 9.0), train(3, 75, 6.0)]
    found = stretches(lines)
    assert totals(found)["training"] == pytest.approx(25.0)
    for stretch in found:
        assert sum(stretch.seconds.values()) == pytest.approx(stretch.end - stretch.begin)


def test_a_clock_that_goes_back_makes_no_negative_time_and_no_share_above_one():
    lines = [
        start(0, 100) | {"born": NOW - 50},  # after its own line
        train(1, 90, 500.0),  # longer than the run
        train(2, 300, None) | {"span_wait_seconds": "much"},
        {"kind": "eval", "time": NOW - 80, "step": 2, "seconds": -3.0},
        start(2, 200),
        train(3, 70, 1.0),
    ]
    found = stretches(lines)
    assert all(second >= 0 for stretch in found for second in stretch.seconds.values())
    assert sum(totals(found).values()) == pytest.approx(30.0)


def test_lines_without_a_start_or_without_a_step_have_stretches_too():
    assert stretches([]) == []
    only = [train(1, 90, 1.0), train(2, 80, 8.0)]
    assert totals(stretches(only))["training"] == pytest.approx(9.0)
    assert totals(stretches([start(0, 100)], until=NOW))["starting"] == pytest.approx(100.0)


def test_stretches_of_a_long_record_are_joined_and_have_the_same_seconds():
    lines = [start(0, 1000), *(train(step, 1000 - step, 0.7) for step in range(1, 400))]
    found = stretches(lines)
    joined = stretches(lines, most=50)
    assert len(found) == 399
    assert 50 <= len(joined) <= 52
    assert totals(joined) == pytest.approx(totals(found))
    assert (joined[0].begin, joined[-1].end) == (found[0].begin, found[-1].end)


def end(step, ago, state="finished"):
    return {"kind": "end", "time": NOW - ago, "step": step, "state": state}


def event(step, ago, name):
    return {"kind": "event", "time": NOW - ago, "step": step, "event": name}


FINISHED = [start(0, 1000), train(10, 800, 100.0), end(10, 800)]


@pytest.mark.parametrize(
    "later",
    [
        [start(10, 400), end(10, 390)],
        [start(10, 400)],
        [event(10, 300, "leftovers_removed"), start(10, 200), event(10, 150, "other_versions")],
        [event(10, 300, "start_refused")],
        [event(10, 300, "start_refused"), start(10, 200), end(10, 190), start(10, 9), end(10, 8)],
    ],
)
def test_a_start_that_adds_nothing_to_a_finished_run_takes_none_of_its_time(tmp_path, later):
    lines = [*FINISHED, *later]
    assert stretches(lines, until=NOW) == stretches(FINISHED)
    write(tmp_path, *lines)
    assert goodput(tmp_path) == pytest.approx(0.5)


def test_a_finished_run_that_goes_on_was_down_until_then(tmp_path):
    write(tmp_path, *FINISHED, start(10, 500), end(10, 490), start(10, 300), train(20, 0, 100.0))
    found = totals(stretches([*FINISHED, start(10, 500), end(10, 490), start(10, 300)]))
    assert sum(found.values()) == pytest.approx(200)
    assert goodput(tmp_path) == pytest.approx(0.2)  # of 1,000 s, 500 of which it was down


def test_a_refused_start_takes_no_time_of_a_run_that_was_stopped():
    stopped = [start(0, 1000), train(10, 800, 100.0), end(10, 800, "stopped")]
    assert stretches([*stopped, event(10, 300, "start_refused")]) == stretches(stopped)


def test_a_change_costs_the_steps_done_again_and_the_time_to_the_next_new_one():
    lines = [
        {"kind": "start", "time": 0.0, "step": 0, "world_size": 1},
        {"kind": "train", "time": 10.0, "step": 1},
        {"kind": "train", "time": 20.0, "step": 2},
        {"kind": "train", "time": 30.0, "step": 3},
        {"kind": "start", "time": 35.0, "step": 1, "world_size": 2},  # two steps are lost
        {"kind": "train", "time": 36.0, "step": 2},
        {"kind": "train", "time": 37.0, "step": 3},
        {"kind": "train", "time": 38.0, "step": 4},
        {"kind": "start", "time": 40.0, "step": 4, "world_size": 1},  # in order
        {"kind": "train", "time": 43.0, "step": 5},
        {"kind": "start", "time": 50.0, "step": 5, "world_size": 1},
    ]
    assert changes(lines) == [
        Restart(35.0, 1, 1, 2, again=2, seconds=8.0),
        Restart(40.0, 4, 2, 1, again=0, seconds=5.0),
        Restart(50.0, 5, 1, 1, again=0, seconds=None),
    ]
    assert changes(lines[:4]) == []
