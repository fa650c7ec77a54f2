import os
import signal
import subprocess
import sys
import threading

import pytest

from llmtrain import processes


def test_cores_are_those_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processes.cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_hangup_that_nohup_ignores_asks_for_nothing():
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        assert signal.SIGHUP in processes.stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in processes.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends it")
@pytest.mark.launches
def test_a_child_ends_with_its_parent():
    child = (
        "import os, signal, time; from llmtrain import processes;"
        "processes.signal_on_death_of_parent(signal.SIGKILL);"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # returns once the child has closed it too


def test_work_in_a_thread_gives_its_result_or_its_exception_to_who_waits():
    assert processes.begin(lambda: 3, "three").result() == 3
    with pytest.raises(KeyError, match="a"):
        processes.begin(lambda: {}["a"], "raises").result()


def test_a_thread_that_hangs_keeps_no_process_from_its_end():
    answer = threading.Event()
    hanging = processes.begin(answer.wait, "hangs")
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "hangs"] == [True]
    answer.set()
    assert hanging.result()
