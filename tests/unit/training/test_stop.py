import os
import signal
import subprocess
import sys
import threading

import pytest

from llmtrain.training import stop


def test_signals_become_a_reason_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stop.catching() as signals:
        assert signals.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_fifty_signals_in_a_second_are_one_request() -> None:
    with stop.catching() as signals:
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGTERM"


def test_a_second_call_keeps_the_handlers_that_stand() -> None:
    with stop.catching() as outer, stop.catching() as inner:
        assert inner is outer
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.catching():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_while_ranks_cannot_talk_ends_the_process_with_0() -> None:
    program = (
        "import os, signal, threading\n"
        "from llmtrain.training.stop import install\n"
        "signals = install()\n"
        "with signals.alone(lambda reason: print('stopped by', reason, flush=True)):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout == "stopped by SIGTERM\n"


def test_a_stop_is_heard_while_the_main_thread_waits_outside_of_python() -> None:
    program = (
        "import ctypes, os, signal, threading\n"
        "from llmtrain.training.stop import install\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "with install().alone(lambda reason: print('stopped by', reason, flush=True)):\n"
        "    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "    # As in a rendezvous: no signal ends this wait, and no handler runs meanwhile.\n"
        "    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout == "stopped by SIGTERM\n"


def test_a_run_that_is_over_is_not_stopped_any_more() -> None:
    with stop.catching() as signals:
        signals.end()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.reason is None


def test_it_needs_the_standard_library_alone() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import llmtrain.training.stop\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (False, "stopping before the first step: there is nothing to save"),
        (True, "stopping after the step under way, with a checkpoint"),
    ],
)
def test_what_a_stop_waits_for_is_said(capfd, begun: bool, said: str) -> None:
    with stop.catching() as signals:
        if begun:
            signals.begin()
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == f"\n{said}\n"


def test_the_first_signal_cuts_short_what_a_step_waits_for() -> None:
    woken = threading.Event()
    calls = []

    def wake() -> None:
        calls.append(threading.current_thread())
        woken.set()

    with stop.catching() as signals:
        signals.cut_short(0.01, wake)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert woken.wait(60)
    assert len(calls) == 1
    assert calls[0] is not threading.main_thread()
