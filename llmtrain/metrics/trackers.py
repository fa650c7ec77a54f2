"""TensorBoard, Weights & Biases, MLflow and trackio, on rank 0 only.

Names are `kind/field` of `metrics.jsonl`: `train/loss`, `eval/bits_per_byte`, and of one source
`eval/LABEL/loss`. Ids are kept in `trackers.json`, so a resumed run continues the same tracker
run. All four write into the run directory, unless the tracker's own variables say otherwise.

The trap: a tracker is an outside service. Its library may write to stdout, ask its maker's server
for something or wait for minutes. Its exceptions must never end the run: a failure is reported as
one event, and the tracker is tried again every 100 logs. One that never answers is waited for once,
and then opened beside the run.

TensorBoard and Weights & Biases go through accelerate's trackers. MLflow and trackio do not:
accelerate's MLflow tracker works on the one run and address of the process, so that a second run in
a notebook would go to the store of the first, and it fails where a resume has changed a value of
the config. Its trackio tracker adds a value of its own to the config, and trackio keeps a finished
run as its current one.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from llmtrain import system
from llmtrain.config import secrets
from llmtrain.config.schema import TrackerName
from llmtrain.errors import Problem, UserError, needed_on_disk
from llmtrain.system import begin_in_thread
from llmtrain.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


_PROJECT = "llmtrain"

# Nothing is sent to MLflow's makers; a store of files is allowed, since one of SQLite takes 2.6 s
# to open and four times as long for each line; a server that is away costs seconds, not minutes.
_MLFLOW_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_MLFLOW_ID = "llmtrain.id"  # a tag, since MLflow chooses the id of a run itself
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]", re.ASCII)
_AT_ONCE, _LONGEST = 100, 6000  # params in a call; characters of one


class Service(Protocol):
    """What takes the values of a run."""

    def log(self, values: JsonObject, step: int | None = None) -> object:
        """Take the values of a step."""

    def finish(self) -> object:
        """Write what is still in memory, and end."""


@dataclass(frozen=True, slots=True)
class OpenTracker:
    """A tracker's run. address: where a person finds it, a URL or a directory."""

    service: Service
    address: str


@dataclass(frozen=True, slots=True)
class Case:
    """What a tracker is told about the run.

    run_id: the tracker's id of it, the same at every start
    name: for people
    config: values by key, without secrets
    step: the last finished step
    """

    run_dir: Path
    run_id: str
    name: str
    config: JsonMapping
    step: int


def open_service(name: TrackerName, case: Case, failed: Callable[[str], None]) -> OpenTracker:
    """Open a tracker's run, or continue it. Raises whatever the tracker's library raises.

    failed: called with the reason of a failure that the library does not raise
    """
    match name:
        case "tensorboard":
            from accelerate.tracking import TensorBoardTracker

            # purge_step: drop what a killed start logged after the checkpoint: it is logged again.
            tracker = TensorBoardTracker("tensorboard", str(case.run_dir), purge_step=case.step + 1)
            tracker.start()
            # As text: TensorBoard's hyperparameters would add a run to its list at every start.
            text = json.dumps(case.config, indent=2, ensure_ascii=False).replace("\n", "\n    ")
            tracker.log({"config": f"    {text}"}, step=case.step)
            return OpenTracker(tracker, str(case.run_dir / "tensorboard"))
        case "wandb":
            return _open_wandb(case)
        case "mlflow":
            for variable, value in _MLFLOW_VARIABLES.items():
                os.environ.setdefault(variable, value)
            from mlflow import MlflowClient

            here = case.run_dir.absolute() / "mlruns"
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            client = MlflowClient(uri or here.as_uri())
            run = _mlflow_run(client, case)
            run_id, experiment_id = run.info.run_id, run.info.experiment_id
            _keep_config(client, run, case.config)
            page = f"/#/experiments/{experiment_id}/runs/{run_id}"
            address = (
                f"{uri.rstrip('/')}{page}" if uri and uri.startswith("http") else uri or str(here)
            )
            return OpenTracker(_MLflow(client, run_id), address)
        case "trackio":
            return _open_trackio(case, failed)
    assert_never(name)


def _open_wandb(case: Case) -> OpenTracker:
    from accelerate.tracking import WandBTracker

    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT") or _PROJECT,
        id=case.run_id,
        name=case.name,
        dir=str(case.run_dir),
        resume="allow",
        settings={"console": "off"},  # it would record the progress line, frame by frame
    )
    tracker.start()
    tracker.store_init_configuration(dict(case.config))
    run = tracker.tracker
    return OpenTracker(tracker, str(Path(run.dir).parent) if run.offline else run.url)


