"""Check the data, tokenizer and model of a config, found in the way a start would find them.

Nothing is written to the run's directory, and no weights are read.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.disk_space import check_room, size
from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data.chat.template import NAMED, template_tokens
from llmtrain.data.remote.request import AttemptError, wait_for
from llmtrain.data.sources.local import is_local
from llmtrain.data.survey import Survey, survey
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.rundir import contents
from llmtrain.tools.data.scratch import aside
from llmtrain.tools.doctor.case import Case, Verdict, attempt, error, ok, warning
from llmtrain.tools.doctor.place import existing
from llmtrain.types import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.model.base import Base
    from llmtrain.model.tokenizer import SpecialTokens

ANSWER_SECONDS = 30.0
MODEL_SECONDS = 60.0  # transformers repeats requests by itself, and imports take a while
OFFLINE = "check network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what was kept before"
_SLOW = "see that the disk answers, and try again"
_ABSENT = "see that it exists, here or on the Hub; check network, HF_ENDPOINT and HF_TOKEN"
_NOT_HERE = "see that it exists and can be read: it is a path of this machine"
_FROM_HUB = ("model.from", "model.tokenizer")
_SMALL_FILES = 10  # of a checkpoint: configs, tokenizer, state, manifest


def data(case: Case, seconds: float = ANSWER_SECONDS) -> Verdict:
    """Check that all sources are found, and count their files and units.

    seconds: how long to wait for the Hub

    Returns an error if the time is over. Raises UserError for a problem of a source, RunError for
    a failure before that time.
    """
    assert case.config is not None
    quiet_hub()
    workers = 0 if case.config.data.workers == "auto" else case.config.data.workers
    ranks, late = case.processes * max(1, workers), threading.Event()
    timer = threading.Timer(seconds, late.set)
    with aside(case.run_dir) as folder, collect_warnings() as heard:
        timer.start()
        try:
            found = survey(data_settings(case.config), ranks, folder, stop=late)
        except RunError:
            if not late.is_set():
                raise
            asked = any(not is_local(one.path) for one in case.config.data.sources)
            remedy = OFFLINE if asked else _SLOW
            return error("; ".join([f"no answer in {seconds:g} s", *heard[-1:]]), remedy)
        finally:
            timer.cancel()
    parts = [
        f"{source.label}: {len(source.files):,} files, {len(source.units):,} units"
        + (f" at {source.revision[:12]}" if source.revision else "")
        for source in found.sources
    ]
    facts = f"{', '.join(parts)}; {found.lanes} lanes"
    if found.has_chat:
        template = _template(case, found)
        if template is None:
            remedy = "chat.template=chatml, unless all prompts and completions are strings"
            return warning(f"{facts}; conversations, but the tokenizer has no template", remedy)
        facts += f"; {template}"
    if heard:
        return warning(f"{facts}; {'; '.join(heard)}", "see that this is meant")
    return ok(facts)


def _template(case: Case, found: Survey) -> str | None:
    """Return what a start would write conversations with; None if there is no template.

    Raises UserError for a template that cannot be read, or does not end a turn.
    """
    from llmtrain.data.chat.chat import Chat
    from llmtrain.data.tokens.encode import settings_of
    from llmtrain.training.start.base import known_base
    from llmtrain.training.start.prepare import make_tokenizer

    config = case.config
    assert config is not None
    asked = config.chat.template
    name = "the tokenizer's" if asked is None else asked if asked in NAMED else "its own"
    if isinstance(config.model.tokenizer, TrainTokenizer):  # there is nothing to try it with
        return asked and f"conversations by {name} template"
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        directory = case.run_dir / contents.TOKENIZER
        begun = (case.run_dir / contents.AUTO).is_file() and directory.is_dir()
        if not begun:  # what a refused start left there is not its tokenizer
            directory = Path(folder) / contents.TOKENIZER
            asks_base = config.model.tokenizer == "auto"
            base = known_base(config.model, case.run_dir) if asks_base else None
            make_tokenizer(config, found, directory, base)
        settings = settings_of(config.chat, datetime.now().isoformat())
        chat = Chat(directory, settings, config.data.seq_len)
        if not chat.has_template:
            return None
        ends = " or ".join(chat.check().texts)
        return f"conversations by {name} template, a turn ends with {ends}"


def quiet_hub() -> None:
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


def model(case: Case) -> Verdict:
    """Describe the model and the tokenizer, and check that they agree on the end of a text."""
    found = _described(case)
    return found if isinstance(found, Verdict) else found[0]


@lru_cache(maxsize=1)
def _described(case: Case) -> tuple[Verdict, Spec] | Verdict:
    """Describe a case's model once, even if that fails: two checks use it."""
    return attempt(lambda: describe(case))


