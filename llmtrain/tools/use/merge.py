"""The weights of a model as an export writes them, one tensor at a time.

    whole     a tensor of the checkpoint, cast
    merged    the base on meta, with peft's layers in it; of one layer at a time the base's weight
              and the adapter's are read, peft merges them in fp32, then the result is cast

peft's own layers do it because a transposed weight (`Conv1D`), DoRA and rsLoRA have formulas of
their own. The trap: a head that is tied to the embedding is not written. If an adapter changes one
of the two alone, they are no longer equal; then both are written, and the config says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.config.schema import ModelConfig
from llmtrain.distributed.engines.state import ADAPTER, persistent_buffers
from llmtrain.errors import Problem, UserError
from llmtrain.model import build, scorer, trainable
from llmtrain.model.base import Base
from llmtrain.model.shape import on_meta
from llmtrain.model.tokenizer import longer
from llmtrain.tools.use import load
from llmtrain.tools.use.target import Target, are_held, round_weight
from llmtrain.types import DTYPES, TensorSpec

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_FLOATS = ("F32", "BF16", "F16")
_NAMES = {dtype: name for name, (_, dtype) in DTYPES.items()}  # torch's → safetensors'
_SAVED = ".modules_to_save.default."  # peft's copy of a layer that is trained whole
_WRAPPED = ".token_adapter"  # peft's layer for token rows, inside the place of the embedding


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model to be written.

    config: of transformers; its dtype and `tie_word_embeddings` are true to the tensors
    specs: name → dtype and shape
    read: returns a tensor of these
    """

    config: PreTrainedConfig
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of peft, on meta.

    parts: names of the adapter's parameters in it → in the adapter's file
    """

    module: LoraLayer
    parts: dict[str, str]


def whole(directory: Path, listed: Collection[str], dtype: str) -> Weights:
    """Return the weights of a checkpoint.

    listed: its files, as its manifest names them
    dtype: of safetensors, for floating point tensors

    Raises UserError if a tensor is missing or has another shape.
    """
    config = load.config_of(directory)
    weights = _tensors(on_meta(config))
    stored = load.of_model(directory, listed)
    if not _fits(stored, weights):
        expected = "every tensor of the model that config.json describes"
        raise UserError(Problem(str(directory), None, expected))

    def read(name: str) -> Tensor:
        return cast(stored.read(name), dtype)

    return Weights(_with_dtype(config, dtype), _specs(weights, dtype), read)


def merged_weights(target: Target, entries: int, dtype: str) -> Weights:
    """Return the weights of a model with an adapter merged into it.

    target: the adapter
    entries: of its tokenizer

    Raises UserError if the adapter does not fit, has what cannot be merged, or its base is gone.
    """
    directory, base = target.directory, load.base_directory(target.directory)
    config = load.config_below(target, base)
    read_base = _open_base(base, config)
    text = config.get_text_config()
    text.vocab_size = load.rows_of(target, entries, text.vocab_size)
    skeleton = on_meta(config)
    weights = _tensors(skeleton)
    first = {id(one): name for name, one in skeleton.named_parameters()}
    every = skeleton.named_parameters(remove_duplicate=False)
    # Each further name of a tied parameter → its first name.
    tied = {name: first[id(one)] for name, one in every if first[id(one)] != name}
    rounded: set[str] = set()
    if are_held(target.state):
        rounded = {f"{name}.weight" for name in trainable.linear_layers(skeleton)}
    layers, replaced = _layers(skeleton, directory)
    for name in layers.keys() - weights.keys() - tied.keys():  # of stacked experts, by name
        raise _unmergeable(directory, next(iter(layers[name].parts.values())))
    apart = {name for name, first in tied.items() if _differ(layers.get(name), layers.get(first))}
    if apart:
        config.tie_word_embeddings = text.tie_word_embeddings = False
    weights |= {name: weights[tied[name]] for name in apart}
    stored = load.Stored.of(directory, ADAPTER)

    def read(name: str) -> Tensor:
        if file := replaced.get(name):
            return cast(stored.read(file), dtype)
        tensor = read_base(tied.get(name, name))
        if rows := weights[name].shape[:1]:
            tensor = longer(tensor, rows[0])
        if name in rounded:
            tensor = round_weight(tensor, target.state)
        if layer := layers.get(name):
            values = {leaf: stored.read(file).float() for leaf, file in layer.parts.items()}
            tensor = _merge(layer.module, tensor.float(), values)
        return cast(tensor, dtype)

    return Weights(_with_dtype(config, dtype), _specs(weights, dtype), read)


def _layers(skeleton: PreTrainedModel, directory: Path) -> tuple[dict[str, Layer], dict[str, str]]:
    """Put the adapter's layers into a model on meta; return them by the weight that they change.

    The second result has the weights of layers that are trained beside adapters, as the score of a
    reward model: name → name in the adapter's file.

    Raises UserError if a tensor of the adapter belongs to no layer that can be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    parameters = load.inject_adapter(skeleton, directory)
    names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    modules = skeleton.named_modules()
    layers = {name: Layer(one, {}) for name, one in modules if isinstance(one, BaseTunerLayer)}
    replaced = {}
    for file, parameter in parameters.items():
        name = names[id(parameter)]
        if _SAVED in name:
            replaced[name.replace(_SAVED, ".")] = file
            continue
        owner = next((one for one in layers if name.startswith(f"{one}.")), "")
        leaf = name.removeprefix(f"{owner}.")
        if not owner or leaf.startswith("base_layer.") or leaf.endswith(".bias"):
            raise _unmergeable(directory, file)
        layers[owner].parts[leaf] = file
    merged = {f"{name.removesuffix(_WRAPPED)}.weight": layer for name, layer in layers.items()}
    return merged, replaced


