"""Killed at every row of the commit protocol, while loading, while deleting, within a step."""

import shutil

import pytest
from helpers.faults import KILLED

FIRST, SECOND = "step-00000004", "step-00000008"


def killed_then_finished(run, fault, rank, newest):
    """One rank dies at step 8's save; `newest` is what counts then, and the same command ends."""
    codes = run.launch(fault)
    assert codes == [KILLED if one == rank else 75 for one in range(run.world_size)]
    assert run.valid()[-1] == newest
    assert run.launch() == [0] * run.world_size
    assert run.resumed() == [None, newest]


@pytest.mark.parametrize(
    ("fault", "newest"),
    [
        pytest.param("save.mkdir@step=8=kill", FIRST, id="f01_mkdir"),
        pytest.param("save.create@step=8@nth=2=kill", FIRST, id="f02_create"),
        pytest.param("save.manifest@step=8=kill", FIRST, id="f06_manifest"),
        pytest.param("save.rename@step=8=kill", FIRST, id="f07_rename"),
        pytest.param("save.parentsync@step=8=kill", SECOND, id="f08_parentsync"),
    ],
)
def test_f01_f02_f06_f07_f08_rank_0_killed_while_it_commits(faulty, straight, fault, newest):
    run = faulty(2)
    killed_then_finished(run, fault, 0, newest)
    assert run.outcome() == straight(2)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("save.write@step=8@rank=1@bytes=70%=kill", id="f03_write"),
        pytest.param("save.fsync@step=8@rank=1=kill", id="f04_fsync", marks=pytest.mark.slow),
        pytest.param("save.vote2@step=8@rank=1=kill", id="f05_vote2", marks=pytest.mark.slow),
    ],
)
def test_f03_f04_f05_a_rank_killed_while_it_writes_its_part(faulty, straight, fault):
    run = faulty(2, "fsdp2")
    killed_then_finished(run, fault, 1, FIRST)
    assert run.outcome() == straight(2, "fsdp2")


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_f09_every_rank_killed_while_all_write(faulty, straight, world_size):
    run = faulty(world_size, "fsdp2")
    assert run.launch("save.write@step=8=kill") == [KILLED] * world_size
    assert "step-00000008.partial" in run.names()
    assert run.valid() == [FIRST]
    assert run.launch() == [0] * world_size
    assert run.outcome() == straight(world_size, "fsdp2")


def test_f10_killed_while_it_resumes(faulty, straight):
    run = faulty(2)
    assert run.launch("loop.step@step=6=kill") == [KILLED, KILLED]
    assert run.launch("load.read@rank=1@nth=3=kill") == [75, KILLED]
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, FIRST]  # the second start did not come to train
    assert run.status()["restarts"] == 2
    assert run.outcome() == straight(2)


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        pytest.param("retain.trash@step=4=kill", "step-00000004", id="f11_trash"),
        pytest.param("retain.delete@nth=1=kill", ".trash-4", id="f11_delete"),
    ],
)
def test_f11_killed_while_an_old_checkpoint_is_deleted(faulty, straight, fault, left):
    run = faulty(2, checkpoint__keep_last=2, checkpoint__keep_best=0)
    assert run.launch(fault) == [KILLED, 75]
    assert left in run.names()
    assert run.valid()[-2:] == ["step-00000008", "step-00000012"]
    assert run.launch("loop.step@nth=1=kill") == [KILLED, KILLED]  # before any retention
    assert ".trash-4" not in run.names()
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000012", "step-00000012"]
    assert run.names() == ["step-00000020", "step-00000024"]
    assert run.outcome() == straight(2)


def test_f12_killed_in_its_very_first_save_it_begins_again_and_says_so(faulty, straight):
    run = faulty(2)
    assert run.launch("save.write@step=4=kill") == [KILLED, 75]
    assert run.valid() == []
    assert run.events("begun_again") == []
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, None]
    assert [event["step"] for event in run.events("begun_again")] == [0]
    assert run.outcome() == straight(2)


@pytest.mark.slow  # F46 kills a rank of a launcher, too
def test_f35_under_a_real_launcher_too(faulty, straight):
    run = faulty(2)
    assert run.accelerate("loop.micro@rank=1@step=10@nth=2=kill").returncode == 1
    assert run.processes() == []
    assert run.status()["exit_code"] == 75
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000008"]
    assert run.outcome().batches == straight(2).batches


@pytest.mark.parametrize("manifest_came_first", [False, True], ids=["f47_last", "f47_first"])
def test_f47_a_resume_while_a_checkpoint_is_being_copied_in(faulty, straight, manifest_came_first):
    run = faulty(2)
    assert run.launch("loop.step@step=14=kill") == [KILLED, KILLED]
    newest, aside = run.checkpoints / "step-00000012", run.folder / "aside"
    newest.rename(aside)
    newest.mkdir()
    for file in sorted(aside.iterdir()):  # what `cp -r` has done when it is half way
        if file.name == "manifest.json" and not manifest_came_first:
            continue
        shutil.copyfile(file, newest / file.name)
    cut = newest / "optimizer-00001-of-00001.safetensors"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])

    assert run.launch() == [0, 0]
    assert run.resumed() == [None, SECOND]
    assert [event["checkpoint"] for event in run.events("checkpoint_quarantined")] == [newest.name]
    assert "step-00000012.damaged" in run.names()
    assert run.outcome() == straight(2)
