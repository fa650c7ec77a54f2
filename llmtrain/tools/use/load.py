"""Load a model to use it: whole, or adapters on the model that they were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.config.schema import ModelConfig
from llmtrain.distributed.engines.accelerator import on_cpu
from llmtrain.errors import Problem, UserError
from llmtrain.model import attention, build, untrusted
from llmtrain.model import tokenizer as tokenizers
from llmtrain.model.base import CONFIG, Base, check_code
from llmtrain.model.trainable.adapters import hold_base
from llmtrain.model.vocabulary import grow, rows_for, set_rows
from llmtrain.tools.use import adapters, as_run, four_bits
from llmtrain.tools.use.as_run import Seen
from llmtrain.tools.use.target import KEY, Target, as_argument, download, is_hub_id
from llmtrain.training.start.base import what_changed

if TYPE_CHECKING:
    import torch

_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")  # as the model types name it
_DEFAULT_POSITIONS = 2048  # of a model that states no limit
_UNLIMITED = 1 << 60  # what a tokenizer without a limit states is far above


@dataclass(frozen=True, slots=True)
class Opened:
    """A model in evaluation mode on its device, and its tokenizer, both of transformers."""

    target: Target
    model: Any
    tokenizer: Any
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
            if (found := getattr(text, name, None)) is not None:
                return int(found)
        limit = self.tokenizer.model_max_length
        return int(limit) if limit < _UNLIMITED else _DEFAULT_POSITIONS


def open_model(
    target: Target,
    *,
    precision: str = "fp32",
    seq_len: int | None = None,
    small: bool = False,
    seen: Seen | None = None,
) -> Opened:
    """Load a model and its tokenizer.

    precision: bf16 = hold a model below adapters in bf16, as a run with that precision does
    seq_len: positions of a block, to compute as a run does: with its attention, and the weights
        that it trains marked as trained, since torch chooses kernels by that, too. None = with
        transformers' own attention and no trained weights
    small: on a GPU, hold the weights in the dtype of the files; otherwise they are fp32
    seen: the run with whose tokenizer, rows and adapters the model is loaded; None = its own

    Raises UserError for a model that cannot be loaded.
    """
    import torch

    device = torch.device("cpu" if on_cpu() else "cuda")
    with as_argument():
        base = base_directory(target.directory) if target.is_adapter else target.directory
        config = config_of(base)
        tokenizer = tokenizers.load(str(seen.tokenizer if seen else target.directory), None)
        stored = config.dtype
        if seen is not None:
            as_run.check_positions(target, seen, config)
            set_rows(config, tokenizers.length_of(tokenizer), seen.config.model.pad_vocab_to)
        asked = ModelConfig(freeze=seen.config.model.freeze if seen else _frozen(target))
        model: Any = build.build(config, asked, Base(str(base), None, None))
    if tokenizer.eos_token_id is None:
        raise UserError(Problem(KEY, target.given, "a tokenizer with an end-of-text token"))
    if seq_len is not None:
        attention.install(model, seq_len)
    if target.is_adapter:
        model = _with_adapter(model, target, tokenizers.length_of(tokenizer), precision)
    elif seen is not None:
        as_run.attach_adapters(model, base, seen)
    if small and device.type == "cuda" and stored is not None:
        hold_base(model, stored, trained=True)
    if seq_len is None:
        model.requires_grad_(False)
    return Opened(target, model.eval().to(device), tokenizer, device)


def _frozen(target: Target) -> tuple[str, ...]:
    """Return what `model.freeze` was in the run of a checkpoint; nothing for any other model."""
    return tuple((target.state.get("config") or {}).get("model.freeze") or ())


def _with_adapter(model: Any, target: Target, entries: int, precision: str) -> Any:
    """Return the model with an adapter. entries: of the tokenizer. The others: as `open_model`."""
    import torch
    from transformers import GenerationConfig

    stored = model.get_input_embeddings().weight.shape[0]
    if (rows := rows_of(target, entries, stored)) > stored:
        grow(model, rows)
    if four_bits.are_held(target.state):
        four_bits.round_layers(model, target.state)
    if precision == "bf16":
        hold_base(model, torch.bfloat16, trained=True)
    trained = adapters.attach(model, target.directory)
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
    base = adapters.base_of(adapter)
    on_hub = is_hub_id(base.path) and not Path(base.path).is_dir()
    if not on_hub and (said := what_changed(base)):
        expected = f"the model that the adapter was trained on ({base}); that directory {said}"
        raise UserError(Problem(f"base of {adapter.name}", base.path, expected, "put it back"))
    return download(base.path, base.revision)


def config_of(directory: Path) -> Any:
    """Return the transformers config of a model directory.

    Raises UserError for one that is not safe, or that transformers cannot read.
    """
    untrusted.check(str(directory))
    if (directory / CONFIG).is_file():
        check_code(str(directory), directory / CONFIG)
    return build.weights_config(Base(str(directory), None, None))


def rows_of(target: Target, entries: int, stored: int) -> int:
    """Return how many rows a run gave its base: as stored, if the tokenizer has no more entries."""
    padded = (target.state.get("config") or {}).get("model.pad_vocab_to")
    return stored if entries <= stored else rows_for(entries, padded)
