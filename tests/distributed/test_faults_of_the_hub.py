"""Whole runs on a data set of the Hub: faults, an outage beyond all patience, no network at all."""

import os
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from helpers import corpus, hub
from helpers.ranks import until
from helpers.tiny import lines, status, tiny_config, weights, write_config

STEPS = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """45 small row groups in two files: a few are read in every step of 8 blocks."""
    root = tmp_path_factory.mktemp("files")
    corpus.write_parquet(root / "data" / "1.parquet", corpus.articles(100), group=4)
    corpus.write_parquet(root / "data" / "2.parquet", corpus.articles(80, 100), group=4)
    return root


@pytest.fixture
def away(files):
    """The same files on the Hub."""
    with hub.serving(hub.read_files(files)) as serving:
        yield serving


def config_of(folder, source, **data):
    config = tiny_config(folder / "run", training__steps=STEPS, training__global_batch_size=8)
    config["data"] |= {"sources": [{"path": source}], "lanes": 4, "heldout": 0.05, **data}
    # The rates of the first steps do not depend on how many will follow.
    config["optimizer"] |= {"schedule": "constant", "warmup_steps": 2}
    return config


def environment(server, home, **more):
    """What makes a rank ask this server, and nobody else."""
    return {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), **more}


@pytest.fixture(scope="module")
def expected(server, tmp_path_factory, files):
    """The run on the files themselves."""
    folder = tmp_path_factory.mktemp("here")
    path = write_config(folder, config_of(folder, str(files / "data")))
    assert server.run(["train", str(path)], 2, folder) == [0, 0]
    return folder / "run"


def etags(files):
    return {hub.etag(file.read_bytes()) for file in files.rglob("*.parquet")}


def digests(run_dir):
    return [line["batch_digest"] for line in lines(run_dir, "train")]


def check(run_dir, expected):
    """It was trained on the same batches, to the same bits."""
    assert status(run_dir)["state"] == "finished"
    assert len(digests(run_dir)) == STEPS
    assert digests(run_dir) == digests(expected)
    assert weights(run_dir, STEPS) == weights(expected, STEPS)


