"""What the agent of a machine decides between two groups; torch's own rendezvous is played."""

import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from llmtrain.errors import UserError
from llmtrain.rundir import failures
from llmtrain.tools.launch import elastic
from llmtrain.tools.launch.elastic import EndedError, Folder, Machines, _agree, _SharedFile
from llmtrain.tools.launch.launch import AgentSettings


class Torchs:
    """A rendezvous that gives what is in `meetings`: (rank, machines), or an error."""

    def __init__(self, *meetings):
        self.meetings = list(meetings)
        self.waiting = 0
        self.closed = False

    def next_rendezvous(self):
        found = self.meetings.pop(0)
        if isinstance(found, Exception):
            raise found
        rank, world_size = found
        return SimpleNamespace(
            store=HashStore(), rank=rank, world_size=world_size, bootstrap_store_info=None
        )

    def num_nodes_waiting(self):
        return self.waiting

    def is_closed(self):
        return self.closed

    def set_closed(self):
        self.closed = True

    def shutdown(self):
        self.closed = True
        return True


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Make the handler of a machine. counts: of machines that may train"""

    def make(*meetings, counts=(1, 2), max_restarts=2):
        torchs = Torchs(*meetings)
        monkeypatch.setattr(elastic.dynamic, "create_handler", lambda *_: torchs)
        run_dir, folder = tmp_path / "run", tmp_path / "meeting"
        (run_dir / "logs").mkdir(parents=True)
        folder.mkdir()
        settings = AgentSettings(counts, 1, max_restarts, 1, "127.0.0.1")
        made = Machines(run_dir, folder, settings, tmp_path / "ended", tmp_path / "regroup")
        made.torchs = torchs
        return made

    return make


def say(tmp_path, **status):
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))


def test_a_group_gets_a_number_and_old_notes_are_gone(machines, tmp_path):
    made = machines((0, 1), (0, 2))
    (tmp_path / "regroup").touch()
    (tmp_path / "ended").write_text('[75, ""]')
    info = made.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert not (tmp_path / "regroup").exists()
    assert not (tmp_path / "ended").exists()
    assert (tmp_path / "meeting" / "groups").read_text() == "1"
    made.next_rendezvous()
    assert (tmp_path / "meeting" / "groups").read_text() == "2"


def test_ranks_are_told_before_they_are_signalled_for_a_machine_that_waits(machines, tmp_path):
    made = machines()
    assert made.num_nodes_waiting() == 0
    assert not (tmp_path / "regroup").exists()
    made.torchs.waiting = 1
    assert made.num_nodes_waiting() == 1
    assert (tmp_path / "regroup").exists()


@pytest.mark.parametrize(("rank", "trains"), [(0, True), (1, True), (2, False)])
def test_of_three_machines_two_train_if_three_do_not_divide_the_batch(
    machines, monkeypatch, capsys, rank, trains
):
    made = machines((rank, 3), (0, 4), counts=(1, 2, 4))

    def another_comes(_seconds):
        made.torchs.waiting = 1

    monkeypatch.setattr(elastic.time, "sleep", another_comes)
    info = made.next_rendezvous()
    assert (info.rank, info.world_size) == ((rank, 2) if trains else (0, 4))
    assert ("this machine waits: with 3 machines" in capsys.readouterr().err) is not trains


def test_a_meeting_that_takes_long_or_loses_a_machine_is_repeated(machines):
    made = machines(RendezvousTimeoutError(), elastic.DistStoreError("gone"), (0, 1))
    assert made.next_rendezvous().world_size == 1


def test_a_machine_that_only_waited_does_not_end_the_run_of_the_others(machines, tmp_path):
    made = machines(RendezvousGracefulExitError("closed"), (0, 1))
    with pytest.raises(RendezvousClosedError):
        made.next_rendezvous()
    assert made.shutdown()
    assert not made.torchs.closed
    made.next_rendezvous()
    made.shutdown()
    assert made.torchs.closed
    assert (tmp_path / "meeting" / "closed").exists()


@pytest.mark.parametrize("code", [2, 74])
@pytest.mark.parametrize("by", ["report", "mark"])
def test_what_another_group_would_meet_again_ends_the_run(machines, tmp_path, code, by):
    made = machines((0, 1))
    made.next_rendezvous()
    if by == "report":
        (tmp_path / "ended").write_text(json.dumps([code, "error: a bad row"]))
    else:
        failures.write(tmp_path / "run", 1, code, "a bad row")
    with pytest.raises(EndedError, match="a bad row") as ended:
        made.next_rendezvous()
    assert ended.value.code == code


def test_failures_without_a_step_are_counted(machines, tmp_path):
    made = machines(*[(0, 2)] * 4)
    say(tmp_path, state="running", step=5)
    for _ in range(3):
        made.next_rendezvous()
    with pytest.raises(EndedError, match="2 restarts without a step") as ended:
        made.next_rendezvous()
    assert ended.value.code == 75


@pytest.mark.parametrize("cause", ["a step", "a note", "in order", "another number of machines"])
def test_a_change_of_machines_and_a_step_start_the_count_again(machines, tmp_path, cause):
    worlds = [2, 1] * 5 if cause == "another number of machines" else [2] * 10
    made = machines(*[(0, world) for world in worlds])
    for number in range(10):
        state = {"a note": "running", "in order": "stopped"}.get(cause, "failed")
        step = number if cause == "a step" else 5
        say(tmp_path, state=state, exit_code=75, step=step, restarts=number)
        if cause == "a note":
            (tmp_path / "regroup").touch()
        made.next_rendezvous()
    assert made.torchs.meetings == []


def test_a_note_for_the_failure_of_another_machine_hides_no_failures(machines, tmp_path):
    """The machine of the rank that failed waits for the next group, so the others write a note."""
    made = machines(*[(0, 2)] * 4)
    for number in range(3):
        say(tmp_path, state="failed", exit_code=75, step=5, restarts=number)
        (tmp_path / "regroup").touch()
        made.next_rendezvous()
    say(tmp_path, state="failed", exit_code=75, step=5, restarts=3)
    (tmp_path / "regroup").touch()
    with pytest.raises(EndedError, match="2 restarts without a step"):
        made.next_rendezvous()


@pytest.mark.parametrize("by", ["report", "status"])
def test_a_run_that_has_ended_is_not_begun_again_for_a_machine_that_waits(machines, tmp_path, by):
    made = machines((0, 2))
    made.next_rendezvous()
    (tmp_path / "regroup").touch()
    if by == "report":
        (tmp_path / "ended").write_text('[0, "stopped at step 7"]')
    else:
        say(tmp_path, state="stopped", exit_code=0, step=7)
    with pytest.raises(EndedError) as ended:
        made.next_rendezvous()
    assert ended.value.code == 0
    assert json.loads((tmp_path / "meeting" / "closed").read_text())[0] == 0


def test_ranks_of_a_run_that_is_over_are_told_and_not_signalled(machines, tmp_path):
    made = machines((0, 2))
    made.next_rendezvous()
    made.torchs.waiting = 1
    (tmp_path / "meeting" / "closed").touch()
    assert made.num_nodes_waiting() == 0
    assert (tmp_path / "closing").exists()
    assert not (tmp_path / "regroup").exists()


def test_a_machine_whose_heartbeat_was_late_asks_for_another_group(machines, tmp_path):
    """torch has dropped it by then, and it sends no heartbeats any more."""
    made = machines((0, 2), (0, 2))
    made.next_rendezvous()
    assert made.num_nodes_waiting() == 0
    made.state.written -= 7.0
    assert made.num_nodes_waiting() == 1
    assert (tmp_path / "regroup").exists()
    made.next_rendezvous()
    assert made.num_nodes_waiting() == 0
    made.state.written -= 7.0
    assert made.state.set_state(b"a heartbeat")
    assert made.num_nodes_waiting() == 0


def test_a_full_disk_does_not_change_how_the_run_has_ended(machines, tmp_path):
    made = machines((0, 2))
    made.next_rendezvous()
    failures.write(tmp_path / "run", 1, 74, "the disk is full")
    shutil.rmtree(tmp_path / "meeting")
    with pytest.raises(EndedError, match="the disk is full") as ended:
        made.next_rendezvous()
    assert ended.value.code == 74
    made.set_closed()
    made.shutdown()


def test_a_status_from_before_hides_no_failures(machines, tmp_path):
    """Ranks that die before they write one leave what an earlier group wrote as it stopped."""
    made = machines(*[(0, 2)] * 4)
    say(tmp_path, state="stopped", exit_code=75, step=5)
    for _ in range(3):
        made.next_rendezvous()
    with pytest.raises(EndedError, match="2 restarts without a step"):
        made.next_rendezvous()


def test_a_machine_that_gives_up_tells_the_others_how_the_run_has_ended(machines, tmp_path):
    made = machines((0, 2))
    made.next_rendezvous()
    failures.write(tmp_path / "run", 1, 2, "a bad row")
    with pytest.raises(EndedError):
        made.next_rendezvous()
    say(tmp_path, state="stopped", exit_code=75)
    code, message = elastic._outcome(tmp_path / "run", tmp_path / "none", tmp_path / "meeting")
    assert (code, "a bad row" in message) == (2, True)


@pytest.mark.parametrize(
    ("met", "over"),
    [
        (None, True),
        (EndedError(1, "given up"), True),
        (RendezvousClosedError(), True),
        (RendezvousConnectionError("no disk"), False),
        (OSError("no memory"), False),
    ],
)
def test_an_error_of_one_machine_does_not_end_the_run_of_the_others(machines, tmp_path, met, over):
    made = machines((0, 2))
    made.next_rendezvous()
    with pytest.raises(type(met)) if met else nullcontext():
        try:
            if met:
                raise met
        finally:
            made.shutdown()
    assert made.torchs.closed is over
    assert (tmp_path / "meeting" / "closed").exists() is over


def test_while_the_disk_is_away_no_machine_is_seen_and_the_ranks_go_on(machines, tmp_path, capsys):
    made = machines()

    def away():
        raise RendezvousConnectionError("the disk is away")

    made.torchs.num_nodes_waiting = away
    assert made.num_nodes_waiting() == 0
    assert "the disk is away" in capsys.readouterr().err
    assert not (tmp_path / "regroup").exists()


def test_a_state_is_replaced_only_by_who_knows_it(tmp_path):
    one, two = (_SharedFile(tmp_path / "state") for _ in range(2))
    assert one.get_state() is None
    assert one.set_state(b"first", b"of nobody") is None
    assert one.set_state(b"first") == (b"first", b"first", True)
    assert two.set_state(b"second") == (b"first", b"first", False)
    assert two.set_state(b"second", b"first") == (b"second", b"second", True)
    assert one.set_state(b"third", b"first") == (b"second", b"second", False)
    assert one.get_state() == (b"second", b"second")
    assert (tmp_path / "state").stat().st_size == len(b"second")


def test_a_file_that_is_stale_for_a_moment_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "_ANSWER_SECONDS", 0.05)
    shared = _SharedFile(tmp_path / "state")
    shared.set_state(b"first")
    read, stale = Path.read_bytes, [OSError(errno.ESTALE, "Stale file handle")] * 3

    def read_bytes(path):
        if stale:
            raise stale.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert shared.get_state() == (b"first", b"first")
    assert stale == []


def test_a_folder_that_cannot_be_used_is_an_error_of_the_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "_ANSWER_SECONDS", 0.05)
    (tmp_path / "state").mkdir()
    with pytest.raises(RendezvousConnectionError):
        _SharedFile(tmp_path / "state").get_state()
    with pytest.raises(RendezvousConnectionError):
        _SharedFile(tmp_path / "missing" / "state").set_state(b"")


def test_agents_share_a_folder_and_the_last_removes_it(tmp_path):
    root = tmp_path / "rendezvous"
    one = Folder(root)
    two = Folder(root)
    assert one.path == two.path == root / "1"
    (one.path / "closed").touch()
    later = Folder(root)  # a launch that begins while agents of the last one still end
    assert later.path == root / "2"
    one.leave()
    two.leave()
    assert later.path.is_dir()
    later.leave()
    assert not root.exists()


def test_what_killed_agents_left_behind_does_not_count(tmp_path):
    root = tmp_path / "rendezvous"
    killed = Folder(root)
    (killed.path / "settings").write_text("others")
    os.close(killed._agents)  # as a kill does
    again = Folder(root)
    assert again.path == root / "1"
    assert list(again.path.iterdir()) == []
    again.leave()


def test_all_machines_have_the_settings_of_the_first(tmp_path):
    first = AgentSettings((1, 2), 1, 3, 5, "10.0.0.1")
    _agree(tmp_path, first)
    _agree(tmp_path, AgentSettings((1, 2), 1, 3, 5, "10.0.0.2"))
    with pytest.raises(UserError, match="1, 2, 4 machines × 1 processes") as refused:
        _agree(tmp_path, AgentSettings((1, 2, 4), 1, 3, 5, "10.0.0.3"))
    first = (
        "expected: 1, 2 machines × 1 processes, --last-call 5, --max-restarts 3, as on the machine"
    )
    assert first in str(refused.value)
    for other in (((1, 3), 1, 3, 5), ((1, 2), 2, 3, 5), ((1, 2), 1, 4, 5), ((1, 2), 1, 3, 6)):
        with pytest.raises(UserError, match="--nodes"):
            _agree(tmp_path, AgentSettings(*other, "10.0.0.1"))


def test_a_rank_is_told_how_often_the_run_was_started_before(tmp_path, monkeypatch):
    """By `supervise` and by this launcher; the number is not there before the first group is."""
    told = []
    monkeypatch.setattr(elastic.os, "setsid", lambda: None)
    monkeypatch.setattr(elastic.signal, "signal", lambda *_: None)
    monkeypatch.setattr(elastic, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(elastic.sys, "argv", [])
    run = lambda *_, **__: told.append(os.environ[elastic.RESTARTS])  # noqa: E731
    monkeypatch.setattr(elastic.runpy, "run_module", run)
    groups = tmp_path / "groups"
    for before, number in (("0", None), ("0", "1"), ("0", "3"), ("2", "1"), ("2", "3")):
        monkeypatch.setenv(elastic.RESTARTS, before)
        if number:
            groups.write_text(number)
        elastic.rank(groups, [])
    assert told == ["0", "0", "2", "2", "4"]


@pytest.mark.parametrize(
    ("number", "parent", "leaves", "sent"),
    [
        (signal.SIGTERM, None, False, signal.SIGTERM),
        (signal.SIGINT, None, False, signal.SIGINT),
        (signal.SIGUSR1, None, True, signal.SIGTERM),
        (signal.SIGTERM, 1, True, signal.SIGTERM),
    ],
)
def test_a_signal_ends_the_run_unless_the_machine_leaves(
    tmp_path, monkeypatch, number, parent, leaves, sent
):
    """parent: another one, as `llmtrain train` was killed, which sends SIGTERM"""
    monkeypatch.setattr(elastic.signal, "signal", lambda *_: None)
    monkeypatch.setattr(elastic.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(elastic.multiprocessing, "set_forkserver_preload", lambda _: None)
    signals = elastic.AgentSignals(tmp_path / "regroup")
    if parent:
        monkeypatch.setattr(elastic.os, "getppid", lambda: parent)
    with pytest.raises(SignalException) as raised:
        signals._handle(number, None)
    assert raised.value.sigval == sent
    assert signals.leaves is leaves
    assert (tmp_path / "regroup").exists() is leaves
    assert (tmp_path / "closing").exists()


@pytest.mark.parametrize(
    ("status", "report", "expected"),
    [
        ({"state": "finished"}, None, (0, "")),
        ({"state": "stopped", "exit_code": 0}, None, (0, "")),
        ({"state": "stopped", "exit_code": 75}, None, (0, "")),  # a person closed the run then
        ({"state": "finished"}, [0, "the report"], (0, "the report")),
        ({"state": "failed", "exit_code": 74}, [75, "lost"], (74, "failed at step 7 (why)")),
        ({"state": "failed", "exit_code": 1}, None, (1, "failed at step 7 (why)")),
        ({"state": "running"}, None, (75, "without a word of rank 0")),
    ],
)
def test_the_end_of_a_run_is_what_rank_0_says_here_or_elsewhere(
    tmp_path, monkeypatch, status, report, expected
):
    monkeypatch.setattr(elastic, "wait_until", lambda condition, _seconds: condition())
    (tmp_path / "run").mkdir()
    say(tmp_path, **{"step": 7, "reason": "why", **status})
    if report:
        (tmp_path / "ended").write_text(json.dumps(report))
    (tmp_path / "closed").touch()
    code, message = elastic._outcome(tmp_path / "run", tmp_path / "ended", tmp_path)
    assert code == expected[0]
    assert expected[1] in message
    shutil.rmtree(tmp_path / "run")
