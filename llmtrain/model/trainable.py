"""Which parameters are trained: all, what `model.freeze` leaves, or adapters beside frozen ones.

A frozen parameter keeps its initial value. A tied one has several names; any of them freezes it.
Adapters are small matrices that peft injects beside the weights of a model:

    lora      W·x + α/r · B·A·x        A random, B zero: training begins with the output of the base
    rslora    α/√r instead
    dora      each row of W + α/r · B·A scaled to a length that is trained, too
    qlora     lora, the base in four bits (`model.quantized`)

peft changes the model in place and wraps nothing around it, so it is still a transformers model
with a loss, blocks and attention. The trap: peft gives its matrices the dtype of the layer that
they belong to. So the base is cast after they exist, and they stay fp32. peft is imported where it
is used, because that takes a second, which other runs need not wait for.

Four bits are nf4 with double quantization, by bitsandbytes. The model is built as any other; then
its linear layers are replaced. Their weights are still whole numbers of 16 bits: bitsandbytes
quantizes each when it is moved to its device.
"""

import difflib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.config.schema import AdapterConfig
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model.base import Base
from llmtrain.model.scorer import SCORE, is_scorer, score_layer
from llmtrain.model.untrusted import ADAPTER_CONFIG

_FREEZE = "model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Set requires_grad to False for all parameters whose names match a pattern (`*`, `?`).

    model: the bare model, which may be on meta. Raises UserError for each pattern that matches
    nothing, and if nothing would be left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(n, pattern) for n in names)]
    raise_any(no_match(_FREEZE, pattern, names) for pattern in unmatched)
    frozen = [p for name, p in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if {id(p) for p in frozen} == {id(p) for _, p in named}:
        expected = f"something left to train of {len(names)} parameters"
        raise UserError(Problem(_FREEZE, ", ".join(patterns), expected))
    for parameter in frozen:
        parameter.requires_grad = False


def no_match(key: str, pattern: str, names: Sequence[str]) -> Problem:
    """Return the problem of a pattern that matches none of these parameter names."""
    near = difflib.get_close_matches(pattern.strip("*?."), names, n=3, cutoff=0.3)
    inside = [name for name in names if pattern.strip("*?.") in name][:3]  # without stars
    shown = ", ".join(inside or near or names[:3])
    return Problem(key, pattern, "a pattern that matches a parameter's name", f"like {shown}")


def missing_for_four_bits(*, cpu: bool) -> Iterator[Problem]:
    """Yield what keeps `adapter.kind: qlora` from working on this machine."""
    key, kind = "adapter.kind", "qlora"
    if cpu:
        yield Problem(key, kind, "a CUDA device for weights in four bits", "adapter.kind=lora")
    elif importlib.util.find_spec("bitsandbytes") is None:
        expected = "bitsandbytes, which is not here"
        remedy = "pip install 'llmtrain[quantized]', or adapter.kind=lora"
        yield Problem(key, kind, expected, remedy)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers whose weights are held in four bits: linear, not the head."""
    heads, modules = _heads(model), model.named_modules()
    return [name for name, one in modules if type(one) is nn.Linear and one not in heads]


def _heads(model: PreTrainedModel) -> tuple[nn.Module | None, ...]:
    """Return the layers behind the decoder: the head, which may be tied, or that of the score."""
    return model.get_output_embeddings(), score_layer(model)


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the linear layers by layers of four bits, in place.

    dtype: of the forward, from which the weights are quantized
    """
    import bitsandbytes as bnb

    for name in linear_layers(model):
        dense = model.get_submodule(name)
        # Without a dtype for now, or peft would give its matrices that dtype.
        four = bnb.nn.Linear4bit(
            dense.in_features,
            dense.out_features,
            bias=dense.bias is not None,
            compute_dtype=None,
            quant_type="nf4",
            device=torch.device("meta"),
        )
        weight = dense.weight.detach().to(dtype)
        four.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=four)
        if dense.bias is not None:
            four.bias = nn.Parameter(dense.bias.detach(), requires_grad=False)
        model.set_submodule(name, four)


@contextmanager
def as_quantized(model: Any) -> Iterator[None]:
    """Mark a model with four-bit layers in this context, as peft expects it."""
    if not any(type(module).__name__ == "Linear4bit" for module in model.modules()):
        yield
        return
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        del model.is_loaded_in_4bit


_TARGETS = "adapter.targets"
BASE_FILE = "adapter.json"
_NAME = "default"  # of the adapter, as peft calls the only one
_ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of their names
# What `_names_that_peft_changes` has found, by all that it depends on: a start asks three times.
_changed_names: dict[tuple[str, frozenset[str]], set[str]] = {}

