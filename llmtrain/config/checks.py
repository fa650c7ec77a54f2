"""Rules between keys of a config, and those of a model's own fields.

Each function takes only the sections that it checks, so that `load_config` can apply it even if
another section is not valid. None imports transformers, which takes seconds.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from llmtrain.config import schema, secrets
from llmtrain.config.keys import all_keys, general_name, sections
from llmtrain.errors import Problem
from llmtrain.text import DURATION, parse_duration
from llmtrain.types import Algorithm, JsonMapping

# Sizes that an architecture with such a field needs. In some architectures null or a list is valid.
_SIZES = (
    *("vocab_size", "hidden_size", "head_dim", "n_embd", "n_layer", "n_head"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def field_problems(fields: JsonMapping, prefix: str) -> Iterator[Problem]:
    """Yield a problem for each size that is not a whole number above 0, and for a blank type.

    prefix: of the keys, such as `model.config.`
    """
    for name in _SIZES:
        value = fields.get(name)
        if value is None or isinstance(value, list | dict):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(f"{prefix}{name}", value, "a whole number ≥ 1")
    kind = fields.get("model_type", "none is given")  # then transformers lists those it knows
    if not (isinstance(kind, str) and kind.strip()):
        expected = "a model type as transformers names it, such as llama"
        yield Problem(f"{prefix}model_type", kind, expected)


# A function that returns what is wrong with some sections; its parameters have their names.
Rule = Callable[..., Iterable[Problem]]
_LONGEST = ("max_position_embeddings", "n_positions")  # as the model types name it
_PATH_BYTES, _NAME_BYTES, _SHOWN = 4095, 255, 40
# Optimizers that do not work under all strategies. Muon needs whole matrices: FSDP2 gathers them,
# ZeRO cuts them anywhere. 8-bit moments have a scale for each block of a whole parameter.
_STRATEGIES: Mapping[Algorithm, tuple[str, ...]] = {
    "muon": ("ddp", "hsdp", "fsdp2"),
    "adamw_8bit": ("ddp",),
}
EXACT = ("ddp", "fsdp2")  # strategies with an engine for `training.same_bits`


def check(config: schema.Config) -> list[Problem]:
    """Return every problem that the schema cannot find, for a Config not read from a file."""
    problems = secrets.problems(secrets.in_config(config.model_dump(by_alias=True)))
    return [*problems, *apply(RULES, dict(config))]


def apply(rules: Iterable[Rule], valid: Mapping[str, schema.Section]) -> Iterator[Problem]:
    """Yield what the rules find, as far as the sections that they check are valid."""
    for rule in rules:
        names = inspect.signature(rule).parameters.keys()
        if names <= valid.keys():
            yield from rule(**{name: valid[name] for name in names})


def check_paths(
    run: schema.RunConfig,
    model: schema.ModelConfig,
    data: schema.DataConfig,
    evaluation: schema.EvaluationConfig,
) -> Iterator[Problem]:
    """Check that no path is longer than Linux takes, as a whole or between two slashes."""
    paths = {"run.dir": run.dir, "model.from": model.from_, "model.tokenizer": model.tokenizer}
    for section, sources in (("data", data.sources), ("evaluation", evaluation.sources)):
        paths |= {f"{section}.sources.{n}.path": one.path for n, one in enumerate(sources)}
    for key, path in paths.items():
        name = path.encode(errors="replace") if isinstance(path, str) else b""
        if len(name) > _PATH_BYTES or max(map(len, name.split(b"/"))) > _NAME_BYTES:
            expected = f"a path of at most {_PATH_BYTES:,} bytes, with {_NAME_BYTES} in each name"
            yield Problem(key, f"{str(path)[:_SHOWN]}…", expected)


def check_model(model: schema.ModelConfig) -> Iterator[Problem]:
    """Check where the model and its tokenizer come from, and the model's own fields."""
    for path, value in secrets.leaves(model.config):
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
            yield Problem(".".join(("model.config", *path)), value, "a finite number")
    yield from field_problems(model.config, "model.config.")
    if model.from_ is None and model.config.get("model_type") is None:
        expected = "model.config.model_type (train from scratch) or model.from (start from weights)"
        remedy = "model: {config: {model_type: llama, hidden_size: 256}, tokenizer: sample}"
        yield Problem("model", None, expected, remedy)
    elif model.from_ is not None and model.config:
        expected = "either model.from or model.config: weights bring their own config"
        yield Problem("model.from", model.from_, expected, "remove one of the two")
    if model.from_ is None and model.tokenizer == "auto":
        expected = "a tokenizer: `auto` means that of model.from, which is not set"
        remedy = "a Hub id, a directory, sample, or {train: 8192} for one of your own"
        yield Problem("model.tokenizer", model.tokenizer, expected, remedy)
    if model.from_ is None and model.revision is not None:
        expected = "null without model.from: it is the revision of those weights"
        yield Problem("model.revision", model.revision, expected)
    if model.pad_vocab_to is not None and "vocab_size" in model.config:
        expected = "null with model.config.vocab_size, which is the number of rows itself"
        yield Problem("model.pad_vocab_to", model.pad_vocab_to, expected, "leave one of them out")


