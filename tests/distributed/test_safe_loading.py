"""Nothing of a checkpoint is ever unpickled, on any rank, sharded or not."""

import json

import pytest
from helpers.tiny import lines, tiny_config, write_config


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_resumed_run_unpickles_nothing_while_it_searches_and_loads(server, tmp_path, strategy):
    config = tiny_config(tmp_path / "run", training__steps=2)
    config["distributed"] = {"strategy": strategy, "timeout_minutes": 3.0}
    path = write_config(tmp_path, config)
    assert server.run(["train", str(path)], 2, tmp_path) == [0, 0]
    config["training"]["steps"] = 3
    path = write_config(tmp_path, config)
    arguments = ["call", "helpers.audited", "train", str(path), str(tmp_path / "seen")]
    assert server.run(arguments, 2, tmp_path) == [0, 0]
    assert lines(tmp_path / "run", "start")[-1]["resumed_from"] == "step-00000002"
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert seen == {"stages": ["find", "load"], "unpickled": [], "heard": True}
