"""TensorBoard, Weights & Biases, MLflow and trackio, on rank 0 only.

Names are `kind/field` of `metrics.jsonl`: `train/loss`, `eval/bits_per_byte`, and of one source
`eval/LABEL/loss`. Ids are kept in `trackers.json`, so a resumed run continues the same tracker
run. The trap: a tracker is an outside service. Its exceptions must never end the run: a failure is
reported as one event, and the tracker is tried again every 100 logs. One that never answers is
waited for once, and then opened beside the run.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain import durable
from llmtrain.config import secrets
from llmtrain.config.schema import TrackerName
from llmtrain.errors import Problem, UserError, needed_on_disk
from llmtrain.metrics.services import Case, Opened, open_service
from llmtrain.processes import begin

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
        self._opening: Future[Opened] | None = None
        self._case = case
        self._report = report
        self._opened: Opened | None = None
        self._failing = False
        self._to_skip = 0  # logs to skip before the next try: calling a dead service costs time
        self._works(self._get)

    def log(self, values: dict[str, Any], step: int) -> None:
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

    def _get(self) -> Opened:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Opened:
        """Open the tracker in a thread of its own, which may hang; a later call asks it again."""
        work = partial(open_service, self.name, self._case, self._failed)
        if self.name in _LOCAL:
            return work()
        if self._opening is None:
            self._opening = begin(work, f"tracker-{self.name}")
        try:
            found = self._opening.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            if self._opening.done():  # it is the service's own
                self._opening = None
                raise
            raise TimeoutError(f"no answer in {PATIENCE_SECONDS:g} s") from None
        except Exception:
            self._opening = None
            raise
        return found

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
        if values := secrets.hidden(_flat(_prefix(kind, fields), fields), self._hide):
            for tracker in self._trackers:
                tracker.log(values, step)

    def close(self) -> None:
        """Close every tracker. A failure is reported as an event."""
        for tracker in self._trackers:
            tracker.close()


def check_installed(names: Iterable[TrackerName]) -> None:
    """Raise UserError if a tracker's package is missing. It imports nothing, so it is fast."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        expected, remedy = "an installed package of that name", "pip install 'llmtrain[trackers]'"
        raise UserError(Problem("logging.trackers", ", ".join(missing), expected, remedy))


def _is_installed(name: TrackerName) -> bool:
    found = importlib.util.find_spec(name)
    # A directory without code, such as the `wandb` of an earlier run, has no origin.
    return found is not None and found.origin is not None


def open_trackers(
    names: Sequence[TrackerName],
    ids_file: Path,
    config: Mapping[str, Any],
    step: int,
    report: Report,
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
    kept = _kept(path)
    ids = kept | {name: uuid.uuid4().hex[:12] for name in names if name not in kept}
    if ids != kept:
        with needed_on_disk(path):
            durable.write(path, (json.dumps(ids, indent=2) + "\n").encode())
    return ids


def _kept(path: Path) -> dict[str, str]:
    """Read the ids of earlier starts."""
    try:
        kept = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        kept = None
    if isinstance(kept, dict) and all(isinstance(one, str) for one in kept.values()):
        return kept
    expected = "a JSON object of trackers' ids, as this program has written there"
    remedy = "restore it, or delete it: trackers then begin new runs of their own"
    raise UserError(Problem(str(path), None, expected, remedy))


def _prefix(kind: str, fields: Mapping[str, object]) -> str:
    """Return the beginning of the names of a line's values: its kind, and its source if any."""
    source = str(fields.get("split", "")).removeprefix("heldout").lstrip("/")
    return f"{kind}/{source}" if source else kind


def _flat(prefix: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """Return numbers and a sample's text by `kind/field`, nested ones by `kind/field/name`."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            flat |= _flat(name, value)
        elif isinstance(value, (bool, int, float)):
            flat[name] = float(value) if isinstance(value, bool) else value
        elif name == "sample/text":
            flat[name] = value
    return flat
