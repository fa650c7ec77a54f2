"""TensorBoard and Weights & Biases, through accelerate's trackers, on rank 0 only.

Names are `kind/field` of `metrics.jsonl`: `train/loss`, `eval/bits_per_byte`, and of one source
`eval/LABEL/loss`. Ids are kept in `trackers.json`, so a resumed run continues the same tracker
run. The trap: a tracker is an outside service. Its exceptions must never end the run: a failure is
reported as one event, and the tracker is tried again every 100 logs.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmtrain import durable
from llmtrain.config import secrets
from llmtrain.errors import Problem, UserError, needed_on_disk

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

RETRY_EVERY = 100

Name = Literal["tensorboard", "wandb"]
Report = Callable[[str, Mapping[str, object]], None]

_log = logging.getLogger(__name__)


class _Guarded:
    """One tracker, whose failures are reported as events and not raised."""

    def __init__(
        self, name: Name, open_tracker: Callable[[], GeneralTracker], report: Report
    ) -> None:
        self._name = name
        self._open = open_tracker
        self._report = report
        self._tracker: GeneralTracker | None = None
        self._failing = False
        self._to_skip = 0  # logs to skip before the next try: calling a dead service costs time
        self._works(self._get)

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._to_skip:
            self._to_skip -= 1
        elif self._works(lambda: self._get().log(values, step=step)) and self._failing:
            self._failing = False
            self._report("tracker_recovered", {"tracker": self._name})

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._works(tracker.finish)

    def _get(self) -> GeneralTracker:
        if self._tracker is None:
            self._tracker = self._open()
        return self._tracker

    def _works(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # an outside service may raise anything
            _log.warning("tracker %s failed", self._name, exc_info=True)
            self._to_skip = RETRY_EVERY - 1
            if not self._failing:
                self._failing = True
                detail = {"tracker": self._name, "error": f"{type(error).__name__}: {error}"}
                self._report("tracker_failed", detail)
            return False
        return True


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


def check_installed(names: Iterable[Name]) -> None:
    """Raise UserError if a tracker's package is missing. It imports nothing, so it is fast."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        expected, remedy = "an installed package of that name", "pip install 'llmtrain[trackers]'"
        raise UserError(Problem("logging.trackers", ", ".join(missing), expected, remedy))


def open_trackers(
    names: Sequence[Name], ids_file: Path, config: Mapping[str, Any], step: int, report: Report
) -> Trackers:
    """Open the trackers of a run, or continue those that an earlier start opened.

    ids_file: in the run directory; TensorBoard and Weights & Biases write to that directory, too
    step: the last finished step; TensorBoard drops what an earlier start wrote after it
    report: called as report(event, detail) for a failure and for a recovery

    May be called only after `Accelerator()`, whose process state accelerate's trackers need. Raises
    UserError for a missing package or a broken `ids_file`, RunError (74) if that cannot be written.
    """
    check_installed(names)
    ids, run_dir = _ids(names, ids_file), ids_file.parent
    hide = secrets.hider(os.environ)
    secretless = secrets.hidden(config, hide)
    openers: dict[Name, Callable[[], GeneralTracker]] = {
        "tensorboard": lambda: _open_tensorboard(run_dir, secretless, step),
        "wandb": lambda: _open_wandb(run_dir, ids["wandb"], secretless),
    }
    return Trackers([_Guarded(name, openers[name], report) for name in names], hide)


def _ids(names: Sequence[Name], path: Path) -> dict[str, str]:
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


def _open_tensorboard(run_dir: Path, config: Mapping[str, Any], step: int) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    # purge_step: drop what a killed start logged after the checkpoint; redone steps log it again.
    tracker = TensorBoardTracker("tensorboard", str(run_dir), purge_step=step + 1)
    tracker.start()
    # As text, because TensorBoard's hyperparameters would add a run to its list at every start.
    text = json.dumps(config, indent=2, ensure_ascii=False).replace("\n", "\n    ")
    tracker.log({"config": f"    {text}"}, step=step)
    return tracker


def _open_wandb(run_dir: Path, run_id: str, config: Mapping[str, Any]) -> GeneralTracker:
    from accelerate.tracking import WandBTracker

    tracker = WandBTracker(
        "llmtrain",
        id=run_id,
        name=run_dir.name,
        dir=str(run_dir),
        resume="allow",
        settings={"console": "off"},  # it would record the progress line, frame by frame
    )
    tracker.start()
    tracker.store_init_configuration(dict(config))
    return tracker


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
