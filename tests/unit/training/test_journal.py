"""What a run records: planned memory beside measured, evaluations, its state and its end."""

import logging
import math
import os
import shutil
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import runs
from helpers.tiny import lines, status

from llmtrain.distributed.plan.memory import MemoryPlan
from llmtrain.errors import RunError
from llmtrain.metrics import memory
from llmtrain.report.collect import collect
from llmtrain.rundir import record as jsonl
from llmtrain.rundir.lock import RunLock, read as read_lock
from llmtrain.rundir.record import Lines
from llmtrain.rundir.status import start_status
from llmtrain.training.due import Due
from llmtrain.training.journal import Journal, RunLog
from llmtrain.types import Evaluation

GIB = 2**30


def compared(folder, caplog, monkeypatch, device, planned):
    """The event of the third step, when 3.5004 GiB were held before and 1.25 since."""
    monkeypatch.setattr(memory, "peak_bytes", lambda device: int(4.7504 * GIB))
    plan = None if planned is None else MemoryPlan({"weights": planned, "reserve": 0}, 0)
    due: Any = SimpleNamespace(first=0, line=lambda step: False)
    with closing(Journal(folder, 0)) as journal, caplog.at_level(logging.INFO):
        log = RunLog(journal, due, torch.device(device), None, plan, int(3.5004 * GIB))
        for step in (2, 3, 4):
            log.training(runs.numbers(step))
        journal.sync()
    (event,) = lines(folder, "event")
    assert (event["event"], event["step"]) == ("memory_compared", 3)
    return event["detail"]


def test_a_plan_and_a_peak_are_told_in_rounded_numbers(tmp_path, caplog, monkeypatch):
    detail = compared(tmp_path, caplog, monkeypatch, "cuda", int(1.2 * GIB))
    assert detail == {"planned_gb": 1.2, "measured_gb": 1.25, "difference": 0.042}
    assert "memory compared at step 3" in caplog.text
    assert "planned_gb 1.2, measured_gb 1.25, difference 0.042" in caplog.text


def test_on_a_cpu_they_stand_in_the_record_alone(tmp_path, caplog, monkeypatch):
    detail = compared(tmp_path, caplog, monkeypatch, "cpu", int(1.2 * GIB))
    assert detail == {"planned_gb": 1.2, "measured_gb": 1.25, "difference": 0.042}
    assert "memory compared" not in caplog.text


@pytest.mark.parametrize(("device", "events"), [("cpu", []), ("cuda", ["memory_compared"])])
def test_resident_memory_is_no_event_of_the_report(tmp_path, caplog, monkeypatch, device, events):
    compared(tmp_path, caplog, monkeypatch, device, int(1.2 * GIB))
    assert [event["event"] for event in collect(tmp_path).events] == events


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_plan_there_is_no_difference(tmp_path, caplog, monkeypatch, device):
    detail = compared(tmp_path, caplog, monkeypatch, device, None)
    assert detail == {"planned_gb": None, "measured_gb": 1.25, "difference": None}


@pytest.mark.parametrize(
    ("at_peak", "share"),
    [
        (lambda trained, real: (trained + 3 * real) / 16640, 0.25),
        (lambda trained, real: None, None),
    ],
)
def test_a_line_says_which_share_of_the_peak_a_step_reached_where_it_is_known(
    tmp_path, at_peak, share
):
    due: Any = SimpleNamespace(first=0, line=lambda step: True)
    with closing(Journal(tmp_path, 0)) as journal:
        log = RunLog(journal, due, torch.device("cpu"), None, None, 0, at_peak)
        log.training(runs.numbers(2, seconds=0.4, step_tokens=128, real_tokens=512))
        journal.sync()
    (line,) = lines(tmp_path, "train")
    assert line["mfu"] == (None if share is None else pytest.approx(share))


def test_a_status_that_the_disk_refuses_is_an_event_and_told_later(tmp_path, monkeypatch):
    journal = Journal(tmp_path, 0)
    with closing(journal):
        journal.status(step=1)
        with monkeypatch.context() as full:
            full.setattr("llmtrain.system.os.fsync", _refuse)
            journal.status(checkpoint="step-00000004")
            journal.status(step=2)
        assert status(tmp_path)["checkpoint"] is None
        journal.status(step=3)
        assert (status(tmp_path)["checkpoint"], status(tmp_path)["step"]) == ("step-00000004", 3)
        assert [line["event"] for line in lines(tmp_path, "event")] == ["status_not_written"]


def test_an_end_that_cannot_be_recorded_is_a_failure_of_the_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path, 0)
    with closing(journal):
        journal.status(step=1)
        monkeypatch.setattr("llmtrain.system.os.fsync", _refuse)
        with pytest.raises(RunError) as caught:
            journal.end("finished", 0, None)
        monkeypatch.undo()
    assert caught.value.exit_code == 74


