"""The values of a config as flat keys, and which of them may change in a run that has begun.

A resumed run needs the config with which it began. Keys that decide the data, the model or the
arithmetic must be equal; the length of the run, intervals and places may change.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.config import schema
from llmtrain.config.checks import evaluates
from llmtrain.config.keys import general_name
from llmtrain.config.yaml12 import write
from llmtrain.errors import Problem

# Keys, or beginnings of keys, that decide the result of a step.
_BINDING = (
    *("model.", "data.", "run.seed", "optimizer.", "adapter.", "chat.", "preference."),
    *("training.global_batch_size", "training.precision", "training.loss_kernel"),
    *("training.compile", "training.deterministic", "training.max_grad_norm", "training.z_loss"),
    "training.same_bits",
    *("evaluation.max_documents", "evaluation.sources"),
)
_OF_DATA = ("data.", "run.seed", "evaluation.", "model.tokenizer", "model.from", "chat.")
EPOCHS = "training.epochs"
# Keys that decide the result of a step with `same_bits` alone.
_OF_BITS = ("training.micro_batch_size", "training.threads")
_FREE = (
    *("chat.bad_rows", "data.workers", "data.cache_gb", "data.on_bad_unit"),
    "model.activation_checkpointing",
)
# Keys that came after the first runs, with their defaults, and sections of such keys. They bind
# only where they are set, so that a run that does without them is the same run with any version.
_NEWER: Mapping[str, object] = {
    "model.pad_vocab_to": None,
    "model.attention_backend": "auto",
    "training.compile": "auto",
    "training.deterministic": False,
    "training.same_bits": False,
    "data.sources.*.columns": {},
    "evaluation.sources.*.columns": {},
    "data.sources.*.document": "line",
    "evaluation.sources.*.document": "line",
    "optimizer.name": "adamw",
    "optimizer.groups": [],
    "training.loss_kernel": "auto",
    "training.z_loss": 0.0,
}
_NEWER_SECTIONS: Mapping[str, type[schema.Section]] = {
    "chat": schema.ChatConfig,
    "adapter": schema.AdapterConfig,
    "preference": schema.PreferenceConfig,
}
_NO_DEFAULT = object()


class Change(NamedTuple):
    """A binding key whose value has changed; a value is None where the key is not set."""

    key: str
    old: object
    new: object


@dataclass(frozen=True, slots=True)
class Bound:
    """The values of a config, computed once for a run.

    values: dotted name → value as in JSON, for every key; a source's keys contain its number
    binding: those of them that must not change when the run is resumed
    digest: equal for equal configs
    """

    values: dict[str, object]
    binding: dict[str, object]
    digest: str


def bind(config: schema.Config) -> Bound:
    """Compute the values of a config."""
    values = dict(_flat("", config.model_dump(mode="json", by_alias=True)))
    unset = _unset()
    unused = {"adapter.": config.adapter.kind, "preference.": config.preference.loss}
    idle = tuple(section for section, kind in unused.items() if kind == "none")
    # The weights of sources may change, and also their paths, as the manifest shows whether the
    # data is still the same.
    binding = {
        key: value
        for key, value in values.items()
        if (key.startswith(_BINDING) or (key in _OF_BITS and config.training.same_bits))
        and key not in _FREE
        and not (key.startswith("data.sources.") and key.endswith((".weight", ".path")))
        and unset.get(general_name(key), _NO_DEFAULT) != value
        and not key.startswith(idle)
    }
    text = json.dumps(values, sort_keys=True, default=str)
    return Bound(values, binding, hashlib.sha256(text.encode()).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The settings of a config that concern the data, computed once for a run.

    data: the section `data`
    chat: the section `chat`
    preference: the section `preference`
    epochs: `training.epochs`
    evaluation: the sources to evaluate on, if any are named
    seed: of the order of documents
    timeout_minutes: after which other processes no longer wait for one
    accepted: keys or sections that may have changed
    values: the binding values that decide the blocks and what is held out
    """

    data: schema.DataConfig
    chat: schema.ChatConfig
    preference: schema.PreferenceConfig
    epochs: float | None
    evaluation: tuple[schema.DocumentsConfig, ...]
    seed: int
    timeout_minutes: float
    accepted: tuple[str, ...]
    values: Mapping[str, object]


