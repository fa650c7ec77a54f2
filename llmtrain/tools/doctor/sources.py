"""Check the data, tokenizer and model of a config, found in the way a start would find them.

Nothing is written to the run's directory, and no weights are read.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.room import check_room, size
from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data.remote.request import AttemptError, wait_for
from llmtrain.data.survey import survey
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.rundir import contents
from llmtrain.tools.data.scratch import aside
from llmtrain.tools.doctor.case import Case, Verdict, error, ok, warning
from llmtrain.tools.doctor.place import existing, room
from llmtrain.types import Spec

if TYPE_CHECKING:
    from llmtrain.model.tokenizer import SpecialTokens

ANSWER_SECONDS = 30.0
_MODEL_SECONDS = 60.0  # transformers repeats requests by itself, and imports take a while
_OFFLINE = "check network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what was kept before"
_ABSENT = "see that it exists, here or on the Hub; check network, HF_ENDPOINT and HF_TOKEN"
_SMALL_FILES = 10  # of a checkpoint: configs, tokenizer, state, manifest


@dataclass(frozen=True, slots=True)
class Described:
    """A model without weights, and its tokenizer.

    kind: its model_type
    rows: of its embedding, the vocabulary size
    ends: the end-of-text ids in the model's own config
    parameters: their number
    tokens: length and special tokens of the tokenizer
    trained: whether the run trains its tokenizer itself
    spec: files and tensors of its checkpoints
    """

    kind: str
    rows: int
    ends: tuple[int, ...]
    parameters: int
    tokens: SpecialTokens
    trained: bool
    spec: Spec


# Returns the model, or the verdict on why there is no model.
Describe = Callable[[], tuple[Described | None, Verdict | None]]


class Deadline:
    """A time limit for waiting for the Hub, with the `wait` method of a `threading.Event`."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the deadline, at most `timeout` seconds; return whether it has passed."""
        left = max(0.0, self._until - time.monotonic())
        time.sleep(left if timeout is None else min(timeout, left))
        return time.monotonic() >= self._until


def data(case: Case, seconds: float = ANSWER_SECONDS) -> Verdict:
    """Check that all sources are found, and count their files and units.

    seconds: how long to wait for the Hub

    Returns an error if the time is over. Raises UserError for a problem of a source, RunError for
    a failure before that time.
    """
    assert case.config is not None
    _quiet_hub()
    workers = 0 if case.config.data.workers == "auto" else case.config.data.workers
    ranks, deadline = case.processes * max(1, workers), Deadline(seconds)
    with aside(case.run_dir) as folder, collect_warnings() as heard:
        try:
            found = survey(data_settings(case.config), ranks, folder, stop=deadline)
        except RunError:
            if not deadline.wait(0):
                raise
            return error("; ".join([f"no answer in {seconds:g} s", *heard[-1:]]), _OFFLINE)
    parts = [
        f"{source.label}: {len(source.files):,} files, {len(source.units):,} units"
        + (f" at {source.revision[:12]}" if source.revision else "")
        for source in found.sources
    ]
    facts = f"{', '.join(parts)}; {found.lanes} lanes"
    if heard:
        return warning(f"{facts}; {'; '.join(heard)}", "see that this is meant")
    return ok(facts)


