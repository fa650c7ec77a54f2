"""What the other tests here stand on: a run that is struck, and one that is not."""

from __future__ import annotations

import time

import pytest
from helpers.faults import KILLED


def test_a_killed_rank_ends_the_other_and_the_same_command_ends_in_equal_bits(faulty, straight):
    run = faulty(2)
    assert run.launch("loop.micro@rank=1@step=6@nth=2=kill") == [75, KILLED]
    assert run.valid() == ["step-00000004"]
    assert run.launch() == [0, 0]
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


def test_a_process_of_the_run_is_seen_as_long_as_it_lives(faulty):
    run = faulty(2)
    ranks = run.start("loop.step@step=2=hang")
    while not run.run_dir.exists():
        time.sleep(0.01)
    assert set(ranks.pids) <= set(run.processes())
    assert ranks.kill() == [KILLED, KILLED]
    assert run.processes() == []
    assert "LLMTRAIN_FAULTS=loop.step@step=2=hang llmtrain train" in run.replay()
    assert run.launch("", "training.steps=2") == [0, 0]