_log = logging.getLogger(__name__)


def attach(
    model: PreTrainedModel,
    config: AdapterConfig,
    new_tokens: Sequence[int] = (),
    *,
    meta: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freeze a model and inject the adapters that `config` asks for, in place; nothing for `none`.

    new_tokens: ids whose embeddings are trained too
    meta: whether the model is on meta; otherwise the matrices draw from torch's global generator
    dtype: of the forward, in which the frozen weights are held; the adapters are fp32

    Call it after `attention.install`, which compares the model in fp32, and before an optimizer is
    made. Raises UserError for patterns of `targets` that match no linear layer.
    """
    if config.kind == "none":
        return
    targets = find_targets(model, config.targets)
    if config.kind == "qlora" and not meta:
        quantize(model, dtype)
    inject(model, config, targets, new_tokens, meta=meta)
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype, module.compute_type_is_set = dtype, True
    hold_base(model, dtype)
    if not meta:
        names = ", ".join(short_names(model))
        _log.info("adapter: %s on %s%s", config.kind, names, _left_out(model))


def find_targets(model: PreTrainedModel, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers that get an adapter, in the order of the model.

    patterns: `auto` for all that can have one, or patterns (`*`, `?`) of names or of their ends

    Raises UserError for each pattern that matches none of them.
    """
    # The names of the linear layers that can have an adapter. Left out are the head, which may be
    # tied, or the score, which is trained; routers of a mixture, whose balance adapters disturb;
    # and layers that are not called, as their weights are read by others. Experts that are stacked
    # in one tensor are no layers.
    heads, refused = _heads(model), _names_that_peft_changes(model)
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module not in heads
        and not _is_router(name, module)
        and not _is_read(model, name)
        and _last(name) not in refused
    ]
    if patterns == "auto":
        if not layers:
            expected = "a model with linear layers that can have an adapter"
            raise UserError(Problem(_TARGETS, "auto", expected))
        return tuple(layers)
    asked = (patterns,) if isinstance(patterns, str) else patterns
    unmatched = (one for one in asked if not any(_matches(one, name) for name in layers))
    raise_any(_no_match(one, model, layers) for one in unmatched)
    return tuple(name for name in layers if any(_matches(one, name) for one in asked))


def inject(
    model: PreTrainedModel,
    config: AdapterConfig,
    targets: Sequence[str],
    new_tokens: Sequence[int],
    *,
    meta: bool,
) -> None:
    """Inject adapters at layers that `find_targets` has found.

    targets: those that this model does not have, because it has fewer blocks, are passed over

    The other arguments are those of `attach`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = dict(model.named_modules()).keys()
    targets = [name for name in targets if name in layers]
    scores = is_scorer(model.config)
    settings = LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        modules_to_save=[SCORE] if scores else None,
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        use_rslora=config.kind == "rslora",
        use_dora=config.kind == "dora",
        trainable_token_indices=_token_rows(model, new_tokens) if new_tokens else None,
    )
    with warnings.catch_warnings(), as_quantized(model):
        # That the weights of a Conv1D lie the other way round; peft finds that out by itself.
        warnings.simplefilter("ignore", UserWarning)
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=meta)
    if other := set(adapted_layers(model)) ^ set(targets):
        raise RuntimeError(f"peft adapted other layers than asked: {', '.join(sorted(other)[:3])}")


def hold_base(model: nn.Module, dtype: torch.dtype, *, trained: bool = False) -> None:
    """Cast the frozen weights of a model, in place; ties are kept. trained: those too.

    Parameters are replaced one by one, because the type of a fake one cannot be changed.
    """
    held: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or not weight.is_floating_point():
                continue
            if type(weight).__name__ == "Params4bit":  # four-bit weights, now or once on a device
                continue
            if weight.dtype == dtype or (weight.requires_grad and not trained):
                continue
            if id(weight) not in held:
                cast = weight.detach().to(dtype)
                held[id(weight)] = nn.Parameter(cast, requires_grad=weight.requires_grad)
            module._parameters[name] = held[id(weight)]


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that have an adapter."""
    return [name for name, one in model.named_modules() if "lora_A" in dict(one.named_children())]


def adapter_files(model: PreTrainedModel, base: Base) -> dict[str, bytes]:
    """Return name → content of the files beside an adapter's tensors.

    base: what the adapter is trained on

    `PeftModel.from_pretrained(base, checkpoint)` reads the first one, a resumed run the second.
    """
    settings = model.peft_config[_NAME].to_dict() | {
        "base_model_name_or_path": base.path,
        "revision": base.revision,
        "inference_mode": True,
        "target_modules": short_names(model),
    }
    # peft's sets are sorted, since their order differs from process to process.
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    return {ADAPTER_CONFIG: text.encode(), BASE_FILE: json.dumps({"base": asdict(base)}).encode()}


