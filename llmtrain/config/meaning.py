"""What a config means for a run that exists: its values as flat keys, and which of them may change.

A run is resumed by the config that began it. Keys that decide the data, the model or the arithmetic
must be equal then; how long, how often and where may change.
"""

from __future__ import annotations

from llmtrain.config.schema import Config
from llmtrain.config.yaml12 import write

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
_FREE = ("data.workers", "data.cache_gb", "data.on_bad_unit")


def config_digest_values(config: Config) -> dict[str, object]:
    """Every key's value as JSON has it, by dotted name; a source's keys carry its number."""
    return dict(_flat("", config.model_dump(mode="json", by_alias=True)))


def differences(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """(key, old, new) of every key that changes the meaning of a run; None where it is not set."""
    before, after = config_digest_values(old), config_digest_values(new)
    keys = [key for key in {**before, **after} if _binds(key)]
    changed = [(key, before.get(key), after.get(key)) for key in keys]
    return [change for change in changed if change[1] != change[2]]


def binding_values(config: Config) -> dict[str, object]:
    """The values that a resumed run must share with the one that it continues, by dotted name."""
    return {key: value for key, value in config_digest_values(config).items() if _binds(key)}


def dump(config: Config) -> str:
    """The config as YAML; `load_config` of that file gives an equal one."""
    return write(config.model_dump(mode="json", by_alias=True))


def _binds(key: str) -> bool:
    """Whether a run cannot go on with another value.

    The shares of sources may change, and so may the place where they lie: the manifest knows
    whether the data there is the same.
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