def _refuse(_):
    raise OSError(28, "No space left on device")


def test_a_record_that_the_disk_refuses_still_leaves_a_status_that_says_how_it_ended(
    tmp_path, monkeypatch
):
    with closing(Journal(tmp_path, 0)) as journal:
        monkeypatch.setattr(Lines, "sync", refused)
        with pytest.raises(RunError, match="no room"):
            journal.end("failed", 74, "three saves")
        monkeypatch.undo()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 74)


def refused(_lines):
    raise RunError("no room", 74, "")


def test_a_run_whose_lock_another_has_ends_with_75_an_event_and_no_word_in_its_status(tmp_path):
    lock: Any = SimpleNamespace(lost=None, made_again=0, keep=lambda: None)
    with closing(Journal(tmp_path, 0, lock)) as journal:
        journal.status(step=1)
        journal.check_lock()
        lock.made_again = 1
        journal.check_lock()
        journal.check_directory()
        lock.lost = "in use by pid 12 on host there"
        for check in (journal.check_lock, journal.check_directory):
            with pytest.raises(RunError, match="in use by pid 12 on host there") as caught:
                check()
            assert caught.value.exit_code == 75
        journal.status(step=2)
        journal.end("failed", 75, "lost")
    assert journal.exit_code == 75
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 1)
    events = [line["event"] for line in lines(tmp_path, "event")]
    assert events == ["lock_made_again", "lock_lost", "lock_lost"]
    assert lines(tmp_path, "end") == []


