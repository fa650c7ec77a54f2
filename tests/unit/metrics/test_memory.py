import mmap
import sys

import pytest
import torch

from llmtrain.metrics import memory

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
