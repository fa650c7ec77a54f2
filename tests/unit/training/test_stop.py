import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.config.schema import CheckpointConfig
from llmtrain.training import stop
from llmtrain.training.stop import Requests, stop_code
from llmtrain.types import STOPS, Flags


@dataclass
class Clock:
    """One that is set by hand, and says what no real one says at its start."""

    now: float = 5000.0

    def __call__(self):
        return self.now


def requests(run_dir, clock=None, rank=0, started=5000.0, **keys):
    return Requests(run_dir, CheckpointConfig(**keys), rank, started, clock or Clock())


def test_nothing_is_asked_of_a_run_that_is_left_alone(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock)
    clock.now += 1e9
    assert asked.flags(None) == Flags()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_says_what_it_was_signalled(tmp_path, rank):
    asked = requests(tmp_path, rank=rank)
    assert asked.flags("SIGTERM") == Flags(signal=True)
    assert asked.flags("launcher_lost") == Flags(launcher_lost=True)


def test_files_and_clocks_are_rank_0s_alone(tmp_path):
    (tmp_path / "STOP").touch()
    (tmp_path / "SAVE").touch()
    late = Clock(9000.0)
    keys = {"stop_after": "1h", "every_minutes": 1.0}
    first, second = (requests(tmp_path, late, rank, **keys) for rank in (0, 1))
    late.now += 60
    assert first.flags(None) == Flags(
        stop_file=True, stop_after=True, minutes_due=True, save_file=True
    )
    assert second.flags(None) == Flags()
    second.begin_save()
    second.end_stop()
    assert {path.name for path in tmp_path.iterdir()} == {"STOP", "SAVE"}


def test_a_save_serves_the_file_and_a_new_one_asks_again(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)
    asked.begin_save()
    assert asked.flags(None) == Flags()
    assert not (tmp_path / "SAVE").exists()
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)


def test_a_save_that_was_left_over_is_asked_for_at_once(tmp_path):
    (tmp_path / "SAVE").touch()
    assert requests(tmp_path).flags(None) == Flags(save_file=True)


def test_the_minutes_count_from_the_begin_of_the_last_save(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock, started=0.0, every_minutes=2.5)
    clock.now += 149
    assert not asked.flags(None).minutes_due
    clock.now += 1
    assert asked.flags(None).minutes_due
    asked.begin_save()
    asked.end_save(20.0)
    clock.now += 149
    assert not asked.flags(None).minutes_due
    clock.now += 1
    assert asked.flags(None).minutes_due


def test_stop_after_leaves_time_for_twice_the_longest_save(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock, started=4000.0, stop_after="1h")  # until 7600
    due_at = {7600.0: (), 7540.0: (30.0,), 7500.0: (50.0, 10.0)}
    for moment, saves in due_at.items():
        for seconds in saves:
            asked.end_save(seconds)
        clock.now = moment - 0.5
        assert not asked.flags(None).stop_after
        clock.now = moment
        assert asked.flags(None).stop_after


def test_a_stop_is_deleted_when_it_has_come_to_its_end(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "STOP").touch()
    assert asked.flags(None) == Flags(stop_file=True)
    asked.begin_save()
    assert (tmp_path / "STOP").exists()
    asked.end_stop()
    assert not (tmp_path / "STOP").exists()
    asked.end_stop()


def test_a_stop_that_was_left_over_is_said_by_rank_0(tmp_path, caplog):
    (tmp_path / "STOP").touch()
    requests(tmp_path, rank=1)
    assert not caplog.records
    requests(tmp_path)
    assert f"{tmp_path / 'STOP'} is there already" in caplog.text


def test_a_file_that_cannot_be_deleted_is_served_once(tmp_path, monkeypatch, caplog):
    def refused(path, *, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        asked.begin_save()
    assert "SAVE could not be deleted" in caplog.text
    assert asked.flags(None) == Flags()
    (tmp_path / "SAVE").unlink()
    assert asked.flags(None) == Flags()
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)


def test_a_file_system_that_does_not_answer_asks_for_nothing_and_is_said_once(
    tmp_path, monkeypatch, caplog
):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    asked = requests(tmp_path)
    (tmp_path / "STOP").touch()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", stale)
        assert asked.flags(None) == asked.flags(None) == Flags()
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2  # STOP and SAVE
    assert asked.flags(None) == Flags(stop_file=True)


def test_steps_look_for_the_files_at_most_every_fifth_of_a_second(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock)
    assert asked.flags(None, look=False) == Flags()  # the first one looks
    (tmp_path / "STOP").touch()
    clock.now += 0.19
    assert asked.flags(None, look=False) == Flags()
    clock.now += 0.02
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    (tmp_path / "SAVE").touch()
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    assert asked.flags(None) == Flags(stop_file=True, save_file=True)  # a step that decides at once