def check_adapter(
    model: schema.ModelConfig, adapter: schema.AdapterConfig, distributed: schema.DistributedConfig
) -> Iterator[Problem]:
    """Check that adapters have a base, frozen as a whole, and that of qlora is not split."""
    kind, strategy = adapter.kind, distributed.strategy
    if kind == "none":
        return
    if not adapter.targets:
        expected = "auto, or at least one pattern: without one nothing would be trained"
        yield Problem("adapter.targets", "[]", expected, "adapter.targets=auto")
    if model.from_ is None:
        expected = "none without model.from: adapters are trained beside weights that exist"
        yield Problem("adapter.kind", kind, expected, "model.from=DIR, or a model of the Hub")
    if model.freeze:
        expected = f"[] with adapter.kind {kind}: all weights of the model are frozen"
        yield Problem("model.freeze", ", ".join(model.freeze), expected, "leave it out")
    if kind == "qlora" and strategy not in ("auto", "ddp"):
        yield unsplit(strategy)


def unsplit(strategy: str) -> Problem:
    """Return the problem of a strategy that would split the four-bit weights of qlora."""
    expected = "ddp with adapter.kind qlora: weights in four bits are not split"
    return Problem("distributed.strategy", strategy, expected, "adapter.kind=lora, or ddp")


def check_length(model: schema.ModelConfig, data: schema.DataConfig) -> Iterator[Problem]:
    """Check that blocks are not longer than the model's positions."""
    for name in _LONGEST:
        longest = model.config.get(name)
        if isinstance(longest, int) and data.seq_len > longest:
            expected = f"at most the model's {name} {longest} (model.config)"
            remedy = f"data.seq_len={longest}, or model.config.{name}={data.seq_len}"
            yield Problem("data.seq_len", data.seq_len, expected, remedy)


def check_packing(data: schema.DataConfig) -> Iterator[Problem]:
    """Check that the document mask is not turned off with a packing that needs it."""
    if data.packing not in ("auto", "concat") and data.document_mask is False:
        with_packing = f"true or auto with data.packing {data.packing}"
        expected = f"{with_packing}: no label crosses the border of a document"
        remedy = "data.document_mask=auto, or for texts data.packing=concat"
        yield Problem("data.document_mask", False, expected, remedy)


def check_duration(training: schema.TrainingConfig) -> Iterator[Problem]:
    """Check that exactly one key sets the length of the run."""
    steps, epochs = training.steps, training.epochs
    expected = "exactly one of training.steps and training.epochs"
    if steps is None and epochs is None:
        yield Problem("training.steps", None, expected, "training.steps=1000")
    elif steps is not None and epochs is not None:
        value = f"{steps} and training.epochs = {epochs:g}"
        by_epochs = f"training.steps=null training.epochs={epochs:g}"
        by_steps = f"training.epochs=null training.steps={steps}"
        yield Problem("training.steps", value, expected, f"{by_epochs}, or {by_steps}")


def check_growth(training: schema.TrainingConfig) -> Iterator[Problem]:
    """Check that the sizes of a batch that grows are in the order of the steps, from the first."""
    asked = training.global_batch_size
    if isinstance(asked, int):
        return
    key, before = "training.global_batch_size", 0
    for number, one in enumerate(asked):
        expected = f"a step behind {before}, where the size before it begins"
        if not number and one.from_step != 1:
            yield Problem(f"{key}.0.from_step", one.from_step, "1: the first size is of step 1 on")
        elif one.from_step <= before:
            yield Problem(f"{key}.{number}.from_step", one.from_step, expected)
        before = one.from_step


def _batch_sizes(training: schema.TrainingConfig) -> Iterator[tuple[str, int]]:
    """Yield each size of the global batch, with its key."""
    key, asked = "training.global_batch_size", training.global_batch_size
    if isinstance(asked, int):
        yield key, asked
    else:
        yield from ((f"{key}.{number}.size", one.size) for number, one in enumerate(asked))


