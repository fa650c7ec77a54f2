"""Checkpoints that are written beside the training: the same bytes, whatever strikes meanwhile."""

import hashlib
from contextlib import suppress

import pytest
from helpers import rings
from helpers.faults import KILLED
from helpers.ranks import until

ALL = {"checkpoint__keep_last": 99}
BESIDE = {"checkpoint__background": True}


def files(run):
    """Every tensor file of every checkpoint, as a digest."""
    found = sorted(run.checkpoints.glob("step-*/*.safetensors"))
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


@pytest.mark.parametrize(
    "strategy",
    ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2"))],
)
def test_f13_what_is_written_late_is_the_state_of_its_own_step(faulty, strategy):
    in_line = faulty(2, strategy, "in-line", **ALL, training__steps=12)
    assert in_line.launch() == [0, 0]
    run = faulty(2, strategy, "beside", **ALL, **BESIDE, training__steps=12)
    # The step under way goes on: its own micro-batches wait, or nothing would be beside the save.
    assert run.launch("save.write=delay:0.02;loop.step=delay:0.1") == [0, 0]
    assert len(run.lines("checkpoint")) == 3
    assert files(run) == files(in_line)
    noted = [(one.run_dir / "cursors.jsonl").read_bytes() for one in (run, in_line)]
    assert noted[0] == noted[1], "of the saved step, not of the one at which it was committed"
    assert run.outcome().batches == in_line.outcome().batches


def test_f13_the_training_goes_on_while_files_are_written(faulty, straight):
    run = faulty(2, **BESIDE)
    ranks = run.start("save.write@step=8@nth=1=hang")  # for good: step 12, with its own save, waits
    until(lambda: any(line["step"] == 11 for line in run.lines("train")), "steps beside the save")
    assert run.valid() == ["step-00000004"]
    ranks.kill()
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(2)


@pytest.mark.parametrize(
    ("point", "rank"),
    rings.diagonal(["save.snapshot", "save.write", "save.fsync"], [0, 1], beside="slow"),
)
def test_f13_a_kill_while_the_training_goes_on_leaves_the_older_one(faulty, straight, point, rank):
    run = faulty(2, **BESIDE, checkpoint__writers="all")
    codes = run.launch(f"{point}@step=8@rank={rank}=kill")
    assert codes[rank] == KILLED
    assert run.valid() == ["step-00000004"]
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(2)


@pytest.mark.parametrize("fault", ["save.write@rank=1=enospc", "save.snapshot@rank=1=raise"])
def test_f13_a_save_that_fails_beside_the_training_is_an_event(faulty, straight, fault):
    run = faulty(2, **BESIDE, checkpoint__writers="all")
    point, _, action = fault.partition("@rank=1")
    assert run.launch(f"{point}@rank=1@step=8{action}") == [0, 0]
    failed = run.events("save_failed")
    assert [one["step"] for one in failed] == [8]
    assert "rank 1" in failed[0]["failures"]
    assert [line["step"] for line in run.lines("checkpoint")] == [4, 12, 16, 20, 24]
    assert run.outcome() == straight(2)


def test_f13_a_save_in_flight_is_complete_when_a_stop_ends_the_run(faulty, straight):
    run = faulty(2, **BESIDE)
    assert run.launch("save.write@step=8=delay:0.03;loop.micro@step=9@rank=1=term") == [0, 0]
    assert run.status()["state"] == "stopped"
    assert [line["step"] for line in run.lines("checkpoint")][:2] == [4, 8]
    assert run.valid()[-1] == run.status()["checkpoint"] == f"step-{run.status()['step']:08d}"
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


@pytest.mark.slow  # the same when a stop ends the run
def test_f13_a_save_in_flight_is_complete_when_data_fails(faulty, straight):
    run = faulty(2, **BESIDE)
    assert run.launch("save.write@step=8=delay:0.03;data.next@rank=1@nth=10=raise") == [1, 1]
    assert run.valid()[-1] == "step-00000008"
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000008"]
    assert run.outcome() == straight(2)


def test_f13_what_cannot_be_written_beside_the_training_is_said(faulty):
    asked = {"checkpoint__writers": "rank0", "training__steps": 4}
    run = faulty(2, "fsdp2", **BESIDE, **asked)
    assert run.launch() == [0, 0]
    assert [one["step"] for one in run.events("saving_in_line")] == [0]
    assert run.valid() == ["step-00000004"]


@pytest.mark.slow
def test_f32_two_checkpoints_are_valid_at_every_instant(faulty):
    run = faulty(2, **BESIDE, checkpoint__every_steps=2, checkpoint__keep_last=2)
    ranks = run.start("save.write=delay:0.01;retain.delete=delay:0.1;save.rename=delay:0.1")
    seen: list[int] = []
    while ranks.alive():
        if run.checkpoints.is_dir():
            before = run.names()
            with suppress(FileNotFoundError):  # one has gone while it was looked at
                valid = run.valid()
                if run.names() == before:
                    seen.append(len(valid))
    assert run.wait(ranks) == [0, 0]
    assert 2 in seen
    assert min(seen[seen.index(2) :]) >= 2, seen
