"""What the data does to a run: it ends, it fails under way, it is exchanged on purpose."""

import json

from helpers.tiny import lines, status, tiny_config, write_config


def events(run_dir, name):
    return [line["detail"] for line in lines(run_dir, "event") if line["event"] == name]


def test_a_changed_key_is_refused_until_it_is_accepted(server, tmp_path):
    run_dir = tmp_path / "run"
    config = tiny_config(run_dir, training__steps=3, data__lanes=24)
    path = str(write_config(tmp_path, config))
    assert server.run(["train", path], 2, tmp_path) == [0, 0]
    changes = ["data.seq_len=16", "training.steps=5"]
    assert server.run(["train", path, *changes], 1, tmp_path) == [2]
    said = (tmp_path / "output.txt").read_text()
    assert "checkpoint.accept_changes=[data.seq_len]" in said
    assert status(run_dir)["step"] == 3
    accepted = "checkpoint.accept_changes=[data.seq_len]"
    assert server.run(["train", path, *changes, accepted], 2, tmp_path) == [0, 0]
    assert [line["step_tokens"] for line in lines(run_dir, "train")] == [768] * 3 + [384] * 2
    (event,) = events(run_dir, "changes_accepted")
    assert event == {"keys": ["data.seq_len"], "data": ["seq_len"]}
    # The same command goes on from here; the manifest is of the new data now.
    assert server.run(["train", path, *changes, accepted, "training.steps=6"], 1, tmp_path) == [0]
    assert len(events(run_dir, "changes_accepted")) == 1
    # What was frozen when the run began gives way, too.
    again = ["data.seq_len=16", "training.steps=7", "training.precision=bf16"]
    accepted = "checkpoint.accept_changes=[data.seq_len, training.precision]"
    assert server.run(["train", path, *again, accepted], 1, tmp_path) == [0]
    assert json.loads((run_dir / "auto.json").read_text())["run"]["precision"] == "bf16"


def test_epochs_are_a_number_of_steps_decided_once(server, tmp_path):
    run_dir = tmp_path / "run"
    config = tiny_config(run_dir, training__epochs=0.1)
    del config["training"]["steps"]
    path = str(write_config(tmp_path, config))
    assert server.run(["train", path], 2, tmp_path) == [0, 0]
    epoch = json.loads((run_dir / "auto.json").read_text())["run"]["epoch"]
    assert epoch["exact"]  # the sample is small
    assert status(run_dir)["step"] == round(0.1 * epoch["blocks"] / 24)
    assert server.run(["train", path, "training.epochs=0.12"], 1, tmp_path) == [0]
    assert status(run_dir)["step"] == round(0.12 * epoch["blocks"] / 24)
    assert server.run(["train", path, "training.epochs=0.01"], 1, tmp_path) == [2]
    assert "training.epochs" in (tmp_path / "output.txt").read_text()
