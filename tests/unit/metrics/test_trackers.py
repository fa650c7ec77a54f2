import errno
import importlib.util
import json
import re
import threading
import time
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import get_args

import pytest
from helpers.ranks import until
from helpers.rings import needs

from llmtrain.config.schema import TrackerName
from llmtrain.errors import RunError, UserError
from llmtrain.metrics import trackers
from llmtrain.metrics.trackers import OpenTracker, check_installed, open_trackers

ROOT = Path(__file__).parents[3]
IDS = "trackers.json"
CONFIG = {"run": {"dir": "runs/a", "seed": 1}, "logging": {"trackers": ["tensorboard"]}}


class Fake:
    """A tracker that remembers, and fails while it is told to."""

    def __init__(self):
        self.logged, self.fails, self.closed = [], False, False

    def log(self, values, step=None):
        if self.fails:
            raise ConnectionError("no route")
        self.logged.append((step, values))

    def finish(self):
        if self.fails:
            raise ConnectionError("no route")
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    tracker = Fake()
    opens(monkeypatch, lambda *_: tracker)
    return tracker


def opens(monkeypatch, opened):
    """Open a fake tracker: what opened(name, case) returns."""
    found = lambda name, case, failed: OpenTracker(opened(name, case), "https://example.org/me/a")  # noqa: E731
    monkeypatch.setattr(trackers, "open_service", found)
    monkeypatch.setattr(trackers, "check_installed", lambda names: None)


@pytest.fixture
def events():
    return []


def opened(tmp_path, events, names=("wandb",)):
    return open_trackers(names, tmp_path / IDS, CONFIG, 0, lambda *event: events.append(event))


def test_names_are_the_kind_and_the_field_of_the_metrics(tmp_path, fake, events):
    fields = {
        "loss": 2.5,
        "skipped": True,
        "sources": {"sample": 7},
        "batch_digest": "ff",
        "x": None,
    }
    opened(tmp_path, events).log("train", 3, fields)
    assert fake.logged == [
        (3, {"train/loss": 2.5, "train/skipped": 1.0, "train/sources/sample": 7})
    ]


def test_the_text_of_a_sample_goes_up_too(tmp_path, fake, events):
    opened(tmp_path, events).log("sample", 3, {"prompt": "The", "text": " sea"})
    assert fake.logged == [(3, {"sample/text": " sea"})]


def test_a_failing_tracker_is_one_event_and_is_tried_again_after_100_logs(tmp_path, fake, events):
    run = opened(tmp_path, events)
    run.log("train", 1, {"loss": 1.0})
    fake.fails = True
    for step in range(2, 402):
        run.log("train", step, {"loss": 1.0})
    assert events == [
        ("tracker_failed", {"tracker": "wandb", "error": "ConnectionError: no route"})
    ]
    fake.fails = False
    for step in range(402, 502):
        run.log("train", step, {"loss": 1.0})
    assert events[1:] == [("tracker_recovered", {"tracker": "wandb"})]
    assert [step for step, _ in fake.logged] == [1, *range(402, 502)]


def test_a_tracker_that_cannot_be_opened_is_opened_later(tmp_path, fake, events, monkeypatch):
    def refuse(*_):
        raise OSError("no key")

    opens(monkeypatch, refuse)
    run = opened(tmp_path, events)
    for step in range(1, 100):
        run.log("train", step, {"loss": 1.0})
    opens(monkeypatch, lambda *_: fake)
    for step in range(100, 103):
        run.log("train", step, {"loss": 1.0})
    run.close()
    assert [step for step, _ in fake.logged] == [100, 101, 102]
    assert [event for event, _ in events] == ["tracker_failed", "tracker_recovered"]
    assert fake.closed


def test_a_tracker_that_never_answers_is_waited_for_once(tmp_path, fake, events, monkeypatch):
    answers = threading.Event()

    def hang(*_):
        answers.wait()
        return fake

    opens(monkeypatch, hang)
    monkeypatch.setattr(trackers, "PATIENCE_SECONDS", 0.3)
    begun = time.monotonic()
    run = opened(tmp_path, events, names=("wandb", "mlflow", "trackio"))
    for step in range(1, 301):
        run.log("train", step, {"loss": 1.0})
    assert 0.3 <= time.monotonic() - begun < 3
    assert [detail for event, detail in events if event == "tracker_failed"] == [
        {"tracker": name, "error": "TimeoutError: no answer in 0.3 s"}
        for name in ("wandb", "mlflow", "trackio")
    ]
    answers.set()
    until(lambda: all(one._opening.done() for one in run._trackers), "the answers")
    for step in range(301, 402):
        run.log("train", step, {"loss": 1.0})
    assert [event for event, _ in events[3:]] == ["tracker_recovered"] * 3
    assert {step for step, _ in fake.logged} == {400, 401}


def test_a_tracker_that_fails_at_the_end_does_not_raise(tmp_path, fake, events):
    run = opened(tmp_path, events)
    fake.fails = True
    run.close()
    assert [event for event, _ in events] == ["tracker_failed"]


