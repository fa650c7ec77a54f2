"""Load a model to use it: whole, or saved adapters on the model that they were trained on.

peft makes the layers of the adapters, and decides which name in their file belongs to which
parameter, as it differs by kind:

    file     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    model                     model.layers.0.self_attn.q_proj.lora_A.default.weight

The trap: peft loads a file that lacks tensors, or has others, without an error. So names and shapes
are compared first.

Tensors are read and written by safetensors. A file that is read is mapped while one of its tensors
is in use. Only what is touched of it is in memory, so an export holds one file that it writes, and
of those that it reads no more than that.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llmtrain.checkpoint import disk, format as form
from llmtrain.config.schema import ModelConfig
from llmtrain.distributed.engines.accelerator import on_cpu
from llmtrain.distributed.engines.state import ADAPTER
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, needed_on_disk, raise_any
from llmtrain.model import attention, build, scorer, tokenizer as tokenizers, untrusted
from llmtrain.model.base import CONFIG, Base, check_code
from llmtrain.model.tokenizer import grow, rows_for, set_rows
from llmtrain.model.trainable import BASE_FILE, hold_base
from llmtrain.text import first_line
from llmtrain.tools.use import target as targets
from llmtrain.training.start.frozen import what_changed
from llmtrain.types import JsonMapping, JsonObject, Spec, TensorSpec

if TYPE_CHECKING:
    from peft import LoraConfig

# Values of `init_lora_weights` that leave the base as it is. Others (pissa, olora, corda, loftq,
# lora_ga) change it when the adapter is made, so that its file is of no use without that change.
_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# Of an init, not read here.
_IDLE = {"corda_config", "eva_config", "lora_ga_config", "loftq_config"}
_PREFIX = "base_model.model."  # of all names in the file, as of a `PeftModel`
_SHOWN = 3
_LONGEST = 200  # characters of a value in a message

Size = Annotated[int, Field(ge=1)]
Row = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors on disk, in one file or several.

    files: name → its file in the directory
    specs: name → dtype and shape
    """

    directory: Path
    files: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, directory: Path, *names: str) -> Stored:
        """Return the tensors of these files. Raises as `specs` does."""
        parts = {file: specs(directory, file) for file in names}
        files = {name: file for file, part in parts.items() for name in part}
        return cls(directory, files, {name: parts[file][name] for name, file in files.items()})

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises RunError 74 if the disk does not answer."""
        path = self.directory / self.files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _no_answer(path, error) from error
        return tensor


def of_model(directory: Path, listed: Collection[str] | None = None) -> Stored:
    """Return the tensors of a model directory. Raises UserError if its files are not whole.

    listed: the files to choose from; None = all of the directory
    """
    files = listed if listed is not None else [path.name for path in directory.iterdir()]
    whole = "model.safetensors"
    names = [whole] if whole in files else [one for one in files if one.startswith("model-")]
    return Stored.of(directory, *sorted(one for one in names if one.endswith(form.TENSORS)))


def specs(directory: Path, name: str) -> dict[str, TensorSpec]:
    """Return dtype and shape of each tensor of a file.

    Raises UserError if the file is missing or has no valid header, RunError 74 if the disk does not
    answer.
    """
    try:
        return form.check_tensors(directory, name)
    except (form.DamagedError, FileNotFoundError) as error:
        why = error.reason if isinstance(error, form.DamagedError) else "there is no such file"
        problem = Problem(str(directory / name), None, f"whole safetensors ({why})")
        raise UserError(problem) from error
    except OSError as error:
        raise _no_answer(directory / name, error) from error


def _no_answer(path: Path, error: Exception) -> RunError:
    remedy = "see that the disk can be read, then give the same command again"
    return RunError(f"cannot read {path}: {error}", DISK_FAILED, remedy)


def write(directory: Path, spec: Spec, read: Callable[[str], Tensor]) -> None:
    """Write and sync the files of a spec, one after the other, with no more than one in memory.

    read: returns a tensor in the dtype of the spec; no two may share memory

    Raises RunError 74 if the disk refuses.
    """
    for file, part in spec.items():
        path = directory / file
        with needed_on_disk(path):
            try:
                save_file({name: read(name).contiguous() for name in part}, path, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from error
            path.chmod(directory.stat().st_mode & 0o666)  # it is made for its owner alone
            disk.durable(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


class _AdapterSettings(BaseModel):
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
    auto_mapping: JsonObject | None = None
    inference_mode: bool = True
    corda_config: Any = None
    eva_config: Any = None
    lora_ga_config: Any = None
    loftq_config: Any = None
    megatron_core: Any = None
    qalora_group_size: Any = None


def base_of_adapter(directory: Path) -> Base:
    """Return what an adapter was trained on, from `adapter.json`, else from peft's own file.

    Raises UserError if neither names it.
    """
    named = _json(directory / BASE_FILE).get("base") if (directory / BASE_FILE).exists() else None
    if isinstance(named, dict) and named.get("path"):
        return Base(str(named["path"]), named.get("revision"), named.get("digest"))
    settings = _json(directory / untrusted.ADAPTER_CONFIG)
    if path := settings.get("base_model_name_or_path"):
        return Base(str(path), settings.get("revision"), None)
    expected = "an adapter that names the model that it was trained on"
    raise UserError(Problem(str(directory / untrusted.ADAPTER_CONFIG), None, expected))


def inject_adapter(model: PreTrainedModel, directory: Path) -> dict[str, torch.nn.Parameter]:
    """Put an adapter's layers into a model and return its parameters by their names in the file.

    model: is changed; it may be on meta. The parameters are on meta.

    Raises UserError if this is no LoRA adapter, or the file has other tensors than its config says.
    """
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    with warnings.catch_warnings():
        # That the weights of a Conv1D lie the other way round; peft finds that out by itself.
        warnings.simplefilter("ignore", UserWarning)
        with _read_by_peft(str(directory / untrusted.ADAPTER_CONFIG)):
            inject_adapter_in_model(_lora_config(directory), model, low_cpu_mem_usage=True)
    state_dict = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), save_embedding_layers=False
    )
    parameters = {f"{_PREFIX}{name}": parameter for name, parameter in state_dict.items()}
    raise_any(_compare(parameters, specs(directory, ADAPTER), directory))
    return parameters


def attach_adapter(model: PreTrainedModel, directory: Path) -> set[str]:
    """Put an adapter's layers into a model, with weights in fp32. Raises as `inject_adapter` does.

    Returns the names of its parameters in the model.
    """
    parameters = inject_adapter(model, directory)
    stored = Stored.of(directory, ADAPTER)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {names[id(parameters[name])]: stored.read(name).float() for name in parameters}
    model.load_state_dict(values, strict=False, assign=True)
    return set(values)


def _lora_config(directory: Path) -> LoraConfig:
    from peft import LoraConfig

    path = directory / untrusted.ADAPTER_CONFIG
    file, settings = str(path), _json(path)
    if (kind := settings.get("peft_type")) != "LORA":
        raise UserError(Problem(file, kind, "a LoRA adapter (peft_type LORA)"))
    try:
        known = _AdapterSettings.model_validate(settings)
    except ValidationError as error:
        wrong = {str(one["loc"][0]): one for one in error.errors()}  # one for each key
        problems = (
            Problem(f"{file}: {key}", json.dumps(one["input"])[:_LONGEST], one["msg"])
            for key, one in wrong.items()
        )
        raise UserError(*problems) from error
    raise_any(_unsupported(file, settings))
    given = known.model_dump(include=settings.keys() & _AdapterSettings.model_fields.keys() - _IDLE)
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


def _unsupported(file: str, settings: JsonMapping) -> Iterator[Problem]:
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
        if value and key not in _AdapterSettings.model_fields:
            expected = "not set: llmtrain does not compute what it asks for"
            remedy = "use the adapter with peft, which has it, or merge it there"
            yield Problem(f"{file}: {key}", json.dumps(value)[:_LONGEST], expected, remedy)


def _compare(
    wanted: Mapping[str, torch.nn.Parameter], stored: Mapping[str, TensorSpec], directory: Path
) -> Iterator[Problem]:
    """Yield a problem if the file lacks a tensor of the layers, or has another one."""
    expected = "the tensors of the layers that adapter_config.json names"
    both = wanted.keys() & stored.keys()
    differing = {
        "missing": wanted.keys() - stored.keys(),
        "not in the model": stored.keys() - wanted.keys(),
        "of another shape": {n for n in both if tuple(wanted[n].shape) != stored[n].shape},
    }
    for what, names in differing.items():
        if names:
            difference = f"{len(names)} {what} ({', '.join(sorted(names)[:_SHOWN])})"
            yield Problem(str(directory / ADAPTER), difference, expected)


def _json(path: Path) -> JsonObject:
    try:
        return untrusted.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(str(path), None, f"a JSON object ({error})")) from error


_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")  # as the model types name it
_DEFAULT_POSITIONS = 2048  # of a model that states no limit
_UNLIMITED = 1 << 60  # what a tokenizer without a limit states is far above


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and its tokenizer, both of transformers."""

    target: targets.Target
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @property
    def begin(self) -> int:
        """The id that precedes a text: the begin token, else the end-of-text token."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(eos if bos is None else bos)

    @property
    def positions(self) -> int:
        """The most tokens that the model takes at once, found as lm-eval finds it."""
        text = self.model.config.get_text_config()
        for name in _POSITIONS:
            if (stated := getattr(text, name, None)) is not None:
                return int(stated)
        limit = self.tokenizer.model_max_length
        return int(limit) if limit < _UNLIMITED else _DEFAULT_POSITIONS


def open_model(
    target: targets.Target,
    *,
    precision: str = "fp32",
    seq_len: int | None = None,
    small: bool = False,
    seen: targets.Seen | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    precision: bf16 = hold a model below adapters in bf16, as a run with that precision does
    seq_len: positions of a block, to compute as a run does: with its attention, and the weights
        that it trains marked as trained, since torch chooses kernels by that, too. None = with
        transformers' own attention and no trained weights
    small: on a GPU, hold the weights in the dtype of the files; otherwise they are fp32
    seen: the run with whose tokenizer, rows and adapters the model is loaded; None = its own

    Raises UserError for a model that cannot be loaded.
    """
    device = torch.device("cpu" if on_cpu() else "cuda")
    with targets.as_argument():
        base = base_directory(target.directory) if target.is_adapter else target.directory
        config = config_below(target, base)
        tokenizer = tokenizers.load(str(seen.tokenizer if seen else target.directory), None)
        stored = config.dtype
        if seen is not None:
            targets.check_positions(target, seen, config)
            set_rows(config, tokenizers.length_of(tokenizer), seen.config.model.pad_vocab_to)
        asked = ModelConfig(freeze=seen.config.model.freeze if seen else _frozen(target))
        model: PreTrainedModel = build.build(config, asked, Base(str(base), None, None))
    if tokenizer.eos_token_id is None:
        raise UserError(Problem(targets.KEY, target.given, "a tokenizer with an end-of-text token"))
    if seq_len is not None:
        attention.install(model, seq_len)
    if target.is_adapter:
        model = _with_adapter(model, target, tokenizers.length_of(tokenizer), precision)
    elif seen is not None:
        targets.attach_adapters(model, base, seen)
    if small and device.type == "cuda" and stored is not None:
        hold_base(model, stored, trained=True)
    if seq_len is None:
        model.requires_grad_(False)
    return LoadedModel(target, model.eval().to(device), tokenizer, device)


