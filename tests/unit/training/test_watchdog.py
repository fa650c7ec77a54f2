import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import until

from llmtrain import system
from llmtrain.rundir import failures
from llmtrain.training import watchdog
from llmtrain.training.watchdog import Watchdog, watching


class Record:
    """What a run says of itself, as far as the watchdog uses it."""

    def __init__(self, run_dir):
        (run_dir / "logs").mkdir()
        self.run_dir = run_dir
        self.rank = 0
        self.step = 7
        self.exit_code: int | None = None
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.ends: list[tuple[str, int, str]] = []

    def event(self, name, step, **detail):
        self.events.append((name, step, detail))

    def end(self, state, code, reason):
        self.ends.append((state, code, reason))


@pytest.fixture
def record(tmp_path):
    system.beat("a micro-batch")
    return Record(tmp_path)


def reported(record, median, minutes, looks, rank=0):
    """After how many looks without progress it reports, and how often; after how many it ends."""
    left: list[int] = []
    record.rank = rank
    dog = Watchdog(record, minutes, left.append)
    if median is not None:
        dog.follow(lambda: median)
    said, ended = [], []
    for look in range(1, looks + 1):
        dog.look()
        said += [look] * (len(record.events) - len(said))
        ended += [look] * (len(left) - len(ended))
        if left:
            break
    return said, ended


@pytest.mark.parametrize(
    ("median", "minutes", "expected"),
    [
        (0.5, 20, ([300], [1190])),
        (20.0, 20, ([400], [1190])),  # 20 steps
        (60.0, 20, ([600], [1190])),  # half of the time-out
        (0.5, 60, ([300], [3590])),
        (0.5, 1, ([30], [54])),  # of a short time-out the last tenth in place of ten seconds
        (None, 20, ([300], [1190])),  # while it starts
    ],
)
def test_a_hang_is_reported_once_and_ended_before_the_peers_give_up(
    record, median, minutes, expected
):
    assert reported(record, median, minutes, 4000) == expected


@pytest.mark.parametrize("phase", ["building the model", "a vote (training a tokenizer)"])
def test_one_long_call_of_a_library_is_told_late_and_never_ended(record, phase):
    system.beat(phase)
    assert reported(record, None, 20, 4000) == ([600], [])


def test_a_report_names_the_phase_and_shows_every_thread(record):
    release = threading.Event()

    def stuck_in_a_test():
        release.wait()

    thread = threading.Thread(target=stuck_in_a_test)
    thread.start()
    (record.run_dir / "logs" / "rank-0.log").write_text("before\n")
    try:
        reported(record, 0.1, 20, 300)
    finally:
        release.set()
        thread.join()
    detail = {"seconds": 300, "phase": "a micro-batch", "rank": 0}
    assert record.events == [("no_progress", 7, detail)]
    log = (record.run_dir / "logs" / "rank-0.log").read_text()
    assert log.startswith("before\nno progress for 300 s: a micro-batch; the stacks")
    assert "stuck_in_a_test" in log
    assert "test_a_report_names_the_phase" in log


def test_the_end_is_recorded_with_75_and_the_phase(record, capfd):
    left: list[int] = []
    dog = Watchdog(record, 1.0, left.append)
    for _ in range(54):
        dog.look()
    assert left == [75]
    assert record.ends == [("failed", 75, "no progress for 54 s: a micro-batch")]
    assert "rank 0: error: no progress for 54 s: a micro-batch" in capfd.readouterr().err
    (mark,) = failures.read(record.run_dir)
    assert (mark.rank, mark.code, mark.lost_peer) == (0, 75, False)
    assert mark.reason == record.ends[0][2]
    log = (record.run_dir / "logs" / "rank-0.log").read_text()
    assert log.count("the stacks of all threads") == 2  # where it hung, and where it was at the end


def test_the_cause_is_that_of_a_rank_that_failed_while_this_one_waited(record, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    failures.write(record.run_dir, 1, 75, "no progress")
    failures.write(record.run_dir, 2, 1, "a defect")
    left: list[int] = []
    dog = Watchdog(record, 1.0, left.append)
    for _ in range(54):
        dog.look()
    assert left == [1]
    assert record.ends == [("failed", 1, "rank 2: a defect")]


def test_a_run_that_is_over_keeps_its_end_and_its_code(record):
    """It hangs while it closes: what it had to do is done and recorded."""
    record.exit_code = 0
    left: list[int] = []
    dog = Watchdog(record, 1.0, left.append)
    for _ in range(54):
        dog.look()
    assert (left, record.ends) == ([0], [])


def test_progress_begins_the_count_anew_and_another_hang_is_another_report(record):
    dog = Watchdog(record, 20, pytest.fail)
    dog.follow(lambda: 0.1)
    for _ in range(3):
        for _ in range(299):
            dog.look()
        system.beat("the reduction of a step")
    dog.look()
    assert record.events == []
    for _ in range(2):
        for _ in range(500):
            dog.look()
        system.beat("a micro-batch")
        dog.look()
    phases = [detail["phase"] for _, _, detail in record.events]
    assert phases == ["the reduction of a step", "a micro-batch"]


def test_while_a_run_starts_others_than_rank_0_wait_for_it_in_silence(record):
    assert reported(record, None, 20, 4000, rank=1) == ([], [1190])
    assert "no progress" in (record.run_dir / "logs" / "rank-1.log").read_text()
    assert reported(record, 0.1, 20, 4000, rank=1) == ([300], [1190])


def test_what_cannot_be_written_holds_up_nothing(record, monkeypatch, capfd):
    """The disk hangs, which is why there is no progress; and there is no log to write to."""
    monkeypatch.setattr(watchdog, "_WRITING_SECONDS", 0.01)
    release = threading.Event()
    record.event = record.end = lambda *_, **__: release.wait()  # type: ignore[method-assign]
    (record.run_dir / "logs").rmdir()
    left: list[int] = []
    dog = Watchdog(record, 1.0, left.append)
    for _ in range(54):
        dog.look()
    assert left == [75]
    release.set()
    until(lambda: "watchdog writes" not in {one.name for one in threading.enumerate()}, "the end")
    assert "the stacks of all threads" in capfd.readouterr().err


def test_a_thread_looks_as_long_as_the_run_is_open(record, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(watchdog, "_REPORT_SECONDS", 5)
    with watching(record, 1e6):
        until(lambda: bool(record.events), "a report")
    assert "watchdog" not in {one.name for one in threading.enumerate()}
    assert len(record.events) == 1


def test_a_terminal_that_takes_no_lines_does_not_stop_the_watchdog(record, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(watchdog, "_REPORT_SECONDS", 5)
    monkeypatch.setattr(watchdog, "_WRITING_SECONDS", 0.01)
    paused = threading.Event()
    with watching(record, 1e6, paused.wait):
        until(lambda: bool(record.events), "a report")
    paused.set()
    assert "watchdog" not in {one.name for one in threading.enumerate()}


def test_the_long_calls_have_the_names_that_the_start_gives_them():
    package = Path(watchdog.__file__).parents[1]
    said = "".join(path.read_text() for path in package.rglob("*.py") if path.stem != "watchdog")
    for phase in watchdog._LONG:
        assert f'beat("{phase}"' in said