class _MLflow:
    """A run in MLflow. It takes numbers only."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def log(self, values: JsonObject, step: int | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # noqa: TID251 a time stamp
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        metrics = [Metric(_allowed(name), value, now, step) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _allowed(name: str) -> str:
    """Return the name of a metric as MLflow takes it: names of sources may have other signs."""
    return posixpath.normpath(_NOT_IN_NAMES.sub("_", name))


def _mlflow_run(client: MlflowClient, case: Case) -> Run:
    """Return the run that has our id as a tag, or a new one with it.

    So a kill between the making of a run and the writing of its id leaves no second run.
    """
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
    existing = client.get_experiment_by_name(name)
    experiment = existing.experiment_id if existing else client.create_experiment(name)
    tagged = f"tags.`{_MLFLOW_ID}` = '{case.run_id}'"
    for run in client.search_runs([experiment], tagged, max_results=1):
        client.update_run(run.info.run_id, status="RUNNING")
        return run
    return client.create_run(experiment, run_name=case.name, tags={_MLFLOW_ID: case.run_id})


def _keep_config(client: MlflowClient, run: Run, config: JsonMapping) -> None:
    """Write the config as params, and values that a resume has changed as tags.

    MLflow never changes a param.
    """
    from mlflow.entities import Param, RunTag

    known = run.data.params
    values = {_allowed(key): str(value)[:_LONGEST] for key, value in config.items()}
    params = [Param(key, value) for key, value in values.items() if key not in known]
    changed = [
        RunTag(f"changed.{key}", value)
        for key, value in values.items()
        if known.get(key, value) != value
    ]
    for i in range(0, max(len(params), len(changed)), _AT_ONCE):
        part = slice(i, i + _AT_ONCE)
        client.log_batch(run.info.run_id, params=params[part], tags=changed[part])


class _Trackio:
    """A run in trackio, whose thread writes every half second.

    trackio raises nothing: it warns, in the log of rank 0, and remembers which warnings it gave.
    """

    def __init__(self, run: Any, failed: Callable[[str], None]) -> None:
        self._run = run
        self._failed = failed
        self._told: set[str] = set()

    def log(self, values: JsonObject, step: int | None = None) -> None:
        self._run.log(values, step=step)
        self._tell()

    def finish(self) -> None:
        with _printed():  # not `trackio.finish`, which knows only the run of its own thread
            self._run.finish()
        self._tell()

    def _tell(self) -> None:
        """Report the first warning. trackio is not waited for, so later values go there, too."""
        if not self._told and (warned := set(self._run._warned_failures)):
            self._told = warned
            self._failed(f"{', '.join(sorted(warned))}: trackio's warning is in logs/rank-0.log")


def _open_trackio(case: Case, failed: Callable[[str], None]) -> OpenTracker:
    with _variable("TRACKIO_DIR", str(case.run_dir.absolute() / "trackio")), _printed():
        import trackio

        run = trackio.init(
            _PROJECT,
            name=f"{case.name}-{case.run_id}",  # the name is what trackio knows a run by
            resume="allow",
            config=dict(case.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    return OpenTracker(_Trackio(run, failed), run.url or str(trackio.utils.TRACKIO_DIR))


def _variable(name: str, value: str) -> AbstractContextManager[None]:
    """Set a variable for a while, unless it is set.

    trackio reads TRACKIO_DIR when it is imported: later runs of a process share that directory.
    """
    from accelerate.utils import patch_environment

    setting: AbstractContextManager[None] = patch_environment(
        **{name: os.environ.get(name) or value}
    )
    return setting


@contextmanager
def _printed() -> Iterator[None]:
    """Keep what a library prints on stdout, which belongs to commands, for the log."""
    with redirect_stdout(io.StringIO()) as output:
        yield
    logging.getLogger("trackio").info("%s", output.getvalue().strip())


RETRY_EVERY = 100
PATIENCE_SECONDS = 15.0  # for all trackers of a start together; then the run goes on without them
_LOCAL = ("tensorboard",)  # written by this process alone, so there is nobody to wait for

Report = Callable[[str, Mapping[str, object]], None]

_log = logging.getLogger(__name__)


class _Guarded:
    """One tracker, whose failures are reported as events and not raised."""

    def __init__(self, name: TrackerName, case: Case, report: Report, until: float) -> None:
        """Open the tracker. until: of `time.monotonic`, when its answer is no longer waited for."""
        self.name = name
        self._until = until
        self._opening: Future[OpenTracker] | None = None
        self._case = case
        self._report = report
        self._opened: OpenTracker | None = None
        self._failing = False
        self._to_skip = 0  # logs to skip before the next try: calling a dead service costs time
        self._works(self._get)

    def log(self, values: JsonObject, step: int) -> None:
        if self._to_skip:
            self._to_skip -= 1
        elif self._works(lambda: self._get().service.log(values, step=step)) and self._failing:
            self._failing = False
            self._report("tracker_recovered", {"tracker": self.name})

    def close(self) -> None:
        if (opened := self._opened) is not None:
            self._works(opened.service.finish)

    @property
    def address(self) -> str | None:
        """Where a person finds the tracker's run; None if it could not be opened so far."""
        return self._opened.address if self._opened else None

    def _get(self) -> OpenTracker:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> OpenTracker:
        """Open the tracker in a thread of its own, which may hang; a later call asks it again."""
        work = partial(open_service, self.name, self._case, self._failed)
        if self.name in _LOCAL:
            return work()
        if self._opening is None:
            self._opening = begin_in_thread(work, f"tracker-{self.name}")
        try:
            return self._opening.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            if self._opening.done():  # it is the service's own
                self._opening = None
                raise
            raise TimeoutError(f"no answer in {PATIENCE_SECONDS:g} s") from None
        except Exception:
            self._opening = None
            raise

    def _works(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # an outside service may raise anything
            _log.warning("tracker %s failed", self.name, exc_info=True)
            self._to_skip = RETRY_EVERY - 1
            if not self._failing:
                self._failing = True
                self._failed(f"{type(error).__name__}: {error}")
            return False
        return True

    def _failed(self, error: str) -> None:
        self._report("tracker_failed", {"tracker": self.name, "error": error})


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Sequence[_Guarded], hide: secrets.Hide) -> None:
        self._trackers = trackers
        self._hide = hide

    def log(self, kind: str, step: int, fields: Mapping[str, object]) -> None:
        """Send a line of `metrics.jsonl` to every tracker: its numbers, and a sample's text."""
        source = str(fields.get("split", "")).removeprefix("heldout").lstrip("/")
        flat = _flat(f"{kind}/{source}" if source else kind, fields)
        if values := secrets.hidden(flat, self._hide):
            for tracker in self._trackers:
                tracker.log(values, step)

    def close(self) -> None:
        """Close every tracker. A failure is reported as an event."""
        for tracker in self._trackers:
            tracker.close()


