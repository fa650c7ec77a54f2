"""Guess what was meant by a key that does not exist.

Four places are searched: our sections, names that other trainers use (with how their value
converts), the last part of our own keys, and our full dotted names.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from llmtrain.config.keys import ITEM, all_keys, general_name, sections

_NEAR = 0.75  # of difflib: 1 for equal names
_NEARLY_THE_SAME = 0.9
_STEP = "training.global_batch_size"
_SOURCE = f"data.sources.{ITEM}"
_ENTRY = "of the entry in data.sources"
_TYPED = "the name that the model_type uses"

# Our key → names of other trainers for it, whose values are the same. A key that ends with a dot
# continues with the name.
_SAME = {
    "run.dir": "output_dir out_dir",
    "run.seed": "random_seed",
    "model.revision": "model_revision",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "model.config.": "hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings",
    "data.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len "
    "context_length block_size cutoff_len",
    "data.workers": "dataloader_num_workers",
    "training.steps": "max_steps num_steps train_steps train_iters max_iters total_steps "
    "max_train_steps",
    "training.epochs": "num_train_epochs num_epochs",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.warmup_steps": "warmup_iters num_warmup_steps",
    "optimizer.weight_decay": "wd",
    "checkpoint.every_steps": "save_steps save_interval save_every checkpoint_interval",
    "evaluation.every_steps": "eval_steps eval_interval eval_every",
    "evaluation.max_documents": "max_eval_samples",
    "logging.every_steps": "logging_steps log_interval log_every",
}
# Names of other trainers → our key ("" for no key), and how the value converts.
_CONVERTED = {
    "logging_dir": ("run.dir", "logs are in its logs/"),
    "run_name": ("run.dir", "the directory names the run"),
    "resume_from_checkpoint": ("run.dir", "the same command again resumes"),
    "data_seed": ("run.seed", "one seed for weights, order and dropout"),
    "model_name_or_path model_name model_id base_model": (
        "model.from",
        "to start from its weights; its name stays the same",
    ),
    "pretrained_model_name_or_path": ("model.from", "to start from its weights"),
    "init_from": ("model.from", "weights only; a run resumes by itself"),
    "config_overrides": ("model.config", "a mapping of the model's own fields"),
    "architecture": ("model.config.model_type", "as transformers names it, such as llama"),
    "model_type": ("model.config.model_type", "as transformers names it, such as llama"),
    "vocab_size": ("model.config.vocab_size", "left out = the tokenizer's length"),
    "tie_word_embeddings": ("model.config.tie_word_embeddings", "true or false"),
    "n_layer n_head n_embd": ("model.config.", _TYPED),
    "dropout": ("model.config", f"{_TYPED}, such as attention_dropout"),
    "trust_remote_code": ("", "code from the Hub is never run"),
    "dataset dataset_name dataset_path train_file train_data data_path": (
        f"{_SOURCE}.path",
        "one entry in the list data.sources",
    ),
    "data_dir": (f"{_SOURCE}.path", "a directory is a source too"),
    "datasets": ("data.sources", "a list of {path: …}"),
    "dataset_config_name dataset_config": (f"{_SOURCE}.name", _ENTRY),
    "dataset_split": (f"{_SOURCE}.split", _ENTRY),
    "dataset_text_field text_field text_key": (f"{_SOURCE}.text_column", _ENTRY),
    "streaming": ("", "every source is streamed"),
    "val_size val_set_size test_size": ("data.heldout", "a share: 5 percent is 0.05"),
    "validation_split_percentage": ("data.heldout", "a share: 5 percent is 0.05"),
    "validation_file": ("data.heldout", "a share of the documents is held out"),
    "num_workers num_proc": ("data.workers", "processes that read ahead for each rank"),
    "preprocessing_num_workers": ("data.workers", "nothing is prepared before the first step"),
    "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu micro_batch "
    "mbs": (
        "training.micro_batch_size",
        f"blocks per forward on one device; {_STEP} are those of a step",
    ),
    "per_device_eval_batch_size": (
        "training.micro_batch_size",
        "evaluation uses the micro-batch of training",
    ),
    "batch_size train_batch_size total_batch_size effective_batch_size gbs": (
        _STEP,
        "blocks in a step over all devices",
    ),
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps": (
        _STEP,
        "accumulation follows: global_batch_size / (micro_batch_size × processes)",
    ),
    "grad_clip gradient_clipping gradient_clip_val clip_grad": (
        "training.max_grad_norm",
        "the same number; null = never",
    ),
    "bf16 fp16 tf32 dtype torch_dtype mixed_precision": (
        "training.precision",
        "bf16 or fp32; fp16 is not offered",
    ),
    "optim": ("", "the optimizer is AdamW"),
    "min_lr lr_min": ("optimizer.min_lr_ratio", "as a share of learning_rate"),
    "lr_scheduler_type lr_scheduler scheduler lr_decay_style": (
        "optimizer.schedule",
        "cosine, linear, constant or wsd",
    ),
    "warmup_ratio": ("optimizer.warmup_steps", "a fraction below 1 is a share of the steps"),
    "warmup": ("optimizer.warmup_steps", "steps, or a share below 1"),
    "adam_beta1 adam_beta2 beta1 beta2": ("optimizer.betas", "[beta1, beta2]"),
    "num_processes num_gpus": ("", "use --processes N, or num_processes in the accelerate file"),
    "ddp_timeout": ("distributed.timeout_minutes", "in minutes: seconds / 60"),
    "save_total_limit": ("checkpoint.keep_last", "the same number, at least 2"),
    "load_best_model_at_end": ("checkpoint.keep_best", "how many of the best to keep"),
    "eval_iters": ("evaluation.max_documents", "documents, not batches"),
    "report_to log_with": ("logging.trackers", "a list, such as [tensorboard]"),
    "use_wandb": ("logging.trackers", "[wandb]"),
    "wandb_project": ("logging.trackers", "[wandb]; the project comes from WANDB_PROJECT"),
}


class Guess(NamedTuple):
    """What was probably meant.

    key: our key; "" if there is none
    advice: how the value converts; "" if there is nothing to say
    """

    key: str
    advice: str = ""


# Another trainer's name → our key and how the value converts.
FOREIGN = {
    name: Guess(key + name if key.endswith(".") else key, advice)
    for names, key, advice in (
        *((names, key, "the same value") for key, names in _SAME.items()),
        *((names, *meaning) for names, meaning in _CONVERTED.items()),
    )
    for name in names.split()
}


def guess(name: str, *, is_section: bool = False) -> Guess:
    """Return the most likely meaning of an unknown dotted name, or else the keys of its section.

    is_section: whether its value is a mapping, as for a section

    A number stands for a source: `data.sources.1.pth` → `data.sources.1.path`.
    """
    general, section = general_name(name), near_section(name)
    last = general.rpartition(".")[2].lower().replace("-", "_")
    found = FOREIGN.get(last) or _same_last(general, last)
    if section and (is_section or not found):
        return Guess(section)
    found = found or _near(general, last)
    if found is None:
        return Guess("", _neighbours(general))
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    return found._replace(key=found.key.replace(ITEM, number[0] if number else "0"))


def near_section(name: str) -> str:
    """Return the section that a dotted name may be a misspelling of; "" if none is similar.

    `trainig` → `training`, `optim` → `optimizer`, `distributed.dddp` → `distributed.ddp`.
    """
    outer, dot, inner = name.rpartition(".")
    written = inner.lower()
    beside = [
        one.rpartition(".")[2] for one in sorted(sections()) if one.rpartition(".")[0] == outer
    ]
    near = difflib.get_close_matches(written, beside, n=1, cutoff=_NEAR)
    shortened = [one for one in beside if len(written) > 2 and one.startswith(written)]
    return next((outer + dot + one for one in [*near, *shortened]), "")


def _candidates(general: str) -> list[str]:
    """Return our keys; those of a source only if it may be meant (not for `optimizer.name`)."""
    anywhere = "." not in general or general.startswith(("data.", "evaluation.sources."))
    return [key.name for key in all_keys() if anywhere or ITEM not in key.name]


def _same_last(general: str, last: str) -> Guess | None:
    names = [name for name in _candidates(general) if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(general, names, n=1, cutoff=0.0)
    return Guess(near[0]) if near else None


def _near(general: str, last: str) -> Guess | None:
    """Return the most similar name: another trainer's, the last part of our keys, or a full name.

    Another trainer's name must be nearly the same, since our key for it may have a very different
    name.
    """
    section = general.rpartition(".")[0]
    names = _candidates(general)
    beside = [name for name in names if name.startswith(f"{section}.")]
    ours = {name.rpartition(".")[2]: name for name in [*reversed(names), *beside]}
    for match in difflib.get_close_matches(last, FOREIGN, n=1, cutoff=_NEARLY_THE_SAME):
        return FOREIGN[match]
    for match in difflib.get_close_matches(last, ours, n=1, cutoff=_NEAR):
        return Guess(ours[match])
    for match in difflib.get_close_matches(general, names, n=1, cutoff=0.8):
        return Guess(match)
    return None


def _neighbours(general: str) -> str:
    section = general.rpartition(".")[0]
    prefix = f"{section}." if section in sections() else ""
    keys = [key.name.removeprefix(prefix) for key in all_keys() if key.name.startswith(prefix)]
    return f"one of {', '.join(dict.fromkeys(key.partition('.')[0] for key in keys))}"
