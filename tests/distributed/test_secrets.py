"""Canaries: secrets of the environment stand nowhere in what a run writes and says.

They are planted where a run could repeat them: in the names of files, in the text of an error, of
a warning and of a log line, on rank 0 and on rank 1.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.ranks import ROOT
from helpers.rings import needs
from helpers.tiny import lines, status, tiny_config, write_config

CANARIES = {
    "HF_TOKEN": "hf_" + "Canary" * 6,
    "WANDB_API_KEY": "0ca0a00c" * 5,
    "MY_PASSWORD": 'c"an\\ary-ü',
}
LOOKS_LIKE = "ghp_" + "Canary" * 6  # of no variable: known by what it looks like


def spellings():
    texts = [*CANARIES.values(), LOOKS_LIKE]
    shown = [*texts, *(json.dumps(text)[1:-1] for text in texts), *(repr(t)[1:-1] for t in texts)]
    return [text.encode() for text in shown]


def assert_nowhere(*places):
    files = [p for place in places for p in (place.rglob("*") if place.is_dir() else [place])]
    files = [path for path in files if path.is_file()]
    assert files
    for path in files:
        body = path.read_bytes()
        assert [text for text in spellings() if text in body] == [], path


@needs("tensorboard")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_no_canary_stands_in_a_run_that_repeats_it_in_logs_errors_and_metrics(
    server, tmp_path, rank
):
    run_dir = tmp_path / "run"
    config = tiny_config(run_dir, training__steps=6, checkpoint__every_steps=2)
    config["logging"]["trackers"] = ["tensorboard"]
    path = write_config(tmp_path, config)
    env = {**CANARIES, "CANARY_RANK": rank, "LOOKS_LIKE": LOOKS_LIKE}
    env["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    arguments = ["call", "helpers.odd_ranks", "repeating_secrets", str(path)]
    assert server.run(arguments, 2, tmp_path, env)[int(rank)] == 1
    assert_nowhere(run_dir, tmp_path / "output.txt", tmp_path / "error.json")

    log = (run_dir / "logs" / f"rank-{rank}.log").read_text()
    assert log.count("looked at ***, ***, *** and ***") == 1  # what the ranks said is there
    assert "Traceback" in log
    said = (tmp_path / "output.txt").read_text()
    assert "cannot look at ***, ***, *** and ***" in said
    if rank == "0":  # else it is rank 0's peer that is gone
        assert "cannot look at ***" in status(run_dir)["reason"]
        assert "cannot look at ***" in lines(run_dir, "end")[-1]["reason"]
    repeated = [one for one in lines(run_dir, "event") if one["event"] == "repeated"]
    assert repeated[0]["detail"]["nested"] == {"inner": ["look at ***, ***, *** and ***"]}


def test_no_canary_is_told_by_a_launcher(tmp_path):
    """The marks of a real launch, where rank 0's last words are its parent's."""
    config = tiny_config(tmp_path / "run", training__steps=2)
    config["data"]["sources"] = [{"path": str(tmp_path / CANARIES["WANDB_API_KEY"])}]
    path = write_config(tmp_path, config)
    command = [sys.executable, "-m", "llmtrain", "train", str(path), "--processes", "2"]
    env = {**os.environ, **CANARIES, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ended.returncode == 2
    assert "***" in ended.stderr
    (tmp_path / "said").write_text(ended.stdout + ended.stderr)
    assert_nowhere(tmp_path / "said", tmp_path / "run" / "logs", tmp_path / "run" / "status.json")