def check_installed(names: Iterable[TrackerName]) -> None:
    """Raise UserError if a tracker's package is missing. It imports nothing, so it is fast."""
    # A directory without code, such as the `wandb` of an earlier run, has no origin.
    specs = {name: importlib.util.find_spec(name) for name in names}
    if missing := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        expected, remedy = "an installed package of that name", "pip install 'llmtrain[trackers]'"
        raise UserError(Problem("logging.trackers", ", ".join(missing), expected, remedy))


def open_trackers(
    names: Sequence[TrackerName], ids_file: Path, config: JsonMapping, step: int, report: Report
) -> Trackers:
    """Open the trackers of a run, or continue those that an earlier start opened.

    ids_file: in the run directory, to which the trackers write, too
    step: the last finished step; TensorBoard drops what an earlier start wrote after it
    report: called as report(event, detail) for a failure and for a recovery

    May be called only after `Accelerator()`, whose process state accelerate's trackers need. Raises
    UserError for a missing package or a broken `ids_file`, RunError (74) if that cannot be written.
    """
    check_installed(names)
    ids, run_dir = _ids(names, ids_file), ids_file.parent
    hide = secrets.hider(os.environ)
    name, values = hide(run_dir.name), secrets.hidden(config, hide)
    until = time.monotonic() + PATIENCE_SECONDS
    trackers = [
        _Guarded(one, Case(run_dir, ids[one], name, values, step), report, until) for one in names
    ]
    for one in trackers:
        if one.address:
            _log.info("tracker   %s: %s", one.name, hide(one.address))
    return Trackers(trackers, hide)


def _ids(names: Sequence[TrackerName], path: Path) -> dict[str, str]:
    """Return one id for each tracker, from an earlier start or new.

    New ids are written before their first use, so that after a kill in between the next start does
    not open a second tracker run. Raises UserError if the file is not one of ours, RunError (74) if
    it cannot be written.
    """
    try:
        earlier = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or not all(isinstance(one, str) for one in earlier.values()):
        expected = "a JSON object of trackers' ids, as this program has written there"
        remedy = "restore it, or delete it: trackers then begin new runs of their own"
        raise UserError(Problem(str(path), None, expected, remedy))
    ids = earlier | {name: uuid.uuid4().hex[:12] for name in names if name not in earlier}
    if ids != earlier:
        with needed_on_disk(path):
            system.write_durably(path, (json.dumps(ids, indent=2) + "\n").encode())
    return ids


def _flat(prefix: str, fields: Mapping[str, object]) -> JsonObject:
    """Return numbers and a sample's text by `kind/field`, nested ones by `kind/field/name`."""
    flat: JsonObject = {}
    for key, value in fields.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            flat |= _flat(name, value)
        elif isinstance(value, (bool, int, float)):
            flat[name] = float(value) if isinstance(value, bool) else value
        elif name == "sample/text":
            flat[name] = value
    return flat