def _unmergeable(directory: Path, name: str) -> UserError:
    expected = "an adapter of low-rank layers and token rows alone, which can be merged"
    return UserError(Problem(str(directory / ADAPTER), name, expected))


def _merge(layer: LoraLayer, weight: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Fill one layer, let peft merge it, and put it back on meta. All tensors are fp32."""
    state = {"base_layer.weight": weight, **values}
    layer.load_state_dict(state, strict=False, assign=True)
    layer.merge()
    merged: Tensor = layer.get_base_layer().weight.data
    layer.to("meta")
    return merged


def _differ(one: Layer | None, first: Layer | None) -> bool:
    """Whether adapters make two tied weights unequal: they change one alone, or each apart."""
    if one is None or first is None:
        return one is not first
    return getattr(one.module, "tied_adapter", None) is not first.module


def _open_base(base: Path, config: PreTrainedConfig) -> Callable[[str], Tensor]:
    """Return what reads a model's tensors by their names in transformers' class, to be changed.

    Files from elsewhere may have other names; then the model is loaded whole.
    """
    stored = load.of_model(base)
    weights = _tensors(on_meta(config))
    if scorer.is_scorer(config):
        weights.pop(f"{scorer.SCORE}.weight")  # the adapter has it
    if _fits(stored, weights):
        return stored.read
    values = _tensors(build.build(config, ModelConfig(), Base(str(base), None, None)))
    return lambda name: values[name].detach().clone()


def _fits(stored: load.Stored, weights: Mapping[str, Tensor]) -> bool:
    shapes = {name: spec.shape for name, spec in stored.specs.items()}
    return all(shapes.get(name) == tuple(tensor.shape) for name, tensor in weights.items())


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied one once."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor of floating point numbers; return any other as it is."""
    wanted: torch.dtype = getattr(torch, DTYPES[dtype][1].removeprefix("torch."))
    return tensor.to(wanted) if tensor.is_floating_point() else tensor


def _specs(weights: Mapping[str, Tensor], dtype: str) -> dict[str, TensorSpec]:
    kinds = {name: _NAMES[str(tensor.dtype)] for name, tensor in weights.items()}
    specs = {name: TensorSpec(kinds[name], tuple(weights[name].shape)) for name in weights}
    return cast_specs(specs, dtype)


def cast_specs(specs: Mapping[str, TensorSpec], dtype: str) -> dict[str, TensorSpec]:
    """Return the specs with this dtype in place of every floating point dtype."""
    return {
        name: TensorSpec(dtype, spec.shape) if spec.dtype in _FLOATS else spec
        for name, spec in specs.items()
    }


def _with_dtype(config: PreTrainedConfig, dtype: str) -> PreTrainedConfig:
    """Return the config with the dtype of the tensors as they are written."""
    config.dtype = DTYPES[dtype][1].removeprefix("torch.")
    return config
