"""Build a transformers causal LM in fp32 from `model.config` or `model.from`, ready to train.

Weights are read only from safetensors, and only transformers' own code is run. A misspelt field of
`model.config` is an error, because transformers would accept it and build another model.
"""

import copy
import difflib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llmtrain.config.schema import ModelConfig
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import scorer
from llmtrain.model.base import Base
from llmtrain.model.shape import CANNOT_BUILD, from_config, on_meta
from llmtrain.model.tokenizer import SpecialTokens, grow, rows_for, set_rows
from llmtrain.model.trainable import freeze
from llmtrain.model.untrusted import KEY, quantized
from llmtrain.text import first_line

_HEADS = ("lm_head.", "embed_out.", "output.")  # of causal models, as their classes name them
_NOISE = ("drop", "jitter")  # parts of the names of fields
_log = logging.getLogger(__name__)


def model_config(
    asked: ModelConfig,
    tokens: SpecialTokens,
    seq_len: int,
    base: Base | None = None,
    *,
    scores: bool = False,
) -> PreTrainedConfig:
    """Return the transformers config of the model, checked against the tokenizer and `seq_len`.

    base: the weights that it begins with; None = it is made from `model.config`
    scores: whether it is to score sequences, as a reward model does

    Its rows are enough for the tokenizer, also where those of the weights are not, which `build`
    adds. Raises UserError with every problem found.
    """
    if base is None:
        config = _from_fields(asked, tokens)
    else:
        config = weights_config(base)
        set_rows(config, tokens.length, asked.pad_vocab_to)
    if scores:
        scorer.make_scorer(config, tokens.eos, tokens.pad)
    elif scorer.is_scorer(config):
        expected = "a language model; this one scores answers, as preference.loss=reward trains it"
        raise UserError(Problem(KEY, base, expected))
    raise_any(_size_problems(config, tokens, seq_len))
    return config


def build(config: PreTrainedConfig, asked: ModelConfig, base: Base) -> PreTrainedModel:
    """Return the model with the weights of `base`.

    Raises UserError for weights that do not fit, and for patterns of `model.freeze` that cannot be
    applied.
    """
    model = _load(config, base)
    # Raise UserError for weights with a value that is not finite, as of a run that diverged.
    with torch.no_grad():
        # A sum is one pass without a copy; it is not finite if a value is not, or if it overflows.
        named = model.named_parameters()
        wrong = [n for n, p in named if not p.sum().isfinite() and not p.isfinite().all()]
    if wrong:
        expected = f"finite weights; {len(wrong)} tensors have NaN or inf ({', '.join(wrong[:3])})"
        raise UserError(Problem(KEY, base, expected, "another checkpoint of that model"))
    _check(model)
    return _set_up(model, asked)


def stored_config(checkpoint: Path) -> PreTrainedConfig:
    """Return the config in one of our checkpoints."""
    return _without_code(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))


def without_noise(config: PreTrainedConfig) -> list[str]:
    """Set each kind of dropout and noise in a config to 0, in place; return the fields changed."""
    changed = []
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            changed += [f"{name}.{inner}" for inner in without_noise(value)]
        elif isinstance(value, float) and value > 0 and any(part in name for part in _NOISE):
            setattr(config, name, 0.0)
            changed.append(name)
    return sorted(changed)


def rebuild(config: PreTrainedConfig, asked: ModelConfig) -> PreTrainedModel:
    """Return a model of this config with random weights, of torch's global generator.

    A checkpoint may be read into it later.
    """
    model = from_config(config)
    _check(model)
    return _set_up(model, asked)


def skeleton(config: PreTrainedConfig, asked: ModelConfig) -> PreTrainedModel:
    """Return the same model on meta, for a rank that receives its weights from another rank."""
    return _set_up(on_meta(config), asked)


def _set_up(model: PreTrainedModel, asked: ModelConfig) -> PreTrainedModel:
    freeze(model, asked.freeze)
    model.train()
    model.config.architectures = [type(model).__name__]
    if scorer.is_scorer(model.config):
        model.generation_config = None  # as of a model that could write and has none
    return model