def _quiet_hub() -> None:
    """Silence the Hub's logger permanently: threads that timed out continue to log."""
    from huggingface_hub.utils import logging as hub

    hub.set_verbosity(logging.CRITICAL)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings of our own code are added, instead of being shown."""
    heard: list[str] = []
    logger, handler = logging.getLogger("llmtrain"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def model(describe: Describe) -> Verdict:
    """Describe the model and the tokenizer, and check that they agree on the end of a text."""
    there, broken = describe()
    if there is None:
        return broken or ok("")
    entries = f"a tokenizer of {there.tokens.length:,} entries"
    if there.trained:
        entries += ", trained at the start"
    found = f"{there.kind}, {there.parameters:,} parameters, {there.rows:,} rows; {entries}"
    if there.ends and there.tokens.eos not in there.ends:
        ends = " or ".join(map(str, there.ends))
        found += f" ends texts with {there.tokens.eos}, the model with {ends}"
        return warning(found, "model.tokenizer: the one that belongs to the model")
    return ok(found)


def disk(case: Case, describe: Describe) -> Verdict:
    """Check the space for the checkpoints to keep. Raises UserError if there is too little."""
    from llmtrain.distributed.engines.state import bytes_of

    assert case.config is not None
    there, _ = describe()
    if there is None:
        return warning("a checkpoint's size is not known: the model is not", "see the line model")
    spec = there.spec
    keep, steps = case.config.checkpoint, case.config.training.steps
    root, once = case.run_dir / contents.CHECKPOINTS, bytes_of(spec)
    needed = check_room(root, keep, steps or 0, once, len(spec) + _SMALL_FILES)
    free = room(existing(case.run_dir))
    found = f"{size(once)} a checkpoint, {size(needed)} still to be kept, {size(free)} free"
    if steps is None and keep.keep_every:
        remedy = f"allow {size(once)} for every {keep.keep_every} steps, or set steps"
        return warning(f"{found}; training.epochs: how many are kept permanently is open", remedy)
    return ok(found)


def describe(config: Config, run_dir: Path, seconds: float = _MODEL_SECONDS) -> Described:
    """Return the model, built on the meta device, and its tokenizer.

    run_dir: if a run began there, its model config and tokenizer are used
    seconds: time limit, as the Hub may not answer

    Raises UserError for problems of the config, RunError after the time limit.
    """
    _quiet_hub()
    try:
        return wait_for(lambda: _describe(config, run_dir), seconds, None)
    except UserError as wrong:
        raise UserError(*map(_with_remedy, wrong.problems)) from wrong
    except AttemptError as late:
        raise RunError(f"model or tokenizer: {late}", RESTARTABLE, _OFFLINE) from late


def _with_remedy(problem: Problem) -> Problem:
    """Add a remedy where a model or tokenizer was not found: the Hub may be out of reach."""
    absent = problem.key in ("model.from", "model.tokenizer") and not problem.remedy
    return replace(problem, remedy=_ABSENT) if absent else problem


def _describe(config: Config, run_dir: Path) -> Described:
    from llmtrain.distributed.engines import state
    from llmtrain.model.build import model_config, resolve_revision
    from llmtrain.model.freeze import freeze
    from llmtrain.model.shape import on_meta
    from llmtrain.training.optimizer import make_optimizer
    from llmtrain.training.start.planning import config_of_newest_checkpoint, own_tokens

    tokens = own_tokens(config, run_dir) or _from_elsewhere(config)
    found = config_of_newest_checkpoint(config, run_dir)
    if found is None:
        if config.model.from_:
            resolve_revision(config.model.from_, config.model.revision)
        found = model_config(config.model, tokens, config.data.seq_len)
    built = on_meta(found)
    freeze(built, config.model.freeze)
    optimizer = make_optimizer(built, config.optimizer, fused=False)
    described = built.config.get_text_config()
    ends = described.eos_token_id
    return Described(
        kind=str(built.config.model_type),
        rows=described.vocab_size,
        ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        tokens=tokens,
        trained=isinstance(config.model.tokenizer, TrainTokenizer),
        spec=state.spec(built, optimizer, int(config.checkpoint.shard_gb * 2**30)),
    )


def _from_elsewhere(config: Config) -> SpecialTokens:
    """Return the special tokens of a tokenizer, saved to a temporary directory as a start does."""
    from llmtrain.model.tokenizer import save_tokenizer, special_tokens

    asked, model = str(config.model.tokenizer), config.model
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if asked == "auto":
            save_tokenizer(str(model.from_), model.revision, Path(folder))
        else:
            save_tokenizer(asked, None, Path(folder))
        return special_tokens(Path(folder))
