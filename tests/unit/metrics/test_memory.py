import sys

import pytest
import torch

from llmtrain.metrics import memory

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of a process")
def test_a_peak_is_seen_after_it_was_given_back():
    before = memory.reset_peak(CPU)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert memory.peak_bytes(CPU) - before > 60 << 20
    assert memory.resident_bytes() - before < 60 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of a process")
def test_a_new_peak_begins_at_what_is_held_now():
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
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
