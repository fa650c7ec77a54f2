import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import Pipe

import numpy as np
import pytest
from helpers import corpus
from helpers.streams import Run, named, rows_of

from llmtrain.data import workers
from llmtrain.data.lanes import Block
from llmtrain.data.packing import Span
from llmtrain.data.stream import Stream
from llmtrain.data.tokens.tokenizer import open_tokenizer
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


# Failures of other libraries where ranks share a stream: rows that two get, or none.
STEPS = 60
WORLD_SIZE = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources, whose articles have other numbers, and a tokenizer."""
    root = tmp_path_factory.mktemp("ranks")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a.parquet", corpus.articles(60), group=4)
    corpus.write_parquet(root / "b.parquet", corpus.articles(40, 500), group=3)
    return root


@pytest.fixture(scope="module")
def tokenizer(place):
    return open_tokenizer(place / "tokenizer")


@pytest.fixture(scope="module")
def mixed(place):
    """One pass over each source; no article's first line is cut."""
    sources = [{"path": str(place / f"{name}.parquet"), "max_epochs": 1} for name in "ab"]
    return corpus.manifest_of(place / "tokenizer", *sources, lanes=8, packing="bestfit")


@pytest.fixture(scope="module")
def alone(mixed, place):
    return Run(mixed, place).start(1, STEPS)


@pytest.fixture(scope="module")
def spread(mixed, place):
    """The same run on four ranks."""
    return Run(mixed, place).start(WORLD_SIZE, STEPS)


def of_rank(run, tokenizer, rank):
    """How often each article begins in the blocks of a rank."""
    rows = [row for batch in run.ranks[rank] for row in rows_of(batch)]
    return Counter(named([tokenizer.decode(row.ids) for row in rows]))


def test_ranks_of_mixed_sources_never_get_the_same_rows(tokenizer, spread):
    found = [set(of_rank(spread, tokenizer, rank)) for rank in range(WORLD_SIZE)]
    assert sum(map(len, found)) == len(set().union(*found)) == 100
    for numbers in found:
        assert {number < 500 for number in numbers} == {True, False}  # of both sources


def test_no_row_vanishes_between_the_ranks(tokenizer, spread):
    assert all(batches[-1].ended for batches in spread.ranks)
    found = sum((of_rank(spread, tokenizer, rank) for rank in range(WORLD_SIZE)), Counter())
    assert found == Counter([*range(60), *range(500, 540)])


def test_one_ranks_state_is_not_saved_for_all(mixed, place, alone):
    run = Run(mixed, place).start(WORLD_SIZE, 6)
    assert np.array_equal(run.states[-1].cursors, alone.states[6].cursors)
    assert (run.states[-1].cursors.sum(axis=(1, 2)) > 0).all()
    own = [set().union(*(batch.cursors for batch in batches)) for batches in run.ranks]
    assert own == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_nothing_can_be_loaded_into_a_stream_that_was_opened(mixed, place, alone):
    assert not [name for name in vars(Stream) if "load" in name or "state" in name]
    run = alone.resumed(5)
    with ExitStack() as stack:
        stream = run.open(0, 1, 0, stack)
        run.states[-1].cursors[:] = 0  # whatever becomes of the state that it was opened at
        assert rows_of(next(stream)) == alone.after(5, 1)


def test_ranks_do_not_train_on_the_same_stream(alone, spread):
    for step in range(20):
        digests = [batches[step].digest for batches in spread.ranks]
        assert len(set(digests)) == WORLD_SIZE
        assert sum(digests) % 2**64 == alone.digests[step]
    assert spread.rows == alone.rows
