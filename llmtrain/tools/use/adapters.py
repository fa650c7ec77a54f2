"""Saved adapters: what they were trained on, and their layers in a model, made by peft.

    file     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    model                     model.layers.0.self_attn.q_proj.lora_A.default.weight

Which name in the file belongs to which parameter is left to peft, as it differs by kind. The trap:
peft loads a file that lacks tensors, or has others, without an error. So names and shapes are
compared first.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.distributed.engines.state import ADAPTER
from llmtrain.errors import Problem, UserError, first_line, raise_any
from llmtrain.model.base import Base
from llmtrain.model.trainable.adapters import BASE_FILE, CONFIG_FILE
from llmtrain.tools.use import tensors
from llmtrain.types import TensorSpec

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG, BASE = ADAPTER, CONFIG_FILE, BASE_FILE
_PREFIX = "base_model.model."  # of all names in the file, as of a `PeftModel`
_SHOWN = 3


def base_of(directory: Path) -> Base:
    """Return what an adapter was trained on, from `adapter.json`, else from peft's own file.

    Raises UserError if neither names it.
    """
    named = _json(directory / BASE).get("base") if (directory / BASE).exists() else None
    if isinstance(named, dict) and named.get("path"):
        return Base(str(named["path"]), named.get("revision"), named.get("digest"))
    settings = _json(directory / CONFIG)
    if path := settings.get("base_model_name_or_path"):
        return Base(str(path), settings.get("revision"), None)
    expected = "an adapter that names the model that it was trained on"
    raise UserError(Problem(str(directory / CONFIG), None, expected))


def inject(model: Any, directory: Path) -> dict[str, torch.nn.Parameter]:
    """Put an adapter's layers into a model and return its parameters by their names in the file.

    model: is changed; it may be on meta. The parameters are on meta.

    Raises UserError if this is no LoRA adapter, or the file has other tensors than its config says.
    """
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    with warnings.catch_warnings():
        # That the weights of a Conv1D lie the other way round; peft finds that out by itself.
        warnings.simplefilter("ignore", UserWarning)
        try:
            inject_adapter_in_model(_lora_config(directory), model, low_cpu_mem_usage=True)
        except ValueError as error:
            expected = f"an adapter for the layers of this model: {first_line(error)}"
            raise UserError(Problem(str(directory / CONFIG), None, expected)) from error
    own = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), save_embedding_layers=False
    )
    found = {f"{_PREFIX}{name}": parameter for name, parameter in own.items()}
    _compare(found, tensors.specs(directory, WEIGHTS), directory)
    return found


def attach(model: Any, directory: Path) -> None:
    """Put an adapter's layers into a model, with their weights in fp32. Raises as `inject` does."""
    found = inject(model, directory)
    stored = tensors.Stored.of(directory, WEIGHTS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {names[id(found[name])]: stored.read(name).float() for name in found}
    model.load_state_dict(values, strict=False, assign=True)


def _lora_config(directory: Path) -> Any:
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        expected = f"a config that peft can read: {first_line(error)}"
        raise UserError(Problem(str(directory / CONFIG), None, expected)) from error
    if not isinstance(config, LoraConfig):
        expected = "a LoRA adapter (peft_type LORA)"
        raise UserError(Problem(str(directory / CONFIG), config.peft_type, expected))
    config.init_lora_weights = False  # the weights come from the file
    config.inference_mode = True
    return config


def _compare(
    wanted: Mapping[str, torch.nn.Parameter], stored: Mapping[str, TensorSpec], directory: Path
) -> None:
    """Raise UserError unless the file has every tensor of the layers, and no other."""
    expected = "the tensors of the layers that adapter_config.json names"
    problems = []
    for what, names in {
        "missing": wanted.keys() - stored.keys(),
        "not in the model": stored.keys() - wanted.keys(),
        "of another shape": {
            name
            for name in wanted.keys() & stored.keys()
            if tuple(wanted[name].shape) != stored[name].shape
        },
    }.items():
        if names:
            found = f"{len(names)} {what} ({', '.join(sorted(names)[:_SHOWN])})"
            problems.append(Problem(str(directory / WEIGHTS), found, expected))
    raise_any(problems)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(str(path), None, f"a JSON object ({error})")) from error
    if not isinstance(found, dict):
        raise UserError(Problem(str(path), None, "a JSON object"))
    return found