def test_passing_faults_change_no_bit_and_nothing_is_kept_but_what_a_run_is_for(
    server, tmp_path, away, expected, files
):
    away.mixture = hub.mixture(3, share=0.15)
    path = write_config(tmp_path, config_of(tmp_path, hub.ID))
    elsewhere = {name: str(tmp_path / name) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for folder in elsewhere.values():
        Path(folder).mkdir()
    env = environment(away, tmp_path / "HF_HOME", **elsewhere)
    codes = server.run(["train", str(path)], 2, tmp_path, env)
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()
    check(tmp_path / "run", expected)
    # All folders that a library writes to are below this one, beside the run directory.
    found = [file for file in tmp_path.rglob("*") if file.is_file()]
    run_dir = tmp_path / "run"
    outside = {
        str(file.relative_to(tmp_path))
        for file in found
        if file.stat().st_size and run_dir not in file.parents
    }
    revision = f"HF_HOME/hub/datasets--{hub.ID.replace('/', '--')}/refs/main"  # 40 bytes
    assert outside == {"config.yaml", "output.txt", revision}
    # A run on local files keeps the same, but for the footers, which the Hub is asked for once.
    there = {file.relative_to(run_dir).parts[0] for file in found if run_dir in file.parents}
    assert there - {one.name for one in expected.iterdir()} == {"footers"}
    assert {file.name for file in (run_dir / "footers").iterdir()} == etags(files)
    assert away.requests["range"] > 45
    assert "trying again" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow  # unit tests end with 75; restarts: F46
def test_an_outage_beyond_all_patience_costs_a_restart_and_no_bit(server, tmp_path, away, expected):
    path = str(write_config(tmp_path, config_of(tmp_path, hub.ID)))
    run_dir, env = tmp_path / "run", environment(away, tmp_path)
    begin = ["train", path, "training.steps=2"]
    assert server.run(begin, 2, tmp_path, env) == [0, 0], (tmp_path / "output.txt").read_text()

    going = ["train", path, "distributed.timeout_minutes=0.2"]
    asked = count(1)

    def soon_gone():
        away.down = next(asked) >= 16
        return "reset" if away.down else ""

    away.mixture = soon_gone
    assert server.run(going, 2, tmp_path, env) == [75, 75]
    found = status(run_dir)
    assert (found["state"], found["exit_code"]) == ("failed", 75)
    assert "could not be read" in found["reason"]
    saved = lines(run_dir, "checkpoint")[-1]
    assert saved["reason"] == "data_failed"
    assert saved["step"] == found["step"]
    assert saved["name"] == found["checkpoint"]
    assert 2 < found["step"] < STEPS
    assert away.requests["down"] > 2

    away.mixture, away.down = str, False
    assert server.run(going, 2, tmp_path, env) == [0, 0]
    assert lines(run_dir, "start")[-1]["resumed_from"] == saved["name"]
    check(run_dir, expected)


def test_a_full_cache_trains_without_one_request(server, tmp_path, away, expected):
    first = str(
        write_config(tmp_path / "online", config_of(tmp_path / "online", hub.ID, cache_gb=1))
    )
    online = environment(away, tmp_path)
    assert server.run(["train", first], 2, tmp_path / "online", online) == [0, 0]
    check(tmp_path / "online" / "run", expected)
    away.requests.clear()

    offline = environment(away, tmp_path, HF_HUB_OFFLINE="1")
    # A run of its own, from nothing; then the first one goes on into further epochs.
    again = config_of(tmp_path / "offline", hub.ID, cache_gb=1)
    second = str(write_config(tmp_path / "offline", again))
    codes = server.run(["train", second], 2, tmp_path / "offline", offline)
    assert codes == [0, 0], (tmp_path / "offline" / "output.txt").read_text()
    check(tmp_path / "offline" / "run", expected)
    further = ["train", first, f"training.steps={3 * STEPS}"]
    assert server.run(further, 1, tmp_path / "online", offline) == [0]
    assert status(tmp_path / "online" / "run")["step"] == 3 * STEPS
    assert not away.requests


def test_a_signal_does_not_wait_for_a_network_that_is_away(server, tmp_path, away, expected):
    path = str(write_config(tmp_path, config_of(tmp_path, hub.ID)))
    run_dir, env = tmp_path / "run", environment(away, tmp_path)
    begin = ["train", path, "training.steps=2"]
    assert server.run(begin, 2, tmp_path, env) == [0, 0], (tmp_path / "output.txt").read_text()

    away.down = True  # and 15 minutes of patience begin
    ranks = server.start(["train", path], 2, tmp_path, env)
    until(lambda: away.requests["down"] > 2, "ranks that wait for the network")
    for pid in ranks.pids:
        os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == [0, 0], (tmp_path / "output.txt").read_text()
    found = status(run_dir)
    assert (found["state"], found["exit_code"], found["reason"]) == ("stopped", 0, "signal")

    away.down = False
    assert server.run(["train", path], 2, tmp_path, env) == [0, 0]
    check(run_dir, expected)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_at_a_first_start_does_not_wait_for_the_hub_either(
    server, tmp_path, away, world_size
):
    path = str(write_config(tmp_path, config_of(tmp_path, hub.ID)))
    run_dir, env = tmp_path / "run", environment(away, tmp_path)
    away.down = True  # and two minutes of patience begin
    ranks = server.start(["train", path], world_size, tmp_path, env)
    until(lambda: away.requests["down"] > 2, "a rank that waits for the Hub")
    began = time.monotonic()
    for pid in ranks.pids:
        os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == [0] * world_size, (tmp_path / "output.txt").read_text()
    assert time.monotonic() - began < 30
    found = status(run_dir)
    assert (found["state"], found["exit_code"], found["reason"]) == ("stopped", 0, "signal")
    said = (tmp_path / "output.txt").read_text()
    assert "stopping before the first step: there is nothing to save\n" in said
    assert "with a checkpoint" not in said

    away.down = False
    assert server.run(["train", path, "training.steps=2"], world_size, tmp_path, env) == (
        [0] * world_size
    )
