"""Rotary positions whose frequencies a model chooses by the length of what it is given.

LongRoPE has two sets of factors: short ones for up to `original_max_position_embeddings` tokens,
long ones beyond. transformers chooses by the largest position of the whole micro-batch:

    alone            24 tokens → short factors      40 tokens → long factors     (original: 32)
    side by side     24 and 40 tokens → long factors for both: other logits for the shorter one

`by_document` makes the choice once for each document, so that packed documents and rows of a batch
get what each gets alone. The config and the weights stay what they are: whoever opens the model in
transformers finds the same choice for a text by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ARGUMENTS = ("x", "position_ids", "layer_type")  # of each forward that `dynamic_rope_update` wraps


def by_document(model: PreTrainedModel) -> None:
    """Let LongRoPE choose its factors for each document by itself. Other models are left alone.

    A document begins where `position_ids` restart at 0. Without `position_ids` each row is one.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if "longrope" in named and _choose not in module._forward_hooks.values():
            module.register_forward_hook(_choose, with_kwargs=True)


def change(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the kind of rope whose frequencies depend on length, and up to how many tokens not.

    Returns None for a model whose frequencies are always the same.
    """
    config = model.config.get_text_config()
    found = []
    for rope in _ropes(config):
        if rope["rope_type"] == "longrope":
            found.append(("longrope", int(rope["original_max_position_embeddings"])))
        elif "dynamic" in rope["rope_type"]:
            found.append((str(rope["rope_type"]), int(config.max_position_embeddings)))
    return min(found, key=lambda one: one[1], default=None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each rope: a model may have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (one for one in parameters.values() if isinstance(one, Mapping))


def _choose(module: nn.Module, args: tuple[Any, ...], keywords: Any, output: Any) -> Any:
    """Return cosines and sines, (B, T, D) each, with short factors in every short document.

    output: with long factors everywhere, if any document is long; else with short ones.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False)) | keywords
    config: Any = module.config
    layer = given.get("layer_type")
    rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
    if rope["rope_type"] != "longrope":
        return output
    long = _is_long(given["position_ids"], rope["original_max_position_embeddings"])
    short = module.forward(**given | {"position_ids": given["position_ids"].masked_fill(long, 0)})

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(long[..., None], one, other)

    # Two tensors, or one of complex numbers.
    return pick(output, short) if isinstance(output, Tensor) else tuple(map(pick, output, short))


def _is_long(positions: Tensor, original: int) -> Tensor:
    """Return whether each position's document has more than `original` tokens, (B, T) bool.

    positions: (B, T) int64, counted in each document.
    """
    count = positions.shape[-1]
    # Where a document that is long enough has the position `original`.
    place = torch.arange(count, device=positions.device) - positions + original
    there = positions.gather(-1, place.clamp(0, count - 1)) == original
    return (positions >= original) | ((place < count) & there)