def disk(case: Case) -> Verdict:
    """Check the space for the checkpoints to keep. Raises UserError if there is too little."""
    from llmtrain.distributed.engines.state import bytes_of

    assert case.config is not None
    described = _described(case)
    if isinstance(described, Verdict):
        return warning("a checkpoint's size is not known: the model is not", "see the line model")
    _, spec = described
    keep, steps = case.config.checkpoint, case.config.training.steps
    root, once = case.run_dir / contents.CHECKPOINTS, bytes_of(spec)
    needed = check_room(root, keep, steps or 0, once, len(spec) + _SMALL_FILES)
    free = shutil.disk_usage(existing(case.run_dir)).free
    found = f"{size(once)} a checkpoint, {size(needed)} still to be kept, {size(free)} free"
    if steps is None and keep.keep_every:
        remedy = f"allow {size(once)} for every {keep.keep_every} steps, or set steps"
        return warning(f"{found}; training.epochs: how many are kept permanently is open", remedy)
    return ok(found)


def describe(case: Case, seconds: float = MODEL_SECONDS) -> tuple[Verdict, Spec]:
    """Return the line about model and tokenizer, and the files and tensors of its checkpoints.

    The model is built on the meta device. If a run began in the run directory, its model config and
    tokenizer are used.

    seconds: time limit, as the Hub may not answer

    Raises UserError for problems of the config, RunError after the time limit.
    """
    quiet_hub()
    try:
        return wait_for(lambda: _describe(case), seconds, None)
    except UserError as wrong:
        # If a model or tokenizer was not found, the Hub may be out of reach.
        problems = (
            replace(one, remedy=one.remedy or _absent(one)) if one.key in _FROM_HUB else one
            for one in wrong.problems
        )
        raise UserError(*problems) from wrong
    except AttemptError as late:
        raise RunError(f"model or tokenizer: {late}", RESTARTABLE, OFFLINE) from late


def _absent(problem: Problem) -> str:
    """Return what to do about a model or tokenizer that was not found, by where it was sought."""
    return _NOT_HERE if is_local(str(problem.value)) else _ABSENT


def _describe(case: Case) -> tuple[Verdict, Spec]:
    from llmtrain.distributed.engines import state
    from llmtrain.model.build import model_config
    from llmtrain.model.shape import on_meta
    from llmtrain.model.trainable import adapters
    from llmtrain.model.trainable.freeze import freeze
    from llmtrain.training.optimizer import make_optimizer
    from llmtrain.training.start.adapters import trained_tokens
    from llmtrain.training.start.base import known_base
    from llmtrain.training.start.planning import config_of_newest_checkpoint, own_tokens

    config = case.config
    assert config is not None
    tokens = own_tokens(config, case.run_dir)
    found = config_of_newest_checkpoint(config, case.run_dir)
    needed = config.model.from_ and not (tokens and found)
    base = known_base(config.model, case.run_dir) if needed else None
    tokens = tokens or _from_elsewhere(config, base)
    if found is None:
        found = model_config(config.model, tokens, config.data.seq_len, base)
    built = on_meta(found)
    freeze(built, config.model.freeze)
    adapters.attach(built, config.adapter, trained_tokens(config, base, None), meta=True)
    optimizer = make_optimizer(built, config.optimizer, fused=False)
    trained = isinstance(config.model.tokenizer, TrainTokenizer)
    spec = state.spec(built, optimizer, int(config.checkpoint.shard_gb * 2**30))
    return _line(built, tokens, trained=trained), spec


def _line(model: PreTrainedModel, tokens: SpecialTokens, *, trained: bool) -> Verdict:
    own = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = (
        f"{model.config.model_type}, {parameters:,} parameters, {own.vocab_size:,} rows; "
        f"a tokenizer of {tokens.length:,} entries{', trained at the start' * trained}"
    )
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    if ends in ([], [None]) or tokens.eos in ends:
        return ok(found)
    found += f" ends texts with {tokens.eos}, the model with {' or '.join(map(str, ends))}"
    return warning(found, "model.tokenizer: the one that belongs to the model")


def _from_elsewhere(config: Config, base: Base | None) -> SpecialTokens:
    """Return the special tokens of a tokenizer, saved to a temporary directory as a start does."""
    from llmtrain.model.tokenizer import save_tokenizer, special_tokens

    asked = config.model.tokenizer
    if asked == "auto":
        assert base is not None  # `auto` is the tokenizer of model.from
        path, revision = base.path, base.revision
    else:
        path, revision = str(asked), None
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        save_tokenizer(path, revision, Path(folder))
        return special_tokens(Path(folder), added=template_tokens(config.chat.template))
