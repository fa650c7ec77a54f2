"""The values of a config as flat keys, and which of them may change in a run that has begun.

A run is resumed by the config that began it. Keys that decide the data, the model or the arithmetic
must be equal then; how long, how often and where may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.config.checks import evaluates
from llmtrain.config.schema import Config, DataConfig, DocumentsConfig
from llmtrain.config.yaml12 import write
from llmtrain.errors import Problem

# Keys, or beginnings of keys, that change what a finished step has done.
_BINDING = (
    "model.",
    "data.",
    "run.seed",
    "training.global_batch_size",
    "training.precision",
    "training.max_grad_norm",
    "optimizer.",
    "evaluation.max_documents",
    "evaluation.sources",
)
_OF_DATA = ("data.", "run.seed", "evaluation.", "model.tokenizer", "model.from")
_FREE = (
    "data.workers",
    "data.cache_gb",
    "data.on_bad_unit",
    "model.activation_checkpointing",
)


class Change(NamedTuple):
    """A key whose value changes the meaning of a run; None where it is not set."""

    key: str
    old: object
    new: object


@dataclass(frozen=True, slots=True)
class Bound:
    """The values of a config, computed once for a run and handed on.

    values: of every key, as JSON has it, by dotted name; a source's keys carry its number
    binding: those that a resumed run must share with the one that it continues
    digest: equal for equal configs
    """

    values: dict[str, object]
    binding: dict[str, object]
    digest: str


def bind(config: Config) -> Bound:
    """Compute the values of a config."""
    values = dict(_flat("", config.model_dump(mode="json", by_alias=True)))
    binding = {key: value for key, value in values.items() if _binds(key)}
    text = json.dumps(values, sort_keys=True, default=str)
    return Bound(values, binding, hashlib.sha256(text.encode()).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What of a config concerns the data, computed once for a run.

    data: its section
    evaluation: the sources that are evaluated on, where some are named
    seed: of the order
    timeout_minutes: after which peers give up on a process
    accepted: keys, or sections, that may have changed
    values: those of the binding values that decide the blocks, and what is held out
    """

    data: DataConfig
    evaluation: tuple[DocumentsConfig, ...]
    seed: int
    timeout_minutes: float
    accepted: tuple[str, ...]
    values: Mapping[str, object]


def data_settings(config: Config) -> DataSettings:
    """The settings of the data in this config."""
    return DataSettings(
        data=config.data,
        evaluation=config.evaluation.sources,
        seed=config.run.seed,
        timeout_minutes=config.distributed.timeout_minutes,
        accepted=config.checkpoint.accept_changes,
        values={k: value for k, value in bind(config).binding.items() if k.startswith(_OF_DATA)},
    )


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[Change]:
    """What differs between two configs' binding values."""
    found = [Change(key, old.get(key), new.get(key)) for key in {**old, **new}]
    return [change for change in found if change.old != change.new]


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether `checkpoint.accept_changes` names the key, or a section that it is in."""
    return any(f"{key}.".startswith(f"{name}.") for name in accepted)


def touches(key: str, accepted: Sequence[str]) -> bool:
    """Whether an accepted key is this one, is in it, or contains it."""
    within = (f"{name}.".startswith(f"{key}.") for name in accepted)
    return is_accepted(key, accepted) or any(within)


def refusals(found: Iterable[Change], accepted: Sequence[str], expected: str) -> list[Problem]:
    """One problem for each change that is not accepted. expected: `as …`, where the old is from."""
    return [
        Problem(key, new, f"{old}, {expected}", f"put it back, or {way_out(key)}")
        for key, old, new in found
        if not is_accepted(key, accepted)
    ]


def way_out(key: str) -> str:
    """What to do where the change is meant."""
    return f"checkpoint.accept_changes=[{key}] if it is meant, or another run.dir"


def dump(config: Config) -> str:
    """The config as YAML; `load_config` of that file gives an equal one.

    Without an evaluation `keep_best` is written as 0: `load_config` would refuse the default.
    """
    values = config.model_dump(mode="json", by_alias=True)
    if not evaluates(config.data, config.evaluation):
        values["checkpoint"]["keep_best"] = 0
    return write(values)


def _binds(key: str) -> bool:
    """Whether a run cannot be resumed with another value.

    The shares of sources may change, and so may their paths: the manifest shows whether the data
    there is the same.
    """
    free = (".weight", ".path")
    if key in _FREE or (key.startswith("data.sources.") and key.endswith(free)):
        return False
    return key.startswith(_BINDING)


def _flat(key: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        inner = value.items()
    elif key in ("data.sources", "evaluation.sources") and value and isinstance(value, list):
        inner = {str(index): source for index, source in enumerate(value)}.items()
    else:
        return [(key, value)]
    prefix = f"{key}." if key else ""
    return [pair for name, part in inner for pair in _flat(f"{prefix}{name}", part)]
