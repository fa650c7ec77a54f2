import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from llmtrain import system
from llmtrain.errors import RunError, UserError
from llmtrain.rundir import lock
from llmtrain.rundir.lock import RunLock, check_file_locks

HOLD = """
import sys, time
from pathlib import Path
from llmtrain.rundir.lock import RunLock
with RunLock(Path(sys.argv[1]), "theirs"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


def left_by(run_dir, **fields):
    """A lock file that names a process of this host, which has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said = {
        "host": socket.gethostname(),
        "boot_id": lock.boot_id(),
        "pid": ended.pid,
        "started": "1",
        "run_id": "theirs",
        "beat": 7,
    }
    run_dir.mkdir(exist_ok=True)
    (run_dir / "lock").write_text(json.dumps(said | fields))


@pytest.mark.launches
def test_a_run_directory_in_use_names_host_pid_and_since_when(tmp_path, holder):
    with pytest.raises(UserError) as caught, RunLock(tmp_path, "ours"):
        pass
    since = lock.read(tmp_path / "lock").since
    began = datetime.fromisoformat(since).timestamp() - (tmp_path / "lock").stat().st_mtime
    assert -10 < began <= 0
    named = f"in use by pid {holder.pid} on host {socket.gethostname()} since {since}"
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    holder.communicate()
    assert holder.returncode == 0
    with RunLock(tmp_path, "ours") as held:
        assert held.takeover is None


@pytest.mark.launches
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder):
    holder.kill()
    # Not waited for: a process that has ended but is still listed counts as ended.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with RunLock(tmp_path, "ours") as held:
        assert held.takeover == "that process has ended"
        assert lock.read(tmp_path / "lock").pid == os.getpid()


def test_a_clean_end_leaves_an_empty_file_and_no_takeover(tmp_path):
    with RunLock(tmp_path / "new" / "run", "ours"):
        held = lock.read(tmp_path / "new" / "run" / "lock")
        assert (held.run_id, held.beat) == ("ours", 0)
    assert (tmp_path / "new" / "run" / "lock").read_bytes() == b""
    with RunLock(tmp_path / "new" / "run", "ours") as again:
        assert again.takeover is None


def test_the_lock_is_freed_when_the_run_fails(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path, "ours"):
        raise KeyError
    with RunLock(tmp_path, "ours"):
        pass


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "has ended"),
        ({"boot_id": "another"}, "started again"),
        ({"pid": os.getppid(), "started": "1"}, "another process has that number"),
        ({"pid": os.getpid()}, "this process or an earlier one"),
    ],
)
@pytest.mark.launches
def test_a_lock_left_on_this_host_is_taken_over(tmp_path, fields, reason):
    left_by(tmp_path, **fields)
    with RunLock(tmp_path, "ours") as held:
        assert reason in held.takeover


@pytest.mark.launches
def test_a_live_process_that_does_not_hold_the_flock_keeps_the_lock(tmp_path):
    parent = os.getppid()
    left_by(tmp_path, pid=parent, started=system.start_time(parent))
    with pytest.raises(UserError, match=f"pid {parent}"), RunLock(tmp_path, "ours"):
        pass


@pytest.mark.launches
def test_a_still_beat_of_another_host_is_taken_over_after_three_beats(tmp_path):
    left_by(tmp_path, host="elsewhere", pid=12)
    times = []
    with RunLock(tmp_path, "ours", wait=times.append) as held:
        assert times == [5.0, 5.0, 5.0]
        assert "15 s" in held.takeover


@pytest.mark.launches
def test_a_moving_beat_of_another_host_is_in_use(tmp_path):
    left_by(tmp_path, host="elsewhere", pid=12)
    beats = iter([7, 8])

    def wait(_):
        left_by(tmp_path, host="elsewhere", pid=12, beat=next(beats))

    with (
        pytest.raises(UserError, match="pid 12 on host elsewhere"),
        RunLock(tmp_path, "ours", wait=wait),
    ):
        pass


def test_the_beat_moves_and_the_file_stays_whole(tmp_path):
    moved = threading.Event()
    with RunLock(tmp_path, "ours", beat_seconds=0.001):
        for _ in range(100_000):
            held = lock.read(tmp_path / "lock")
            assert held is not None
            if held.beat >= 3:
                moved.set()
                break
    assert moved.is_set()


