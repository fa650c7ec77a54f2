"""Measure a model: on the held-out set of its run, on other documents, on benchmark tasks.

Two figures, which differ:

    held-out set of a run     blocks, as the run scores them: its `eval` line again    packed.py
                              with any model, as if the run began with it              as_run.py
    any documents             each alone behind a begin token: lm-eval's figure        rolling.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.rundir import contents, record
from llmtrain.tools.use import documents, packed, rolling
from llmtrain.tools.use import tasks as benchmarks
from llmtrain.tools.use.as_run import OPTION, find_base, seen_by
from llmtrain.tools.use.load import open_model
from llmtrain.tools.use.packed import HeldOutOfRun, Told
from llmtrain.tools.use.target import KEY, Target, find
from llmtrain.types import Evaluation


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What was measured.

    model: the directory of the weights
    step: of a checkpoint; None for any other model
    split: `heldout`, or what `--data` named
    figures: None if only tasks were asked for
    tasks: task → metric → value
    as_run: the run as whose base the model was measured; None = as a model by itself
    """

    model: Path
    step: int | None
    split: str
    figures: Evaluation | None
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    as_run: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `llmtrain evaluate --json` prints."""
        found: dict[str, Any] = {"model": str(self.model), "step": self.step}
        if self.as_run is not None:
            found["as"] = str(self.as_run)
        if self.figures is not None:
            found |= {"kind": "eval", "split": self.split, **asdict(self.figures)}
            if not self.figures.sources:
                del found["sources"]
        shown = found | ({"tasks": self.tasks} if self.tasks else {})
        return {key: record.finite(value) for key, value in shown.items()}


def evaluate(
    model_or_run: str | Path,
    data: str | Path | None = None,
    *,
    as_run: str | Path | None = None,
    tasks: Sequence[str] = (),
    stride: int | None = None,
    chat: bool = False,
    told: Told = lambda done, of: None,
) -> Evaluated:
    """Measure a model, without training anything and without writing to its run.

    model_or_run: a run (its best checkpoint, else the newest), a checkpoint, a model directory or a
        Hub id
    data: a run, whose held-out set is scored; a file, directory or data set with documents; or a
        config, whose held-out documents are scored. None = the held-out set of its own run, unless
        there are tasks
    as_run: a run; its held-out set is scored as the run scored it before its first step, had it
        begun with this model: with its tokenizer, rows for the tokens that it added, its adapters
    tasks: names of lm-eval's tasks, or YAML files that describe one
    stride: tokens that a window of a long document scores; None = the model's positions
    chat: whether tasks go through the model's chat template
    told: called with how much is done, and of how much (0 = not known)

    Raises UserError for bad input, RunError if the disk or the network fails.
    """
    if as_run is not None:
        other = {"--data": data, "--tasks": ",".join(tasks), "--stride": stride, "--chat": chat}
        expected = f"left out: {OPTION} scores the held-out set of that run"
        raise_any(Problem(key, value, expected) for key, value in other.items() if value)
        return _evaluate_as(str(model_or_run), Path(as_run), told)
    target = find(str(model_or_run))
    benchmarks.check(tasks)
    if chat and not tasks:
        expected = "false here: it gives tasks (--tasks) through the chat template"
        raise UserError(Problem("--chat", True, expected))
    measured = _heldout(target, data, wanted=not tasks)
    if stride is not None and (data is None or measured):
        expected = "null here: a stride is for documents (--data FILE), not for a held-out set"
        raise UserError(Problem("--stride", stride, expected))
    figures = None
    if measured is not None:
        opened = open_model(target, precision=measured.precision, seq_len=measured.seq_len)
        figures = packed.score(opened, measured, told)
    elif data is not None:
        texts = documents.texts(str(data))
        figures = rolling.score(open_model(target), texts, stride, told)
    scores = benchmarks.run(open_model(target), tasks, chat=chat) if tasks else {}
    split = "heldout" if data is None else str(data)
    return Evaluated(target.directory, target.step, split, figures, scores)


def _evaluate_as(given: str, run_dir: Path, told: Told) -> Evaluated:
    seen = seen_by(run_dir)
    measured = packed.heldout_of(run_dir, 0, OPTION)
    target = find_base(given, seen)
    opened = open_model(target, precision=seen.precision, seq_len=measured.seq_len, seen=seen)
    figures = packed.score(opened, measured, told)
    return Evaluated(target.directory, target.step, "heldout", figures, as_run=run_dir)


def _heldout(target: Target, data: str | Path | None, *, wanted: bool) -> HeldOutOfRun | None:
    """Return the held-out set to score; None if other documents are, or tasks alone.

    wanted: whether it is scored if `data` names nothing
    """
    if data is not None:
        run_dir = Path(data)
        is_run = (run_dir / contents.MANIFEST).is_file() and (run_dir / contents.CONFIG).is_file()
        if not is_run:
            return None
        own = target.run_dir is not None and target.run_dir.samefile(run_dir)
        return packed.heldout_of(run_dir, target.step if own else None, "--data")
    if not wanted:
        return None
    if target.run_dir is None:
        expected = "a run, or --data FILE|CONFIG|RUN, or --tasks NAMES: this model has no own data"
        raise UserError(Problem(KEY, target.given, expected))
    return packed.heldout_of(target.run_dir, target.step, KEY)
