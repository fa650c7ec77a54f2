"""What a run begins with: `model.from`, looked up and pinned once.

    a run            its best checkpoint, else its newest    by the digest of its manifest
    a directory      as it is                                by names, sizes, edges of weight files
    a Hub id         what `model.revision` names now         by the commit

Rank 0 looks it up at the first start, before the plan; `auto.json` keeps it, so that a later start,
the tokenizer and every rank read the same. A run that has a checkpoint needs it no more, unless it
trains adapters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain.agreement import from_rank_zero
from llmtrain.checkpoint import candidates
from llmtrain.checkpoint import format as form
from llmtrain.config.schema import ModelConfig
from llmtrain.data.sources.local import edges_digest
from llmtrain.errors import Problem, UserError
from llmtrain.model import untrusted
from llmtrain.model.base import CONFIG, KEY, Base, check_code, pin
from llmtrain.rundir import contents
from llmtrain.rundir.auto import Auto
from llmtrain.rundir.status import read_status
from llmtrain.types import Ranks

_KEPT = "base"  # its name in `auto.json`
_DIGITS = 32


def decide_base(model: ModelConfig, run_dir: Path, ranks: Ranks) -> Base | None:
    """Return the base of a run, the same on all ranks; None without `model.from`. Collective.

    Raises UserError and RunError as `find_base` does.
    """
    if model.from_ is None:
        return None
    return Base(**from_rank_zero(ranks, lambda: asdict(known_base(model, run_dir))))


def known_base(model: ModelConfig, run_dir: Path) -> Base:
    """Return the base that an earlier start of a run has kept, else what `model.from` names now."""
    asked = Auto(run_dir, "").run.get(_KEPT, {}).get("asked")
    kept = kept_base(run_dir)
    return kept if kept is not None and asked == _asked_for(model) else find_base(model)


def kept_base(run_dir: Path) -> Base | None:
    """Return what a run began with; None if it began without weights."""
    kept = Auto(run_dir, "").run.get(_KEPT)
    return Base(kept["path"], kept["revision"], kept["digest"]) if kept else None


def keep_base(auto: Auto, model: ModelConfig, base: Base) -> None:
    """Put the base into the values of `auto.json`, with the keys that named it."""
    auto.run[_KEPT] = {"asked": _asked_for(model), **asdict(base)}


def _asked_for(model: ModelConfig) -> list[str | None]:
    return [model.from_, model.revision]


def find_base(model: ModelConfig) -> Base:
    """Look up what `model.from` names now.

    Raises UserError for what is not weights that can be loaded, RunError (75) if the Hub does not
    answer.
    """
    assert model.from_ is not None
    place = Path(model.from_)
    if not place.exists():
        return pin(model.from_, model.revision)
    if model.revision is not None:
        expected = f"null, as model.from={model.from_} is a directory, which has no revisions"
        raise UserError(Problem("model.revision", model.revision, expected))
    if contents.is_run(place):
        place = _checkpoint_of(place)
    untrusted.check(str(place))
    if (place / CONFIG).is_file():
        check_code(str(place), place / CONFIG)
    return Base(str(place.absolute()), None, _digest(place))


def _checkpoint_of(run_dir: Path) -> Path:
    """Return the best checkpoint of a run. Raises UserError if it has none that is whole."""
    root = run_dir / contents.CHECKPOINTS
    name = candidates.best(root, read_status(run_dir).get("run_id"))
    if name is None:
        expected = "a run that has a whole checkpoint"
        raise UserError(Problem(KEY, run_dir, expected, f"`llmtrain checkpoints list {run_dir}`"))
    return root / name


def check_unchanged(base: Base) -> None:
    """Raise UserError if a base is a directory that is gone, or has other weights than it had."""
    if base.digest is not None and (said := what_changed(base)):
        expected = f"the weights that this run began with ({base}); that directory {said}"
        remedy = "put them back, or begin in another run.dir"
        raise UserError(Problem(KEY, base.path, expected, remedy))


def what_changed(base: Base) -> str | None:
    """Return what became of a directory that is a base; None if it has the same weights.

    Where no digest is known, any directory is the same.
    """
    place = Path(base.path)
    if not place.is_dir():
        return "is gone"
    same = base.digest is None or _digest(place) == base.digest
    return None if same else "has other weights now"


def _digest(place: Path) -> str:
    """Return a hash of the weights in a directory, for which no large file is read whole.

    The manifest of our checkpoints has the digest of every byte.
    """
    if (place / form.STATE).is_file() and (place / form.MANIFEST).is_file():
        return hashlib.sha256((place / form.MANIFEST).read_bytes()).hexdigest()[:_DIGITS]
    files = sorted(place.glob(f"*{form.TENSORS}"))
    listed: list[Any] = [[one.name, one.stat().st_size, edges_digest(one)] for one in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:_DIGITS]
