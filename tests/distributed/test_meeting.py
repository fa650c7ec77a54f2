"""What one rank cannot do, all refuse together, before they are a process group."""

import pytest
from helpers.tiny import lines, status, tiny_config, write_config


def start(server, folder, host_bytes, package, *overrides):
    """Two ranks, of which rank 1 has so much memory and not that package; what they said."""
    made = tiny_config(folder / "run")
    made["distributed"] = {"timeout_minutes": 1.0}
    path = write_config(folder, made)
    arguments = ["call", "helpers.odd_ranks", "unequal", str(path), str(host_bytes), package]
    codes = server.run([*arguments, *overrides], 2, folder)
    said = (folder / "output.txt").read_text()
    assert codes == [2, 2], said
    assert "Traceback" not in said
    assert said.count("error:") == 1
    assert status(folder / "run")["state"] == "failed"
    assert status(folder / "run")["exit_code"] == 2
    assert lines(folder / "run", "start") == []
    return said


def test_a_rank_whose_plan_does_not_fit_is_named_and_nobody_waits(server, tmp_path):
    said = start(server, tmp_path, 1 << 20, "")
    assert "rank 1" in said
    assert "nothing fits" in said
    assert "fsdp2_offload" in said


def test_a_rank_without_deepspeed_is_named(server, tmp_path):
    said = start(server, tmp_path, 0, "deepspeed", "distributed.strategy=zero2")
    assert "rank 1" in said
    assert "pip install 'deepspeed>=0.19.8,<0.20' on Linux" in said


@pytest.mark.parametrize("strategy", ["auto"])
def test_ranks_that_plan_otherwise_are_told_which_memory_to_say(server, tmp_path, strategy):
    said = start(server, tmp_path, 4 << 20, "", f"distributed.strategy={strategy}")
    assert "on rank 1" in said
    assert "distributed.device_memory_gb" in said
