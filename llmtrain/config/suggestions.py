"""Guess what was meant by a key that does not exist.

Four places are searched: our sections, names that other trainers use (with the values that ours
take), the last part of our own keys, and our full dotted names.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import NamedTuple

from llmtrain.config.keys import ITEM, all_keys, general_name, sections

_NEAR = 0.75  # of difflib: 1 for equal names
_NEARLY_THE_SAME = 0.9
_SOURCE = f"data.sources.{ITEM}"

# Our key → names of other trainers for it; the schema says which values it takes. A key that ends
# with a dot continues with the name.
_NAMES = {
    "run.dir": "output_dir out_dir",
    "run.seed": "random_seed",
    "model.from": "model_name_or_path model_name model_id base_model pretrained_model_name_or_path",
    "model.revision": "model_revision",
    "model.config": "config_overrides",
    "model.config.": "hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings tie_word_embeddings",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.sources": "datasets",
    f"{_SOURCE}.path": "dataset dataset_name dataset_path train_file train_data data_path data_dir",
    f"{_SOURCE}.name": "dataset_config_name dataset_config",
    f"{_SOURCE}.split": "dataset_split",
    f"{_SOURCE}.text_column": "dataset_text_field text_field text_key",
    "data.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len "
    "context_length block_size cutoff_len",
    "data.heldout": "val_size val_set_size test_size validation_file",
    "data.workers": "dataloader_num_workers num_workers num_proc",
    "training.steps": "max_steps num_steps train_steps train_iters max_iters total_steps "
    "max_train_steps",
    "training.epochs": "num_train_epochs num_epochs",
    "training.global_batch_size": "batch_size train_batch_size total_batch_size "
    "effective_batch_size gbs",
    "training.micro_batch_size": "per_device_train_batch_size per_device_batch_size "
    "train_micro_batch_size_per_gpu micro_batch mbs",
    "training.deterministic": "full_determinism use_deterministic_algorithms",
    "training.max_grad_norm": "grad_clip gradient_clipping gradient_clip_val clip_grad",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler lr_decay_style",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio",
    "optimizer.min_lr_ratio": "min_lr lr_min",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "checkpoint.every_steps": "save_steps save_interval save_every checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.keep_best": "load_best_model_at_end",
    "evaluation.every_steps": "eval_steps eval_interval eval_every",
    "evaluation.max_documents": "max_eval_samples",
    "evaluation.patience": "early_stopping_patience",
    "logging.every_steps": "logging_steps log_interval log_every",
    "logging.trackers": "report_to log_with",
}
# Names of other trainers → our key ("" for no key), and what is different.
_CONVERTED = {
    "logging_dir": ("run.dir", "logs are in its logs/"),
    "run_name": ("run.dir", "the directory names the run"),
    "resume_from_checkpoint": ("run.dir", "the same command again resumes"),
    "data_seed": ("run.seed", "one seed for weights, order and dropout"),
    "init_from": ("model.from", "weights only; a run resumes by itself"),
    "architecture model_type": (
        "model.config.model_type",
        "as transformers names it, such as llama",
    ),
    "vocab_size": ("model.config.vocab_size", "left out = the tokenizer's length"),
    "n_layer n_head n_embd": ("model.config.", "the name that the model_type uses"),
    "dropout": ("model.config", "the name that the model_type uses, such as attention_dropout"),
    "trust_remote_code": ("", "code from the Hub is never run"),
    "streaming": ("", "every source is streamed"),
    "validation_split_percentage": ("data.heldout", "a share: 5 percent is 0.05"),
    "preprocessing_num_workers": ("data.workers", "nothing is prepared before the first step"),
    "per_device_eval_batch_size": (
        "training.micro_batch_size",
        "evaluation uses the micro-batch of training",
    ),
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps": (
        "training.global_batch_size",
        "accumulation follows: global_batch_size / (micro_batch_size × processes)",
    ),
    "bf16 fp16 tf32 dtype torch_dtype mixed_precision": (
        "training.precision",
        "bf16 or fp32; fp16 is not offered",
    ),
    "torch_compile compile_model use_compile": ("training.compile", "blocks or off"),
    "attn_implementation use_flash_attention_2 flash_attention": (
        "model.attention_backend",
        "flash, cudnn or math: the kernel that is tried first",
    ),
    "optim": ("optimizer.name", "adamw, adamw_8bit or muon"),
    "num_processes num_gpus": ("", "use --processes N, or num_processes in the accelerate file"),
    "ddp_timeout": ("distributed.timeout_minutes", "in minutes: seconds / 60"),
    "eval_iters": ("evaluation.max_documents", "documents, not batches"),
    "use_dora use_rslora use_peft load_in_4bit": ("adapter.kind", "dora, rslora, lora or qlora"),
    "use_wandb": ("logging.trackers", "[wandb]"),
    "wandb_project": ("logging.trackers", "[wandb]; the project comes from WANDB_PROJECT"),
}


class Guess(NamedTuple):
    """What was probably meant.

    key: our key; "" if we have no such key
    advice: which values it takes, or what is different; "" if there is nothing to say
    """

    key: str
    advice: str = ""


@cache
def foreign() -> dict[str, Guess]:
    """Return what each name of another trainer means."""
    described = {key.name: f"{key.takes}. {key.description}" for key in all_keys()}
    meanings = [
        *((names, key, described.get(key, "the same value")) for key, names in _NAMES.items()),
        *((names, *meaning) for names, meaning in _CONVERTED.items()),
    ]
    return {
        name: Guess(key + name if key.endswith(".") else key, advice)
        for names, key, advice in meanings
        for name in names.split()
    }


def guess(name: str, *, is_section: bool = False) -> Guess:
    """Return the most likely meaning of an unknown dotted name, or else the keys of its section.

    is_section: whether its value is a mapping, as for a section

    A number stands for a source: `data.sources.1.pth` → `data.sources.1.path`.
    """
    general, section = general_name(name), near_section(name)
    last = general.rpartition(".")[2].lower().replace("-", "_")
    found = foreign().get(last) or _same_last(general, last)
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
    """Return our keys; those of a source only if it may be meant (not for `training.path`)."""
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
    for match in difflib.get_close_matches(last, foreign(), n=1, cutoff=_NEARLY_THE_SAME):
        return foreign()[match]
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
