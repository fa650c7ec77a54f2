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
# with a dot continues with the name. A name has its section only where it means nothing without.
_NAMES = {
    "run.dir": "output_dir out_dir dump_folder",
    "run.seed": "random_seed",
    "model.from": "model_name_or_path model_name model_id base_model pretrained_model_name_or_path",
    "model.revision": "model_revision",
    "model.config": "config_overrides",
    "model.config.": "hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings tie_word_embeddings",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "model.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing "
    "activation_checkpoint",
    "data.sources": "datasets pretraining_dataset",
    f"{_SOURCE}.path": "dataset dataset_name dataset_path train_file train_data data_path data_dir",
    f"{_SOURCE}.name": "dataset_config_name dataset_config",
    f"{_SOURCE}.split": "dataset_split",
    f"{_SOURCE}.text_column": "dataset_text_field text_field text_key",
    "data.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len "
    "context_length max_context_length block_size cutoff_len",
    "data.heldout": "val_size val_set_size test_size validation_file",
    "data.workers": "dataloader_num_workers num_workers num_proc",
    "chat.template": "chat_template chat_template_path",
    "training.steps": "max_steps num_steps train_steps train_iters max_iters total_steps "
    "max_train_steps",
    "training.epochs": "num_train_epochs num_epochs",
    "training.global_batch_size": "batch_size train_batch_size total_batch_size "
    "effective_batch_size gbs",
    "training.micro_batch_size": "per_device_train_batch_size per_device_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size micro_batch mbs",
    "training.deterministic": "full_determinism use_deterministic_algorithms",
    "training.max_grad_norm": "grad_clip gradient_clipping gradient_clip_val clip_grad max_norm",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler lr_decay_style decay_type",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio lr_warmup_steps "
    "lr_warmup_iters lr_warmup_fraction",
    "optimizer.min_lr_ratio": "min_lr_factor",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "checkpoint.every_steps": "save_steps save_interval save_every checkpoint_interval "
    "checkpoint.interval",
    "checkpoint.keep_last": "save_total_limit keep_latest_k",
    "checkpoint.background": "async_mode async_save",
    "checkpoint.keep_best": "load_best_model_at_end",
    "evaluation.every_steps": "eval_steps eval_interval eval_every eval.interval validator.freq",
    "evaluation.max_documents": "max_eval_samples",
    "evaluation.patience": "early_stopping_patience",
    "logging.every_steps": "logging_steps log_interval log_every log_freq",
    "logging.trackers": "report_to log_with logger_name enable_tensorboard enable_wandb",
}
# Names of other trainers → our key ("" for no key), and what is different.
_CONVERTED = {
    "logging_dir": ("run.dir", "logs are in its logs/"),
    "run_name wandb_name": ("run.dir", "the directory names the run"),
    "resume_from_checkpoint auto_resume_from_checkpoints": (
        "run.dir",
        "the same command again resumes",
    ),
    "overwrite_output_dir": ("run.dir", "no run is overwritten: name another directory"),
    "ignore_data_skip": ("", "a resume opens the data where it stopped and skips through nothing"),
    "save_only_model": ("", "every checkpoint can be resumed, and is a model directory"),
    "load_step": ("checkpoint.resume", "step-N"),
    "data_seed": ("run.seed", "one seed for weights, order and dropout"),
    "init_from initial_checkpoint_dir initial_load_path pretrained_checkpoint checkpoint_dir": (
        "model.from",
        "weights only; a run resumes by itself",
    ),
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
    "preprocessing_num_workers dataset_num_proc": (
        "data.workers",
        "nothing is prepared before the first step",
    ),
    "dataset_prepared_path": (
        "",
        "text is tokenized in training; or once, by llmtrain data tokenize",
    ),
    "sample_packing packing_strategy padding_free eval_packing eval_sample_packing "
    "pad_to_sequence_len": ("data.packing", "concat or bestfit pack blocks; single pads them"),
    "assistant_only_loss completion_only_loss train_on_inputs mask_prompt roles_to_train": (
        "chat.train_turns",
        "answers alone are trained: all of a conversation, or the last",
    ),
    "eos_token eot_tokens": (
        "chat.end_of_turn",
        "auto = what the template writes after an answer and after a call",
    ),
    "special_tokens": ("", "the tokenizer's own are used, and chat.template adds its tokens"),
    "eval_strategy evaluation_strategy evals_per_epoch": (
        "evaluation.every_steps",
        "always by steps",
    ),
    "save_strategy saves_per_epoch": ("checkpoint.every_steps", "always by steps"),
    "logging_strategy": ("logging.every_steps", "always by steps"),
    "metric_for_best_model": ("checkpoint.keep_best", "best = the lowest held-out loss"),
    "hf_assets_path": ("model.tokenizer", "model.from, if its weights are meant, too"),
    "decay_ratio": ("optimizer.schedule", "wsd decays in its last fifth"),
    "max_tokens": ("training.steps", "tokens / (global_batch_size × seq_len)"),
    "num_tokens_per_train_step": ("training.global_batch_size", "in blocks: tokens / seq_len"),
    "num_tokens_per_microbatch_per_dp_rank": (
        "training.micro_batch_size",
        "in blocks: tokens / seq_len",
    ),
    "auto_find_batch_size": ("training.micro_batch_size", "auto: the memory plan chooses it"),
    "min_lr lr_min": ("optimizer.min_lr_ratio", "a share of the peak: min_lr / learning_rate"),
    "eps adam_epsilon": ("", "AdamW's own 1e-8 is used"),
    "use_liger_kernel": ("training.loss_kernel", "auto computes head and loss in chunks of rows"),
    "fsdp fsdp_config deepspeed use_distributed_optimizer data_parallel_shard_degree "
    "data_parallel_replicate_degree": (
        "distributed.strategy",
        "a name, such as fsdp2, hsdp or zero3; auto = by the accelerate file or the memory plan",
    ),
    "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
    "context_parallel_size context_parallel_degree sequence_parallel_size "
    "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size "
    "expert_parallel_size expert_parallel_degree": (
        "",
        "not offered: a model is split by FSDP2 or ZeRO",
    ),
    "push_to_hub hub_model_id": ("", "use llmtrain export RUN --out DIR --push owner/name"),
    "unfrozen_parameters": ("model.freeze", "patterns of what is not trained"),
    "load_in_8bit quantize": (
        "adapter.kind",
        "qlora: the base in four bits; eight are not offered",
    ),
    "per_device_eval_batch_size": (
        "training.micro_batch_size",
        "evaluation uses the micro-batch of training",
    ),
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps": (
        "training.global_batch_size",
        "accumulation follows: global_batch_size / (micro_batch_size × processes)",
    ),
    "bf16 fp16 tf32 dtype torch_dtype mixed_precision mixed_precision_param": (
        "training.precision",
        "bf16 or fp32; fp16 is not offered",
    ),
    "torch_compile compile_model use_compile compile.enable": (
        "training.compile",
        "blocks, model or off",
    ),
    "attn_implementation use_flash_attention_2 flash_attention": (
        "model.attention_backend",
        "flash, cudnn or math: the kernel that is tried first",
    ),
    "optim": ("optimizer.name", "adamw, adamw_8bit or muon"),
    "num_processes num_gpus devices num_nodes": (
        "",
        "use --processes N, or num_processes in the accelerate file",
    ),
    "ddp_timeout train_timeout_seconds": (
        "distributed.timeout_minutes",
        "in minutes: seconds / 60",
    ),
    "eval_iters": ("evaluation.max_documents", "documents, not batches"),
    "use_dora use_rslora use_peft load_in_4bit peft_use_dora peft_use_rslora": (
        "adapter.kind",
        "dora, rslora, lora or qlora",
    ),
    "use_wandb": ("logging.trackers", "[wandb]"),
    "dpo orpo kto ppo grpo rlhf simpo reward_model pref_beta pref_loss ref_model dpo_beta": (
        "",
        "preferences are not trained here: train on the answers, llmtrain export, then trl",
    ),
    "stage training_stage": (
        "",
        "the data decides: texts are trained whole, of conversations the answers",
    ),
    "finetuning_type": ("adapter.kind", "none trains all weights; lora, dora, rslora or qlora"),
    "early_stopping early_stopping_threshold": (
        "evaluation.patience",
        "this many evaluations in a row without a lower loss end the run",
    ),
    "neftune neftune_noise_alpha noise_embedding_alpha": (
        "",
        "no noise is put on embeddings; adapter.dropout is what there is against overfitting",
    ),
    "max_samples max_train_samples": (
        "training.epochs",
        "no rows are left out: a share of the data is trained with 0.1, for example",
    ),
    "wandb_project": ("logging.trackers", "[wandb]; WANDB_PROJECT chooses the project"),
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
    found = foreign().get(general) or foreign().get(last) or _same_last(general, last)
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
