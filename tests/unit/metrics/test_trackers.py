import errno
import importlib.util
import json
import logging
import os
import re
import socket
import threading
import time
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from helpers.ranks import until
from helpers.rings import needs

from llmtrain.config.schema import TrackerName
from llmtrain.errors import RunError, UserError
from llmtrain.metrics import trackers
from llmtrain.metrics.trackers import (
    Case,
    OpenTracker,
    check_installed,
    open_service,
    open_trackers,
)

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
    assert 0.3 <= time.monotonic() - begun < 6
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


# MLflow and trackio with real stores in `tmp_path`, and without a network.
FLAT_CONFIG = {
    "run.dir": "runs/a",
    "optimizer.learning_rate": 0.1,
    "evaluation.prompts": ["The sea"],
}


class MLflow:
    """MLflow's own reader of a store."""

    name = "mlflow"

    def __init__(self, directory):
        self.directory = directory / "mlruns"

    def runs(self):
        from mlflow import MlflowClient

        client = MlflowClient(self.directory.as_uri())
        experiment = client.get_experiment_by_name("llmtrain")
        return [self._run(client, run) for run in client.search_runs([experiment.experiment_id])]

    def _run(self, client, run):
        history = [
            (metric.step, key, metric.value)
            for key in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, key)
        ]
        config = run.data.params | {
            key.removeprefix("changed."): value
            for key, value in run.data.tags.items()
            if key.startswith("changed.")
        }
        return SimpleNamespace(
            name=run.info.run_name,
            id=run.data.tags["llmtrain.id"],
            status=run.info.status,
            params=run.data.params,
            config=config,
            history=sorted(history, key=lambda one: one[:2]),
        )


class Trackio:
    """trackio's own reader of a store, of the runs that one test has made."""

    name = "trackio"

    def __init__(self, directory):
        self.prefix = directory.name + "-"

    def runs(self):
        import trackio

        made = [run for run in trackio.Api().runs("llmtrain") if run.name.startswith(self.prefix)]
        return [self._run(run) for run in made]

    def _run(self, run):
        import trackio

        lines = trackio.SQLiteStorage.get_logs("llmtrain", run.name, run_id=run.id)
        history = [
            (line["step"], key, value)
            for line in lines
            for key, value in line.items()
            if key not in ("step", "timestamp")
        ]
        return SimpleNamespace(
            name=run.name.rpartition("-")[0],
            id=run.name.rpartition("-")[2],
            config={key: str(value) for key, value in run.config.items()},
            history=sorted(history, key=lambda one: one[:2]),
        )


@pytest.fixture(scope="session")
def trackio_store(tmp_path_factory):
    """The directory that trackio has for this process, since it reads the variable once."""
    with trackers._variable("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio"))):
        trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    return trackio.utils.TRACKIO_DIR


