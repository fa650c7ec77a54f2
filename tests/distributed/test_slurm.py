"""The batch script, with the programs of a batch system faked and real training below them."""

import json
import os
import signal
import subprocess

import psutil
import pytest
from helpers.ranks import ROOT, until
from helpers.slurm import NODES, STALE, Slurm
from helpers.tiny import lines, status, tiny_config, weights, write_config

from llmtrain.rundir import failures

SLURM = ROOT / "scripts" / "slurm"
STEPS = 200


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path / "slurm")


def written(folder, **changes):
    config = tiny_config(
        folder / "run",
        training__steps=STEPS,
        training__global_batch_size=8,
        checkpoint__every_steps=20,
        **changes,
    )
    return write_config(folder, config)


@pytest.mark.parametrize("name", ["train.sbatch", "node.sh"])
def test_the_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(SLURM / name)], check=True)


def on_cpus(folder):
    """The launch file that the script takes by itself, for machines without GPUs."""
    text = (ROOT / "accelerate_configs" / "ddp_multinode.yaml").read_text()
    text = text.replace("use_cpu: false", "use_cpu: true").replace("bf16 ", "'no' ", 1)
    path = folder / "launch.yaml"
    path.write_text(text)
    return path


def rank_of_node_1(job):
    """The process number of rank 1."""
    for process in psutil.Process(job).children(recursive=True):
        trains = "scripts/train.py" in process.cmdline()  # its data workers have its environment
        if trains and process.environ().get("RANK") == "1":
            return process.pid
    raise AssertionError("rank 1 does not run")


@pytest.mark.slow  # each half by itself: test_two_nodes, test_stops
def test_a_killed_rank_and_the_time_limit_end_in_the_bits_of_a_straight_run(
    server, slurm, tmp_path
):
    """The launchers restart after the kill (--max_restarts); the job is requeued at its limit."""
    straight = written(tmp_path / "straight")
    assert server.run(["train", str(straight)], 2, tmp_path / "straight") == [0, 0]
    path, run_dir = written(tmp_path), tmp_path / "run"
    env = {"ACCELERATE_FILE": str(on_cpus(tmp_path))}

    job = slurm.sbatch([str(path)], env)
    until(lambda: bool(lines(run_dir, "checkpoint")) or job.poll() is not None, "a checkpoint")
    os.kill(rank_of_node_1(job.pid), signal.SIGKILL)
    until(lambda: len(lines(run_dir, "start")) == 2 or job.poll() is not None, "a second start")
    assert lines(run_dir, "start")[-1]["resumed_from"] is not None, said(slurm, run_dir)
    os.kill(job.pid, signal.SIGUSR1)  # to the batch shell alone, as `B:USR1@180` says
    assert job.wait() == 0, said(slurm, run_dir)
    assert status(run_dir)["state"] == "stopped", said(slurm, run_dir)
    assert status(run_dir)["world_size"] == 2
    assert 0 < status(run_dir)["step"] < STEPS
    stopped_at = status(run_dir)["checkpoint"]
    assert slurm.requeued == [str(slurm.number)]
    assert not (run_dir / "STOP").exists()

    again = slurm.sbatch([str(path)], env)  # what the batch system does with a job in its queue
    assert again.wait() == 0, said(slurm, run_dir)
    assert status(run_dir)["state"] == "finished"
    assert lines(run_dir, "start")[-1]["resumed_from"] == stopped_at
    assert slurm.requeued == [str(slurm.number)]
    assert weights(run_dir, STEPS) == weights(tmp_path / "straight" / "run", STEPS)
    logs = run_dir / "logs" / f"slurm-{slurm.number}"
    assert sorted(path.name for path in logs.iterdir()) == [
        "node-0",
        "node-0.log",
        "node-1",
        "node-1.log",
    ]
    assert len(list(logs.rglob("attempt_0/*/stdout.log"))) == 4  # two nodes, two starts
    # The node of the killed rank counts the restart; the other one only if its rank failed before
    # its launcher heard of that, see `meet`.
    assert list(logs.glob("node-1/*/attempt_[1-3]/*/stdout.log"))


def said(slurm, run_dir):
    logs = sorted((run_dir / "logs").rglob("node-*.log"))
    return "\n".join(path.read_text() for path in [slurm.output, *logs])


def leaving(status):
    """An `srun` whose run leaves this behind."""
    text = json.dumps({"step": 7, "checkpoint": None, "reason": None, **status})
    return f"""echo '{text}' >"$FAKE/../run/status.json"\nexit 1\n"""


ENDS = {
    "finished": ({"state": "finished", "exit_code": 0}, 0, False),
    "a lost peer": ({"state": "failed", "exit_code": 75, "reason": "a peer\nis gone"}, 75, True),
    "died": ({"state": "running", "exit_code": None}, 75, True),
    "lost its launcher": ({"state": "stopped", "exit_code": 0, "reason": "launcher_lost"}, 0, True),
    "was asked to stop": ({"state": "stopped", "exit_code": 0, "reason": "stop_file"}, 0, False),
    "a bad config": ({"state": "failed", "exit_code": 2, "reason": "key"}, 2, False),
    "a full disk": ({"state": "failed", "exit_code": 74, "reason": "disk"}, 74, False),
    "diverged": ({"state": "failed", "exit_code": 1, "reason": "loss"}, 1, False),
}


