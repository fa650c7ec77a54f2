import os
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from multiprocessing import Pipe

import numpy as np
import pytest

from llmtrain.data import workers
from llmtrain.data.lanes import Block
from llmtrain.data.packing import Span
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError


def block():
    ids, starts = np.arange(5, dtype=np.int32), np.zeros(1, np.int32)
    return Block(ids, starts, None, (Span(0, 0, 0, 0, 5, 0),), 0, {}, ())


def blocks_then(error):
    yield block()
    raise error


def last_item(error):
    ((first, last),) = workers.carry(blocks_then(error), 1, size=4)
    assert isinstance(first, Block)
    reader, writer = Pipe(duplex=False)
    writer.send(last)
    return reader.recv()


def test_what_a_person_can_put_right_reaches_the_rank_as_it_was():
    problems = [Problem("a.parquet", 3, "rows", "replace it"), Problem("b", None, "no value")]
    error = last_item(UserError(*problems))
    assert isinstance(error, UserError)
    assert [str(one) for one in error.problems] == [str(one) for one in problems]


def test_a_failure_of_the_machine_keeps_its_code_and_remedy():
    error = last_item(RunError("no network", RESTARTABLE, "wait"))
    assert (error.exit_code, error.remedy, error.args) == (RESTARTABLE, "wait", ("no network",))


def test_any_other_exception_reaches_the_rank_with_its_traceback():
    broken = UnicodeDecodeError("utf-8", b"x", 0, 1, "a constructor of five")
    broken.add_note("the last unit: b.jsonl")
    error = last_item(broken)
    assert (type(error), error.exit_code) == (RunError, 1)
    for part in ("data worker 1", "Traceback", "in blocks_then", "UnicodeDecodeError", "b.jsonl"):
        assert part in str(error)


def test_a_unit_in_a_directory_whose_name_is_no_text_can_be_noted():
    asked = workers.Asked(2)
    asked.write(1, "/data/\udcff/a.jsonl, byte 0")
    assert (asked.read(0), asked.read(1)) == ("no unit yet", r"/data/\udcff/a.jsonl, byte 0")


def test_where_a_block_came_from_stays_in_the_worker():
    ((sent,),) = workers.carry(iter([block()]), 0, size=4)
    assert sent.spans == ()
    assert sent.ids.tolist() == [0, 1, 2, 3, 4]


def test_blocks_go_several_at_once_and_a_failure_behind_those_that_were_made():
    def blocks():
        for _ in range(5):
            yield block()
        raise RunError("no network", RESTARTABLE, "wait")

    items = list(workers.carry(blocks(), 0, size=2))
    assert [len(item) for item in items] == [2, 2, 2]
    assert isinstance(items[-1][-1], workers.Failed)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (partial(signal.raise_signal, signal.SIGKILL), "SIGKILL, as by the kernel when memory"),
        (partial(signal.raise_signal, signal.SIGSEGV), "was killed by signal SIGSEGV"),
        (partial(os._exit, 3), r"ended by itself \(exit code 3\)"),
    ],
)
@pytest.mark.launches
def test_how_a_worker_ended_is_said(ends, words):
    started = workers.Workers([ends], workers.Asked(1), 1, 1, 60)
    with closing(started), pytest.raises(RunError, match=rf"data worker 0 \(pid \d+\) .*{words}"):
        next(started)


def test_the_unit_that_each_worker_asked_for_is_kept_whatever_its_length():
    asked = workers.Asked(2)
    assert asked.read(0) == asked.read(1) == "no unit yet"
    asked.write(1, "x" * 300 + "/ü.parquet, row group 7")
    assert asked.read(1).endswith("x/ü.parquet, row group 7")
    asked.write(1, "b.jsonl")
    assert (asked.read(0), asked.read(1)) == ("no unit yet", "b.jsonl")


@pytest.mark.launches
def test_no_signal_of_a_stop_ends_a_worker_not_even_before_it_can_ignore_it():
    """A launcher signals its rank and all that the rank has started, maybe a moment ago."""
    program = (
        "import sys; print('begun', flush=True); sys.stdin.readline()\n"
        "from llmtrain.data.workers import start_worker\n"
        "start_worker(); print('ready', flush=True); sys.stdin.readline(); print('alive')\n"
    )
    with workers.hold_signals():
        worker = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(workers.IGNORED_SIGNALS)
    for expected in ("begun\n", "ready\n"):
        assert worker.stdout.readline() == expected
        for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            os.kill(worker.pid, signal.Signals[number])
        worker.stdin.write("go on\n")
        worker.stdin.flush()
    assert worker.communicate()[0] == "alive\n"
    assert worker.returncode == 0
