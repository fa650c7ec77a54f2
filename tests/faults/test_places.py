"""The run directory: read-only, in use, left by a process that is gone, under another clock."""

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
from helpers import small_disk
from helpers.damage import copy_as, files_of
from helpers.faults import KILLED
from helpers.ranks import until

from llmtrain.hashing import mix
from llmtrain.rundir import lock

ALONE = {"training__steps": 8, "evaluation__every_steps": 1000}


def test_f26_a_read_only_directory_is_refused_at_the_start(faulty):
    run = faulty(1)
    with small_disk.mounted(run.folder / "run", "ro") as disk:
        run.view = disk.view
        assert run.launch(through=small_disk.through("room", disk, 0, 0)) == [2]
        said = run.output()
        assert "run.dir" in said
        assert "Read-only file system" in said
        assert "Traceback" not in said
        assert list((disk.view / str(run.folder / "run")[1:]).iterdir()) == []


def test_f26_a_directory_that_becomes_read_only_is_an_event(faulty, straight):
    run = faulty(2, checkpoint__keep_last=3, checkpoint__keep_best=0)
    with small_disk.mounted(run.folder / "run", "size=24m") as disk:
        run.view = disk.view
        assert run.launch(through=small_disk.through("read-only", disk, 8, 12)) == [0, 0]
        failed = run.events("save_failed")
        assert [event["step"] for event in failed] == [8, 12]
        assert all("Read-only file system" in event["failures"] for event in failed)
        assert run.valid() == [f"step-{step:08d}" for step in (16, 20, 24)]
        assert run.outcome() == straight(2)
        assert (run.status()["state"], run.status()["checkpoint"]) == ("finished", "step-00000024")
        run.check_clean()


def test_f27_a_second_run_in_a_directory_is_refused_and_the_first_is_unharmed(
    faulty, straight, server
):
    run = faulty(2)
    ranks = run.start()
    until(lambda: len(run.lines("train")) >= 5, "some steps")
    for pid in ranks.pids:  # however slow this machine is, the first is still there
        os.kill(pid, signal.SIGSTOP)
    try:
        second = run.folder / "second"
        second.mkdir()
        command = ["train", str(run.folder / "config.yaml")]
        assert server.run(command, 1, second) == [2]
        said = (second / "output.txt").read_text()
        assert f"in use by pid {ranks.pids[0]} on host {socket.gethostname()}" in said
    finally:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGCONT)
    assert run.wait(ranks) == [0, 0]
    assert run.status()["restarts"] == 0
    assert run.outcome() == straight(2)


def test_f27_a_run_whose_lock_was_removed_and_taken_ends_and_writes_no_more(faulty):
    endless = {"training__steps": 100_000, "checkpoint__every_steps": 100_000}
    run = faulty(2, **endless, checkpoint__keep_best=0)
    ranks = run.start()
    until(lambda: len(run.lines("train")) >= 5, "some steps")
    os.kill(ranks.pids[0], signal.SIGSTOP)  # else it makes the lock again at its next beat
    (run.run_dir / "lock").unlink()
    with lock.RunLock(run.run_dir, "another"):
        os.kill(ranks.pids[0], signal.SIGCONT)
        assert run.wait(ranks) == [75, 75]
        assert lock.read(run.run_dir / "lock").pid == os.getpid()
    (event,) = run.events("lock_lost")
    assert f"in use by pid {os.getpid()} on host {socket.gethostname()}" in event["reason"]
    assert "was removed while this run was using it" in run.output()
    assert (run.status()["state"], run.lines("end")) == ("running", [])  # they are the other's
    assert list(run.checkpoints.glob("*")) == []


def test_a_run_directory_that_is_deleted_during_the_run_is_there_again_at_the_next_save(
    faulty, straight
):
    run = faulty(2, checkpoint__keep_best=0)
    ranks = run.start("loop.step@step=11@rank=0=hang:3")
    until(lambda: len(run.lines("train")) >= 9, "the step in which it waits")
    gone = run.run_dir.rename(run.folder / "gone")  # at once: the beat writes into it meanwhile
    shutil.rmtree(gone)
    assert run.wait(ranks) == [0, 0]
    (restored,) = run.events("files_restored")
    assert restored["step"] == 12
    needed = {"config.yaml", "auto.json", "manifest.json", "eval.safetensors", "status.json"}
    assert needed | {"metrics.jsonl", "tokenizer/tokenizer.json"} <= set(restored["files"])
    assert run.valid() == [f"step-{step:08d}" for step in (16, 20, 24)]
    assert run.outcome().files == straight(2).files
    assert (run.status()["state"], run.resumed()) == ("finished", [None])
    assert run.launch() == [0, 0]  # nothing that a start needs is missing
    assert run.resumed() == [None, "step-00000024"]