def worker_count(data: schema.DataConfig, by_default: int = 0) -> int:
    """Return how many processes read ahead for a rank. by_default: how many auto is; on CUDA 1"""
    return by_default if data.workers == "auto" else data.workers


def data_settings(config: schema.Config) -> DataSettings:
    """Return the settings of a config that concern the data."""
    return DataSettings(
        data=config.data,
        chat=config.chat,
        preference=config.preference,
        epochs=config.training.epochs,
        evaluation=config.evaluation.sources,
        seed=config.run.seed,
        timeout_minutes=config.distributed.timeout_minutes,
        accepted=config.checkpoint.accept_changes,
        values={k: value for k, value in bind(config).binding.items() if k.startswith(_OF_DATA)},
    )


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[Change]:
    """Return the differences between the binding values of two configs."""
    unset = _unset()
    both = (
        Change(key, *(side.get(key, unset.get(general_name(key))) for side in (old, new)))
        for key in {**old, **new}
        if key not in _OF_BITS or (key in old and key in new)
    )
    return [change for change in both if change.old != change.new]


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether `checkpoint.accept_changes` names the key, or a section that it is in."""
    return any(f"{key}.".startswith(f"{name}.") for name in accepted)


def touches(key: str, accepted: Sequence[str]) -> bool:
    """Whether an accepted key or section is this key, is a part of it, or contains it."""
    within = (f"{name}.".startswith(f"{key}.") for name in accepted)
    return is_accepted(key, accepted) or any(within)


def refusals(found: Iterable[Change], accepted: Sequence[str], expected: str) -> list[Problem]:
    """Return one problem for each change that is not accepted.

    expected: where the old value comes from, such as `as …`
    """
    return [
        Problem(key, new, f"{old}, {expected}", f"put it back, or {way_out(key)}")
        for key, old, new in found
        if not is_accepted(key, accepted)
    ]


def way_out(key: str) -> str:
    """Return the remedy for a change that is intended."""
    return f"checkpoint.accept_changes=[{key}] if it is meant, or another run.dir"


def dump(config: schema.Config, *, whole: bool = True) -> str:
    """Return the config as YAML, which `load_config` reads back as an equal config.

    whole: with the keys that nobody has set, too

    Without an evaluation `keep_best` is written as 0: `load_config` would refuse the default. A
    `text_column` that was not set is left out, since setting it makes conversations a text.
    """
    values = config.model_dump(mode="json", by_alias=True)
    for section in ("data", "evaluation"):
        sources = getattr(config, section).sources
        for source, written in zip(sources, values[section]["sources"], strict=True):
            if "text_column" not in source.model_fields_set:
                del written["text_column"]
    if not evaluates(config.data, config.evaluation):
        values["checkpoint"]["keep_best"] = 0
    if not whole:
        chosen = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        values = {name: {key: values[name][key] for key in chosen[name]} for name in chosen}
    return write(values)


def _unset() -> dict[str, object]:
    """Return the defaults of the newer keys, by general name."""
    sections = {
        name: section().model_dump(mode="json") for name, section in _NEWER_SECTIONS.items()
    }
    return {**_NEWER, **dict(_flat("", sections))}


def _flat(key: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        inner = value.items()
    elif key in ("data.sources", "evaluation.sources") and value and isinstance(value, list):
        inner = {str(index): source for index, source in enumerate(value)}.items()
    else:
        return [(key, value)]
    prefix = f"{key}." if key else ""
    return [pair for name, part in inner for pair in _flat(f"{prefix}{name}", part)]