def refuse_other_base(saved: bytes, base: Base, checkpoint: str) -> None:
    """Raise UserError if a checkpoint's adapter was trained on another base than this one.

    saved: its `adapter.json`
    A directory that was moved is the same base.
    """
    was = Base(**json.loads(saved)["base"])
    same_place = was.digest is not None or was.path == base.path
    if (was.digest, was.revision) == (base.digest, base.revision) and same_place:
        return
    expected = f"{was}, on which the adapter in {checkpoint} was trained"
    remedy = "put it back, or begin again in another run.dir"
    raise UserError(Problem("model.from", base, expected, remedy))


def _names_that_peft_changes(model: PreTrainedModel) -> set[str]:
    """Return the last parts of layers' names that peft takes for names of stacked experts.

    For mixtures whose experts were layers in older versions of transformers, peft turns
    `gate_proj` into the experts' tensor `gate_up_proj`, also where a dense layer has that name.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    linear = (name for name, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D))
    names = frozenset(map(_last, linear))
    key = (model.config.model_type, names)
    if key in _changed_names:
        return _changed_names[key]
    changed: set[str] = set()
    for name in names:
        settings = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(settings, model, None)
        except ValueError:  # it is one of two that became one tensor
            changed.add(name)
        if set(settings.target_modules or ()) != {name}:
            changed.add(name)
    _changed_names[key] = changed
    return changed


def _is_router(name: str, module: nn.Module) -> bool:
    """Whether a linear layer chooses experts, by its name or class."""
    parts = name.split(".")
    named = parts[-1] in _ROUTERS or "router" in parts
    return named or "router" in type(module).__name__.lower()


def _is_read(model: nn.Module, name: str) -> bool:
    """Whether a kernel reads the weight of a linear layer of a state-space mixer.

    It would ignore an adapter. Only the projection of the mixer's input is called.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    names = {one for one, _ in owner.named_parameters(recurse=False)}
    return names >= {"A_log", "D"} and _last(name) != "in_proj"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name, or its end behind a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _no_match(pattern: str, model: nn.Module, layers: Sequence[str]) -> Problem:
    every = [*dict(model.named_modules()), *dict(model.named_parameters())]
    if other := next((name for name in every if name and _matches(pattern, name)), None):
        expected = (
            f"a linear layer other than the head and a mixture's routers; {other} is not one: it "
            "and experts that are stacked in one tensor get no adapter"
        )
        return Problem(_TARGETS, pattern, expected)
    ends = list(dict.fromkeys(map(_last, layers)))
    near = difflib.get_close_matches(_last(pattern).strip("*?"), ends, n=3, cutoff=0.5) or ends[:3]
    expected = "a pattern that matches the name of a linear layer"
    return Problem(_TARGETS, pattern, expected, f"nearest: {', '.join(near)}" if near else "")


def _token_rows(model: PreTrainedModel, ids: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Return which rows peft trains: of the embedding, and of a head that is not tied to it.

    A head with a bias is left out, as peft's layer would drop the bias.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is None or head.weight is embedding.weight
    if tied or head.bias is not None:
        return list(ids)
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(one)]: list(ids) for one in (embedding, head)}


def short_names(model: nn.Module) -> list[str]:
    """Return the names of the adapted layers as peft takes them: by their ends, where these do."""
    targets = adapted_layers(model)
    inside = tuple(f"{name}." for name in targets)
    names = (name for name, _ in model.named_modules() if name not in targets)
    others = {_last(name) for name in names if not name.startswith(inside)}
    ends = (name if _last(name) in others else _last(name) for name in targets)
    return list(dict.fromkeys(ends))


def _left_out(model: PreTrainedModel) -> str:
    """Return in words which share of a mixture's weights, routers and experts, has no adapter."""
    left = 0
    for name, module in model.named_modules():
        weights = [weight for weight in module._parameters.values() if weight is not None]
        if not (name and _is_router(name, module)):  # then only experts stacked in one tensor
            stacked = not isinstance(module, nn.Conv1d)
            weights = [weight for weight in weights if weight.ndim == 3 and stacked]
        left += sum(weight.numel() for weight in weights)
    share = 100 * left / sum(weight.numel() for weight in model.parameters())
    return f"; routers and stacked experts, {share:.0f} % of the weights, have none" * bool(left)
