"""Models that score a sequence with a number, instead of the next token: reward models.

They are transformers' classes for sequence classification with one label. The decoder is that of
the causal model, and the matrix `score`, (1, h), takes the place of the head:

    ids ─► decoder ─► hidden state of the last token · score ─► a number

Which class a model has stands in its config, as `architectures`, where whoever makes the model from
a config looks: the plan, a start, a resumed run, and `AutoModelForSequenceClassification`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from llmtrain.errors import Problem, UserError

KEY = "preference.loss"
SCORE = "score"  # the name of the matrix in each class that can be trained here
_CLASS = "ForSequenceClassification"  # the end of the name of such a class
_IDS = 8


def is_scorer(config: PreTrainedConfig) -> bool:
    """Whether the model of a config scores sequences."""
    return any(name.endswith(_CLASS) for name in config.architectures or ())


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes the model of a config."""
    return AutoModelForSequenceClassification if is_scorer(config) else AutoModelForCausalLM


def make_scorer(config: PreTrainedConfig, end: int | None, pad: int | None) -> None:
    """Let a config be that of a model that scores, in place.

    end, pad: tokens; where they are the same, the model has no token for padding, which it would
        look for from the right to find the last token

    Raises UserError for an architecture without such a class.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        kind = config.model_type
        expected = f"another loss: transformers has no class for sequence classification of {kind}"
        raise UserError(Problem(KEY, "reward", expected))
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    config.architectures = [(classes[0] if isinstance(classes, tuple) else classes).__name__]
    config.num_labels = 1
    config.get_text_config().pad_token_id = None if pad == end else pad


def score_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Return the layer that makes the score, the trained one beside adapters; None = no scorer."""
    layer: Any = getattr(model, SCORE, None) if is_scorer(model.config) else None
    if hasattr(layer, "modules_to_save"):  # peft keeps the untrained one too
        (layer,) = layer.modules_to_save.values()
    return layer if isinstance(layer, nn.Linear) else None


def widen(layer: nn.Linear) -> None:
    """Let the layer of the score compute in at least fp32, whatever the rest of the model does.

    Its forward is replaced, for it is there that ZeRO-3 has its weight.
    """

    def forward(hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(wide)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(wide), layer.weight.to(wide), bias)

    layer.forward = forward  # type: ignore[method-assign, assignment]


def outputs(model: PreTrainedModel, ids: Tensor, **keywords: Any) -> Tensor:
    """Return what a model computes at each position: logits, or hidden states, if it scores."""
    if is_scorer(model.config):
        hidden: Tensor = model.base_model(ids, **keywords)[0]
        return hidden
    logits: Tensor = model(ids, **keywords).logits
    return logits


def check(model: PreTrainedModel) -> None:
    """Raise UserError unless a model scores by a layer behind its decoder. model: on the CPU"""
    layer, training = score_layer(model), model.training
    same = layer is not None and layer.out_features == 1
    if layer is not None and same:
        ids = torch.arange(_IDS)[None] % model.config.get_text_config().vocab_size
        pad = model.config.get_text_config().pad_token_id
        ids = torch.where(ids == pad, (ids + 1) % _IDS, ids) if pad is not None else ids
        model.eval()
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits[:, 0]
            by_layer = layer(outputs(model, ids, use_cache=False)[:, -1])[:, 0]
        model.train(training)
        same = torch.allclose(by_layer, whole, rtol=1e-5, atol=1e-5)
    if not same:
        other = f"{type(model).__name__} is none, or has several labels"
        expected = f"a model whose score is one layer behind its decoder; {other}"
        raise UserError(Problem(KEY, "reward", expected))
