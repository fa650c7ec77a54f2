import gzip
import json
import mmap
import sys

import pytest
import torch

from llmtrain.metrics import memory
from llmtrain.metrics.memory import Profile

CPU = torch.device("cpu")
BLOCK = 64 << 20


@pytest.fixture
def given_back():
    """Begin a peak and reach it, and return what was held before."""
    held = memory.reset_peak(CPU)
    with mmap.mmap(-1, BLOCK) as block:  # not from what an allocator has kept
        for page in range(0, BLOCK, mmap.PAGESIZE):
            block[page] = 1
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of a process")
def test_a_peak_is_seen_after_it_was_given_back(given_back):
    assert memory.peak_bytes(CPU) - given_back > 60 << 20
    assert memory.resident_bytes() - given_back < 60 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of a process")
def test_a_new_peak_begins_at_what_is_held_now(given_back):
    held = memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) - held < 32 << 20


def test_the_smallest_limit_of_the_control_groups_above_counts(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "slurm" / "job").mkdir(parents=True)
    (root / "slurm" / "memory.max").write_text("2000000000\n")
    (root / "slurm" / "job" / "memory.max").write_text("max\n")
    own.write_text("0::/slurm/job\n")
    assert memory.limit_bytes(root, own) == 2_000_000_000
    (root / "slurm" / "job" / "memory.max").write_text("1000\n")
    assert memory.limit_bytes(root, own) == 1000
    own.write_text("0::/\n")
    assert memory.limit_bytes(root, own) is None
    assert memory.limit_bytes(root, tmp_path / "nothing") is None


def test_the_host_is_what_its_control_groups_leave_of_it(monkeypatch):
    import psutil

    total = psutil.virtual_memory().total
    for limit, expected in ((None, total), (2**30, 2**30), (2 * total, total)):
        monkeypatch.setattr(memory, "limit_bytes", lambda limit=limit: limit)
        assert memory.host_bytes() == expected


@pytest.mark.parametrize("name", ["_REFERENCES", "_STATUS"])
def test_a_system_without_a_file_of_peaks_says_what_is_held(
    tmp_path, monkeypatch, given_back, name
):
    monkeypatch.setattr(memory, name, tmp_path / "no" / "none")
    said = (memory.reset_peak(CPU), memory.peak_bytes(CPU))
    assert said == pytest.approx([memory.resident_bytes()] * 2, abs=32 << 20)


def test_a_system_that_knows_no_peak_says_what_is_held(tmp_path, monkeypatch, given_back):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t  1024 kB\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    held = memory.resident_bytes()
    assert memory.peak_bytes(CPU) == pytest.approx(held, abs=32 << 20)


def test_a_system_that_begins_no_peak_anew_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_REFERENCES", tmp_path)  # a directory: it cannot be written
    assert memory.reset_peak(CPU) == pytest.approx(memory.resident_bytes(), abs=32 << 20)


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