def _frozen(target: targets.Target) -> tuple[str, ...]:
    """Return what `model.freeze` was in the run of a checkpoint; nothing for any other model."""
    return tuple((target.state.get("config") or {}).get("model.freeze") or ())


def _with_adapter(
    model: PreTrainedModel, target: targets.Target, entries: int, precision: str
) -> PreTrainedModel:
    """Return the model with an adapter. entries: of the tokenizer. The others: as `open_model`."""
    stored = model.get_input_embeddings().weight.shape[0]
    if (rows := rows_of(target, entries, stored)) > stored:
        grow(model, rows)
    if targets.are_held(target.state):
        targets.round_layers(model, target.state)
    if precision == "bf16":
        hold_base(model, torch.bfloat16, trained=True)
    trained = attach_adapter(model, target.directory)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if (target.directory / "generation_config.json").is_file():  # with the end of a turn
        model.generation_config = GenerationConfig.from_pretrained(target.directory)
    return model


def base_directory(adapter: Path) -> Path:
    """Return the directory of the model that an adapter was trained on.

    A model of the Hub is downloaded at its commit. Raises UserError if it is not there, or is a
    directory with other weights.
    """
    base = base_of_adapter(adapter)
    on_hub = targets.is_hub_id(base.path) and not Path(base.path).is_dir()
    if not on_hub and (change := what_changed(base)):
        expected = f"the model that the adapter was trained on ({base}); that directory {change}"
        raise UserError(Problem(f"base of {adapter.name}", base.path, expected, "put it back"))
    return targets.download(base.path, base.revision)