def test_a_served_request_is_not_reported_again_by_the_next_step(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    (tmp_path / "STOP").touch()
    assert asked.flags(None, look=False) == Flags(save_file=True, stop_file=True)
    asked.begin_save()
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    asked.end_stop()
    assert asked.flags(None, look=False) == Flags()


def test_signals_become_a_reason_and_the_old_handlers_come_back():
    before = signal.getsignal(signal.SIGUSR1)
    with stop.catching() as signals:
        assert signals.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_fifty_signals_in_a_second_are_one_request():
    with stop.catching() as signals:
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGTERM"


def test_a_second_call_keeps_the_handlers_that_stand():
    with stop.catching() as outer, stop.catching() as inner:
        assert inner is outer
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.catching():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.launches
def test_a_stop_while_ranks_cannot_talk_ends_the_process_with_0():
    program = (
        "import os, signal, threading\n"
        "from llmtrain.training.stop import install\n"
        "signals = install()\n"
        "with signals.alone(lambda reason: print('stopped by', reason, flush=True) or 0):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout == "stopped by SIGTERM\n"


@pytest.mark.launches
def test_a_stop_is_heard_while_the_main_thread_waits_outside_of_python():
    program = (
        "import ctypes, os, signal, threading\n"
        "from llmtrain.training.stop import install\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "with install().alone(lambda reason: print('stopped by', reason, flush=True) or 7):\n"
        "    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "    # As in a rendezvous: no signal ends this wait, and no handler runs meanwhile.\n"
        "    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 7  # what the callback gives
    assert ended.stdout == "stopped by SIGTERM\n"


# As in a reduction whose peer hangs: no signal ends the wait for a lock of C, no handler runs.
STUCK = (
    "import ctypes, os, signal, sys, threading\n"
    "from llmtrain.training import stop\n"
    "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
    "def wait_for_ever():\n"
    "    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)\n"
)


@pytest.mark.launches
def test_a_second_interrupt_ends_a_process_whose_main_thread_hangs_outside_of_python():
    program = STUCK + (
        "stop._SECOND_INTERRUPT_SECONDS = 0.2\n"
        "stop.install()\n"
        "def press():\n"
        "    while True:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        threading.Event().wait(0.05)\n"
        "threading.Thread(target=press, daemon=True).start()\n"
        "wait_for_ever()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 75
    assert ended.stderr.endswith("interrupted again: ending without a checkpoint\n")


def test_interrupts_at_once_are_one_and_other_signals_never_end_a_run():
    with stop.catching() as signals:
        for number in [signal.SIGINT, signal.SIGINT, *[signal.SIGTERM] * 9, signal.SIGHUP]:
            os.kill(os.getpid(), number)
        assert signals.reason == "SIGINT"


def test_usr2_writes_the_stacks_of_all_threads_into_the_log_and_nothing_stops(tmp_path, capfd):
    with stop.catching() as signals, (tmp_path / "log").open("ab") as log:
        with signals.stacks_in(log.fileno()):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.reason is None
        stacks = (tmp_path / "log").read_text()
        assert "in test_usr2_writes_the_stacks" in stacks
        assert "in _listen" in stacks  # another thread's
        assert capfd.readouterr().err == ""
        os.kill(os.getpid(), signal.SIGUSR2)
    assert "in test_usr2_writes_the_stacks" in capfd.readouterr().err
    assert (tmp_path / "log").read_text() == stacks


@pytest.mark.launches
def test_usr2_shows_where_a_main_thread_hangs_outside_of_python():
    program = STUCK + (
        "stop.install()\n"
        "def look():\n"
        "    signal.raise_signal(signal.SIGUSR2)\n"
        "    os._exit(7)\n"
        "threading.Timer(0.2, look).start()\n"
        "wait_for_ever()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 7
    assert "in wait_for_ever" in ended.stderr


@pytest.mark.launches
def test_a_terminal_that_is_gone_does_not_turn_a_stop_into_an_error():
    """`train | tee log`: Ctrl-C has ended tee when the handler speaks."""
    program = (
        "import os, signal\n"
        "from llmtrain.training.stop import install\n"
        "signals = install()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert signals.reason == 'SIGINT'\n"
        "os._exit(7)\n"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        assert subprocess.run([sys.executable, "-c", program], stderr=write).returncode == 7
    finally:
        os.close(write)


@pytest.mark.launches
def test_who_cannot_record_a_stop_ends_with_1_and_says_why():
    program = (
        "import os, signal, threading\n"
        "from llmtrain.training.stop import install\n"
        "def full(reason): raise OSError(28, 'No space left on device')\n"
        "with install().alone(full):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr


LAUNCHED = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("save", "step", "environ", "value"),
    [
        (20.0, 0.4, LAUNCHED, None),  # 20.8 of 21 s
        (20.0, 0.6, LAUNCHED, 40),  # 21.2 s are 0.7 of 30.3
        (1.0, 60.0, {stop.LAUNCHED: "/tmp/mark"}, 180),
        (100.0, 1.0, LAUNCHED | {stop.GRACE: "150"}, None),
        (105.0, 1.0, LAUNCHED | {stop.GRACE: "150"}, 160),
        (1000.0, 1.0, {}, None),  # nobody waits, nobody kills
    ],
)
def test_a_save_that_outlasts_the_launchers_patience_is_said_with_the_value_to_export(
    save, step, environ, value
):
    warning = stop.grace_warning(save, step, environ)
    if value is None:
        assert warning is None
    else:
        assert warning is not None
        assert warning.endswith(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={value} in its environment")
        assert stop.grace_warning(save, step, environ | {stop.GRACE: str(value)}) is None


def test_a_run_that_is_over_is_not_stopped_any_more():
    with stop.catching() as signals:
        signals.end()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.reason is None


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (False, "stopping before the first step: there is nothing to save"),
        (True, "stopping after the step under way, with a checkpoint"),
    ],
)
def test_what_a_stop_waits_for_is_said(capfd, begun, said):
    with stop.catching() as signals:
        if begun:
            signals.begin()
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == f"{said}\n"


def test_the_first_signal_cuts_short_what_a_step_waits_for():
    woken = threading.Event()
    calls = []

    def wake():
        calls.append(threading.current_thread())
        woken.set()

    with stop.catching() as signals:
        signals.cut_short(0.01, wake)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert woken.wait(60)
    assert len(calls) == 1
    assert calls[0] is not threading.main_thread()


def test_a_signal_of_a_launcher_that_forms_its_group_again_is_no_persons(tmp_path, monkeypatch):
    note = tmp_path / "regroup"
    monkeypatch.setenv(stop.REGROUP, str(note))
    with stop.catching() as signals:
        note.touch()
        assert signals.reason is None  # nobody has signalled yet
        signal.raise_signal(signal.SIGTERM)
        assert signals.reason == "launcher_lost"
        note.unlink()
        assert signals.reason is None  # whoever stops launcher and ranks at once may be seen first
        (tmp_path / stop.CLOSING).touch()
        assert signals.reason == "SIGTERM"
        note.touch()  # this machine leaves, and its launcher ends
        assert signals.reason == "launcher_lost"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_of_a_launcher_without_a_note_is_the_death_of_a_neighbour(
    tmp_path, monkeypatch, number
):
    monkeypatch.setenv(stop.REGROUP, str(tmp_path / "regroup"))
    monkeypatch.setattr(stop, "_NOTE_SECONDS", 0.0)
    with stop.catching() as signals:
        signal.raise_signal(number)
        assert signals.reason == "rank_lost"
        assert stop.asked(signals.reason).launcher_lost


def test_a_rank_that_is_alone_hears_that_the_run_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv(stop.REGROUP, str(tmp_path / "regroup"))
    with stop.catching() as signals:
        assert signals.reason_alone is None
        (tmp_path / stop.CLOSING).touch()
        assert signals.reason_alone == "SIGTERM"
        assert signals.reason is None  # with others it may still save


def test_a_run_of_several_groups_begins_when_its_launcher_did(monkeypatch):
    monkeypatch.setenv(stop.STARTED, "12.5")
    assert stop.Signals().started == 12.5
    monkeypatch.delenv(stop.STARTED)
    assert stop.Signals().started == pytest.approx(time.monotonic(), abs=60)


@pytest.mark.parametrize("reason", STOPS)
def test_a_stop_ends_with_75_only_where_the_launcher_starts_the_run_again(reason):
    assert stop_code(reason, {}) == 0
    again = reason == "launcher_lost"
    assert stop_code(reason, {stop.REGROUP: "/tmp/x"}) == (75 if again else 0)
    assert stop_code(None, {stop.REGROUP: "/tmp/x"}) == 0


def test_a_rank_is_awaited_unless_its_launcher_ends(tmp_path):
    assert not stop.is_awaited({})
    environ = {stop.REGROUP: str(tmp_path / "regroup")}
    assert stop.is_awaited(environ)
    (tmp_path / stop.CLOSING).touch()
    assert not stop.is_awaited(environ)