def open_files(pid):
    """What a process that goes on has open; what it closes meanwhile is left out."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(path))  # noqa: PTH115
    return found


def test_f27_no_child_of_a_run_keeps_its_lock(faulty):
    run = faulty(1, training__steps=100_000, data__workers=1)
    notes = run.folder / "forks.txt"
    ranks = run.start(through=("call", "helpers.odd_ranks", "noting_forks", str(notes)))
    until(lambda: len(run.lines("train")) >= 5, "some steps")
    held = str(run.run_dir / "lock")
    assert held in open_files(ranks.pids[0])
    children = psutil.Process(ranks.pids[0]).children(recursive=True)
    assert children  # its data worker, at least
    assert not any(held in open_files(child.pid) for child in children)
    (run.run_dir / "STOP").touch()
    assert run.wait(ranks) == [0]
    assert not notes.exists(), notes.read_text()


def killed(run):
    """Start it, kill it behind its first checkpoint; the lock file that it leaves."""
    assert run.launch("loop.step@step=6=kill") == [KILLED]
    assert json.loads((run.run_dir / "lock").read_text())["pid"]
    return run.run_dir / "lock"


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        ({}, "that process has ended"),
        ({"boot_id": "another"}, "the machine was started again since"),
        ({"pid": os.getpid(), "started": "1"}, "another process has that number now"),
    ],
    ids=["dead", "boot", "reused"],
)
def test_f28_a_lock_that_was_left_is_taken_over(faulty, left, reason):
    run = faulty(1, **ALONE)
    file = killed(run)
    file.write_text(json.dumps(json.loads(file.read_text()) | left))
    assert run.launch() == [0]
    assert [event["reason"] for event in run.events("lock_taken_over")] == [reason]
    assert run.resumed() == [None, "step-00000004"]
    assert file.read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("moving", [True, False], ids=["moving", "still"])
def test_f29_a_lock_of_another_host_counts_while_its_beat_moves(faulty, moving):
    run = faulty(1, **ALONE)
    file = killed(run)
    other = json.loads(file.read_text()) | {"host": "elsewhere", "pid": 12}
    file.write_text(json.dumps(other))
    ended = threading.Event()

    def beat():
        for number in range(10_000):
            if ended.wait(0.5):
                return
            file.write_text(json.dumps(other | {"beat": number}))

    beats = threading.Thread(target=beat) if moving else None
    if beats:
        beats.start()
    try:
        codes = run.launch()
    finally:
        ended.set()
        if beats:
            beats.join()
    if moving:
        assert codes == [2]
        assert "in use by pid 12 on host elsewhere" in run.output()
        file.write_bytes(b"")
    else:
        assert codes == [0]
        assert "15 s" in run.events("lock_taken_over")[0]["reason"]


def test_f30_no_clock_decides_anything(faulty, straight):
    run = faulty(2)

    def shuffled():
        """Times of change in another order than the names."""
        for number, path in enumerate(sorted(run.checkpoints.rglob("*"))):
            os.utime(path, (1e9, 1e9 + mix(30, number) / 2**35))

    assert run.launch("loop.step@step=10=kill") == [KILLED, KILLED]
    shuffled()
    yesterday = ("call", "helpers.odd_ranks", "on_another_day", "-1")
    assert run.launch("loop.step@step=18=kill", through=yesterday) == [KILLED, KILLED]
    shuffled()
    next_year = ("call", "helpers.odd_ranks", "on_another_day", "365")
    assert run.launch(through=next_year) == [0, 0]
    assert run.resumed() == [None, "step-00000008", "step-00000016"]
    assert [event["reason"] for event in run.events("lock_taken_over")] == [
        "that process has ended"
    ] * 2
    times = [line["time"] for line in run.lines("start")]
    assert times[1] < times[0] < times[2]  # the clocks were off
    assert run.valid()[-3:] == ["step-00000016", "step-00000020", "step-00000024"]
    assert run.outcome() == straight(2)
    assert lock.read(run.run_dir / "lock") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checkpoints", "directory"),
        ("metrics.jsonl", "regular file"),
        ("logs/rank-0.failed", "regular file"),
    ],
)
def test_what_can_be_no_part_of_a_run_directory_is_refused_at_the_start(faulty, name, expected):
    run = faulty(1)
    strange = run.run_dir / name
    strange.parent.mkdir(parents=True)
    if expected == "directory":
        strange.symlink_to(run.folder / "a disk that is not mounted")
    else:
        strange.mkdir()
    assert run.launch() == [2]
    said = run.output()
    assert f"  {strange}\n    expected: a {expected}, or nothing of that name" in said
    assert "Traceback" not in said
    assert [path for path in run.run_dir.rglob("*") if path != strange.parent] == [strange]


def test_a_record_and_a_status_that_say_strange_things_do_not_hinder_a_run(faulty):
    run = faulty(1, **ALONE)
    killed(run)
    with (run.run_dir / "metrics.jsonl").open("a") as record:
        record.write('{}\n{"kind": "start"}\n')
    (run.run_dir / "status.json").write_text('{"step": "x", "run_id": 1}')
    assert run.launch() == [0], run.output()
    assert run.resumed()[-1] == "step-00000004"
    assert (run.status()["state"], run.status()["step"]) == ("finished", 8)


def test_a_checkpoint_of_another_run_in_the_way_of_the_last_one_stays_and_is_named(faulty):
    run = faulty(1, **ALONE)
    killed(run)
    foreign = copy_as(run.checkpoints / "step-00000004", 8, "another")
    before = files_of(foreign)
    assert run.launch() == [74]
    assert f"({foreign})" in run.output()
    assert "move away what has that name, then give the same command again" in run.output()
    assert "make room" not in run.output()
    assert files_of(foreign) == before
    foreign.rename(run.folder / "moved away")
    assert run.launch() == [0], run.output()
    assert run.resumed() == [None, "step-00000004", "step-00000004"]
