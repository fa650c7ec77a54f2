"""What `--nodes MIN:MAX` takes, and what it refuses before anything is started."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess

import pytest
import yaml
from helpers.config import SMALLEST, written
from helpers.ranks import ROOT

from llmtrain.cli.main import main
from llmtrain.errors import UserError
from llmtrain.tools.launch import launch as module
from llmtrain.tools.launch.child import Ended, Forward
from llmtrain.tools.launch.launch import launch_on_machines, parse_nodes
from llmtrain.tools.launch.supervise import is_of_machines
from llmtrain.training.stop import SUPERVISOR

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
    assert parse_nodes(text, 2) == (*expected, 2)


@pytest.mark.parametrize("text", ["0:2", "4:2", "", "x", "1:", ":2", "1:2:3", "-1:2", "1.5:2", "0"])
def test_other_nodes_are_refused(text):
    with pytest.raises(UserError, match="two whole numbers with 1 ≤ MIN ≤ MAX"):
        parse_nodes(text, 2)


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


def test_an_accelerate_file_for_another_number_of_machines_is_refused(tmp_path, started):
    values = {"num_machines": 3, "num_processes": 3, "rdzv_backend": "c10d", "same_network": False}
    meeting = {"main_process_ip": "10.0.0.1", "main_process_port": 29500}
    file = accelerate_file(tmp_path, **values, **meeting)
    expected = r"num_machines = 3\n    expected: a number from 1 to 2, as --nodes says"
    with pytest.raises(UserError, match=expected) as refused:
        launch_on_machines(str(written(tmp_path, EIGHT)), [], file, "1:2", 1)
    assert str(file) in str(refused.value)
    assert started == []


def test_an_accelerate_file_becomes_the_environment_of_the_ranks(tmp_path, started):
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    file = accelerate_file(tmp_path, num_processes=8, distributed_type="FSDP", fsdp_config=fsdp)
    launch_on_machines(str(written(tmp_path, EIGHT)), [], file, "1:2", 2)
    ((command, env),) = started
    assert env["ACCELERATE_USE_FSDP"] == "true"
    assert env["FSDP_VERSION"] == "2"
    assert command[5:7] == ["--config_file", str(file)]


def test_a_directory_without_file_locks_is_refused(tmp_path, started, monkeypatch):
    def no_locks(_descriptor, _operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match="file locks, by which machines meet") as refused:
        launch_on_machines(str(written(tmp_path)), [], None, "1:2", 1)
    assert "No locks available" in str(refused.value)
    assert started == []


def test_a_machine_whose_supervisor_was_killed_leaves(monkeypatch):
    """Its death sends SIGTERM, as a person does who stops all machines."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for supervisor, asked in (
        (None, signal.SIGTERM),
        (os.getpid(), signal.SIGTERM),
        (ended.pid, signal.SIGUSR1),
    ):
        monkeypatch.delenv(SUPERVISOR, raising=False)
        if supervisor:
            monkeypatch.setenv(SUPERVISOR, str(supervisor))
        forward = Forward(may_leave=True)
        forward(signal.SIGTERM, None)
        assert forward.asked == asked


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


def test_the_manifest_for_kubernetes_starts_what_it_says():
    """Its fields are those of JobSet v1alpha2 and of a Job; a cluster fills in `$(NAME)`."""
    manifest = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "train.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job.keys() == {"name", "replicas", "template"}
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert parse_nodes(env["PET_NNODES"], 8) == (1, spec["completions"], 8)
    assert env["PET_NPROC_PER_NODE"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    words = [re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], word) for word in container["args"]]
    supervise = ["llmtrain", "supervise", "--", "llmtrain", "train"]
    assert container["command"][:5] == supervise
    assert is_of_machines([*container["command"], *words])
    assert words == ["run.dir=/shared/runs/mine", "--nodes=1:4", "--processes-per-node=8"]


def test_a_node_of_slurm_that_may_fail_starts_its_part_of_the_run(tmp_path):
    node = ROOT / "scripts" / "slurm" / "node.sh"
    arguments = ["echo", "my.yaml", "10.0.0.1", "29500", "8", "logs", "2", "CONFIG", "a.b=1"]
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_NUM_NODES": "4"}
    done = subprocess.run(["bash", node, *arguments], env=env, capture_output=True, text=True)
    assert done.stdout == (
        "-m llmtrain supervise -- echo -m llmtrain train CONFIG a.b=1 --nodes 2:4 "
        "--processes-per-node 8 --accelerate my.yaml\n"
    )
