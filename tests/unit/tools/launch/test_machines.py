"""What `--nodes MIN:MAX` takes, and what it refuses before anything is started."""

import errno
import fcntl
import json
import re

import pytest
import yaml
from helpers.config import SMALLEST, written

from llmtrain.cli.main import main
from llmtrain.errors import UserError
from llmtrain.tools.launch import launch as module
from llmtrain.tools.launch.child import Ended
from llmtrain.tools.launch.launch import launch_on_machines, parse_nodes

EIGHT = SMALLEST.replace("{steps: 10}", "{steps: 10, global_batch_size: 8}")


@pytest.fixture
def started(monkeypatch):
    """The commands that would be started, and their environments."""
    commands = []

    def run(command, env, report, run_dir, **_more):
        commands.append((command, env))
        report.write_text('[0, ""]')
        return Ended(0, "")

    monkeypatch.setattr(module, "run_launcher", run)
    monkeypatch.setenv("PET_LOCAL_ADDR", "10.0.0.7")
    return commands


def settings(started):
    ((command, _),) = started
    return json.loads(command[4])


@pytest.mark.parametrize(("text", "expected"), [("1:2", (1, 2)), ("3", (3, 3)), ("2:16", (2, 16))])
def test_nodes_are_two_numbers_or_one_for_both(text, expected):
    assert parse_nodes(text) == expected


@pytest.mark.parametrize("text", ["0:2", "4:2", "", "x", "1:", ":2", "1:2:3", "-1:2", "1.5:2", "0"])
def test_other_nodes_are_refused(text):
    with pytest.raises(UserError, match="two whole numbers with 1 ≤ MIN ≤ MAX"):
        parse_nodes(text)


def test_the_agent_is_told_what_all_machines_agree_on(tmp_path, started):
    path = written(tmp_path, EIGHT)
    ended = launch_on_machines(str(path), ["training.steps=3"], None, "1:2", 2, 7, 0)
    assert ended == Ended(0, "")
    expected = {"counts": [1, 2], "processes": 2, "max_restarts": 0, "last_call": 7}
    assert settings(started) == expected | {"address": "10.0.0.7"}
    ((command, env),) = started
    assert command[-2:] == [str(path), "training.steps=3"]
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} & env.keys()


def test_numbers_that_do_not_divide_the_batch_are_named_and_left_out(tmp_path, started, capsys):
    path = written(tmp_path, EIGHT)
    launch_on_machines(str(path), [], None, "1:5", 1)
    assert settings(started)["counts"] == [1, 2, 4]
    said = capsys.readouterr().err
    assert "among 3 machines (3 processes): 2 of them train" in said
    assert "among 5 machines (5 processes): 4 of them train" in said


def test_no_number_that_divides_the_batch_is_refused(tmp_path, started):
    path = written(tmp_path, EIGHT)
    with pytest.raises(UserError, match=r"training\.global_batch_size = 8") as refused:
        launch_on_machines(str(path), [], None, "5:7", 1)
    assert "--nodes 5:7" in str(refused.value)
    assert started == []


def accelerate_file(folder, **values):
    path = folder / "accelerate.yaml"
    values = {"distributed_type": "MULTI_GPU", "use_cpu": True, "mixed_precision": "no"} | values
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_machines": 3, "num_processes": 3}, "num_machines = 3.*a number from 1 to 2"),
        ({"num_machines": 2, "num_processes": 4}, "num_processes = 4.*2 × 1 = 2"),
        ({"num_machines": 1, "num_processes": 2}, "num_processes = 2.*1 × 1 = 1"),
    ],
)
def test_an_accelerate_file_for_other_machines_is_refused(tmp_path, started, values, message):
    meeting = {"main_process_ip": "10.0.0.1", "main_process_port": 29500}
    file = accelerate_file(tmp_path, rdzv_backend="c10d", same_network=False, **meeting, **values)
    path = written(tmp_path, EIGHT)
    with pytest.raises(UserError) as refused:
        launch_on_machines(str(path), [], file, "1:2", 1)
    assert re.search(message, str(refused.value), re.DOTALL), str(refused.value)
    assert started == []


def test_a_directory_without_file_locks_is_refused(tmp_path, started, monkeypatch):
    def no_locks(_descriptor, _operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match="file locks, by which machines meet") as refused:
        launch_on_machines(str(written(tmp_path)), [], None, "1:2", 1)
    assert "No locks available" in str(refused.value)
    assert started == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "1:2"], "--processes-per-node"),
        (["--nodes", "1:2", "--processes", "2"], "no such option beside --nodes"),
        (["--last-call", "3"], "no such option without --nodes"),
        (["--processes-per-node", "3"], "no such option without --nodes"),
        (["--max-restarts", "3", "--processes", "1"], "no such option without --nodes"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(tmp_path, capsys, words, expected):
    with pytest.raises(SystemExit) as left:
        main(["train", str(written(tmp_path)), *words])
    assert left.value.code == 2
    assert expected in capsys.readouterr().err


def test_an_unknown_network_device_is_refused(tmp_path, started, monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME = eth99"):
        launch_on_machines(str(written(tmp_path)), [], None, "1:2", 1)


def test_the_address_is_that_of_the_device_for_gloo(tmp_path, started, monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    launch_on_machines(str(written(tmp_path)), [], None, "1:2", 1)
    assert settings(started)["address"] == "127.0.0.1"
