"""Check a model's own fields without transformers, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.errors import Problem

# Sizes that an architecture with such a field needs. In some architectures null or a list is valid.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_embd",
    "n_layer",
    "n_head",
)


def field_problems(fields: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    """Yield a problem for each size that is not a whole number above 0, and for a blank type.

    prefix: of the keys, such as `model.config.`
    """
    for name in _SIZES:
        value = fields.get(name)
        if value is None or isinstance(value, list | dict):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(f"{prefix}{name}", value, "a whole number ≥ 1")
    kind = fields.get("model_type", "none is given")  # then transformers lists those it knows
    if not (isinstance(kind, str) and kind.strip()):
        expected = "a model type as transformers names it, such as llama"
        yield Problem(f"{prefix}model_type", kind, expected)
