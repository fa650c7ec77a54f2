"""The shape of the model of a transformers config for the memory plan, and what is recomputed.

The model is built on meta, without memory, weights or a download. Parameters are identified by the
object, not by name, so that a tied parameter counts once.

What the backward recomputes is `model.activation_checkpointing`:

    none        nothing is recomputed: every tensor that the backward needs is kept
    selective   the results of matrix products and attention, which are expensive, are kept
    full        whole blocks are recomputed: only the input of each block is kept

The random state is restored for the second forward, so dropout is the same and gradients do not
change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.config.schema import AdapterConfig
from llmtrain.errors import Problem, UserError
from llmtrain.model import tensor, trainable
from llmtrain.model.scorer import auto_class, is_scorer
from llmtrain.text import first_line
from llmtrain.torch_private import ATTENTIONS, GROUPED_PRODUCT
from llmtrain.types import Algorithm, ModelShape, ParameterShape

# The errors of transformers' models for a config with inconsistent values.
CANNOT_BUILD = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(LookupError, ArithmeticError, ImportError),
)
# Modules whose weights autocast casts to bf16. It does not cast those of embeddings and norms, nor
# the experts of a mixture, which are stacked in three dimensions and multiplied group by group.
_CAST = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)
# Fields of configs: the experts that a token is sent to, and how many there are to choose from.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
Updates = Callable[[nn.Module], Mapping[int, Algorithm]]


def describe_parameters(
    model_config: PreTrainedConfig,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    new_tokens: Sequence[int] = (),
    *,
    updates: Updates | None = None,
) -> ModelShape:
    """Return the shape of the model that `build` makes from this config.

    freeze: patterns of `model.freeze`.
    adapter, new_tokens: as of `trainable.attach`; None = no adapter.
    updates: as for `shape`

    Raises UserError for patterns that cannot be applied. It takes about a tenth of a second for
    models of any size.
    """
    model = on_meta(model_config)
    trainable.freeze(model, freeze)
    if adapter is None or adapter.kind == "none":
        return shape(model, updates=updates)
    four_bits = trainable.linear_layers(model) if adapter.kind == "qlora" else []
    weights = {id(model.get_submodule(name).weight) for name in four_bits}
    trainable.attach(model, adapter, new_tokens, meta=True)
    described = shape(model, updates=updates)
    marked = zip(described.parameters, model.parameters(), strict=True)
    parameters = tuple(replace(one, quantized=id(p) in weights) for one, p in marked)
    return replace(described, parameters=parameters, adapted=True, token_rows=len(new_tokens))


def on_meta(model_config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model on meta, which has shapes, names and ties but no storage.

    Raises UserError for a config that transformers accepts but cannot build a model from, with the
    field at fault if it is known.
    """
    try:
        with torch.device("meta"):
            return from_config(model_config, dtype)
    except CANNOT_BUILD as error:
        path = model_config.name_or_path
        prefix = f"{path}/config.json: " if path else "model.config."
        text = f"{type(error).__name__}: {first_line(error)}"
        expected = f"what transformers can build a model of ({text})"
        missing = error.args[0] if isinstance(error, KeyError) and error.args else None
        for key, value in _leaves(model_config.to_dict(), ""):
            if isinstance(value, str) and value == missing:
                raise UserError(Problem(f"{prefix}{key}", value, expected)) from error
        key, value = f"{prefix}model_type", model_config.model_type
        raise UserError(Problem(key, value, f"fields of {expected}")) from error


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield the values of nested mappings with their dotted names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def from_config(
    model_config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return the model with random weights from torch's global generator."""
    model: PreTrainedModel = auto_class(model_config).from_config(
        model_config, dtype=dtype, trust_remote_code=False
    )
    return model


def shape(model: PreTrainedModel, *, updates: Updates | None = None) -> ModelShape:
    """Return the shape of a bare model, on any device.

    updates: returns what updates each trained parameter, by its id; None = AdamW updates all
    """
    algorithms = updates(model) if updates else {}
    described = model.config.get_text_config()
    repeated = blocks(model)
    of_block = {id(p): number for number, one in enumerate(repeated) for p in one.parameters()}
    cast = {id(module.weight) for module in model.modules() if isinstance(module, _CAST)}
    used, axes = _used(model, cast), tensor.axes_of(model)
    embedding, head = _weight(model.get_input_embeddings()), _weight(model.get_output_embeddings())
    width = 0 if embedding is None else embedding.shape[-1]
    kinds = dict.fromkeys(type(one).__name__ for one in model.modules())
    return ModelShape(
        parameters=tuple(
            ParameterShape(
                tuple(p.shape),
                p.requires_grad,
                id(p) in cast,
                of_block.get(id(p)),
                algorithms.get(id(p), "adamw"),
                used=used[id(p)],
                axis=axes.get(id(p)),
            )
            for p in model.parameters()
        ),
        hidden=getattr(described, "hidden_size", None) or width,
        vocabulary=1 if is_scorer(model.config) else described.vocab_size,
        embedding=0 if embedding is None else embedding.numel(),
        head=0 if head is None else head.numel(),
        tied=head is not None and head is embedding,
        blocks=len(repeated),
        block_class=(",".join(name for name in kinds if name in _whole(model)) or None),
        attention=_attention(described),
        recomputes=model.supports_gradient_checkpointing,
        listed=",".join(dict.fromkeys(type(one).__name__ for one in repeated)),
        head_trained=head is not None and head.requires_grad,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks in order.

    They are the modules in lists that the model declares as not to be split, otherwise those of the
    list with the most parameters. A block inside a block (experts of a mixture) does not count.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [
        one for module_list in lists for one in module_list if type(one).__name__ in _whole(model)
    ]
    if named:
        inner = {id(part) for one in named for part in one.modules() if part is not one}
        return [one for one in named if id(one) not in inner]
    sizes = [sum(p.numel() for p in module_list.parameters()) for module_list in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _whole(model: PreTrainedModel) -> set[str]:
    """Return the names of the classes that the model declares as not to be split."""
    return set(model._no_split_modules or ())


def _weight(module: nn.Module | None) -> nn.Parameter | None:
    if module is None:
        return None
    bare = getattr(module, "original_module", module)  # peft wraps it where rows of it are trained
    return dict(bare.named_parameters(recurse=False)).get("weight")


def _used(model: PreTrainedModel, cast: set[int]) -> dict[int, float]:
    """Return, by id of a parameter, the share of its elements that each token is multiplied with.

    cast: ids of the weights of linear layers; the matrix of an embedding is one if the head has it
    """
    lookups = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(p) for one in lookups for p in one.parameters(recurse=False)} - cast
    described = model.config.get_text_config()
    # Of how many experts a token is sent to how many; 0 if the config does not say.
    chosen, experts = _first_number(described, _CHOSEN), _first_number(described, _EXPERTS)
    shares = {}
    for name, p in model.named_parameters():
        shares[id(p)] = float(p.ndim > 1 and id(p) not in looked_up)
        if chosen and "experts" in name.split("."):
            shares[id(p)] *= min(1.0, chosen / (experts or p.shape[0]))
    return shares


def _first_number(described: object, names: Sequence[str]) -> int:
    values = (getattr(described, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def _attention(described: PreTrainedConfig) -> int:
    """Return Σ heads × head size over the layers with softmax attention.

    State-space layers and linear attention do not count.
    """
    count = described.num_hidden_layers
    kinds = getattr(described, "layer_types", None) or ["attention"] * count
    # Older releases of transformers (5.12) have no layers with sizes of their own.
    layers = getattr(described, "per_layer_config", [described] * count)
    width = 0
    for layer, kind in zip(layers, kinds, strict=True):
        heads, size = getattr(layer, "num_attention_heads", None), getattr(layer, "head_dim", None)
        softmax = "attention" in kind.replace("linear_attention", "") or kind == "hybrid"
        if heads and softmax:
            width += int(heads * size if size else layer.hidden_size)
    return width


KEY = "model.activation_checkpointing"
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_KEPT = [*(product.default for product in _PRODUCTS), GROUPED_PRODUCT, *ATTENTIONS]


def apply_checkpointing(model: PreTrainedModel, checkpointing: str) -> None:
    """Set up `none`, `selective` or `full` in place for the training forwards of a bare model.

    Call it before the model is sharded; compiled blocks are computed again, too. Raises UserError
    for a model whose code does not support it.
    """
    if checkpointing == "none":
        return
    if not model.supports_gradient_checkpointing:
        kind = model.config.model_type
        expected = f"none: the code of {kind} does not support activation checkpointing"
        raise UserError(Problem(KEY, checkpointing, expected))
    keywords: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "selective":
        keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(keywords)
    else:  # its name in older releases of transformers (5.12)
        model.gradient_checkpointing_enable(keywords)
    # transformers makes the embeddings' output require a gradient, which only reentrant
    # checkpoints need. Frozen first blocks would then keep activations that are never used.
    model.disable_input_require_grads()