@pytest.mark.parametrize("case", list(ENDS))
def test_what_the_run_says_decides_and_not_the_code_of_srun(slurm, tmp_path, case):
    left, code, again = ENDS[case]
    slurm.program("srun", leaving(left))
    assert slurm.sbatch([str(written(tmp_path))]).wait() == code, slurm.output.read_text()
    assert slurm.requeued == ([str(slurm.number)] if again else [])


def test_a_status_of_an_earlier_start_is_no_answer(slurm, tmp_path):
    path = written(tmp_path)
    (tmp_path / "run").mkdir()
    earlier = {"state": "failed", "exit_code": 75, "checkpoint": None, "step": 3, "reason": ""}
    (tmp_path / "run" / "status.json").write_text(json.dumps(earlier))
    slurm.program("srun", "exit 1\n")
    assert slurm.sbatch([str(path)]).wait() == 1
    assert "no rank came as far" in slurm.output.read_text()
    assert slurm.requeued == []


def marking(rank, code, reason):
    """An `srun` in which a rank leaves its mark, as `llmtrain.rundir.failures` writes it."""
    program = (
        "import sys; from pathlib import Path; from llmtrain.rundir import failures; "
        "failures.write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
    )
    return f'"$PYTHON" -c "{program}" "$FAKE/../run" {rank} {code} "{reason}"\n'


@pytest.mark.parametrize(
    ("code", "expected", "again"), [(2, 2, False), (74, 74, False), (1, 1, False), (75, 75, True)]
)
def test_where_rank_0_died_without_a_word_another_rank_may_know_why(
    slurm, tmp_path, code, expected, again
):
    slurm.program(
        "srun", marking(3, code, "why") + leaving({"state": "running", "exit_code": None})
    )
    assert slurm.sbatch([str(written(tmp_path))]).wait() == expected, slurm.output.read_text()
    assert slurm.requeued == ([str(slurm.number)] if again else [])
    assert ("rank 3: why" in slurm.output.read_text()) != again


def test_a_mark_of_an_earlier_start_explains_nothing(slurm, tmp_path):
    path = written(tmp_path)
    (tmp_path / "run").mkdir()
    failures.write(tmp_path / "run", 3, 2, "an old config")
    slurm.program("srun", leaving({"state": "running", "exit_code": None}))
    assert slurm.sbatch([str(path)]).wait() == 75
    assert slurm.requeued == [str(slurm.number)]


def test_a_rank_that_refused_before_rank_0_began_is_heard(slurm, tmp_path):
    slurm.program("srun", marking(1, 2, "no such file") + "exit 1\n")
    assert slurm.sbatch([str(written(tmp_path))]).wait() == 2
    assert "rank 1: no such file" in slurm.output.read_text()


def test_without_a_new_checkpoint_a_job_is_requeued_three_times(slurm, tmp_path):
    path = written(tmp_path)
    failed = {"state": "failed", "exit_code": 75, "reason": "a peer is gone"}

    def start(checkpoint):
        slurm.program("srun", leaving({**failed, "checkpoint": checkpoint}))
        slurm.sbatch([str(path)]).wait()
        return len(slurm.requeued)

    requeued = [start(name) for name in ["a", "b", "b", "b", "b"]]
    assert requeued == [1, 2, 3, 4, 4]
    assert "no new checkpoint since 3 requeues" in slurm.output.read_text()


@pytest.mark.parametrize("body", ["exit 1\n", "exit 0\n"], ids=["fails", "says nothing"])
def test_without_the_names_of_the_nodes_nothing_is_started(slurm, tmp_path, body):
    slurm.program("scontrol", body)
    assert slurm.sbatch([str(written(tmp_path))]).wait() == 1
    assert slurm.started == []
    assert "scontrol" in slurm.output.read_text()


def test_a_wrong_config_ends_the_job_before_anything_is_started(slurm, tmp_path):
    path = written(tmp_path, training__lerning_rate=1)
    assert slurm.sbatch([str(path)]).wait() == 2
    assert "training.lerning_rate" in slurm.output.read_text()
    assert slurm.started == []
    assert slurm.requeued == []


def test_every_node_is_given_the_name_of_the_first(slurm, tmp_path):
    slurm.program("srun", 'echo "$*" >>"$FAKE/started"\n')
    slurm.sbatch([str(written(tmp_path)), "run.seed=7"]).wait()
    (started,) = slurm.started
    port = str(10_000 + slurm.number % 20_000)
    assert f"{NODES[0]} {port} 1 " in started
    assert started.endswith("config.yaml run.seed=7")
    assert "--kill-on-bad-exit=1" in started


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_launcher_is_told_where_all_meet_and_nothing_of_other_launchers(tmp_path, nodes):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "$*"\nenv\n')
    python.chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NODEID": "0", "SLURMD_NODENAME": "node7"}
    arguments = [str(python), "launch.yaml", "node7", "12345", "8", "logs", "", "run.yaml"]
    started = subprocess.run(
        ["bash", str(SLURM / "node.sh"), *arguments],
        env={"PATH": os.environ["PATH"], **STALE, **job},
        capture_output=True,
        text=True,
        check=True,
    )
    command, *env = started.stdout.splitlines()
    assert f"--num_machines {nodes} --num_processes {nodes * 8} " in command
    assert "--rdzv_backend c10d --rdzv_conf is_host=1 --max_restarts 3" in command
    assert "PET_RDZV_ENDPOINT=node7:12345" in env  # with one node accelerate passes no address on
    assert "PET_LOCAL_ADDR=node7" in env
    assert not {one.partition("=")[0] for one in env} & set(STALE)
