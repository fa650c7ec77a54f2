"""A run on two machines: equal to a run on one, and what the loss of a machine or of a cable does.

Ranks that need no launcher are forked in the two network namespaces; see helpers/netns.py.
"""

import re
import sys
import time

import pytest
import yaml
from helpers.netns import ADDRESSES, RANKS, Network
from helpers.ranks import ROOT, until
from helpers.tiny import lines, status, tiny_config, weights, write_config

STEPS = 120
SAVED_EVERY = 20
PORT = 29507
TIMEOUT_SECONDS = 15.0
# The kernel's word that a peer is gone, and no timeout.
CONNECTION_ENDED = re.compile(
    "a peer process is gone: .*(Connection closed by peer|Connection reset by peer|Broken pipe)"
)


@pytest.fixture
def network():
    made = Network()
    try:
        made.up()
        yield made
    finally:
        made.down()


def written(folder, steps=STEPS, timeout_seconds=300.0):
    config = tiny_config(
        folder / "run",
        training__steps=steps,
        training__global_batch_size=8,
        checkpoint__every_steps=SAVED_EVERY,
    )
    config["distributed"] = {"timeout_minutes": timeout_seconds / 60}
    return write_config(folder, config)


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """A run of two processes on one machine, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert server.run(["train", str(written(folder))], 2, folder) == [0, 0]
    return folder / "run"


def launch_file(folder):
    """`accelerate_configs/ddp_multinode.yaml` for these two machines."""
    values = yaml.safe_load((ROOT / "accelerate_configs" / "ddp_multinode.yaml").read_text())
    here = {"use_cpu": True, "mixed_precision": "no", "num_processes": 2}
    here |= {"main_process_ip": ADDRESSES[0], "main_process_port": PORT}
    assert set(here) <= set(values)
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(values | here))
    return path


def newest(run_dir):
    logged = lines(run_dir, "train")
    return int(logged[-1]["step"]) if logged else 0


def under_way(run_dir):
    return lambda: newest(run_dir) >= 5


def test_a_node_is_killed_and_the_same_commands_resume_exactly(network, straight, tmp_path):
    path, run_dir, output = written(tmp_path), tmp_path / "run", tmp_path / "output.txt"
    file = str(launch_file(tmp_path))

    def start():
        train = [sys.executable, "-m", "llmtrain", "train", str(path), "--accelerate", file]
        return [network.start(node, train, output, {}) for node in (0, 1)]

    first, _ = start()
    until((run_dir / "checkpoints" / "step-00000020").is_dir, "a checkpoint")
    network.power_off(1)
    assert first.wait() == 75
    assert status(run_dir)["state"] == "failed", output.read_text()
    assert status(run_dir)["exit_code"] == 75
    assert status(run_dir)["step"] < STEPS
    assert CONNECTION_ENDED.search(status(run_dir)["reason"]), status(run_dir)["reason"]

    assert [one.wait() for one in start()] == [0, 0], output.read_text()
    resumed = lines(run_dir, "start")[-1]
    assert resumed["resumed_from"] is not None
    assert resumed["world_size"] == 2
    assert weights(run_dir, STEPS) == weights(straight, STEPS)


def test_a_link_that_is_cut_for_good_ends_both_nodes_at_the_timeout(network, server, tmp_path):
    path, run_dir = written(tmp_path, 100_000, TIMEOUT_SECONDS), tmp_path / "run"
    ranks = server.start(network.ranks("train", str(path)), 2, tmp_path, RANKS)
    until(under_way(run_dir), "some steps")
    cut = time.monotonic()
    network.pull_cable()
    codes = ranks.wait()
    seconds = time.monotonic() - cut
    assert codes == [75, 75], (tmp_path / "output.txt").read_text()
    assert seconds > 0.9 * TIMEOUT_SECONDS - 1
    assert status(run_dir)["exit_code"] == 75
    assert "no progress for" in status(run_dir)["reason"]


def test_a_link_that_comes_back_changes_nothing(network, server, straight, tmp_path):
    path, run_dir = written(tmp_path), tmp_path / "run"
    ranks = server.start(network.ranks("train", str(path)), 2, tmp_path, RANKS)
    until(under_way(run_dir), "some steps")
    network.pull_cable()
    time.sleep(0.5)  # what was under way has come to a halt
    halted = newest(run_dir)
    time.sleep(9.5)
    assert newest(run_dir) == halted < STEPS
    network.plug_in_cable()
    assert ranks.wait() == [0, 0], (tmp_path / "output.txt").read_text()
    assert len(lines(run_dir, "start")) == 1
    assert weights(run_dir, STEPS) == weights(straight, STEPS)


@pytest.mark.slow
def test_a_node_lost_under_hsdp_means_75_and_the_next_start_goes_on(
    network, server, straight, tmp_path
):
    """Two machines of two ranks, each machine a whole replica, sharded within it."""
    run_dir = tmp_path / "run"
    command = network.ranks("train", str(written(tmp_path)), "distributed.strategy=hsdp")
    ranks = server.start(command, 4, tmp_path, RANKS)
    until((run_dir / "checkpoints" / "step-00000020").is_dir, "a checkpoint")
    network.power_off(1)
    assert ranks.wait() == [75, 75, -9, -9], (tmp_path / "output.txt").read_text()
    assert status(run_dir)["exit_code"] == 75

    assert server.run(command, 4, tmp_path, RANKS) == [0] * 4, (tmp_path / "output.txt").read_text()
    assert lines(run_dir, "start")[-1]["resumed_from"] is not None
    assert status(run_dir)["strategy"] == "hsdp"
    found, expected = ([one["loss"] for one in lines(run, "train")] for run in (run_dir, straight))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_run_directory_that_is_not_shared_is_refused_and_the_node_named(
    network, server, tmp_path
):
    path, run_dir = written(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    started = network.ranks("train", str(path), apart=run_dir)
    codes = server.run(started, 2, tmp_path, RANKS)
    said = (tmp_path / "output.txt").read_text()
    assert codes == [2, 2], said
    assert f"run.dir on rank 1 (host node-1) = {run_dir}" in said
    assert "rank 0 (host node-0)" in said
    assert "Traceback" not in said
    assert status(run_dir)["exit_code"] == 2
    assert lines(run_dir, "start") == []


@pytest.mark.slow  # DI-25 launches the same, and ends in the same bits
def test_a_static_launch_on_two_machines_equals_one_machine(network, straight, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    script = [str(ROOT / "scripts" / "train.py"), str(written(tmp_path))]
    file = str(launch_file(tmp_path))
    started = [
        network.start(
            node,
            [*launcher, file, "--machine_rank", str(node), *script],
            tmp_path / "output.txt",
            {},
        )
        for node in (0, 1)
    ]
    assert [one.wait() for one in started] == [0, 0], (tmp_path / "output.txt").read_text()
    assert lines(tmp_path / "run", "start")[0]["world_size"] == 2
    assert weights(tmp_path / "run", STEPS) == weights(straight, STEPS)
