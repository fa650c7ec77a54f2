"""A rank that dies, and who starts the run again: supervise, the launcher, or nobody."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import rings
from helpers.faults import KILLED
from helpers.ranks import ROOT, until
from helpers.tiny import write_config

LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"), "--main_process_port", "0"),
]
TRAIN = str(ROOT / "scripts" / "train.py")
SUPERVISE = """
import sys
from llmtrain.tools.launch.supervise import Waits, supervise
say = lambda line: print("supervise:", line, flush=True)
sys.exit(supervise(sys.argv[1:], None, say, Waits(first=0.1)).exit_code)
"""
SHORT = {"training__steps": 8, "checkpoint__every_steps": 2, "evaluation__every_steps": 1000}


def marks(run):
    """Code of each mark, and whether it was left for a lost peer."""
    found = {}
    for path in sorted((run.run_dir / "logs").glob("rank-*.failed")):
        said = json.loads(path.read_text())
        found[path.stem] = (said["code"], said["lost_peer"])
    return found


@pytest.mark.parametrize(("rank", "world_size"), rings.diagonal([0, 1], [2, 3], beside="slow"))
def test_f35_a_rank_killed_within_a_step_ends_the_others(faulty, straight, world_size, rank):
    run = faulty(world_size)
    codes = run.launch(f"loop.micro@nth=12@rank={rank}=kill")  # the second of step 6
    assert codes == [KILLED if one == rank else 75 for one in range(world_size)]
    said = run.status()
    assert (said["state"], said["exit_code"]) == (("failed", 75), ("running", None))[rank == 0]
    others = [one for one in range(world_size) if one != rank]
    assert marks(run) == {f"rank-{one}": (75, True) for one in others}
    assert run.launch() == [0] * world_size
    assert marks(run) == {}
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(world_size)


def test_a_defect_of_another_rank_is_what_the_run_failed_of(faulty):
    run = faulty(2)
    codes = run.launch("loop.micro@nth=12@rank=1=raise")
    assert codes == [1, 1]
    said = run.status()
    assert (said["state"], said["exit_code"]) == ("failed", 1)
    assert said["reason"].startswith("rank 1: InjectedError: loop.micro@nth=12@rank=1=raise")
    assert marks(run) == {"rank-0": (75, True), "rank-1": (1, False)}


def launched(run, command, faults=""):
    """Start a command for the run; what it prints is in the file."""
    path = write_config(run.folder, run.config)
    output = run.folder / "launcher.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"LLMTRAIN_FAULTS": faults} if faults else {}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, str(path)], stdout=file, stderr=file, cwd=run.folder, env=env
        )
    return process, output


def supervised(run, faults=""):
    """`llmtrain supervise -- accelerate launch …`, with short waits: its code, what it said."""
    process, output = launched(run, [sys.executable, "-c", SUPERVISE, *LAUNCH, TRAIN], faults)
    code = process.wait()
    return code, output.read_text(errors="replace")


@pytest.mark.slow  # the restart of one crash is above
def test_f46_a_run_that_crashes_every_three_steps_is_finished(faulty):
    shape = {**SHORT, "training__steps": 5}
    straight = faulty(2, name="straight", **shape)
    assert straight.launch() == [0, 0]
    run = faulty(2, name="crashing", **shape)
    code, said = supervised(run, "loop.step@nth=4@rank=1=kill")
    assert code == 0, said
    assert run.resumed() == [None, "step-00000002"]
    assert said.count("restart in about 0.1 s (0 of 3") == 1
    assert run.status()["state"] == "finished"
    assert run.outcome() == straight.outcome()


@pytest.mark.slow  # the codes alone: tests/unit/tools/launch
def test_f46_what_a_person_must_change_is_not_started_again(faulty):
    run = faulty(2, **SHORT)
    run.config["data"]["sources"] = [{"path": str(run.folder / "nothing.parquet")}]
    code, said = supervised(run)
    assert code == 2, said
    assert said.count("supervise: start") == 2  # one start, one end
    assert run.status()["exit_code"] == 2


@pytest.mark.slow  # three starts of a launcher; what decides is tested beside `supervise`
def test_f46_a_run_without_progress_is_given_up_after_three_starts(faulty):
    run = faulty(2, **SHORT)
    code, said = supervised(run, "loop.step@nth=2@rank=1=kill")
    assert code == 75, said
    assert "start 3 failed" in said
    assert "3 starts without a new checkpoint" in said
    assert run.resumed() == [None, None, None]


@pytest.mark.slow  # `supervise` does not either, above
def test_a_launcher_does_not_try_again_what_was_refused(faulty):
    run = faulty(2, **SHORT)
    run.config["data"]["sources"] = [{"path": str(run.folder / "nothing.parquet")}]
    process, output = launched(run, [*LAUNCH, "--max_restarts", "2", TRAIN])
    assert process.wait() == 1
    said = output.read_text(errors="replace")
    assert said.count("error: 1 problem") == 3, said
    assert run.status()["restarts"] == 0  # the later attempts have not begun
    assert run.status()["exit_code"] == 2


# Rank 1 comes no further than this; rank 0 waits for it before there is a group.
ALONE = """
import os, signal, sys, time
from pathlib import Path
if os.environ["RANK"] == "1":
    from llmtrain.training.stop import install
    signals = install()
    while signals.reason is None:
        time.sleep(0.05)
        if "{how}" == "dies" and (Path("run") / "status.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)
from llmtrain.cli.main import main
main(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("how", "state", "code"),
    [
        ("dies", "failed", 75),
        pytest.param("waits", "stopped", 0, marks=pytest.mark.slow),  # as a stop at a start, F38
    ],
)
def test_a_rank_that_dies_before_there_is_a_group_is_no_stop(faulty, how, state, code):
    run = faulty(2, **SHORT)
    run.folder.mkdir()
    script = run.folder / "train.py"
    script.write_text(ALONE.replace("{how}", how))
    process, output = launched(run, [*LAUNCH, str(script)])
    until((run.run_dir / "status.json").exists, "rank 0 waits for rank 1")
    if how == "waits":
        process.send_signal(signal.SIGTERM)
    process.wait()
    until(lambda: run.status()["state"] != "running", "the record of the end")
    said = run.status()
    assert (said["state"], said["exit_code"]) == (state, code), output.read_text(errors="replace")
    if how == "dies":
        assert said["reason"] == "rank 1 died before the ranks met"
