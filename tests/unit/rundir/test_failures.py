"""What a rank that failed leaves for the others, and which of several marks they believe."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.rundir import failures

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def changed(run_dir, rank, **fields):
    """Change what stands in a mark."""
    path = run_dir / "logs" / f"rank-{rank}.failed"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_mark_is_json_with_code_and_reason(run_dir):
    failures.write(run_dir, 3, 2, "a row is bad")
    said = json.loads((run_dir / "logs" / "rank-3.failed").read_text())
    assert (said["code"], said["reason"], said["rank"]) == (2, "a row is bad", 3)
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["rank-3.failed"]


def test_a_later_mark_takes_the_place_of_an_earlier_one(run_dir):
    failures.write(run_dir, 1, 75, "lost", lost_peer=True)
    failures.write(run_dir, 1, 1, "KeyError: 'x'")
    assert [(mark.code, mark.lost_peer) for mark in failures.read(run_dir)] == [(1, False)]


def test_no_run_directory_is_made_for_a_mark(tmp_path):
    failures.write(tmp_path / "run", 1, 2, "no")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_mark_hinders_nothing(run_dir, caplog):
    (run_dir / "logs").write_text("a file")
    with caplog.at_level(logging.WARNING):
        failures.write(run_dir, 1, 75, "gone")
    assert "could not write" in caplog.text
    assert failures.read(run_dir) == []


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "{}", '{"rank": 1, "code": 2}', '{"rank": "x"}', "null", "7"]
)
def test_a_file_that_is_no_mark_says_nothing(run_dir, body):
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rank-1.failed").write_text(body)
    assert failures.read(run_dir) == []
    assert failures.outranking(run_dir, wait=lambda _: None) is None


def test_each_rank_removes_its_own_and_rank_0_those_of_ranks_that_are_no_more(run_dir):
    for rank in range(5):
        failures.write(run_dir, rank, 75, "gone")
    failures.clear(run_dir, 1, 3)
    assert [mark.rank for mark in failures.read(run_dir)] == [0, 2, 3, 4]
    failures.clear(run_dir, 0, 3)
    assert [mark.rank for mark in failures.read(run_dir)] == [2]
    failures.clear(run_dir, 0, 3)


@pytest.mark.parametrize(
    ("left", "believed"),
    [
        ([(1, 75, True), (2, 2, False)], 2),
        ([(1, 74, False), (2, 75, False)], 1),
        ([(1, 1, False), (2, 74, False)], 2),
        ([(1, 1, False), (2, 2, False)], 2),
        ([(1, 75, True), (2, 75, False)], 2),
        ([(1, 75, True), (2, 75, True)], None),
        ([(1, 0, False), (2, 0, False)], None),
        ([(1, 0, False), (2, 75, False)], 2),
        ([(0, 2, False)], None),
        ([(7, 2, False)], None),
        ([], None),
    ],
)
def test_a_cause_outranks_what_follows_from_it(run_dir, left, believed):
    for rank, code, lost in left:
        failures.write(run_dir, rank, code, f"of {rank}", lost_peer=lost)
    told = failures.outranking(run_dir, wait=lambda _: None)
    assert (told.rank if told else None) == believed


def test_rank_0_looks_for_two_seconds_until_a_cause_is_there(run_dir):
    waits: list[float] = []
    failures.write(run_dir, 2, 75, "hung")

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            failures.write(run_dir, 1, 2, "late")

    told = failures.outranking(run_dir, wait=wait)
    assert told is not None
    assert told.reason == "late"
    assert len(waits) == 3
    waits.clear()
    (run_dir / "logs" / "rank-1.failed").unlink()
    told = failures.outranking(run_dir, wait=lambda seconds: waits.append(seconds))
    assert told is not None
    assert told.reason == "hung"
    assert sum(waits) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, True),
        ({"launcher": "1:2"}, False),
        ({"attempt": 4}, False),
        ({"host": "another", "launcher": "1:2"}, True),
    ],
)
def test_the_mark_of_an_earlier_start_is_not_believed(run_dir, fields, counts):
    failures.write(run_dir, 1, 2, "bad")
    changed(run_dir, 1, **fields)
    assert (failures.outranking(run_dir, wait=lambda _: None) is not None) == counts
    assert failures.has(run_dir, 1) == counts
    assert not failures.has(run_dir, 0)


def test_a_second_attempt_with_the_same_config_is_refused_as_the_first_was(run_dir, monkeypatch):
    failures.write(run_dir, 1, 2, "bad", config="abc")
    assert failures.refused_before(run_dir, "abc") is None  # it is this attempt's own
    monkeypatch.setenv(ATTEMPT, "1")
    mark = failures.refused_before(run_dir, "abc")
    assert mark is not None
    assert mark.reason == "bad"
    assert failures.refused_before(run_dir, "another") is None


@pytest.mark.parametrize("fields", [{"code": 75}, {"code": 1}, {"launcher": "1:2"}, {"host": "b"}])
def test_a_second_attempt_begins_after_anything_else(run_dir, monkeypatch, fields):
    failures.write(run_dir, 1, 2, "bad", config="abc")
    changed(run_dir, 1, **fields)
    monkeypatch.setenv(ATTEMPT, "1")
    assert failures.refused_before(run_dir, "abc") is None


def test_new_marks_are_told_from_old_ones(run_dir):
    failures.write(run_dir, 1, 75, "old")
    failures.write(run_dir, 2, 75, "old")
    before = failures.versions(run_dir)
    assert failures.new_since(run_dir, before) == []
    failures.write(run_dir, 2, 2, "new")
    failures.write(run_dir, 3, 1, "new")
    assert [mark.rank for mark in failures.new_since(run_dir, before)] == [2, 3]


# Two ranks of a launcher, which is this program: rank 0 says who is gone once its input ends.
RANK = """
import os, sys
from pathlib import Path
from llmtrain.rundir import failures
run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if rank == 0:
    print("begun", flush=True)
    sys.stdin.read()
    print(failures.silent(run_dir, os.environ), flush=True)
else:
    sys.stdin.read()
    if sys.argv[2:]:
        failures.write(run_dir, rank, int(sys.argv[2]), "ended")
"""


@pytest.fixture
def start(run_dir):
    def started(rank, *arguments):
        launch = {"TORCHELASTIC_RUN_ID": "none", "RANK": str(4 + rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK.replace("rank == 0", "rank == 4"),
                str(run_dir),
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **launch, "LOCAL_WORLD_SIZE": "3"},
        )

    return started


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="ranks are looked up in /proc")
@pytest.mark.launches
def test_a_rank_that_is_gone_without_a_word_is_named(start):
    first, marked, killed = start(0), start(1, "0"), start(2)
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    marked.communicate("")
    killed.kill()  # not waited for: a process that is listed, but has ended, is gone
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    said, _ = first.communicate("")
    assert said == "[6]\n"
    killed.communicate()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="ranks are looked up in /proc")
@pytest.mark.launches
def test_ranks_that_live_are_not_missed(start):
    first, second, third = start(0), start(1), start(2)
    said, _ = first.communicate("")
    assert said == "begun\n[]\n"
    second.communicate("")
    third.communicate("")


def test_without_a_launcher_nobody_is_missed(run_dir):
    assert failures.silent(run_dir, {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == []
