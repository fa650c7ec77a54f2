"""What a launcher's second attempt finds: the store of the first, with its dead addresses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.ranks import ROOT, until
from helpers.tiny import lines, status, tiny_config, weights, write_config


def test_a_second_attempt_does_not_call_the_ranks_of_the_first(server, tmp_path):
    from torch.distributed import TCPStore

    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as a launcher does
    env = {"MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(3):
        output = tmp_path / str(attempt)
        env["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        codes = server.run(["call", "helpers.talk", "talk", str(output)], 3, tmp_path, env)
        assert codes == [0, 0, 0], (tmp_path / "output.txt").read_text()
        heard = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(3)]
        assert [one["broadcast"] for one in heard] == ["from 0"] * 3


def test_nodes_that_count_attempts_differently_meet(server, tmp_path):
    """A node that hears of a lost peer before its own rank fails does not count that restart."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # as scripts/slurm/node.sh asks for
    output = tmp_path / "met"
    arguments = ["call", "helpers.talk", "meet_in_attempts", str(output), "0", "1"]
    assert server.run(arguments, 2, tmp_path, env) == [0, 0], (tmp_path / "output.txt").read_text()
    assert json.loads(output.read_text()) == ["rank 0", "rank 1"]


STEPS = 80


@pytest.mark.slow  # the launchers of tests/distributed/test_slurm.py restart a rank, too
def test_a_rank_that_its_launcher_restarts_resumes_exactly(server, tmp_path):
    paths = {}
    for name in ("straight", "killed"):
        config = tiny_config(
            tmp_path / name / "run",
            training__steps=STEPS,
            training__global_batch_size=8,
            checkpoint__every_steps=20,
        )
        paths[name] = str(write_config(tmp_path / name, config))
    assert server.run(["train", paths["straight"]], 2, tmp_path) == [0, 0]

    run_dir = tmp_path / "killed" / "run"
    file = str(ROOT / "accelerate_configs" / "cpu.yaml")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
    options = ["--main_process_port", "0", "--max_restarts", "3"]
    with (tmp_path / "launcher.txt").open("wb") as output:
        launched = subprocess.Popen(
            [*launcher, *options, str(ROOT / "scripts" / "train.py"), paths["killed"]],
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    until(lambda: bool(lines(run_dir, "checkpoint")), "a checkpoint")
    ranks = {
        child.environ()["RANK"]: child.pid for child in psutil.Process(launched.pid).children()
    }
    os.kill(ranks["1"], signal.SIGKILL)
    assert launched.wait() == 0, (tmp_path / "launcher.txt").read_text()
    assert len(lines(run_dir, "start")) == 2
    assert lines(run_dir, "start")[1]["resumed_from"] is not None
    assert (status(run_dir)["state"], status(run_dir)["restarts"]) == ("finished", 1)
    expected = weights(tmp_path / "straight" / "run", STEPS)
    assert weights(run_dir, STEPS) == expected
