"""Which weights a MODEL_OR_RUN means.

    runs/a                             its best checkpoint, else the newest
    runs/a/checkpoints/step-00000300   that one
    DIR                                a model as `save_pretrained` writes it, or adapters for one
    owner/name                         a model of the Hub, downloaded into the Hub's cache

Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtrain.checkpoint import candidates
from llmtrain.checkpoint import format as form
from llmtrain.errors import Problem, UserError, first_line
from llmtrain.rundir.status import read_status
from llmtrain.tools.checkpoints import look

KEY = "MODEL_OR_RUN"
_EXPECTED = "a run, a checkpoint, a model directory, or a model of the Hub"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that somebody named, on this machine's disk.

    given: as they were named
    directory: where they are, with their config and tokenizer
    run_dir: the run that saved them; None if they are not in a run
    state: the checkpoint's `trainer_state.json`; empty for any other model
    """

    given: str
    directory: Path
    run_dir: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step of a checkpoint; None for any other model."""
        step: int | None = self.state.get("step")
        return step

    @property
    def is_adapter(self) -> bool:
        """Whether these are adapters, which need the model that they were trained on."""
        return (self.directory / "adapter_config.json").is_file()


def find(given: str, revision: str | None = None) -> Target:
    """Find the weights. A model of the Hub is downloaded, unless it is in the Hub's cache.

    revision: branch, tag or commit of a model of the Hub; None = the default branch

    Raises UserError if there are none, RunError 74 if the disk cannot be read.
    """
    path = Path(given)
    if path.is_dir():
        return _in_directory(given, path)
    if path.exists() or not is_hub_id(given):
        raise UserError(Problem(KEY, given, _EXPECTED))
    return Target(given, download(given, revision))


def is_hub_id(name: str) -> bool:
    """Whether this can be the name of a model of the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def download(name: str, revision: str | None) -> Path:
    """Return the directory of a model of the Hub, or of a directory, which is returned as it is.

    revision: branch, tag or commit; None = the default branch

    Files in folders of the repository are left out: they are copies in other formats. Raises
    UserError if the Hub does not have it or cannot be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of its client
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RevisionResolutionError,
    )

    refusals = (HfHubHTTPError, HFValidationError, RevisionResolutionError, HTTPError, OSError)
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]
        )
    except refusals as error:
        raise UserError(Problem(KEY, name, f"{_EXPECTED}: {first_line(error)}")) from error
    return Path(found)


def _in_directory(given: str, path: Path) -> Target:
    try:
        place = look.place_of(path)
    except UserError:
        if not any((path / name).is_file() for name in _MODEL_FILES):
            raise UserError(Problem(KEY, given, _EXPECTED)) from None
        return Target(given, path)
    directory = place.root / (place.only or _best(given, place))
    if directory.suffix == ".partial":
        raise UserError(Problem(KEY, given, "a complete checkpoint; this one never is read"))
    return Target(given, directory, place.run_dir, _state(given, directory))


def _best(given: str, place: look.Place) -> str:
    """Return the name of the checkpoint that `model.from` would begin with, too."""
    known = read_status(place.run_dir).get("run_id") if place.run_dir else None
    name = candidates.best(place.root, known)
    if name is None:
        expected = "a run with a complete checkpoint; it has none"
        raise UserError(Problem(KEY, given, expected, "`llmtrain checkpoints list` shows them"))
    return name


def _state(given: str, directory: Path) -> dict[str, Any]:
    """Return the state in a checkpoint; {} for a model that is no checkpoint of ours."""
    if not (directory / form.STATE).exists():
        return {}
    try:
        return form.state(directory)
    except form.DamagedError as error:
        raise UserError(Problem(KEY, given, f"a whole checkpoint; {error}")) from error


@contextmanager
def as_argument() -> Iterator[None]:
    """Name the command's argument in problems of code that also reads a config's `model.from`."""
    try:
        yield
    except UserError as error:
        keys = dict.fromkeys(("model.from", "model.tokenizer"), KEY)
        problems = (replace(one, key=keys.get(one.key, one.key)) for one in error.problems)
        raise UserError(*problems, where=error.where) from error