def test_a_run_directory_that_was_deleted_is_there_again_before_a_save(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("run: {}\n")
    with RunLock(run_dir, "one", beat_seconds=60) as lock:
        start_status(run_dir, run_id="one", strategy="ddp", world_size=1)
        with closing(Journal(run_dir, 0, lock)) as journal:
            journal.write("start", 0, run_id="one")
            journal.keep_files()
            journal.check_directory()
            assert lines(run_dir, "event") == []
            shutil.rmtree(run_dir)
            journal.step = 8
            journal.status(step=8)  # refused, and no reason to end
            journal.check_directory()
            journal.check_directory()
            assert (run_dir / "config.yaml").read_text() == "run: {}\n"
            assert (status(run_dir)["run_id"], status(run_dir)["step"]) == ("one", 8)
            assert read_lock(run_dir / "lock").pid == os.getpid()
    first, *rest = jsonl.record(run_dir)
    assert (first["kind"], first["run_id"]) == ("start", "one")
    assert [(line["event"], line["detail"]) for line in rest] == [
        ("lock_made_again", {}),
        ("files_restored", {"files": ["config.yaml", "status.json", "metrics.jsonl"]}),
    ]


def test_a_run_directory_that_cannot_be_made_again_ends_the_run_with_74(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    lock: Any = SimpleNamespace(lost=None, made_again=0, keep=lambda: None)
    with closing(Journal(run_dir, 0, lock)) as journal:
        (run_dir / "config.yaml").touch()
        journal.keep_files()
        shutil.rmtree(run_dir)
        run_dir.write_bytes(b"in the way")
        with pytest.raises(RunError, match=str(run_dir)) as caught:
            journal.check_directory()
    assert caught.value.exit_code == 74


def evaluated(loss, **sources):
    return Evaluation(loss, math.exp(loss), 1.5, 100, 400, 3, 0.25, sources)


def recorded(folder, losses, last=None, **settings):
    """What is due and logged behind evaluations at steps 0, 10, 20 …"""
    periods = {"evaluate_every": 10, "save_every": 1000, "log_every": 1, "steps": 1000}
    due = Due(first=0, last_evaluation=None, heldout=True, data_ended=False, **periods, **settings)
    with closing(Journal(folder, 0)) as journal:
        log = RunLog(journal, due, torch.device("cpu"), last, None, 0)
        for k, loss in enumerate(losses):
            log.evaluation(10 * k, evaluated(loss))
    return due, log


PAIRS = {
    "pairs": 4,
    "accuracy": 0.875,
    "margin": 0.75,
    "chosen_reward": 0.5,
    "rejected_reward": -0.25,
    "chosen_logp": -20.0,
    "rejected_logp": -25.0,
    "chosen_loss": 2.0,
}


def test_lines_of_a_run_on_pairs_have_their_figures_and_no_perplexity(tmp_path, capfd):
    due = Due(
        first=0,
        last_evaluation=None,
        heldout=True,
        data_ended=False,
        evaluate_every=10,
        save_every=1000,
        log_every=1,
        steps=1000,
    )
    part = Evaluation(0.6, None, None, 100, 0, 3, 0.0, pairs=PAIRS)
    whole = replace(part, sources={"a": part, "b": replace(part, pairs={**PAIRS, "pairs": 3})})
    with closing(Journal(tmp_path, 0)) as journal:
        log = RunLog(journal, due, torch.device("cpu"), None, None, 0)
        log.training(runs.numbers(1, loss=0.7, pairs=PAIRS))
        log.evaluation(10, whole)
        journal.sync()
    (train,) = lines(tmp_path, "train")
    assert PAIRS.items() <= train.items()
    evaluations = lines(tmp_path, "eval")
    assert [one["split"] for one in evaluations] == ["heldout", "heldout/a", "heldout/b"]
    assert [one["pairs"] for one in evaluations] == [4, 4, 3]
    assert PAIRS.items() <= evaluations[0].items()
    assert (evaluations[0]["perplexity"], evaluations[0]["bits_per_byte"]) == (None, None)
    assert "sources" not in evaluations[0]
    shown = capfd.readouterr().err
    assert "loss=0.7 pairs=4 accuracy=0.875 margin=0.75" in shown
    assert "split=heldout loss=0.6 pairs=4 accuracy=0.875 margin=0.75 documents=3" in shown


def test_a_loss_that_is_not_lower_costs_patience(tmp_path):
    due, log = recorded(tmp_path, [3.0, 2.0, 2.0, 2.5], patience=3)
    assert due.without_gain == 2
    assert log.last_evaluation == {"step": 30, "loss": 2.5, "best": 2.0}
    assert not due.stop(30)
    due, _ = recorded(tmp_path, [3.0, 2.0, 2.0, 2.5, math.nan], patience=3)
    assert due.stop(40)
    assert due.ended_by(40) == "patience"


def test_what_an_earlier_start_measured_counts(tmp_path):
    before = {"step": 5, "loss": 3.0, "best": 2.0}
    due, log = recorded(tmp_path, [2.5], before, patience=3, without_gain=1, keep_best=True)
    assert due.without_gain == 2
    assert log.last_evaluation["best"] == 2.0
    assert not due.begins(0)


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path):
    due, log = recorded(tmp_path, [math.inf, math.nan], keep_best=True)
    assert (due.without_gain, log.last_evaluation["best"]) == (2, None)
    due, _ = recorded(tmp_path, [math.nan, 4.0], keep_best=True)
    assert due.begins(10)


def test_each_source_has_a_line_of_its_own(tmp_path):
    chat = replace(evaluated(1.0), bits_per_byte=None, seconds=0.0)
    with closing(Journal(tmp_path, 0)) as journal:
        log = RunLog(journal, SimpleNamespace(record_evaluation=_accept), None, None, None, 0)
        log.evaluation(10, evaluated(2.0, **{"a.parquet": evaluated(3.0), "b": chat}))
    found = lines(tmp_path, "eval")
    assert [line["split"] for line in found] == ["heldout", "heldout/a.parquet", "heldout/b"]
    assert [line["loss"] for line in found] == [2.0, 3.0, 1.0]
    assert [line["bits_per_byte"] for line in found] == [1.5, 1.5, None]
    fields = {"split", "loss", "perplexity", "bits_per_byte", "tokens", "bytes", "documents"}
    assert all(line.keys() == {"kind", "time", "step", "seconds", *fields} for line in found)


def _accept(step, *, lower):
    assert lower


def test_a_graph_after_the_first_evaluation_is_an_event(tmp_path, monkeypatch):
    """Graphs of the first steps and of the first evaluation are what a start needs."""
    count = 3  # compiled while the run was opened
    monkeypatch.setattr("llmtrain.training.journal.graphs", lambda: count)
    due: Any = SimpleNamespace(
        first=4, line=lambda step: False, record_evaluation=lambda step, lower: None
    )
    found = Evaluation(2.0, 7.4, 1.0, 10, 10, 1, 0.1)
    with closing(Journal(tmp_path, 0)) as journal:
        log = RunLog(journal, due, torch.device("cpu"), None, None, 0)
        count = 4
        log.training(runs.numbers(5))
        log.training(runs.numbers(6))
        count = 5
        log.evaluation(6, found)
        log.training(runs.numbers(7))
        count = 7
        log.training(runs.numbers(8))
        count = 8
        log.evaluation(8, found)
        log.training(runs.numbers(9))
        journal.sync()
    events = [line for line in lines(tmp_path, "event") if line["event"] == "compiled_again"]
    assert [(one["step"], one["detail"]) for one in events] == [
        (8, {"graphs": 2}),
        (8, {"graphs": 1}),
    ]