def test_a_beat_that_cannot_be_written_is_logged_and_goes_on(tmp_path, monkeypatch, caplog):
    failed = threading.Event()

    def pwrite(*_):
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with RunLock(tmp_path, "ours", beat_seconds=0.001):
        monkeypatch.setattr(os, "pwrite", pwrite)
        assert failed.wait(30)
    assert "could not write the beat" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"pid": 3}',
        b'{"host":"h","boot_id":null,"pid":"x","started":null,"run_id":"r"}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_names_nobody_is_no_obstacle(tmp_path, body):
    (tmp_path / "lock").write_bytes(body)
    with RunLock(tmp_path, "ours") as held:
        assert held.takeover is None


@pytest.mark.launches
def test_a_system_without_proc_goes_by_the_pid_alone(tmp_path, monkeypatch):
    real = Path.read_text

    def read_text(self, *args, **kwargs):
        if self.parts[1] == "proc":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    left_by(tmp_path, started=None)
    with RunLock(tmp_path, "ours") as held:
        assert "has ended" in held.takeover
    left_by(tmp_path, pid=os.getppid(), started=None)
    with pytest.raises(UserError, match="in use"), RunLock(tmp_path, "ours"):
        pass


def test_a_file_system_without_flock_goes_by_the_json(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(tmp_path, "ours"):
        assert "no flock" in caplog.text


def test_the_lock_is_not_inherited_by_programs(tmp_path):
    with RunLock(tmp_path, "ours") as held:
        assert not os.get_inheritable(held._descriptor)


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_bytes(b"")
    for run_dir in (tmp_path / "run", tmp_path / "run" / "below"):
        with (
            pytest.raises(UserError, match=r"a file of that name|is not one and cannot be made"),
            RunLock(run_dir, "ours"),
        ):
            pass


@pytest.fixture
def read_only():
    """A directory of others, with an old lock that anybody may write."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to others
        path = Path(name)
        (path / "lock").write_bytes(b"")
        (path / "lock").chmod(0o666)
        path.chmod(0o555)
        yield path
        path.chmod(0o755)


@pytest.fixture
def no_rights():
    """This process without root's rights, if it has them."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.usefixtures("read_only", "no_rights")
def test_an_unwritable_run_directory_is_refused(read_only):
    for run_dir in (read_only, read_only / "new"):
        with pytest.raises(UserError, match="Permission denied") as caught, RunLock(run_dir, "x"):
            pass
        assert caught.value.problems[0].key == "run.dir"


@pytest.mark.parametrize(
    ("error", "kind"), [(errno.ENOSPC, UserError), (errno.EROFS, UserError), (errno.EIO, RunError)]
)
def test_a_disk_that_takes_no_lock_is_told_in_one_message(tmp_path, monkeypatch, error, kind):
    def pwrite(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(kind, match=os.strerror(error)), RunLock(tmp_path, "ours"):
        pass
    monkeypatch.undo()
    with RunLock(tmp_path, "ours"):
        pass


@pytest.mark.launches
def test_a_check_refuses_what_taking_would_and_changes_nothing(tmp_path, holder):
    with pytest.raises(UserError, match=f"pid {holder.pid}"):
        RunLock(tmp_path, "ours").check()
    assert lock.is_held(tmp_path)
    holder.communicate()
    assert not lock.is_held(tmp_path)
    left_by(tmp_path)
    before = (tmp_path / "lock").read_bytes()
    RunLock(tmp_path, "ours").check()
    assert (tmp_path / "lock").read_bytes() == before
    with RunLock(tmp_path, "ours") as held:
        assert held.takeover is not None


def test_a_directory_without_a_lock_is_not_held(tmp_path):
    assert not lock.is_held(tmp_path / "nowhere")


@pytest.mark.launches
def test_without_flock_a_lock_is_held_while_its_process_lives(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    parent = os.getppid()
    left_by(tmp_path, pid=parent, started=system.start_time(parent))
    assert lock.is_held(tmp_path)
    left_by(tmp_path)
    assert not lock.is_held(tmp_path)


@pytest.mark.parametrize("fields", [{"host": "third"}, {"pid": 13}, {"run_id": "another"}])
@pytest.mark.launches
def test_a_lock_that_another_took_while_it_was_watched_is_in_use(tmp_path, fields):
    left_by(tmp_path, host="elsewhere", pid=12)

    def wait(_):
        left_by(tmp_path, **{"host": "elsewhere", "pid": 12, **fields})

    with pytest.raises(UserError, match="in use"), RunLock(tmp_path, "ours", wait=wait):
        pass


@pytest.mark.launches
def test_a_holder_elsewhere_that_ends_while_it_is_watched_is_waited_for_no_longer(tmp_path):
    left_by(tmp_path, host="elsewhere", pid=12)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        (tmp_path / "lock").write_bytes(b"")

    with RunLock(tmp_path, "ours", wait=wait) as held:
        assert "ended" in held.takeover
    assert len(waits) == 1


def wait_until(true):
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 30 s")


def test_a_lock_that_is_removed_is_made_again_and_keeps_others_out(tmp_path, caplog):
    with RunLock(tmp_path, "ours", beat_seconds=0.01) as held:
        (tmp_path / "lock").unlink()
        wait_until(lambda: held.made_again)
        assert held.lost is None
        assert "was removed while this run holds it" in caplog.text
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()}"):
            RunLock(tmp_path, "second").check()
    assert (tmp_path / "lock").read_bytes() == b""


@pytest.mark.launches
def test_a_lock_that_is_removed_and_taken_by_another_process_is_lost(tmp_path, request):
    with RunLock(tmp_path, "ours", beat_seconds=60) as held:
        (tmp_path / "lock").unlink()
        other = request.getfixturevalue("holder")
        held.keep()
        theirs = lock.read(tmp_path / "lock")
        assert theirs.pid == other.pid
        assert held.lost == f"in use by pid {other.pid} on host {theirs.host} since {theirs.since}"
    assert lock.read(tmp_path / "lock") == theirs  # a lost lock changes nothing of the other's


def test_a_run_directory_that_is_deleted_is_left_to_the_next_save(tmp_path):
    run_dir = tmp_path / "run"
    with RunLock(run_dir, "ours", beat_seconds=0.001) as held:
        (run_dir / "lock").unlink()
        run_dir.rmdir()
        time.sleep(0.1)
        assert not run_dir.exists()
        held.keep()
        assert lock.read(run_dir / "lock").pid == os.getpid()


@pytest.mark.launches
def test_a_lock_that_a_launcher_hands_over_is_taken_at_once_from_another_host(tmp_path):
    left_by(tmp_path, host="elsewhere", boot_id="another")
    waited = []
    with RunLock(tmp_path, "ours", wait=waited.append, handed_over=True) as ours:
        assert ours.takeover == "its lock on host elsewhere is free"
    assert waited == []


@pytest.mark.launches
def test_a_lock_that_is_handed_over_is_waited_for_while_its_holder_saves(tmp_path, holder):
    waited = []

    def wait(seconds):
        waited.append(seconds)
        holder.stdin.close()
        holder.wait()

    with RunLock(tmp_path, "ours", wait=wait, handed_over=True):
        assert len(waited) == 1


@pytest.mark.launches
def test_a_holder_that_does_not_end_is_tried_again_where_a_lock_is_handed_over(tmp_path, holder):
    """Its machine may have died, which a file server may notice only later."""
    waited = []
    with (
        pytest.raises(RunError, match=f"in use by pid {holder.pid}") as failed,
        RunLock(tmp_path, "ours", wait=waited.append, handed_over=True),
    ):
        pass
    assert failed.value.exit_code == 75
    assert sum(waited) == pytest.approx(150)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_directory_without_file_locks_is_no_place_for_machines_to_meet(
    tmp_path, monkeypatch, number
):
    check_file_locks(tmp_path)

    def without(_descriptor, _operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", without)
    with pytest.raises(UserError, match="file locks") as refused:
        check_file_locks(tmp_path)
    assert os.strerror(number) in str(refused.value)


@pytest.mark.parametrize(
    ("mount", "option"),
    [
        ("nfs4 server:/runs rw,vers=4.2,local_lock=none", ""),
        ("nfs server:/runs rw,vers=3,nolock,local_lock=all", "local_lock=all, nolock"),
        ("nfs4 server:/runs rw,local_lock=flock", "local_lock=flock"),
        ("lustre mgs@tcp:/runs rw,flock", ""),
        ("lustre mgs@tcp:/runs rw,localflock", "localflock"),
    ],
)
def test_locks_that_other_machines_do_not_see_are_refused(tmp_path, monkeypatch, mount, option):
    (tmp_path / "mounts").write_text(f"36 25 0:32 / {tmp_path} rw,relatime shared:1 - {mount}\n")
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "mounts")
    if not option:
        check_file_locks(tmp_path)
        return
    with pytest.raises(UserError, match="that other machines see") as refused:
        check_file_locks(tmp_path)
    assert f"mounted with {option}" in str(refused.value)


@pytest.mark.launches
def test_a_directory_in_use_has_file_locks(tmp_path, holder):
    check_file_locks(tmp_path)
