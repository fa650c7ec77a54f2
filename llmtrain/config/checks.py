"""Rules between keys of a config.

Each function takes only the sections that it checks, so that `load_config` can apply it even if
another section is not valid.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from llmtrain.config import secrets
from llmtrain.config.duration import GRAMMAR, seconds
from llmtrain.config.keys import ITEM, all_keys
from llmtrain.config.model_fields import field_problems, type_problems
from llmtrain.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from llmtrain.errors import Problem

# A function that returns what is wrong with some sections, and the names of these sections.
Rule = tuple[Callable[..., Iterable[Problem]], tuple[str, ...]]
_LONGEST = ("max_position_embeddings", "n_positions")  # as the model types name it


def check(config: Config) -> list[Problem]:
    """Return every problem that the schema cannot find, for a Config not read from a file."""
    found = secrets.problems(secrets.in_config(config.model_dump(by_alias=True)))
    section = dict(config)
    for rule, names in RULES:
        found += rule(*(section[name] for name in names))
    return found


def check_model(model: ModelConfig) -> list[Problem]:
    """Check where the model and its tokenizer come from, and the model's own fields."""
    problems = list(_not_finite("model.config", model.config))
    problems += field_problems(model.config, "model.config.")
    kind = model.config.get("model_type")
    if model.from_ is None and kind is None:
        expected = "model.config.model_type (train from scratch) or model.from (start from weights)"
        remedy = "model: {config: {model_type: llama, hidden_size: 256}, tokenizer: sample}"
        problems.append(Problem("model", None, expected, remedy))
    elif model.from_ is not None and model.config:
        expected = "either model.from or model.config: weights bring their own config"
        problems.append(Problem("model.from", model.from_, expected, "remove one of the two"))
    elif kind is not None:
        problems += type_problems(kind, "model.config.model_type")
    if model.from_ is None and model.tokenizer == "auto":
        expected = "a tokenizer: `auto` means that of model.from, which is not set"
        remedy = "a Hub id, a directory, sample, or {train: 8192} for one of your own"
        problems.append(Problem("model.tokenizer", model.tokenizer, expected, remedy))
    if model.from_ is None and model.revision is not None:
        expected = "null without model.from: it is the revision of those weights"
        problems.append(Problem("model.revision", model.revision, expected))
    return problems


def check_length(model: ModelConfig, data: DataConfig) -> list[Problem]:
    """Check that blocks are not longer than the model's positions."""
    for name in _LONGEST:
        longest = model.config.get(name)
        if isinstance(longest, int) and data.seq_len > longest:
            expected = f"at most the model's {name} {longest} (model.config)"
            remedy = f"data.seq_len={longest}, or model.config.{name}={data.seq_len}"
            return [Problem("data.seq_len", data.seq_len, expected, remedy)]
    return []


def check_packing(data: DataConfig) -> list[Problem]:
    """Check that the document mask is not turned off with a packing that needs it."""
    if data.packing not in ("auto", "concat") and data.document_mask is False:
        with_packing = f"true or auto with data.packing {data.packing}"
        expected = f"{with_packing}: the end of a long document overlaps"
        return [Problem("data.document_mask", False, expected, "true, or data.packing=concat")]
    return []


def check_duration(training: TrainingConfig) -> list[Problem]:
    """Check that exactly one key sets the length of the run."""
    steps, epochs = training.steps, training.epochs
    expected = "exactly one of training.steps and training.epochs"
    if steps is None and epochs is None:
        return [Problem("training.steps", None, expected, "training.steps=1000")]
    if steps is not None and epochs is not None:
        value = f"{steps} and training.epochs = {epochs:g}"
        by_epochs = f"training.steps=null training.epochs={epochs:g}"
        by_steps = f"training.epochs=null training.steps={steps}"
        return [Problem("training.steps", value, expected, f"{by_epochs}, or {by_steps}")]
    return []


def check_micro_batch(training: TrainingConfig) -> list[Problem]:
    """Check that the global batch is a multiple of the micro-batch."""
    micro, total = training.micro_batch_size, training.global_batch_size
    if micro == "auto" or total % micro == 0:
        return []
    expected = f"a multiple of training.micro_batch_size {micro}"
    return [Problem("training.global_batch_size", total, expected, _nearest(total, micro))]


