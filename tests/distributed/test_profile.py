"""Profiled steps of a run on two processes."""

import json

from helpers.tiny import lines, tiny_config, write_config

from llmtrain.report.page import write_report


def test_profiled_steps_train_the_same_and_each_rank_has_a_trace(server, tmp_path):
    losses = []
    for name, steps in (("plain", None), ("profiled", [3, 4])):
        config = tiny_config(tmp_path / name, training__steps=6, logging__profile_steps=steps)
        path = write_config(tmp_path / f"of {name}", config)
        assert server.run(["train", str(path)], 2, path.parent) == [0, 0]
        found = lines(tmp_path / name, "train")
        losses.append([(line["loss"], line["grad_norm"]) for line in found])
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "operators.json",
        "rank-0.json.gz",
        "rank-1.json.gz",
    ]
    assert json.loads((folder / "operators.json").read_bytes())["steps"] == [3, 4]
    (event,) = (one for one in lines(tmp_path / "profiled", "event") if one["event"] == "profiled")
    assert event["detail"]["steps"] == [3, 4]
    page = write_report(tmp_path / "profiled").read_text("utf-8")
    assert "Steps 3–4, cpu time of rank 0" in page
