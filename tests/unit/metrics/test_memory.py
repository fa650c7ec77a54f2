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
