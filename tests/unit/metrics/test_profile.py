import gzip
import json

import pytest
import torch

from llmtrain.metrics.memory import Profile


def work(steps, profile):
    for step in steps:
        profile.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)


@pytest.fixture
def events():
    return []


def profile_of(folder, steps, events, rank=0):
    def report(name, step, **detail):
        events.append((name, step, detail))

    return Profile(folder / "profile" / "operators.json", rank, torch.device("cpu"), steps, report)


def test_the_steps_of_the_range_and_no_others_are_recorded(tmp_path, events):
    work(range(1, 8), profile_of(tmp_path, (3, 5), events))
    assert events == [("profiled", 5, {"steps": [3, 5]})]
    with gzip.open(tmp_path / "profile" / "rank-0.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    assert sum(one.get("name") == "aten::mm" for one in trace) == 3
    found = json.loads((tmp_path / "profile" / "operators.json").read_bytes())
    assert found["steps"] == [3, 5]
    (product,) = (one for one in found["operators"] if one["name"] == "aten::mm")
    assert product["calls"] == 3
    assert sum(one["share"] for one in found["operators"]) == pytest.approx(1, abs=0.05)


def test_a_run_that_ends_within_the_range_has_what_was_recorded(tmp_path, events):
    profile = profile_of(tmp_path, (3, 100), events, rank=1)
    work(range(4, 6), profile)  # it was resumed within the range, too
    profile.end(5)
    profile.end(5)
    assert events == [("profiled", 5, {"steps": [4, 5]})]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-1.json.gz"]


def test_after_the_range_nothing_is_written(tmp_path, events):
    profile = profile_of(tmp_path, (1, 2), events)
    work(range(3, 6), profile)
    profile.end(5)
    assert events == []
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_is_an_event(tmp_path, events):
    (tmp_path / "profile").write_text("in the way")
    profile = profile_of(tmp_path, (1, 1), events)
    work([1, 2], profile)
    assert [event[0] for event in events] == ["profile_failed"]