def config_of(directory: Path) -> PreTrainedConfig:
    """Return the transformers config of a model directory.

    Raises UserError for one that is not safe, or that transformers cannot read.
    """
    untrusted.check(str(directory))
    if (directory / CONFIG).is_file():
        check_code(str(directory), directory / CONFIG)
    return build.weights_config(Base(str(directory), None, None))


def config_below(target: targets.Target, base: Path) -> PreTrainedConfig:
    """Return the transformers config of a model, without its adapters if it has any.

    base: its directory, or that of the model below the adapters

    Adapters may make a model that scores of one that writes. Raises UserError as `config_of`.
    """
    config = config_of(base)
    settings = target.directory / untrusted.ADAPTER_CONFIG
    if target.is_adapter and _json(settings).get("task_type") == "SEQ_CLS":
        tokens = tokenizers.special_tokens(target.directory)
        scorer.make_scorer(config, tokens.eos, tokens.pad)
    return config


def check_writes(opened: LoadedModel) -> None:
    """Raise UserError for a model that scores answers, and cannot tell what token comes next."""
    if scorer.is_scorer(opened.model.config):
        expected = "a language model; this one scores answers (preference.loss reward)"
        remedy = "`llmtrain evaluate` for its accuracy on pairs"
        raise UserError(Problem(targets.KEY, opened.target.given, expected, remedy))


def rows_of(target: targets.Target, entries: int, stored: int) -> int:
    """Return how many rows a run gave its base: as stored, if the tokenizer has no more entries."""
    padded = (target.state.get("config") or {}).get("model.pad_vocab_to")
    return stored if entries <= stored else rows_for(entries, padded)