def check_micro_batch(training: schema.TrainingConfig) -> Iterator[Problem]:
    """Check that the global batch is a multiple of the micro-batch."""
    micro = training.micro_batch_size
    if micro != "auto":
        expected = f"a multiple of training.micro_batch_size {micro}"
        for key, total in _batch_sizes(training):
            if total % micro:
                yield Problem(key, total, expected, _nearest(total, micro))


def check_batch(
    training: schema.TrainingConfig, world_size: int, what: str = "processes"
) -> Iterator[Problem]:
    """Check that the global batch can be split over `world_size` processes, and micro-batches.

    what: as the message names the processes
    """
    if world_size == 1:
        yield from check_micro_batch(training)
        return
    micro = training.micro_batch_size
    unit = world_size * (1 if micro == "auto" else micro)
    split = f"{world_size} {what}" + ("" if micro == "auto" else f" × micro-batch {micro}")
    expected = f"a multiple of {split} = {unit}"
    share, rest = divmod(training.batch.unit, world_size)
    for key, total in _batch_sizes(training):
        if total % unit == 0:
            continue
        remedy = _nearest(total, unit)
        if micro != "auto" and not rest:
            fitting = max(size for size in range(1, micro + 1) if share % size == 0)
            remedy += f", or training.micro_batch_size={fitting}"
        yield Problem(key, total, expected, remedy)


def check_compile(training: schema.TrainingConfig, data: schema.DataConfig) -> Iterator[Problem]:
    """Check that a whole model is not compiled where documents are hidden from each other."""
    if training.compile == "model" and data.document_mask is True:
        yield whole_with_documents()


def whole_with_documents() -> Problem:
    """Return the problem of `training.compile: model` with a document mask."""
    expected = (
        "blocks or off with data.document_mask: a graph of the whole model holds for one set of "
        "documents, and would be compiled again at each step"
    )
    return Problem("training.compile", "model", expected, "training.compile=blocks")


def check_same_bits(
    training: schema.TrainingConfig,
    optimizer: schema.OptimizerConfig,
    distributed: schema.DistributedConfig,
    preference: schema.PreferenceConfig,
) -> Iterator[Problem]:
    """Check that a run with `training.same_bits` asks for nothing that depends on the processes."""
    if not training.same_bits:
        return
    with_it = "with training.same_bits"
    if training.micro_batch_size == "auto":
        expected = f"a whole number {with_it}: the blocks of a micro-batch decide the bits"
        yield Problem("training.micro_batch_size", "auto", expected, "training.micro_batch_size=4")
    if (precision := training.precision) != "fp32":
        expected = f"fp32 {with_it}: other precisions are not measured"
        yield Problem("training.precision", precision, expected, "training.precision=fp32")
    if (compiled := training.compile) not in ("auto", "off"):
        expected = f"off {with_it}: compiled kernels are not measured"
        yield Problem("training.compile", compiled, expected, "training.compile=off")
    if (strategy := distributed.strategy) not in ("auto", *EXACT):
        expected = f"{' or '.join(EXACT)} {with_it}: other strategies add up in their own order"
        yield Problem("distributed.strategy", strategy, expected, "distributed.strategy=fsdp2")
    if distributed.fsdp_sync == "last":
        expected = f"auto or every {with_it}: each micro-batch is added up by itself"
        yield Problem("distributed.fsdp_sync", "last", expected, "distributed.fsdp_sync=auto")
    for name in ("tensor_parallel", "pipeline_parallel", "sequence_parallel"):
        key, size = f"distributed.{name}", getattr(distributed, name)
        if size not in ("auto", 1):
            yield Problem(key, size, f"1 {with_it}: a model that is cut has other sums", f"{key}=1")
    if (name := optimizer.name) == "adamw_8bit" or (name == "muon" and strategy == "fsdp2"):
        yield inexact_optimizer(name)
    if preference.loss == "kto":
        expected = f"another loss {with_it}: kto takes the mean over all answers of a step"
        yield Problem("preference.loss", "kto", expected, "training.same_bits=false")


def same_bits_in_words(training: schema.TrainingConfig) -> str:
    """Return on how many processes a run with `training.same_bits` has the same bits.

    These divide the micro-batches of every step.
    """
    micro = training.micro_batch_size
    assert micro != "auto", "`check_same_bits` has refused it"
    count = training.batch.unit // micro
    sizes = [str(size) for size in range(1, count + 1) if count % size == 0]
    return f"{', '.join(sizes)} processes"


def inexact_optimizer(name: Algorithm) -> Problem:
    """Return the problem of an optimizer whose sums depend on the processes."""
    why = f"what {name} adds up depends on how tensors are divided"
    expected = f"adamw, or muon under ddp, with training.same_bits: {why}"
    remedy = "optimizer.name=adamw" + (", or distributed.strategy=ddp" if name == "muon" else "")
    return Problem("optimizer.name", name, expected, remedy)


