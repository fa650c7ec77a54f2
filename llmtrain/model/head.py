"""Finds out whether a model's logits are those of a plain linear head.

Only then can the loss be computed a chunk of rows at a time, from the decoder's output and the
head's weight (`model.cross_entropy`). Between the head and the logits a model may multiply by a
constant and cap them with tanh, under names that differ from model to model. Any other model keeps
its logits. What a model does is not read off its class, but found by a comparison:

    decoder ─► hidden ─► head ─► its output · 2ᵏ ─► the model's own end ─► logits
                     └─► softcap(scale · (W·hidden + b) · 2ᵏ) ──────────── equal?

The factor 2ᵏ makes the logits of an untrained model large enough for a cap to show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from llmtrain.errors import first_line
from llmtrain.model.attention import model_keywords

# Fields of configs with the constant or its inverse (Cohere, Granite, FalconH1), and with the cap
# (Gemma 2, RecurrentGemma).
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_WIDTHS = ("dim_model_base",)  # MiniCPM multiplies by it and divides by the hidden size
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_TOKENS = 8
_WITHIN = 1e-5  # of the largest logit


@dataclass(frozen=True, slots=True)
class Head:
    """The function of a plain head: softcap(scale · (W·x + b))."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        """Return the logits of the products W·x + b."""
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def head_to_json(found: Head | str) -> Any:
    """Return an answer of `examine` as a JSON value."""
    return asdict(found) if isinstance(found, Head) else found


def head_from_json(value: Any) -> Head | str:
    """Return the answer that `head_to_json` wrote."""
    return value if isinstance(value, str) else Head(**value)


def examine(model: PreTrainedModel, *, compare: bool = True) -> Head | str:
    """Return the function of the model's head, or why it has none of this form.

    model: on the CPU in fp32, or of fake tensors.
    compare: whether to compare logits, which is not possible on fake tensors. Then a config that
        names a constant or a cap is believed.
    """
    if reason := why_wrapped(model):
        return reason
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _examine(model, compare=compare)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"its code fails without the head: {type(error).__name__}: {first_line(error)}"
    finally:
        model.train(training)


def why_wrapped(model: PreTrainedModel) -> str:
    """Return why the model's head does not compute W·x + b; "" if it does.

    An adapter on the head, and rows of it that are trained, are left out of its `.weight`: a loss
    from there would give them no gradient.
    """
    head = model.get_output_embeddings()
    if head is None:
        return "it has no head that transformers knows"
    if has_router_loss(model):
        return "the loss of its router comes with its logits"
    if type(head) is not nn.Linear:
        return f"its head is no plain linear layer but {type(head).__name__}"
    return ""


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether a mixture of experts adds the loss of its router to that of its tokens."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def _examine(model: PreTrainedModel, *, compare: bool) -> Head | str:
    head = model.get_output_embeddings()
    ids = torch.arange(_TOKENS, device=head.weight.device)[None]
    ids %= model.config.get_text_config().vocab_size
    if not compare:
        calls, _ = _watch(model, ids, 1.0)
        same = len(calls) == 1 and calls[0][0] == calls[0][1]
        return Head() if same else "its head does not take the output of its decoder"
    products = F.linear(model.base_model(ids, **model_keywords())[0], head.weight, head.bias)
    exponent = math.log2(_largest_cap(model) / float(products.abs().max()))
    factor = 2.0 ** max(0, math.ceil(exponent))
    calls, logits = _watch(model, ids, factor)
    if len(calls) != 1:
        return "it does not call its head once"
    within = _WITHIN * float(logits.abs().max())
    for candidate in _candidates(model):
        if float((candidate.apply(products * factor) - logits).abs().max()) <= within:
            return candidate
    return "its logits are not those of its decoder and its head alone"


def _watch(
    model: PreTrainedModel, ids: Tensor, factor: float
) -> tuple[list[tuple[int, int]], Tensor]:
    """Run a model with the output of its head times a factor.

    Returns for each call of the head the storages of its input and of the decoder's output, and the
    logits.
    """
    outputs: list[int] = []
    calls: list[tuple[int, int]] = []

    def see(_module: nn.Module, _inputs: object, output: Any) -> None:
        outputs.append(output[0].untyped_storage()._cdata)

    def multiply(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append((inputs[0].untyped_storage()._cdata, outputs[-1] if outputs else 0))
        return output * factor

    hooks = [
        model.base_model.register_forward_hook(see),
        model.get_output_embeddings().register_forward_hook(multiply),
    ]
    try:
        return calls, model(ids, **model_keywords()).logits
    finally:
        for hook in hooks:
            hook.remove()


def _candidates(model: PreTrainedModel) -> Iterator[Head]:
    """Yield what the head could compute, from the fields of the config."""
    scales = [1.0]
    for value in _fields(model, _SCALES):
        scales += [value, 1 / value]
    described = model.config.get_text_config()
    scales += [value / described.hidden_size for value in _fields(model, _WIDTHS)]
    caps: list[float | None] = [*_fields(model, _CAPS), None]
    for cap, scale in itertools.product(caps, scales):
        yield Head(scale, cap)


def _largest_cap(model: PreTrainedModel) -> float:
    """Return how large logits must be for a cap to show."""
    return max([1.0, *(4 * cap for cap in _fields(model, _CAPS))])


def _fields(model: PreTrainedModel, names: tuple[str, ...]) -> list[float]:
    """Return the values of those fields that are positive numbers."""
    described: dict[str, Any] = model.config.get_text_config().to_dict()
    found = [described.get(name) for name in names]
    return [float(value) for value in found if isinstance(value, int | float) and value > 0]
