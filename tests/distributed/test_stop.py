"""However a run is asked to stop, all ranks end the step, save, and leave with 0."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import ROOT, until
from helpers.tiny import lines, status, tiny_config, write_config

STEPS = 100_000  # never reached


def endless(folder):
    """A run that goes on until it is stopped: (config, run directory)."""
    config = tiny_config(
        folder / "run", training__steps=STEPS, training__global_batch_size=8, logging__every_steps=5
    )
    return write_config(folder, config), folder / "run"


def some_steps(run_dir):
    return lambda: bool(lines(run_dir, "train")) and lines(run_dir, "train")[-1]["step"] >= 5


def stopped_cleanly(run_dir, reason):
    found = status(run_dir)
    assert (found["state"], found["exit_code"], found["reason"]) == ("stopped", 0, reason)
    step = found["step"]
    assert found["checkpoint"] == f"step-{step:08d}"
    assert (run_dir / "checkpoints" / found["checkpoint"] / "manifest.json").is_file()
    steps = [line["step"] for line in lines(run_dir, "train")]
    assert steps[-1] == step
    assert len(steps) == len(set(steps))
    assert (run_dir / "lock").read_bytes() == b""


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda ranks, run: os.kill(ranks.pids[1], signal.SIGUSR1), "signal"),
        (lambda ranks, run: [os.kill(pid, signal.SIGTERM) for pid in ranks.pids], "signal"),
        (lambda ranks, run: os.kill(ranks.pids[0], signal.SIGINT), "signal"),
        (lambda ranks, run: (run / "STOP").touch(), "stop_file"),
    ],
    ids=["USR1 to rank 1", "TERM to all", "INT to rank 0", "STOP file"],
)
def test_one_request_stops_all_ranks(server, tmp_path, ask, reason):
    path, run_dir = endless(tmp_path)
    ranks = server.start(["train", str(path)], 2, tmp_path)
    until(some_steps(run_dir), "some steps")
    ask(ranks, run_dir)
    assert ranks.wait() == [0, 0], (tmp_path / "output.txt").read_text()
    stopped_cleanly(run_dir, reason)
    assert not (run_dir / "STOP").exists()


def test_a_stop_file_left_over_stops_the_next_start_before_its_first_step(server, tmp_path):
    path, run_dir = endless(tmp_path)
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    assert server.run(["train", str(path)], 2, tmp_path) == [0, 0]
    assert status(run_dir)["state"] == "stopped"
    assert status(run_dir)["checkpoint"] is None
    assert lines(run_dir, "train") == []


def test_a_stop_while_the_run_is_still_opening_saves_nothing_and_exits_with_0(server, tmp_path):
    config = tiny_config(tmp_path / "run", training__steps=STEPS)
    config["model"]["tokenizer"] = {"train": 1500}  # takes a while
    path = write_config(tmp_path, config)
    ranks = server.start(["train", str(path)], 2, tmp_path)
    until(lambda: "a new run" in (tmp_path / "output.txt").read_text(), "the start")
    for pid in ranks.pids:
        os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == [0, 0], (tmp_path / "output.txt").read_text()
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"], found["checkpoint"]) == ("stopped", 0, None)
    assert lines(tmp_path / "run", "start") == []


def launch(path, folder):
    """`accelerate launch` with two CPU processes, as the README writes it."""
    config_file = ROOT / "accelerate_configs" / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    script = str(ROOT / "scripts" / "train.py")
    with (folder / "launcher.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, str(config_file), "--main_process_port", "0", script, str(path)],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )


def rank_pids(parent):
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children]


def gone(pids):
    return lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(signal.SIGTERM, "signal", id="TERM"),
        pytest.param(signal.SIGINT, "signal", id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "launcher_lost", id="KILL", marks=pytest.mark.slow),  # as F34
    ],
)
def test_a_launcher_that_is_told_to_stop_or_dies_leaves_a_checkpoint_and_no_orphan(
    tmp_path, number, reason
):
    path, run_dir = endless(tmp_path)
    launcher = launch(path, tmp_path)
    until(some_steps(run_dir), "some steps")
    pids = rank_pids(launcher.pid)
    assert len(pids) == 2
    os.kill(launcher.pid, number)
    launcher.wait()  # its own code is torch's
    until(gone(pids), "the ranks are gone")
    stopped_cleanly(run_dir, reason)


@pytest.mark.slow
def test_usr1_to_a_rank_stops_the_run_and_its_launcher_exits_with_0(tmp_path):
    path, run_dir = endless(tmp_path)
    launcher = launch(path, tmp_path)
    until(some_steps(run_dir), "some steps")
    pids = rank_pids(launcher.pid)
    os.kill(pids[1], signal.SIGUSR1)
    assert launcher.wait() == 0, (tmp_path / "launcher.txt").read_text()
    assert gone(pids)()
    stopped_cleanly(run_dir, "signal")


@pytest.mark.slow  # every other run that ends asks for its code
@pytest.mark.deeper
def test_runs_that_start_and_end_exit_with_0_every_time(server, tmp_path, request):
    """A hundred in `make test-slow`: one in forty aborted where the interpreter was finalised."""
    cycles = 100 if "deeper" in request.config.getoption("markexpr") else 5
    for cycle in range(cycles):
        run_dir = tmp_path / f"run-{cycle}"
        path = write_config(tmp_path, tiny_config(run_dir, training__steps=1))
        codes = server.run(["train", str(path)], 2, tmp_path)
        assert codes == [0, 0], f"cycle {cycle}: " + (tmp_path / "output.txt").read_text()
        assert status(run_dir)["state"] == "finished"
        shutil.rmtree(run_dir)


@pytest.mark.slow  # DI-30 stops a launcher, F34 kills it
def test_llmtrain_train_returns_the_code_of_the_run(tmp_path):
    path, run_dir = endless(tmp_path)
    command = [sys.executable, "-m", "llmtrain", "train", str(path), "--processes", "2"]
    with (tmp_path / "launcher.txt").open("wb") as output:
        train = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        )
    until(some_steps(run_dir), "some steps")
    train.send_signal(signal.SIGTERM)
    assert train.wait() == 0, (tmp_path / "launcher.txt").read_text()
    stopped_cleanly(run_dir, "signal")
    assert json.loads((run_dir / "status.json").read_text())["world_size"] == 2