_LOSSES = tuple(name for name in get_args(schema.PreferenceLoss) if name != "none")
_OF_PAIRS = tuple(name for name in _LOSSES if name not in ("kto", "reward"))
# Key of `preference` → the losses that use it.
_USERS: Mapping[str, tuple[str, ...]] = {
    "beta": (*_OF_PAIRS, "kto"),
    "label_smoothing": ("dpo", "dpo_norm", "robust", "simpo", "cpo"),
    "gamma": ("simpo",),
    "sft_weight": _OF_PAIRS,
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": tuple(
        name for name in _LOSSES if schema.PreferenceConfig(loss=name).has_reference
    ),
}


def check_preference(preference: schema.PreferenceConfig) -> Iterator[Problem]:
    """Check that no key has been changed that the loss does not use."""
    loss, fields = preference.loss, schema.PreferenceConfig.model_fields
    for name, users in _USERS.items():
        value, default = getattr(preference, name), fields[name].default
        if loss not in users and value != default:
            expected = f"{default} with preference.loss {loss}, which does not use it"
            remedy = f"leave it out, or preference.loss={' or '.join(users)}"
            yield Problem(f"preference.{name}", value, expected, remedy)


def check_pair_loss(
    preference: schema.PreferenceConfig,
    chat: schema.ChatConfig,
    training: schema.TrainingConfig,
    evaluation: schema.EvaluationConfig,
) -> Iterator[Problem]:
    """Check that the run asks for nothing that a loss of pairs does not have."""
    loss = preference.loss
    if loss == "none":
        return
    if chat.too_long == "split":
        expected = f"error, drop or truncate with preference.loss {loss}: an answer stays whole"
        yield Problem("chat.too_long", "split", expected, "chat.too_long=drop")
    if training.z_loss:
        expected = f"0.0 with preference.loss {loss}, which is a loss of answers, not of tokens"
        yield Problem("training.z_loss", training.z_loss, expected, "leave it out")
    if training.loss_kernel == "torch":
        expected = f"auto or chunked with preference.loss {loss}: torch has no such loss"
        yield Problem("training.loss_kernel", "torch", expected, "training.loss_kernel=auto")
    if loss == "reward" and evaluation.prompts:
        expected = "[] with preference.loss reward: a model that scores answers writes none"
        yield Problem("evaluation.prompts", list(evaluation.prompts), expected, "leave it out")


def check_pipeline(distributed: schema.DistributedConfig) -> Iterator[Problem]:
    """Check that several stages a rank are interleaved, and that there is a pipeline for them."""
    schedule, each = distributed.pipeline_schedule, distributed.pipeline_stages_per_rank
    key, schedule_key = "distributed.pipeline_stages_per_rank", "distributed.pipeline_schedule"
    if distributed.pipeline_parallel == 1 and each > 1:
        expected = "1 with distributed.pipeline_parallel 1, which is no pipeline"
        yield Problem(key, each, expected, f"{key}=1, or distributed.pipeline_parallel=2")
    elif each > 1 and schedule != "interleaved":
        expected = f"1 with {schedule_key} {schedule}, which runs one stage a rank"
        yield Problem(key, each, expected, f"{schedule_key}=interleaved")
    elif each == 1 and schedule == "interleaved":
        expected = f"1f1b or gpipe with {key} 1: what is interleaved is several stages of a rank"
        yield Problem(schedule_key, schedule, expected, f"{key}=2")


def check_warmup(optimizer: schema.OptimizerConfig) -> Iterator[Problem]:
    """Check that the warm-up is a whole number of steps, or a share of them below 1."""
    steps = optimizer.warmup_steps
    if steps > 1 and not float(steps).is_integer():
        expected = "a whole number of steps, or a share of all steps below 1"
        yield Problem("optimizer.warmup_steps", steps, expected, f"{round(steps)}")


def check_retention(checkpoint: schema.CheckpointConfig) -> Iterator[Problem]:
    """Check that the checkpoints to keep permanently are ever written."""
    every, keep = checkpoint.every_steps, checkpoint.keep_every
    if keep % every:
        expected = f"a multiple of checkpoint.every_steps {every}, or 0"
        yield Problem("checkpoint.keep_every", keep, expected, _nearest(keep, every))


def evaluates(data: schema.DataConfig, evaluation: schema.EvaluationConfig) -> bool:
    """Whether the run has documents to evaluate on."""
    return data.heldout > 0 or bool(evaluation.sources)


