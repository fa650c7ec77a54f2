"""What the data does to a run: it ends, it fails under way, it is exchanged on purpose."""

from __future__ import annotations

from pathlib import Path

import psutil
from helpers.ranks import Server, until
from helpers.tiny import lines, status, tiny_config, weights, write_config


def events(run_dir: Path, name: str) -> list[dict]:
    return [line["detail"] for line in lines(run_dir, "event") if line["event"] == name]


def digests(run_dir: Path) -> dict[int, str]:
    return {line["step"]: line["batch_digest"] for line in lines(run_dir, "train")}


def test_a_changed_key_is_refused_until_it_is_accepted(server: Server, tmp_path: Path) -> None:
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


def test_a_dead_data_worker_costs_no_step(server: Server, tmp_path: Path) -> None:
    def config(folder: Path) -> str:
        made = tiny_config(
            folder / "run",
            training__steps=30,
            training__global_batch_size=8,
            data__workers=1,
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


def data_workers(pid: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
