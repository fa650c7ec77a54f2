import json
import os
import socket
import time

import pytest
from helpers import runs

from llmtrain.errors import UserError
from llmtrain.report.collect import collect, column
from llmtrain.report.verdict import waiting_share
from llmtrain.rundir.lock import boot_id
from llmtrain.system import start_time
from llmtrain.tools.watch import Watcher


def now(*lines):
    """The lines with times that end now."""
    shift = time.time() - lines[-1]["time"]  # noqa: TID251  # compared with the watcher's clock
    return [line | {"time": line["time"] + shift} for line in lines]


def held_by(folder, pid, host=None, boot=None):
    holder = {
        "host": host or socket.gethostname(), "boot_id": boot or boot_id(), "pid": pid,
        "started": start_time(pid), "run_id": "a", "beat": 1, "since": "",
    }  # fmt: skip
    (folder / "lock").write_text(json.dumps(holder))


def test_the_numbers_are_those_of_the_last_lines(tmp_path):
    lines = [line for line in runs.history() if line["kind"] != "end"]
    lines[0] = lines[0] | {"steps": 600}
    run = runs.write_run(tmp_path, now(*lines), runs.status("running"))
    held_by(run, os.getpid())
    view = Watcher(run).look()
    assert (view.state, view.silence, view.step, view.steps) == ("running", "", 300, 600)
    assert view.loss == runs.loss_at(300)
    assert view.heldout == runs.loss_at(300) + 0.05
    assert view.wait == pytest.approx(0.005, rel=0.1)
    assert view.left == pytest.approx(300 * 0.4, rel=0.1)
    assert "curve" not in json.dumps(view.to_json())


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_says_how(tmp_path, state):
    view = Watcher(runs.write_run(tmp_path, runs.history(), runs.status(state))).look()
    assert (view.state, view.left) == (state, None)


def test_a_process_that_is_gone_and_a_run_without_lines_are_said(tmp_path):
    lines = [line for line in runs.history() if line["kind"] != "end"]  # of long ago
    run = runs.write_run(tmp_path, lines, runs.status("running"))
    assert Watcher(run).look().state == "silent"
    held_by(run, os.getpid(), host="elsewhere")
    view = Watcher(run).look()
    assert view.state == "silent"
    assert view.silence.startswith("no line for ")
    held_by(run, os.getpid(), boot="before")  # the number is in use again since
    assert Watcher(run).look().state == "killed"
    held_by(run, 2**22 + 1)
    view = Watcher(run).look()
    assert view.state == "killed"
    assert f"process {2**22 + 1} on host {socket.gethostname()} is gone" in view.silence


def test_a_resume_takes_back_the_curve_and_events_are_in_words(tmp_path):
    lines = runs.interrupted_history()
    run = runs.write_run(tmp_path, lines[:-1])
    watcher = Watcher(run)
    view = watcher.look()
    assert [step for step, _ in view.curve] == sorted({step for step, _ in view.curve})
    assert view.events[-1] == (
        "step 150: An update was skipped, as its loss or gradient was not finite."
    )
    assert watcher.look() == view


def test_the_picture_and_the_report_of_a_start_have_the_same_numbers(tmp_path):
    run = runs.write_run(tmp_path, runs.history())
    view, tables = Watcher(run).look(), collect(run)
    assert view.wait == waiting_share(tables)
    assert view.tokens_per_second == tables.sums.speed
    assert view.best == min(column(tables.evaluations, "loss").values)
    assert view.curve == tuple(tables.numbers("loss"))


def test_what_is_kept_does_not_grow_with_the_run_and_nothing_is_written(tmp_path):
    run = runs.write_run(tmp_path, runs.history(6000, every=1))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    view = Watcher(run).look()
    assert 1000 <= len(view.curve) <= 2000
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    "lines",
    [[], [runs.start_line(0)], [runs.train_line(1, loss=None, tokens=None, span_seconds=None)],
     [runs.train_line(1, loss=1e30, tokens=True)], [runs.train_line(1, loss=10**400)]],
)  # fmt: skip
def test_any_record_has_a_view(tmp_path, lines):
    assert Watcher(runs.write_run(tmp_path, lines)).look().name == tmp_path.name


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        Watcher(tmp_path)
