"""Guess what was meant by a key that does not exist.

Four places are searched: our sections, names that other trainers use (with how their value
converts), the last part of our own keys, and our full dotted names.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from llmtrain.config.keys import ITEM, all_keys, sections

_MICRO = "training.micro_batch_size"
_GLOBAL = "training.global_batch_size"
_PER_DEVICE = f"blocks per forward on one device; {_GLOBAL} are those of a step"
_ACCUMULATION = "accumulation follows: global_batch_size / (micro_batch_size × processes)"
_PRECISION = "bf16 or fp32; fp16 is not offered"
_SAME = "the same number"
_NO_KEY = ""
_NEAR = 0.75  # of difflib: 1 for equal names
_NEARLY_THE_SAME = 0.9

# Our key ("" for no key), how the value converts, and the names that other trainers use.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    (
        _MICRO,
        _PER_DEVICE,
        "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu "
        "micro_batch mbs",
    ),
    (_MICRO, "evaluation uses the micro-batch of training", "per_device_eval_batch_size"),
    (
        _GLOBAL,
        "blocks in a step over all devices",
        "batch_size train_batch_size total_batch_size effective_batch_size gbs",
    ),
    (
        _GLOBAL,
        _ACCUMULATION,
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps",
    ),
    ("training.epochs", _SAME, "num_train_epochs num_epochs"),
    (
        "training.steps",
        _SAME,
        "max_steps num_steps train_steps train_iters max_iters total_steps max_train_steps",
    ),
    (
        "data.seq_len",
        _SAME,
        "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len "
        "context_length block_size cutoff_len",
    ),
    ("run.dir", "the same directory", "output_dir out_dir"),
    ("run.dir", "logs are in its logs/", "logging_dir"),
    ("run.dir", "the directory names the run", "run_name"),
    ("checkpoint.every_steps", _SAME, "save_steps save_interval save_every checkpoint_interval"),
    ("checkpoint.keep_last", "the same number, at least 2", "save_total_limit"),
    ("checkpoint.keep_best", "how many of the best to keep", "load_best_model_at_end"),
    ("run.dir", "the same command again resumes", "resume_from_checkpoint"),
    ("evaluation.every_steps", _SAME, "eval_steps eval_interval eval_every"),
    ("evaluation.max_documents", "documents, not batches", "eval_iters"),
    ("evaluation.max_documents", _SAME, "max_eval_samples"),
    (
        "data.heldout",
        "a share: 5 percent is 0.05",
        "validation_split_percentage val_size val_set_size test_size",
    ),
    ("logging.every_steps", _SAME, "logging_steps log_interval log_every"),
    ("logging.trackers", "a list, such as [tensorboard]", "report_to log_with"),
    ("logging.trackers", "[wandb]", "use_wandb"),
    ("logging.trackers", "[wandb]; the project comes from WANDB_PROJECT", "wandb_project"),
    ("optimizer.learning_rate", _SAME, "lr max_lr"),
    ("optimizer.min_lr_ratio", "as a share of learning_rate", "min_lr lr_min"),
    (
        "optimizer.schedule",
        "cosine, linear, constant or wsd",
        "lr_scheduler_type lr_scheduler scheduler lr_decay_style",
    ),
    ("optimizer.warmup_steps", "a fraction below 1 is a share of the steps", "warmup_ratio"),
    ("optimizer.warmup_steps", _SAME, "warmup_iters num_warmup_steps"),
    ("optimizer.warmup_steps", "steps, or a share below 1", "warmup"),
    ("optimizer.betas", "[beta1, beta2]", "adam_beta1 adam_beta2 beta1 beta2"),
    ("optimizer.weight_decay", _SAME, "wd"),
    (_NO_KEY, "the optimizer is AdamW", "optim"),
    (
        "training.max_grad_norm",
        "the same number; null = never",
        "grad_clip gradient_clipping gradient_clip_val clip_grad",
    ),
    ("training.precision", _PRECISION, "bf16 fp16 tf32 dtype torch_dtype mixed_precision"),
    (
        "model.from",
        "to start from its weights; its name stays the same",
        "model_name_or_path model_name model_id base_model",
    ),
    ("model.from", "to start from its weights", "pretrained_model_name_or_path"),
    ("model.from", "weights only; a run resumes by itself", "init_from"),
    ("model.config", "a mapping of the model's own fields", "config_overrides"),
    (
        "model.config.model_type",
        "as transformers names it, such as llama",
        "architecture model_type",
    ),
    ("model.revision", "the same string", "model_revision"),
    ("model.tokenizer", "the same string", "tokenizer_name tokenizer_name_or_path tokenizer_path"),
    ("model.config.vocab_size", "left out = the tokenizer's length", "vocab_size"),
    ("model.config.hidden_size", _SAME, "hidden_size"),
    ("model.config.num_hidden_layers", _SAME, "num_hidden_layers"),
    ("model.config.num_attention_heads", _SAME, "num_attention_heads"),
    ("model.config.intermediate_size", _SAME, "intermediate_size"),
    ("model.config.max_position_embeddings", _SAME, "max_position_embeddings"),
    ("model.config.tie_word_embeddings", "true or false", "tie_word_embeddings"),
    ("model.config.n_layer", "the name that the model_type uses", "n_layer"),
    ("model.config.n_head", "the name that the model_type uses", "n_head"),
    ("model.config.n_embd", "the name that the model_type uses", "n_embd"),
    ("model.config", "the name that the model_type uses, such as attention_dropout", "dropout"),
    (_NO_KEY, "code from the Hub is never run", "trust_remote_code"),
    (
        f"data.sources.{ITEM}.path",
        "one entry in the list data.sources",
        "dataset dataset_name dataset_path train_file train_data data_path",
    ),
    ("data.sources", "a list of {path: …}", "datasets"),
    (
        f"data.sources.{ITEM}.name",
        "of the entry in data.sources",
        "dataset_config_name dataset_config",
    ),
    (f"data.sources.{ITEM}.split", "of the entry in data.sources", "dataset_split"),
    (
        f"data.sources.{ITEM}.text_column",
        "of the entry in data.sources",
        "dataset_text_field text_field text_key",
    ),
    (f"data.sources.{ITEM}.path", "a directory is a source too", "data_dir"),
    ("data.heldout", "a share of the documents is held out", "validation_file"),
    (_NO_KEY, "every source is streamed", "streaming"),
    ("data.workers", "processes that read ahead for each rank", "num_workers num_proc"),
    ("data.workers", "nothing is prepared before the first step", "preprocessing_num_workers"),
    ("data.workers", _SAME, "dataloader_num_workers"),
    ("distributed.timeout_minutes", "in minutes: seconds / 60", "ddp_timeout"),
    (
        _NO_KEY,
        "use --processes N, or num_processes in the accelerate file",
        "num_processes num_gpus",
    ),
    ("run.seed", _SAME, "random_seed"),
    ("run.seed", "one seed for weights, order and dropout", "data_seed"),
)
# Another trainer's name → our key and how the value converts.
FOREIGN: dict[str, tuple[str, str]] = {
    name: (key, advice) for key, advice, names in _MEANINGS for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Guess:
    """What was probably meant.

    key: our key; "" if there is none
    advice: how the value converts; "" if there is nothing to say
    """

    key: str
    advice: str = ""


def guess(name: str, *, is_section: bool = False) -> Guess:
    """Return the most likely meaning of an unknown dotted name, or else the keys of its section.

    is_section: whether its value is a mapping, as for a section

    A number stands for a source: `data.sources.1.pth` → `data.sources.1.path`.
    """
    if is_section and (section := near_section(name)):
        return Guess(section)
    plain, numbers = _without_numbers(name)
    last = plain.rpartition(".")[2].lower().replace("-", "_")
    if last in FOREIGN:
        return _with_number(Guess(*FOREIGN[last]), numbers)
    found = _same_last(plain, last)
    if found is None and (section := near_section(name)):
        return Guess(section)
    found = found or _near(plain, last)
    return _with_number(found, numbers) if found else Guess("", _neighbours(plain))


def near_section(name: str) -> str:
    """Return the section that a dotted name may be a misspelling of; "" if none is similar.

    `trainig` → `training`, `optim` → `optimizer`, `distributed.dddp` → `distributed.ddp`.
    """
    outer, _, inner = name.rpartition(".")
    written = inner.lower()
    beside = {
        section.rpartition(".")[2]: section
        for section in sorted(sections() - {""})
        if section.rpartition(".")[0] == outer
    }
    near = difflib.get_close_matches(written, beside, n=1, cutoff=_NEAR)
    shortened = [one for one in beside if len(written) > 2 and one.startswith(written)]
    return next((beside[one] for one in [*near, *shortened]), "")


def _candidates(plain: str) -> list[str]:
    """Return our keys; those of a source only if it may be meant (not for `optimizer.name`)."""
    anywhere = "." not in plain or plain.startswith("data.")
    return [key.name for key in all_keys() if anywhere or ITEM not in key.name]


def _same_last(plain: str, last: str) -> Guess | None:
    names = [name for name in _candidates(plain) if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.0)
    return Guess(near[0]) if near else None


def _near(plain: str, last: str) -> Guess | None:
    """Return the most similar name: another trainer's, the last part of our keys, or a full name.

    Another trainer's name must be nearly the same, since our key for it may have a very different
    name.
    """
    section = plain.rpartition(".")[0]
    names = _candidates(plain)
    beside = [name for name in names if name.startswith(f"{section}.")]
    ours = {name.rpartition(".")[2]: name for name in [*reversed(names), *beside]}
    for match in difflib.get_close_matches(last, FOREIGN, n=1, cutoff=_NEARLY_THE_SAME):
        return Guess(*FOREIGN[match])
    for match in difflib.get_close_matches(last, ours, n=1, cutoff=_NEAR):
        return Guess(ours[match])
    for match in difflib.get_close_matches(plain, names, n=1, cutoff=0.8):
        return Guess(match)
    return None


def _neighbours(plain: str) -> str:
    section = plain.rpartition(".")[0]
    section = section if section in sections() else ""
    inner = section + "." if section else ""
    keys = [key.name.removeprefix(inner) for key in all_keys() if key.name.startswith(inner)]
    names = dict.fromkeys(key.partition(".")[0] for key in keys)
    return f"one of {', '.join(names)}"


def _without_numbers(name: str) -> tuple[str, list[str]]:
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return ".".join(ITEM if part.isdigit() else part for part in parts), numbers


def _with_number(found: Guess, numbers: list[str]) -> Guess:
    return Guess(found.key.replace(ITEM, numbers[0] if numbers else "0"), found.advice)