def check_batch(training: TrainingConfig, world_size: int) -> list[Problem]:
    """Check that the global batch can be split over `world_size` processes."""
    micro, total = training.micro_batch_size, training.global_batch_size
    unit = world_size * (1 if micro == "auto" else micro)
    if total % unit == 0:
        return []
    split = f"{world_size} processes" + ("" if micro == "auto" else f" × micro-batch {micro}")
    expected = f"a multiple of {split} = {unit}"
    remedy = _nearest(total, unit)
    if micro != "auto" and total % world_size == 0:
        share = total // world_size
        fitting = max(size for size in range(1, micro + 1) if share % size == 0)
        remedy += f", or training.micro_batch_size={fitting}"
    return [Problem("training.global_batch_size", total, expected, remedy)]


def check_warmup(optimizer: OptimizerConfig) -> list[Problem]:
    """Check that the warm-up is a whole number of steps, or a share of them below 1."""
    steps = optimizer.warmup_steps
    if steps < 1 or float(steps).is_integer():
        return []
    expected = "a whole number of steps, or a share of all steps below 1"
    return [Problem("optimizer.warmup_steps", steps, expected, f"{round(steps)}")]


def check_retention(checkpoint: CheckpointConfig) -> list[Problem]:
    """Check that the checkpoints to keep permanently are ever written."""
    every, keep = checkpoint.every_steps, checkpoint.keep_every
    if keep % every == 0:
        return []
    expected = f"a multiple of checkpoint.every_steps {every}, or 0"
    return [Problem("checkpoint.keep_every", keep, expected, _nearest(keep, every))]


def evaluates(data: DataConfig, evaluation: EvaluationConfig) -> bool:
    """Whether the run has documents to evaluate on."""
    return data.heldout > 0 or bool(evaluation.sources)


def check_best(
    checkpoint: CheckpointConfig, data: DataConfig, evaluation: EvaluationConfig
) -> list[Problem]:
    """Check that best checkpoints are not asked for without an evaluation that ranks them."""
    asked = "keep_best" in checkpoint.model_fields_set and checkpoint.keep_best
    if not asked or evaluates(data, evaluation):
        return []
    expected = "0 without an evaluation: data.heldout is 0, evaluation.sources is empty"
    remedy = "checkpoint.keep_best=0, or data.heldout=0.005"
    return [Problem("checkpoint.keep_best", checkpoint.keep_best, expected, remedy)]


def check_stop_after(checkpoint: CheckpointConfig) -> list[Problem]:
    """Check that `stop_after` is a length of time."""
    value = checkpoint.stop_after
    if value is None or seconds(value):
        return []
    return [Problem("checkpoint.stop_after", value, GRAMMAR)]


def check_resume(checkpoint: CheckpointConfig) -> list[Problem]:
    """Check that `resume` names a checkpoint of this run, and not the path of other weights."""
    value = checkpoint.resume
    if value in ("auto", "never") or re.fullmatch(r"step-\d{8,18}", value):
        return []
    expected = "auto, never, or the name of a checkpoint of this run, as step-00000400"
    elsewhere = "/" in value or Path(value).is_dir()
    remedy = f"did you mean model.from={value}, which takes weights alone?" if elsewhere else ""
    return [Problem("checkpoint.resume", value, expected, remedy)]


def check_accepted(checkpoint: CheckpointConfig) -> list[Problem]:
    """Check that accepted names are keys or sections: others would be ignored silently."""
    known = {key.name for key in all_keys()}
    known |= {name.rsplit(".", depth)[0] for name in known for depth in (1, 2, 3)}
    problems = []
    for name in checkpoint.accept_changes:
        numbered = ".".join(ITEM if part.isdecimal() else part for part in name.split("."))
        if numbered not in known and not name.startswith("model.config."):
            near = difflib.get_close_matches(numbered, sorted(known), n=1)
            expected = "a key or a section of the config"
            remedy = f"did you mean {near[0]}?" if near else ""
            problems.append(Problem("checkpoint.accept_changes", name, expected, remedy))
    return problems


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _not_finite(key: str, value: object) -> Iterator[Problem]:
    """Yield a problem for each number that is not finite: the model's config, as JSON, has none."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_finite(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_finite(f"{key}.{index}", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, value, "a finite number")


RULES: tuple[Rule, ...] = (
    (check_model, ("model",)),
    (check_length, ("model", "data")),
    (check_packing, ("data",)),
    (check_duration, ("training",)),
    (check_micro_batch, ("training",)),
    (check_warmup, ("optimizer",)),
    (check_retention, ("checkpoint",)),
    (check_best, ("checkpoint", "data", "evaluation")),
    (check_stop_after, ("checkpoint",)),
    (check_resume, ("checkpoint",)),
    (check_accepted, ("checkpoint",)),
)