def _check(model: PreTrainedModel) -> None:
    """Raise UserError for a model that cannot be trained here."""
    _refuse_seeing_ahead(model)
    if scorer.is_scorer(model.config):
        scorer.check(model)


def _refuse_seeing_ahead(model: PreTrainedModel) -> None:
    """Raise UserError for a model whose positions see later ones.

    Encoders have causal heads too, but with their attention the loss would have no meaning.
    """
    ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    other = ids.clone()
    other[0, -1] = 0
    model.eval()
    with torch.no_grad():
        one, two = (scorer.outputs(model, part, use_cache=False)[0, :-1] for part in (ids, other))
    if not torch.allclose(one, two, rtol=1e-3, atol=1e-4):
        key, expected = "model.config.model_type", "a model whose positions do not see later ones"
        raise UserError(Problem(key, model.config.model_type, expected))


def _load(config: PreTrainedConfig, base: Base) -> PreTrainedModel:
    """Return the model with the weights of `base`, and with as many rows as `config` says.

    Raises UserError unless its parameters have the names and shapes that their config gives.
    """
    config, stored = copy.deepcopy(config), weights_config(base)
    text, before = config.get_text_config(), stored.get_text_config().vocab_size
    rows, text.vocab_size = text.vocab_size, before
    model = _read(config, base)
    if rows > before:
        _log.info("%s: %d rows became %d, each new one their mean", base, before, rows)
        grow(model, rows)
    # Other ranks and later starts make the model from the config alone. transformers keeps an
    # output head beside the embeddings that the config ties it to, if both are there and differ.
    skeleton = on_meta(copy.deepcopy(model.config))
    given, made = (
        {name: list(p.shape) for name, p in one.named_parameters()} for one in (model, skeleton)
    )
    wrong = sorted(name for name in given.keys() | made.keys() if given.get(name) != made.get(name))
    if wrong:
        name, remedy = wrong[0], ""
        if name in dict(skeleton.named_parameters(remove_duplicate=False)) and name not in made:
            cause = f"{name}, which its config.json ties to other weights, differs from them"
            remedy = "tie_word_embeddings: false in its config.json"
        else:
            cause = f"{name} is {given.get(name)}, and {made.get(name)} with the tokenizer's rows"
        raise UserError(Problem(KEY, base, f"weights in the form of their config; {cause}", remedy))
    return model


def _read(config: PreTrainedConfig, base: Base) -> PreTrainedModel:
    """Return the model of a config with the weights of `base`, in fp32."""
    from safetensors import SafetensorError

    model: PreTrainedModel
    try:
        model, report = scorer.auto_class(config).from_pretrained(
            base.path,
            config=config,
            revision=base.revision or "main",
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with their names
        )
    except (OSError, SafetensorError, ImportError, *CANNOT_BUILD) as error:
        expected = f"a model directory with whole safetensors: {first_line(error)}"
        raise UserError(Problem(KEY, base, expected)) from error
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if scorer.is_scorer(config) and not scorer.is_scorer(weights_config(base)):
        missing -= {f"{scorer.SCORE}.weight"}  # it is new, and random
        unexpected -= {name for name in unexpected if name.startswith(_HEADS)}
    wrong = {
        "missing": sorted(missing),
        "unexpected": sorted(unexpected),
        "of another shape": [
            f"{name}: {list(stored)} in the files, {list(wanted)} by config.json"
            for name, stored, wanted in sorted(report["mismatched_keys"])
        ],
    }
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in wrong.items() if names
    ]
    if problems:
        expected = f"every weight of the model; found {'; '.join(problems)}"
        raise UserError(Problem(KEY, base, expected))
    return model


