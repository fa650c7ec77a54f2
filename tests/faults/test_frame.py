"""What the other tests here stand on: a run that is struck, and one that is not."""

import json
import socket

import pytest
from helpers.faults import KILLED
from helpers.ranks import until

from llmtrain.cli.watch import watch


def watched(run, capsys):
    """What `llmtrain watch --once --json` prints of a run."""
    capsys.readouterr()
    watch(run.run_dir, once=True, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_a_killed_rank_ends_the_other_and_the_same_command_resumes_and_says_so_first(
    faulty, straight
):
    run = faulty(2)
    assert run.launch("loop.micro@rank=1@step=6@nth=2=kill") == [75, KILLED]
    assert run.valid() == ["step-00000004"]
    said = len(run.output())
    assert run.launch() == [0, 0]
    first = run.output()[said:].partition("\n")[0]
    assert first.startswith(
        f"run       {run.run_dir}: resuming at step 4 from step-00000004, the newest valid one ("
    )
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(2)


def test_another_seed_would_be_noticed(faulty, straight):
    run = faulty(2, run__seed=4)
    assert run.launch() == [0, 0]
    assert run.outcome().files != straight(2).files


def test_what_is_left_behind_is_noticed(faulty):
    run = faulty(2)
    assert run.launch("", "training.steps=2") == [0, 0]
    (run.checkpoints / "step-00000099.partial").mkdir()
    with pytest.raises(AssertionError):
        run.check_clean()
    (run.checkpoints / "step-00000099.partial").rmdir()


def test_a_process_of_the_run_is_seen_as_long_as_it_lives(faulty, capsys):
    run = faulty(2)
    ranks = run.start("loop.step@step=2=hang")
    until(lambda: run.run_dir.exists() and bool(run.lines("start")), "the start of the run")
    assert set(ranks.pids) <= set(run.processes())
    assert watched(run, capsys)["state"] == "running"
    assert ranks.kill() == [KILLED, KILLED]
    assert run.processes() == []
    view = watched(run, capsys)
    assert view["state"] == "killed"
    assert f"process {ranks.pids[0]} on host {socket.gethostname()} is gone" in view["silence"]
    assert "LLMTRAIN_FAULTS=loop.step@step=2=hang llmtrain train" in run.replay()
    assert run.launch("", "training.steps=2") == [0, 0]
    assert watched(run, capsys)["state"] == "finished"
