"""Saved adapters: what they were trained on, and their layers in a model, made by peft.

    file     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    model                     model.layers.0.self_attn.q_proj.lora_A.default.weight

Which name in the file belongs to which parameter is left to peft, as it differs by kind. The trap:
peft loads a file that lacks tensors, or has others, without an error. So names and shapes are
compared first.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmtrain.distributed.engines.state import ADAPTER
from llmtrain.errors import Problem, UserError, first_line, raise_any
from llmtrain.model.base import Base
from llmtrain.model.trainable.adapters import BASE_FILE, CONFIG_FILE
from llmtrain.tools.use import tensors
from llmtrain.types import TensorSpec

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG, BASE = ADAPTER, CONFIG_FILE, BASE_FILE
# Values of `init_lora_weights` that leave the base as it is. Others (pissa, olora, corda, loftq,
# lora_ga) change it when the adapter is made, so that its file is of no use without that change.
_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
_IDLE = {
    "corda_config",
    "eva_config",
    "lora_ga_config",
    "loftq_config",
}  # of an init, not read here
_PREFIX = "base_model.model."  # of all names in the file, as of a `PeftModel`
_SHOWN = 3
_LONGEST = 200  # characters of a value in a message

Size = Annotated[int, Field(ge=1)]
Row = Annotated[int, Field(ge=0)]


class _Settings(BaseModel):
    """What an adapter's config may ask for, since its tensors are then all that the adapter is.

    These keys say where its layers are, of which kind and size, and facts for the person who trains
    it. A test compares each with peft. Any other key may change the base or what a layer computes,
    so it is refused. The last ones have an effect only beside another key that is refused, or when
    an adapter is made.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    r: Size = 8
    lora_alpha: int | float = 8
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    fan_in_fan_out: bool = False
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: dict[str, Size] | None = None
    alpha_pattern: dict[str, int | float] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[Row] | dict[str, list[Row]] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str = True
    peft_type: str
    task_type: str | None = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    auto_mapping: dict[str, Any] | None = None
    inference_mode: bool = True
    corda_config: Any = None
    eva_config: Any = None
    lora_ga_config: Any = None
    loftq_config: Any = None
    megatron_core: Any = None
    qalora_group_size: Any = None


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
        with _read_by_peft(str(directory / CONFIG)):
            inject_adapter_in_model(_lora_config(directory), model, low_cpu_mem_usage=True)
    own = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), save_embedding_layers=False
    )
    found = {f"{_PREFIX}{name}": parameter for name, parameter in own.items()}
    _compare(found, tensors.specs(directory, WEIGHTS), directory)
    return found


def attach(model: Any, directory: Path) -> set[str]:
    """Put an adapter's layers into a model, with their weights in fp32. Raises as `inject` does.

    Returns the names of its parameters in the model.
    """
    found = inject(model, directory)
    stored = tensors.Stored.of(directory, WEIGHTS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {names[id(found[name])]: stored.read(name).float() for name in found}
    model.load_state_dict(values, strict=False, assign=True)
    return set(values)


def _lora_config(directory: Path) -> Any:
    from peft import LoraConfig

    file, settings = str(directory / CONFIG), _json(directory / CONFIG)
    if (kind := settings.get("peft_type")) != "LORA":
        raise UserError(Problem(file, kind, "a LoRA adapter (peft_type LORA)"))
    try:
        known = _Settings.model_validate(settings)
    except ValidationError as error:
        raise UserError(*_mistyped(file, error)) from error
    raise_any(_unsupported(file, settings))
    given = known.model_dump(include=settings.keys() & _Settings.model_fields.keys() - _IDLE)
    with _read_by_peft(file):
        config = LoraConfig(**{key: value for key, value in given.items() if value is not None})
    config.init_lora_weights = False  # the weights come from the file
    config.inference_mode = True
    return config


@contextmanager
def _read_by_peft(file: str) -> Iterator[None]:
    """Turn what peft raises about a config that does not fit the model into a UserError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, re.error) as error:
        expected = f"an adapter for the layers of this model: {first_line(error)}"
        raise UserError(Problem(file, None, expected)) from error


def _mistyped(file: str, error: ValidationError) -> Iterator[Problem]:
    """Yield one problem for each key whose value has another type than peft's."""
    for key, found in {str(one["loc"][0]): one for one in error.errors()}.items():
        yield Problem(f"{file}: {key}", json.dumps(found["input"])[:_LONGEST], found["msg"])


def _unsupported(file: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting with which the tensors are not all that the adapter is.

    An empty value is the default of every such key, those of later versions of peft too.
    """
    init = settings.get("init_lora_weights", True)
    if init not in _INITS:
        expected = (
            "an adapter whose base is as its files are; this one was made with a changed base"
        )
        remedy = (
            "convert it where it was trained: peft's save_pretrained with "
            "path_initial_model_for_weight_conversion"
        )
        yield Problem(f"{file}: init_lora_weights", json.dumps(init)[:_LONGEST], expected, remedy)
    for key, value in settings.items():
        if value and key not in _Settings.model_fields:
            expected = "not set: llmtrain does not compute what it asks for"
            remedy = "use the adapter with peft, which has it, or merge it there"
            yield Problem(f"{file}: {key}", json.dumps(value)[:_LONGEST], expected, remedy)


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
