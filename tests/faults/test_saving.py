"""What the disk refuses while a checkpoint is written: an event, and training goes on."""

from contextlib import nullcontext

import pytest
from helpers import small_disk

ROOM = "size=24m"  # of which the tiny run needs less than half
INODES = "nr_inodes=160"


def failed_at(run):
    """Steps whose save failed, and why."""
    return {event["step"]: event["failures"] for event in run.events("save_failed")}


def saved_at(run):
    return [line["step"] for line in run.lines("checkpoint")]


def test_f14_no_room_is_an_event_and_training_goes_on(faulty, straight):
    run = faulty(2, checkpoint__keep_last=6)
    assert run.launch("save.create@step=8=enospc;save.write@step=12@nth=1=enospc") == [0, 0]
    failed = failed_at(run)
    assert list(failed) == [8, 12]
    assert all("No space left on device" in why and "rank 0" in why for why in failed.values())
    assert saved_at(run) == [4, 16, 20, 24]
    assert run.valid() == [f"step-{step:08d}" for step in (4, 16, 20, 24)]
    assert run.outcome() == straight(2)


def on_a_disk(run, kind):
    """A file system for `run/` that can fill up, or none where only files are limited."""
    options = {"room": ROOM, "everything": ROOM, "inodes": INODES}.get(kind)
    at = run.folder / "run"
    return small_disk.mounted(at, options) if options else nullcontext()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        pytest.param("room", "No space left on device", id="f14_room"),
        pytest.param("everything", "No space left on device", id="f14_everything"),
        pytest.param("limit", "File too large", id="f14_limit"),
        pytest.param("inodes", "No space left on device", id="f18_inodes"),
    ],
)
def test_f14_f18_a_disk_that_is_really_full_for_two_saves(faulty, straight, kind, why):
    run = faulty(2, checkpoint__keep_last=3, checkpoint__keep_best=0)
    with on_a_disk(run, kind) as disk:
        run.view = disk.view if disk else run.view
        assert run.launch(through=small_disk.through(kind, disk, 8, 12)) == [0, 0]
        failed = failed_at(run)
        assert list(failed) == [8, 12]
        assert all(why in text for text in failed.values())
        assert run.valid() == [f"step-{step:08d}" for step in (16, 20, 24)]
        assert run.outcome() == straight(2)
        assert [line["step"] for line in run.lines("train")] == list(range(1, 25))
        run.check_clean()


def test_f15_three_times_in_a_row_ends_the_run_and_room_lets_it_go_on(faulty, straight):
    run = faulty(2)
    assert run.launch(through=small_disk.through("limit", None, 8, 16)) == [74, 74]
    said = run.status()
    assert (said["state"], said["exit_code"], said["checkpoint"]) == ("failed", 74, "step-00000004")
    assert list(failed_at(run)) == [8, 12, 16]
    assert run.valid() == ["step-00000004"]
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(2)


def test_f15_failures_that_are_not_in_a_row_end_nothing(faulty, straight):
    run = faulty(2)
    faults = ";".join(f"save.small@step={step}@nth=1=eio" for step in (4, 8, 16, 20))
    assert run.launch(faults) == [0, 0]
    assert list(failed_at(run)) == [4, 8, 16, 20]
    assert run.outcome() == straight(2)


def test_f15_a_last_save_that_fails_ends_the_run_at_once(faulty, straight):
    run = faulty(2)
    assert run.launch("save.dirsync@step=24=eio") == [74, 74]
    assert run.valid()[-1] == "step-00000020"
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


def test_f16_an_error_of_the_disk_on_another_rank_fails_the_vote_of_all(faulty, straight):
    run = faulty(2, "fsdp2", checkpoint__keep_last=6)
    assert run.launch("save.fsync@step=8@rank=1@nth=1=eio") == [0, 0]
    failed = failed_at(run)
    assert list(failed) == [8]
    assert "rank 1" in failed[8]
    assert "Input/output error" in failed[8]
    assert saved_at(run) == [4, 12, 16, 20, 24]
    assert run.outcome() == straight(2, "fsdp2")


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp2", 1)])
def test_f17_a_writer_that_wrote_less_than_it_should_is_found(faulty, straight, strategy, rank):
    run = faulty(2, strategy, checkpoint__keep_last=6)
    assert run.launch(f"save.write@step=8@rank={rank}@nth=3=short") == [0, 0]
    failed = failed_at(run)
    assert list(failed) == [8]
    assert ".safetensors: " in failed[8]
    assert "step-00000008" not in run.names()
    assert run.outcome() == straight(2, strategy)


def test_f24_a_directory_that_another_rank_sees_late_is_waited_for(faulty, straight):
    run = faulty(2, "fsdp2", checkpoint__keep_last=6)
    late = ("call", "helpers.small_disk", "late", "8", "5")
    assert run.launch(through=late) == [0, 0]
    assert failed_at(run) == {}
    assert "step-00000008" in run.valid()
    assert run.outcome() == straight(2, "fsdp2")