@pytest.fixture(params=[MLflow, Trackio])
def store(request, tmp_path):
    if request.param is MLflow:
        pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    else:
        request.getfixturevalue("trackio_store")
    return request.param(tmp_path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail after a test in which somebody has asked for a connection to another machine."""
    for variable in ("HF_TOKEN", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in trackers._MLFLOW_VARIABLES.items():
        monkeypatch.setenv(variable, value)  # so that it is gone after the test
    asked, to_connect = [], socket.socket.connect

    def refuse(*arguments, **_):
        asked.append(arguments)
        raise OSError("there is no network in a test")

    def connect(one, address):
        # A socket in the file system leads to a process of this machine, as that of W&B.
        return (to_connect if one.family == socket.AF_UNIX else refuse)(one, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert asked == []


def opened_service(name, directory, events, config=FLAT_CONFIG, step=0):
    report = lambda *event: events.append(event)  # noqa: E731
    return open_trackers([name], directory / IDS, config, step, report)


@pytest.mark.wide
def test_values_arrive_by_the_names_of_the_metrics(store, tmp_path, events, capfd):
    run = opened_service(store.name, tmp_path, events)
    run.log("train", 1, {"loss": 2.5, "skipped": True, "sources": {"sample": 7}, "x": None})
    run.log("eval", 1, {"split": "heldout/a b*(1).parquet", "loss": 3.5})
    run.log("train", 2, {"loss": float("nan")})
    run.close()
    (found,) = store.runs()
    assert found.name == tmp_path.name
    label = "a b*(1).parquet" if store.name == "trackio" else "a b__1_.parquet"
    assert found.history[:4] == [
        (1, f"eval/{label}/loss", 3.5),
        (1, "train/loss", 2.5),
        (1, "train/skipped", 1.0),
        (1, "train/sources/sample", 7),
    ]
    step, name, value = found.history[4]
    assert (step, name) == (2, "train/loss")
    assert value is None or value != value
    assert found.config["evaluation.prompts"] == "['The sea']"
    assert events == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.wide
def test_the_run_goes_on_after_a_resume(store, tmp_path, events):
    for first, last in ((1, 30), (21, 40)):  # killed at 30, resumed at 20
        run = opened_service(store.name, tmp_path, events, step=first - 1)
        for step in range(first, last + 1):
            run.log("train", step, {"loss": float(step)})
        if last == 40 or store.name == "trackio":  # its thread cannot be killed from here
            run.close()
    (found,) = store.runs()
    assert found.id in (tmp_path / IDS).read_text()
    # Neither can delete a value: the redone steps are there twice.
    steps = sorted([*range(1, 31), *range(21, 41)])
    assert [step for step, name, _ in found.history if name == "train/loss"] == steps
    assert events == []


@pytest.mark.wide
def test_two_runs_of_one_name_stay_apart(store, tmp_path, events):
    for place in ("a", "b"):
        directory = tmp_path / place / tmp_path.name
        directory.mkdir(parents=True)
        run = opened_service(store.name, directory, events)
        run.log("train", 1, {"loss": 1.0})
        run.close()
    if store.name == "mlflow":  # each has a store of its own
        both = [*MLflow(tmp_path / "a" / tmp_path.name).runs()]
        both += MLflow(tmp_path / "b" / tmp_path.name).runs()
    else:
        both = store.runs()
    assert len({run.id for run in both}) == len(both) == 2


@pytest.mark.wide
def test_a_resume_may_change_the_config(store, tmp_path, events):
    for rate in (0.1, 0.2):
        config = {"run.dir": "x", "optimizer.learning_rate": rate, "data.long": "x" * 9000}
        run = opened_service(store.name, tmp_path, events, config)
        run.log("train", 1, {"loss": 1.0})
        run.close()
    assert events == []
    (found,) = store.runs()
    assert found.config["optimizer.learning_rate"] == "0.2"
    if store.name == "mlflow":
        assert found.params["optimizer.learning_rate"] == "0.1"
        assert found.status == "FINISHED"


@pytest.mark.wide
def test_nothing_secret_is_in_the_store(store, tmp_path, events, monkeypatch, request):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a9b")
    config = {"model.from": "https://me:hunter2@host/model", "run.dir": "runs/canary-7f3a9b"}
    run = opened_service(store.name, tmp_path, events, config | {"hf_token": "canary"})
    run.log("sample", 3, {"prompt": "The", "text": " sea canary-7f3a9b"})
    run.log("train", 3, {"loss": 1.0})
    run.close()
    (found,) = store.runs()
    assert found.config["model.from"] == "https://***@host/model"
    place = tmp_path if store.name == "mlflow" else request.getfixturevalue("trackio_store")
    written = b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())
    assert b"https://***@host/model" in written
    assert b"canary" not in written
    assert b"hunter2" not in written


@pytest.mark.wide
def test_mlflow_without_its_store_is_one_event_and_goes_on_when_it_is_back(tmp_path, events):
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    run, store = opened_service("mlflow", tmp_path, events), MLflow(tmp_path)
    run.log("train", 1, {"loss": 1.0})
    away = store.directory.rename(tmp_path / "away")
    for step in range(2, 302):
        run.log("train", step, {"loss": 1.0})
    ((event, detail),) = events
    assert (event, detail["tracker"]) == ("tracker_failed", "mlflow")
    away.rename(store.directory)
    for step in range(302, 402):
        run.log("train", step, {"loss": 1.0})
    run.close()
    assert events[1:] == [("tracker_recovered", {"tracker": "mlflow"})]
    (found,) = store.runs()
    assert [step for step, *_ in found.history] == [1, *range(302, 402)]


@pytest.mark.wide
def test_trackio_without_its_store_is_one_event(trackio_store, tmp_path, events):
    run = opened_service("trackio", tmp_path, events)
    away = trackio_store.rename(trackio_store.with_name("away"))
    trackio_store.write_text("a file, where trackio wants a directory")
    try:
        for step in range(1, 200):
            run.log("train", step, {"loss": 1.0})
        run.close()
    finally:
        trackio_store.unlink()
        away.rename(trackio_store)
    ((event, detail),) = events
    assert (event, detail["tracker"]) == ("tracker_failed", "trackio")
    assert "write-logs" in detail["error"]
    assert "rank-0.log" in detail["error"]


@pytest.mark.wide
def test_the_address_is_a_line_at_the_start(store, tmp_path, events, caplog):
    with caplog.at_level(logging.INFO, "llmtrain"):
        opened_service(store.name, tmp_path, events).close()
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("llm")]
    assert line.startswith(f"tracker   {store.name}: ")
    place = line.partition(": ")[2]
    assert os.path.isdir(place)  # noqa: PTH112 the line is text


@pytest.mark.wide
def test_mlflow_goes_where_its_variables_say(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "theirs").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    found = open_service("mlflow", Case(tmp_path / "a", "1", "a", {}, 0), pytest.fail)
    assert found.address == (tmp_path / "theirs").as_uri()
    client = mlflow.MlflowClient((tmp_path / "theirs").as_uri())
    assert len(client.search_runs([client.get_experiment_by_name("mine").experiment_id])) == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.wide
def test_what_mlflow_is_told_is_left_to_the_user_where_they_have_set_it(monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    open_service("mlflow", Case(tmp_path, "1", "a", {}, 0), pytest.fail)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_variable_is_set_for_a_while_unless_it_is_set(monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    with trackers._variable("TRACKIO_DIR", "ours"):
        assert os.environ["TRACKIO_DIR"] == "ours"
    assert "TRACKIO_DIR" not in os.environ
    monkeypatch.setenv("TRACKIO_DIR", "theirs")
    with trackers._variable("TRACKIO_DIR", "ours"):
        assert os.environ["TRACKIO_DIR"] == "theirs"
    assert os.environ["TRACKIO_DIR"] == "theirs"
