"""What a person may have meant by a key that does not exist.

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
_NO_KEY = ""
_NEAR = 0.75  # of difflib: 1 for equal names
_NEARLY_THE_SAME = 0.9

# Other trainers' names → our key ("" where there is none) and how to convert the value.
FOREIGN: dict[str, tuple[str, str]] = {
    "per_device_train_batch_size": (_MICRO, _PER_DEVICE),
    "per_device_batch_size": (_MICRO, _PER_DEVICE),
    "train_micro_batch_size_per_gpu": (_MICRO, _PER_DEVICE),
    "per_device_eval_batch_size": (_MICRO, "evaluation uses the micro-batch of training"),
    "micro_batch": (_MICRO, _PER_DEVICE),
    "mbs": (_MICRO, _PER_DEVICE),
    "batch_size": (_GLOBAL, "blocks in a step over all devices"),
    "train_batch_size": (_GLOBAL, "blocks in a step over all devices"),
    "total_batch_size": (_GLOBAL, "blocks in a step over all devices"),
    "effective_batch_size": (_GLOBAL, "blocks in a step over all devices"),
    "gbs": (_GLOBAL, "blocks in a step over all devices"),
    "gradient_accumulation_steps": (_GLOBAL, _ACCUMULATION),
    "accumulate_grad_batches": (_GLOBAL, _ACCUMULATION),
    "accumulation_steps": (_GLOBAL, _ACCUMULATION),
    "num_train_epochs": ("training.epochs", "the same number"),
    "num_epochs": ("training.epochs", "the same number"),
    "max_steps": ("training.steps", "the same number"),
    "num_steps": ("training.steps", "the same number"),
    "train_steps": ("training.steps", "the same number"),
    "train_iters": ("training.steps", "the same number"),
    "max_iters": ("training.steps", "the same number"),
    "total_steps": ("training.steps", "the same number"),
    "max_train_steps": ("training.steps", "the same number"),
    "max_seq_length": ("data.seq_len", "the same number"),
    "max_seq_len": ("data.seq_len", "the same number"),
    "max_length": ("data.seq_len", "the same number"),
    "seq_length": ("data.seq_len", "the same number"),
    "sequence_length": ("data.seq_len", "the same number"),
    "sequence_len": ("data.seq_len", "the same number"),
    "context_length": ("data.seq_len", "the same number"),
    "block_size": ("data.seq_len", "the same number"),
    "cutoff_len": ("data.seq_len", "the same number"),
    "output_dir": ("run.dir", "the same directory"),
    "out_dir": ("run.dir", "the same directory"),
    "logging_dir": ("run.dir", "logs lie in its logs/"),
    "run_name": ("run.dir", "the directory names the run"),
    "save_steps": ("checkpoint.every_steps", "the same number"),
    "save_interval": ("checkpoint.every_steps", "the same number"),
    "save_every": ("checkpoint.every_steps", "the same number"),
    "checkpoint_interval": ("checkpoint.every_steps", "the same number"),
    "save_total_limit": ("checkpoint.keep_last", "the same number, at least 2"),
    "load_best_model_at_end": ("checkpoint.keep_best", "how many of the best to keep"),
    "resume_from_checkpoint": ("run.dir", "the same command again resumes"),
    "eval_steps": ("evaluation.every_steps", "the same number"),
    "eval_interval": ("evaluation.every_steps", "the same number"),
    "eval_every": ("evaluation.every_steps", "the same number"),
    "eval_iters": ("evaluation.max_documents", "documents, not batches"),
    "max_eval_samples": ("evaluation.max_documents", "the same number"),
    "validation_split_percentage": ("data.heldout", "a share: 5 percent is 0.05"),
    "val_size": ("data.heldout", "a share: 5 percent is 0.05"),
    "val_set_size": ("data.heldout", "a share: 5 percent is 0.05"),
    "test_size": ("data.heldout", "a share: 5 percent is 0.05"),
    "logging_steps": ("logging.every_steps", "the same number"),
    "log_interval": ("logging.every_steps", "the same number"),
    "log_every": ("logging.every_steps", "the same number"),
    "report_to": ("logging.trackers", "a list, such as [tensorboard]"),
    "log_with": ("logging.trackers", "a list, such as [tensorboard]"),
    "use_wandb": ("logging.trackers", "[wandb]"),
    "wandb_project": ("logging.trackers", "[wandb]; the project comes from WANDB_PROJECT"),
    "lr": ("optimizer.learning_rate", "the same number"),
    "max_lr": ("optimizer.learning_rate", "the same number"),
    "min_lr": ("optimizer.min_lr_ratio", "as a share of learning_rate"),
    "lr_min": ("optimizer.min_lr_ratio", "as a share of learning_rate"),
    "lr_scheduler_type": ("optimizer.schedule", "cosine, linear, constant or wsd"),
    "lr_scheduler": ("optimizer.schedule", "cosine, linear, constant or wsd"),
    "scheduler": ("optimizer.schedule", "cosine, linear, constant or wsd"),
    "lr_decay_style": ("optimizer.schedule", "cosine, linear, constant or wsd"),
    "warmup_ratio": ("optimizer.warmup_steps", "a fraction below 1 is a share of the steps"),
    "warmup_iters": ("optimizer.warmup_steps", "the same number"),
    "num_warmup_steps": ("optimizer.warmup_steps", "the same number"),
    "warmup": ("optimizer.warmup_steps", "steps, or a share below 1"),
    "adam_beta1": ("optimizer.betas", "[beta1, beta2]"),
    "adam_beta2": ("optimizer.betas", "[beta1, beta2]"),
    "beta1": ("optimizer.betas", "[beta1, beta2]"),
    "beta2": ("optimizer.betas", "[beta1, beta2]"),
    "wd": ("optimizer.weight_decay", "the same number"),
    "optim": (_NO_KEY, "the optimizer is AdamW"),
    "grad_clip": ("training.max_grad_norm", "the same number; null = never"),
    "gradient_clipping": ("training.max_grad_norm", "the same number; null = never"),
    "gradient_clip_val": ("training.max_grad_norm", "the same number; null = never"),
    "clip_grad": ("training.max_grad_norm", "the same number; null = never"),
    "bf16": ("training.precision", _PRECISION),
    "fp16": ("training.precision", _PRECISION),
    "tf32": ("training.precision", _PRECISION),
    "dtype": ("training.precision", _PRECISION),
    "torch_dtype": ("training.precision", _PRECISION),
    "mixed_precision": ("training.precision", _PRECISION),
    "model_name_or_path": ("model.from", "to start from its weights; its name stays the same"),
    "model_name": ("model.from", "to start from its weights; its name stays the same"),
    "model_id": ("model.from", "to start from its weights; its name stays the same"),
    "base_model": ("model.from", "to start from its weights; its name stays the same"),
    "pretrained_model_name_or_path": ("model.from", "to start from its weights"),
    "init_from": ("model.from", "weights only; a run resumes by itself"),
    "config_overrides": ("model.config", "a mapping of the model's own fields"),
    "architecture": ("model.config.model_type", "as transformers names it, such as llama"),
    "model_type": ("model.config.model_type", "as transformers names it, such as llama"),
    "model_revision": ("model.revision", "the same text"),
    "tokenizer_name": ("model.tokenizer", "the same text"),
    "tokenizer_name_or_path": ("model.tokenizer", "the same text"),
    "tokenizer_path": ("model.tokenizer", "the same text"),
    "vocab_size": ("model.config.vocab_size", "left out = the tokenizer's length"),
    "hidden_size": ("model.config.hidden_size", "the same number"),
    "num_hidden_layers": ("model.config.num_hidden_layers", "the same number"),
    "num_attention_heads": ("model.config.num_attention_heads", "the same number"),
    "intermediate_size": ("model.config.intermediate_size", "the same number"),
    "max_position_embeddings": ("model.config.max_position_embeddings", "the same number"),
    "tie_word_embeddings": ("model.config.tie_word_embeddings", "true or false"),
    "n_layer": ("model.config.n_layer", "the name that the model_type uses"),
    "n_head": ("model.config.n_head", "the name that the model_type uses"),
    "n_embd": ("model.config.n_embd", "the name that the model_type uses"),
    "dropout": ("model.config", "the name that the model_type uses, such as attention_dropout"),
    "trust_remote_code": (_NO_KEY, "code from the Hub is never run"),
    "dataset": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "datasets": ("data.sources", "a list of {path: …}"),
    "dataset_name": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "dataset_path": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "dataset_config_name": (f"data.sources.{ITEM}.name", "of the entry in data.sources"),
    "dataset_config": (f"data.sources.{ITEM}.name", "of the entry in data.sources"),
    "dataset_split": (f"data.sources.{ITEM}.split", "of the entry in data.sources"),
    "dataset_text_field": (f"data.sources.{ITEM}.text_column", "of the entry in data.sources"),
    "text_field": (f"data.sources.{ITEM}.text_column", "of the entry in data.sources"),
    "text_key": (f"data.sources.{ITEM}.text_column", "of the entry in data.sources"),
    "train_file": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "train_data": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "data_path": (f"data.sources.{ITEM}.path", "one entry in the list data.sources"),
    "data_dir": (f"data.sources.{ITEM}.path", "a directory is a source too"),
    "validation_file": ("data.heldout", "a share of the documents is held out"),
    "streaming": (_NO_KEY, "every source is streamed"),
    "num_workers": ("data.workers", "processes that read ahead for each rank"),
    "num_proc": ("data.workers", "processes that read ahead for each rank"),
    "preprocessing_num_workers": ("data.workers", "nothing is prepared before the first step"),
    "dataloader_num_workers": ("data.workers", "the same number"),
    "ddp_timeout": ("distributed.timeout_minutes", "in minutes: seconds / 60"),
    "num_processes": (_NO_KEY, "say --processes N, or num_processes in the accelerate file"),
    "num_gpus": (_NO_KEY, "say --processes N, or num_processes in the accelerate file"),
    "random_seed": ("run.seed", "the same number"),
    "data_seed": ("run.seed", "one seed for weights, order and dropout"),
}


@dataclass(frozen=True, slots=True)
class Guess:
    """What was probably meant: our key (may be "") and how the value converts (may be "")."""

    key: str
    advice: str = ""


def guess(name: str, *, is_section: bool = False) -> Guess:
    """The likeliest meaning of an unknown dotted name; if nothing is near, the keys beside it.

    A number stands for a source: `data.sources.1.pth` → `data.sources.1.path`. is_section: whether
    it holds a mapping, as sections do.
    """
    if is_section and (section := near_section(name)):
        return Guess(section)
    plain, numbers = _without_numbers(name)
    last = plain.rpartition(".")[2].lower().replace("-", "_")
    if last in FOREIGN:
        return _numbered(Guess(*FOREIGN[last]), numbers)
    found = _same_last(plain, last)
    if found is None and (section := near_section(name)):
        return Guess(section)
    found = found or _near(plain, last)
    return _numbered(found, numbers) if found else Guess("", _neighbours(plain))


def near_section(name: str) -> str:
    """The section that a dotted name may be a misspelling of; "" if none is near.

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
    """Our keys; those of a source only where one may be meant (`optimizer.name` is none)."""
    anywhere = "." not in plain or plain.startswith("data.")
    return [key.name for key in all_keys() if anywhere or ITEM not in key.name]


def _same_last(plain: str, last: str) -> Guess | None:
    names = [name for name in _candidates(plain) if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.0)
    return Guess(near[0]) if near else None


def _near(plain: str, last: str) -> Guess | None:
    """The nearest of our last parts, else of our full names.

    Another trainer's name has to be nearly the same: it says something else than what was written.
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


def _numbered(found: Guess, numbers: list[str]) -> Guess:
    return Guess(found.key.replace(ITEM, numbers[0] if numbers else "0"), found.advice)