def test_a_resumed_run_keeps_its_ids(tmp_path, events, monkeypatch):
    seen = []
    opens(monkeypatch, lambda _, case: seen.append(case.run_id) or Fake())
    opened(tmp_path, events)
    opened(tmp_path, events)
    assert seen[0] == seen[1] == json.loads((tmp_path / IDS).read_text())["wandb"]


@pytest.mark.parametrize("names", [["wandb"], ["tensorboard", "mlflow"], ["trackio"]])
def test_a_missing_package_is_said_with_the_command_that_cures_it(names, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        check_installed(names)
    assert "pip install 'llmtrain[trackers]'" in str(caught.value)
    assert ", ".join(names) in str(caught.value)
    check_installed([])


def test_every_tracker_is_in_the_extra_that_is_named(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in get_args(TrackerName):
        with pytest.raises(UserError) as caught:
            check_installed([name])
        (extra,) = re.findall(r"llmtrain\[(\w+)\]", str(caught.value))
        packages = project["optional-dependencies"][extra]
        assert any(one.startswith((f"{name}>=", f"{name}-skinny>=")) for one in packages)


def test_a_directory_of_that_name_is_no_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(UserError, match="wandb"):
        check_installed(["wandb"])


def test_the_address_is_a_line_at_the_start_without_its_password(tmp_path, events, monkeypatch):
    lines = []
    address = "https://me:hunter2@host/#/experiments/1/runs/2"
    monkeypatch.setattr(trackers, "open_service", lambda *_: OpenTracker(Fake(), address))
    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    monkeypatch.setattr(trackers._log, "info", lambda text, *values: lines.append(text % values))
    opened(tmp_path, events, names=("mlflow",))
    assert lines == ["tracker   mlflow: https://***@host/#/experiments/1/runs/2"]


def test_secrets_do_not_go_up(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a9b")
    given, fake, events = [], Fake(), []
    opens(monkeypatch, lambda _, case: given.append(case.config) or fake)
    config = {"model.from": "https://me:hunter2@host/model", "run.dir": "runs/canary-7f3a9b"}
    run = open_trackers(
        ["wandb"],
        tmp_path / IDS,
        config | {"hf_token": "x"},
        0,
        lambda *event: events.append(event),
    )
    run.log("sample", 3, {"prompt": "The", "text": " sea canary-7f3a9b"})
    assert given == [
        {"model.from": "https://***@host/model", "run.dir": "runs/***", "hf_token": "***"}
    ]
    assert fake.logged == [(3, {"sample/text": " sea ***"})]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, events):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for first, last, start in ((1, 30, 0), (21, 40, 20)):  # killed at 30, resumed at 20
        names = ("tensorboard",)
        run = open_trackers(
            names, tmp_path / IDS, CONFIG, start, lambda *event: events.append(event)
        )
        for step in range(first, last + 1):
            run.log("train", step, {"loss": float(step + 100 * start)})
        run.close()
    assert events == []
    scalars = read_scalars(tmp_path / "tensorboard", "train/loss")
    assert [step for step, _ in scalars] == list(range(1, 41))
    assert dict(scalars)[25] == 25 + 2000


@needs("wandb")
@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 3}', "\xff"])
def test_a_broken_file_of_ids_is_named(tmp_path, events, text):
    (tmp_path / IDS).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="delete it: trackers then begin new runs"):
        opened(tmp_path, events)
    assert (tmp_path / IDS).read_bytes() == text.encode("latin-1")


@needs("wandb")
def test_a_disk_that_takes_no_ids_is_said(tmp_path, events, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trackers.system, "write_durably", full)
    with pytest.raises(RunError, match="No space left") as raised:
        opened(tmp_path, events)
    assert raised.value.exit_code == 74


def read_scalars(directory, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


@pytest.fixture
def process_state():
    """accelerate's, which a run has before it opens a tracker."""
    from accelerate import PartialState

    there = bool(PartialState._shared_state)
    yield PartialState(cpu=True)
    if not there:
        PartialState._reset_state()


@pytest.mark.wide
@pytest.mark.usefixtures("process_state")
def test_wandb_is_resumed_under_its_id(tmp_path, events, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = opened(tmp_path, events)
    run.log("train", 1, {"loss": 1.0})
    kept = json.loads((tmp_path / IDS).read_text())["wandb"]
    assert (wandb.run.id, wandb.run.settings.resume) == (kept, "allow")
    assert wandb.run.project == "mine"
    assert wandb.config["run"]["seed"] == 1
    run.close()
    assert events == []
    assert any(kept in path.name for path in (tmp_path / "wandb").iterdir())


def test_an_evaluation_of_one_source_has_names_of_its_own(tmp_path, fake, events):
    run = opened(tmp_path, events)
    run.log("eval", 3, {"split": "heldout", "loss": 2.5})
    run.log("eval", 3, {"split": "heldout/a.parquet", "loss": 3.5, "bits_per_byte": None})
    assert fake.logged == [(3, {"eval/loss": 2.5}), (3, {"eval/a.parquet/loss": 3.5})]
