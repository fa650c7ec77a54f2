import sys

import pytest

from llmtrain.training.start.announce import _devices


@pytest.mark.parametrize(("devices", "processes"), [(0, 1), (1, 1), (8, 8), (8, 2)])
def test_nothing_is_said_where_several_processes_run_or_there_is_nothing_to_use(devices, processes):
    assert _devices(devices, processes) == []


def test_one_process_on_several_gpus_is_told_how_to_use_them():
    (line,) = _devices(8, 1)
    assert "1 of 8 GPUs is used" in line
    assert "--processes 8" in line
    assert "train(config, processes=8)" in line


def test_macos_is_told_that_its_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (line,) = _devices(0, 1)
    assert "macOS: trains on the CPU, never on Apple's GPU" in line