def check_best(
    checkpoint: schema.CheckpointConfig,
    data: schema.DataConfig,
    evaluation: schema.EvaluationConfig,
) -> Iterator[Problem]:
    """Check that best checkpoints are not asked for without an evaluation that ranks them."""
    asked = "keep_best" in checkpoint.model_fields_set and checkpoint.keep_best
    if asked and not evaluates(data, evaluation):
        expected = "0 without an evaluation: data.heldout is 0, evaluation.sources is empty"
        remedy = "checkpoint.keep_best=0, or data.heldout=0.005"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, expected, remedy)


def check_patience(
    data: schema.DataConfig, evaluation: schema.EvaluationConfig
) -> Iterator[Problem]:
    """Check that there are evaluations to lose patience with."""
    if evaluation.patience is not None and not evaluates(data, evaluation):
        expected = "null without an evaluation: data.heldout is 0, evaluation.sources is empty"
        remedy = "evaluation.patience=null, or data.heldout=0.005"
        yield Problem("evaluation.patience", evaluation.patience, expected, remedy)


def check_optimizer(
    optimizer: schema.OptimizerConfig, distributed: schema.DistributedConfig
) -> Iterator[Problem]:
    """Check that the strategy, if one is named, can run the optimizer."""
    asked = distributed.strategy
    if asked != "auto" and asked not in strategies_with(optimizer.name, [asked]):
        yield strategy_problem(optimizer.name, asked)


def strategies_with(optimizer: Algorithm, strategies: Iterable[str]) -> tuple[str, ...]:
    """Return those of some strategies under which an optimizer works."""
    only = _STRATEGIES.get(optimizer)
    return tuple(name for name in strategies if only is None or name in only)


def strategy_problem(optimizer: Algorithm, strategy: str) -> Problem:
    """Return the problem of an optimizer that does not work under a strategy."""
    only = _STRATEGIES[optimizer]
    expected = f"adamw under {strategy}; {optimizer} works only under {' or '.join(only)}"
    remedy = f"distributed.strategy={only[-1]}, or optimizer.name=adamw"
    return Problem("optimizer.name", optimizer, expected, remedy)


def check_stop_after(checkpoint: schema.CheckpointConfig) -> Iterator[Problem]:
    """Check that `stop_after` is a length of time."""
    value = checkpoint.stop_after
    if value is not None and not parse_duration(value):
        yield Problem("checkpoint.stop_after", value, DURATION)


def check_resume(checkpoint: schema.CheckpointConfig) -> Iterator[Problem]:
    """Check that `resume` names a checkpoint of this run, and not the path of other weights."""
    value = checkpoint.resume
    if not re.fullmatch(r"auto|never|step-\d{8,18}", value):
        expected = "auto, never, or the name of a checkpoint of this run, as step-00000400"
        elsewhere = "/" in value or (len(value) < _NAME_BYTES and Path(value).is_dir())
        remedy = f"did you mean model.from={value}, which takes weights alone?" if elsewhere else ""
        yield Problem("checkpoint.resume", value, expected, remedy)


def check_accepted(checkpoint: schema.CheckpointConfig) -> Iterator[Problem]:
    """Check that accepted names are keys or sections: others would be ignored silently."""
    for name in checkpoint.accept_changes:
        known, general = {key.name for key in all_keys()} | sections(), general_name(name)
        if general not in known and not name.startswith("model.config."):
            near = difflib.get_close_matches(general, sorted(known), n=1)
            expected = "a key or a section of the config"
            remedy = f"did you mean {near[0]}?" if near else ""
            yield Problem("checkpoint.accept_changes", name, expected, remedy)


def check_profile(
    training: schema.TrainingConfig, logging: schema.LoggingConfig
) -> Iterator[Problem]:
    """Check that the steps to profile are a range within the run."""
    if logging.profile_steps is None:
        return
    first, last = logging.profile_steps
    steps = training.steps or last
    if not first <= last <= steps:
        expected = f"[first, last] with first ≤ last ≤ {steps}, the last step of the run"
        remedy = f"[{min(10, steps)}, {min(12, steps)}]"
        yield Problem("logging.profile_steps", [first, last], expected, remedy)


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


RULES: tuple[Rule, ...] = (
    check_paths,
    check_model,
    check_adapter,
    check_length,
    check_packing,
    check_duration,
    check_growth,
    check_micro_batch,
    check_compile,
    check_same_bits,
    check_preference,
    check_pair_loss,
    check_pipeline,
    check_warmup,
    check_retention,
    check_best,
    check_patience,
    check_optimizer,
    check_stop_after,
    check_resume,
    check_accepted,
    check_profile,
)
