"""MLflow and trackio with real stores in `tmp_path`, and without a network."""

import logging
import os
import socket
from types import SimpleNamespace

import pytest

from llmtrain.metrics import trackers
from llmtrain.metrics.trackers import Case, open_service, open_trackers

IDS = "trackers.json"
CONFIG = {"run.dir": "runs/a", "optimizer.learning_rate": 0.1, "evaluation.prompts": ["The sea"]}


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
    """Fail after a test in which somebody has asked for a connection."""
    for variable in ("HF_TOKEN", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in trackers._MLFLOW_VARIABLES.items():
        monkeypatch.setenv(variable, value)  # so that it is gone after the test
    asked = []

    def refuse(*arguments, **_):
        asked.append(arguments)
        raise OSError("there is no network in a test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert asked == []


@pytest.fixture
def events():
    return []


def opened(name, directory, events, config=CONFIG, step=0):
    report = lambda *event: events.append(event)  # noqa: E731
    return open_trackers([name], directory / IDS, config, step, report)


@pytest.mark.wide
def test_values_arrive_by_the_names_of_the_metrics(store, tmp_path, events, capfd):
    run = opened(store.name, tmp_path, events)
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
        run = opened(store.name, tmp_path, events, step=first - 1)
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
        run = opened(store.name, directory, events)
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
        run = opened(store.name, tmp_path, events, config)
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
    run = opened(store.name, tmp_path, events, config | {"hf_token": "canary"})
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
    run, store = opened("mlflow", tmp_path, events), MLflow(tmp_path)
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
    run = opened("trackio", tmp_path, events)
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
        opened(store.name, tmp_path, events).close()
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
