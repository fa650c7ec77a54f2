"""What the data does to a run: it ends, it fails under way, it is exchanged on purpose."""

import json

import psutil
import pytest
from helpers.ranks import until
from helpers.tiny import lines, status, tiny_config, weights, write_config


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


def digests(run_dir):
    return {line["step"]: line["batch_digest"] for line in lines(run_dir, "train")}


@pytest.mark.slow  # F37 is the same with other strikes
def test_a_dead_data_worker_costs_no_step(server, tmp_path):
    def config(folder):
        made = tiny_config(
            folder / "run", training__steps=30, training__global_batch_size=8, data__workers=1
        )
        made["model"]["config"] = {
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.1,
        }
        return str(write_config(folder, made))

    assert server.run(["train", config(tmp_path / "straight")], 2, tmp_path / "straight") == [0, 0]
    folder = tmp_path / "killed"
    run_dir = folder / "run"
    ranks = server.start(["train", config(folder)], 2, folder)
    until(lambda: lines(run_dir, "train"), "a step")
    data_workers(ranks.pids[1])[0].kill()
    assert ranks.wait() == [75, 75]
    found = status(run_dir)
    assert (found["state"], found["exit_code"]) == ("failed", 75)
    assert "worker" in found["reason"]
    saved = lines(run_dir, "checkpoint")
    assert [line["reason"] for line in saved] == ["data_failed"]
    assert saved[0]["step"] == found["step"] > 0
    assert server.run(["train", config(folder)], 2, folder) == [0, 0]
    assert digests(run_dir) == digests(tmp_path / "straight" / "run")
    assert weights(run_dir, 30) == weights(tmp_path / "straight" / "run", 30)


def test_a_run_whose_sources_are_used_up_is_finished(server, tmp_path):
    texts = [f"article {number} says {'word ' * (number % 40)}" for number in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    found = {}
    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        config = tiny_config(folder / "run", training__steps=10_000, data__lanes=6)
        config["data"]["sources"] = [{"path": str(tmp_path / "a.jsonl"), "max_epochs": 1}]
        path = str(write_config(folder, config))
        assert server.run(["train", path], world_size, folder) == [0] * world_size
        ended = status(folder / "run")
        assert (ended["state"], ended["reason"]) == ("finished", "data_ended")
        found[world_size] = digests(folder / "run")
        last = lines(folder / "run", "train")[-1]
        assert lines(folder / "run", "eval")[-1]["step"] == ended["step"]
        assert lines(folder / "run", "checkpoint")[-1]["step"] == ended["step"]
    assert found[1] == found[3]
    steps = len(found[1])
    empty = [
        line["step"]
        for line in lines(folder / "run", "event")
        if line["event"] == "nothing_to_train"
    ]
    assert empty == [
        line["step"] for line in lines(folder / "run", "train") if not line["step_tokens"]
    ]
    assert 0 < last["tokens"] < steps * 24 * 32  # the last blocks are padding
    # Nothing is left to do: the same command takes no step.
    assert server.run(["train", path], 2, folder) == [0, 0]
    assert status(folder / "run")["step"] == ended["step"]
    assert len(lines(folder / "run", "train")) == steps


def test_validation_data_of_its_own_leaves_all_documents_for_training(server, tmp_path):
    run_dir = tmp_path / "run"
    texts = [f"another text, number {number}" for number in range(7)]
    (tmp_path / "own.txt").write_text("\n".join(texts))
    config = tiny_config(run_dir, training__steps=2, evaluation__max_documents=5)
    config["evaluation"]["sources"] = [{"path": str(tmp_path / "own.txt")}]
    assert server.run(["train", str(write_config(tmp_path, config))], 2, tmp_path) == [0, 0]
    evaluations = lines(run_dir, "eval")
    assert [line["documents"] for line in evaluations] == [5, 5]
    assert evaluations[0]["bytes"] == sum(len(text) for text in texts[:5])
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert [source["heldout"] for source in manifest["sources"]] == [{"units": [], "threshold": 0}]


def data_workers(pid):
    return [
        child
        for child in psutil.Process(pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