def weights_config(base: Base) -> PreTrainedConfig:
    """Return the transformers config of the weights, with as many rows as they have.

    Raises UserError for a config that transformers refuses.
    """
    try:
        config = AutoConfig.from_pretrained(
            base.path, revision=base.revision or "main", trust_remote_code=False
        )
    except _refusals() as error:
        file = Path(base.path) / "config.json"
        fields = json.loads(file.read_bytes()) if file.is_file() else {}
        named = _refused_field(error, fields, f"{file}: ")
        expected = f"a model that transformers knows without its own code: {first_line(error)}"
        raise UserError(named or Problem(KEY, base.path, expected)) from error
    _causal(config.model_type, KEY)
    if (asked := getattr(config, "quantization_config", None)) is not None:
        raise UserError(quantized(base.path, asked))
    return _without_code(config)


def _without_code(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config without the names of code of its own, which is never run."""
    vars(config).pop("auto_map", None)
    return config


def _from_fields(asked: ModelConfig, tokens: SpecialTokens) -> PreTrainedConfig:
    fields = asked.config
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        expected = "an architecture of transformers, such as llama, gpt2, qwen3"
        remedy = f"did you mean {', '.join(near)}?" if near else ""
        raise UserError(Problem("model.config.model_type", model_type, expected, remedy))
    _causal(str(model_type), "model.config.model_type")
    given = {key: value for key, value in fields.items() if key != "model_type"}
    raise_any(unknown_fields(asked))
    ours = {
        "vocab_size": rows_for(tokens.length, asked.pad_vocab_to),
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    }
    try:
        config = CONFIG_MAPPING[model_type](**{**ours, **given})
    except _refusals() as error:
        named = _refused_field(error, given, "model.config.")
        expected = f"fields that {model_type} accepts: {_in_a_line(error)}"
        raise UserError(named or Problem("model.config", None, expected)) from error
    if "is_decoder" not in given and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # for causal attention in BERT and similar models
    return config


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors of transformers' config classes for fields that they do not accept."""
    from huggingface_hub.errors import StrictDataclassError

    return (StrictDataclassError, OSError, *CANNOT_BUILD)


def _refused_field(error: Exception, fields: Mapping[str, object], prefix: str) -> Problem | None:
    """Return the problem of the field that transformers' type check refuses, if it is the cause."""
    match = re.match(r"Validation error for field '(\w+)':", str(error))
    if match is None or match[1] not in fields:
        return None
    reason = _in_a_line(error).removeprefix(match[0]).strip()
    value = json.dumps(fields[match[1]], ensure_ascii=False)
    return Problem(f"{prefix}{match[1]}", value, f"what transformers accepts: {reason}")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def unknown_fields(asked: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for each field in `model.config` that its model type does not have.

    They are known without a tokenizer, so that a start names them beside other problems.
    """
    if (model_type := asked.config.get("model_type")) not in CONFIG_MAPPING:
        return
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *config_class.attribute_map} - {"auto_map"}
    expected = f"a field of transformers' {config_class.__name__}"
    for key in sorted(asked.config.keys() - known - {"model_type"}):
        near = difflib.get_close_matches(key, sorted(known), n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
        yield Problem(f"model.config.{key}", asked.config[key], expected, remedy)


def _causal(model_type: str, key: str) -> None:
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        expected = "an architecture with a causal language model in transformers"
        raise UserError(Problem(key, model_type, expected))


def _size_problems(
    config: PreTrainedConfig, tokens: SpecialTokens, seq_len: int
) -> Iterator[Problem]:
    try:
        text = config.get_text_config()
    except ValueError as error:  # such as a decoder of music beside an encoder of texts
        expected = f"an architecture with one model of texts ({first_line(error)})"
        yield Problem("model.config.model_type", config.model_type, expected)
        return
    if text.vocab_size < tokens.length:
        expected = f"at least the tokenizer's {tokens.length:,} entries"
        remedy = f"{tokens.length}, or leave it out; or another model.tokenizer"
        yield Problem("model.config.vocab_size", text.vocab_size, expected, remedy)
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        expected = f"at most the model's max_position_embeddings {longest}"
        remedy = f"{longest}, or model.config.max_position_embeddings={seq_len} for a new model"
        yield Problem("data.seq_len", seq_len, expected, remedy)
