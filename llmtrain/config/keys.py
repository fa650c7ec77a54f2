"""The keys of the schema as a list, and what was meant by a key that does not exist.

The description of the values that a key takes is made from the JSON schema that pydantic derives
from its type, so that messages always agree with what is checked.

Four places are searched for an unknown key: our sections, names that other trainers use (with the
values that ours take), the last part of our own keys, and our full dotted names.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from llmtrain.config.schema import Config
from llmtrain.types import JsonMapping

ITEM = "*"  # stands for the number of an item of a list in a key

Schema = JsonMapping

_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_NEAR = 0.75  # of difflib: 1 for equal names
_NEARLY_THE_SAME = 0.9
_SOURCE = f"data.sources.{ITEM}"

# Our key → names of other trainers for it; the schema says which values it takes. A key that ends
# with a dot continues with the name. Only names that many people type are here: those of Trainer,
# TRL, axolotl and LLaMA-Factory, and a few of torchtitan and Megatron.
_NAMES = {
    "run.dir": "output_dir",
    "model.from": "model_name_or_path base_model",
    "model.config.": "hidden_size",
    "model.activation_checkpointing": "gradient_checkpointing",
    "data.sources": "datasets",
    f"{_SOURCE}.path": "dataset_name",
    f"{_SOURCE}.text_column": "dataset_text_field",
    "data.seq_len": "max_length max_seq_length sequence_len cutoff_len seq_length block_size",
    "data.heldout": "val_set_size val_size",
    "data.workers": "dataloader_num_workers",
    "training.steps": "max_steps train_iters",
    "training.epochs": "num_train_epochs num_epochs",
    "training.global_batch_size": "batch_size",
    "training.micro_batch_size": "per_device_train_batch_size local_batch_size",
    "training.max_grad_norm": "gradient_clipping",
    "optimizer.learning_rate": "lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "optimizer.warmup_steps": "warmup_ratio",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target",
    "preference.loss": "loss_type rl",
    "preference.sft_weight": "rpo_alpha",
    "preference.reference": "ref_model",
    "checkpoint.every_steps": "save_steps save_interval",
    "checkpoint.keep_last": "save_total_limit",
    "evaluation.every_steps": "eval_steps",
    "evaluation.patience": "early_stopping_patience",
    "logging.every_steps": "logging_steps",
    "logging.trackers": "report_to",
    "distributed.tensor_parallel": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "distributed.pipeline_parallel": "pipeline_model_parallel_size pp_size",
}
# Names of other trainers → our key ("" for no key), and what is different.
_CONVERTED = {
    "resume_from_checkpoint": ("run.dir", "the same command again resumes"),
    "dropout": ("model.config", "the name that the model_type uses, such as attention_dropout"),
    "trust_remote_code": ("", "code from the Hub is never run"),
    "streaming": ("", "every source is streamed"),
    "sample_packing": ("data.packing", "concat or bestfit pack blocks; single pads them"),
    "assistant_only_loss train_on_inputs": (
        "chat.train_turns",
        "answers alone are trained: all of a conversation, or the last",
    ),
    "eval_strategy": ("evaluation.every_steps", "always by steps"),
    "save_strategy": ("checkpoint.every_steps", "always by steps"),
    "min_lr": ("optimizer.min_lr_ratio", "a share of the peak: min_lr / learning_rate"),
    "eps": ("", "AdamW's own 1e-8 is used"),
    "fsdp deepspeed": (
        "distributed.strategy",
        "a name, such as fsdp2, hsdp or zero3; auto = by the accelerate file or the memory plan",
    ),
    "context_parallel_size cp_size": (
        "distributed.sequence_parallel",
        "heads are exchanged for positions; ring attention is not offered",
    ),
    "push_to_hub": ("", "use llmtrain export RUN --out DIR --push owner/name"),
    "gradient_accumulation_steps": (
        "training.global_batch_size",
        "accumulation follows: global_batch_size / (micro_batch_size × processes)",
    ),
    "bf16 fp16": ("training.precision", "bf16 or fp32; fp16 is not offered"),
    "torch_compile": ("training.compile", "blocks, model or off"),
    "attn_implementation": (
        "model.attention_backend",
        "flash, cudnn or math: the kernel that is tried first",
    ),
    "optim": ("optimizer.name", "adamw, adamw_8bit or muon"),
    "use_dora load_in_4bit": ("adapter.kind", "dora, rslora, lora or qlora"),
    "dpo": ("preference.loss", "a name, such as dpo or kto"),
    "grpo": ("", "nothing is generated while training: train, llmtrain export, then trl"),
    "stage": ("", "the data decides: texts are trained whole, of conversations the answers"),
    "finetuning_type": ("adapter.kind", "none trains all weights; lora, dora, rslora or qlora"),
    "early_stopping": (
        "evaluation.patience",
        "this many evaluations in a row without a lower loss end the run",
    ),
    "neftune neftune_noise_alpha": (
        "",
        "no noise is put on embeddings; adapter.dropout is what there is against overfitting",
    ),
    "max_samples": (
        "training.epochs",
        "no rows are left out: a share of the data is trained with 0.1, for example",
    ),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema.

    name: with dots, and `*` for the number of an item of a list
    takes: the valid values, in words
    default: as JSON, or `required`
    description: from the schema
    expert: whether the schema marks it as a key for experts
    words: the values among which one chooses, as YAML; () for free ones
    """

    name: str
    takes: str
    default: str
    description: str
    expert: bool
    words: tuple[str, ...]


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of the schema, in its order."""
    schema = Config.model_json_schema()
    return tuple(_walk(schema, schema["$defs"], ""))


@cache
def sections() -> frozenset[str]:
    """Return the dotted names of all groups of keys, such as `data.sources.*`."""
    names = {key.name for key in all_keys()}
    return frozenset(name.rsplit(".", depth)[0] for name in names for depth in (1, 2, 3)) - names


def general_name(name: str) -> str:
    """Return a key with `*` in place of the number of a source: `data.sources.*.path`."""
    return ".".join(ITEM if part.isdecimal() else part for part in name.split("."))


def _walk(section: Schema, definitions: Schema, prefix: str) -> Iterator[Key]:
    for name, field in section["properties"].items():
        key, inner = prefix + name, _definition(field.get("items", field), definitions)
        is_section = "properties" in inner
        if "items" in field or not is_section:
            default = json.dumps(field.get("default"), ensure_ascii=False)
            yield Key(
                name=key,
                takes=_takes(field, definitions),
                default="required" if name in section.get("required", ()) else default,
                description=" ".join(field.get("description", "").split()),
                expert=field.get("expert", False),
                words=tuple(_words(field, definitions)),
            )
        if is_section:
            item = f".{ITEM}" if "items" in field else ""
            yield from _walk(inner, definitions, f"{key}{item}.")


def _definition(field: Schema, definitions: Schema) -> Schema:
    """Return the section that a field refers to, or the field itself."""
    return definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _takes(field: Schema, definitions: Schema) -> str:
    """Return in words what a field takes."""
    match _definition(field, definitions):
        case {"anyOf": choices}:
            return _either([_takes(choice, definitions) for choice in choices])
        case {"enum": values}:
            return _either(values)
        case {"const": value}:
            return str(value)
        case {"prefixItems": [first, *_] as items}:
            return f"a list of {len(items)}, each {_takes(first, definitions)}"
        case {"items": item, "minItems": 1}:
            return f"a list of one or more, each {_takes(item, definitions)}"
        case {"items": item}:
            return f"a list, each {_takes(item, definitions)}"
        case {"properties": inner, "required": names}:
            parts = (f"{name}: {_takes(inner[name], definitions)}" for name in names)
            return f"{{{', '.join(parts)}}}"
    hidden = "maximum" if field.get("generous") else None
    limits = [
        f"{sign} {field[name]}" for name, sign in _SIGNS.items() if name in field and name != hidden
    ]
    return " ".join([_WORDS[field["type"]], " and ".join(limits)]).rstrip()


def _words(field: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the values of a field that are named one by one, as YAML spells them."""
    match _definition(field, definitions):
        case {"anyOf": choices}:
            for choice in choices:
                yield from _words(choice, definitions)
        case {"enum": values}:
            yield from values
        case {"const": value}:
            yield str(value)
        case {"type": "boolean"}:
            yield from ("true", "false")
        case {"type": "null"}:
            yield "null"


def _either(choices: Sequence[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


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
    meant = foreign().get(general) or foreign().get(last)
    if meant is None:
        names = [one for one in _candidates(general) if one.rpartition(".")[2] == last]
        for match in difflib.get_close_matches(general, names, n=1, cutoff=0.0):
            meant = Guess(match)
    if section and (is_section or not meant):
        return Guess(section)
    meant = meant or _near(general, last)
    if meant is None:  # name those beside it
        around = general.rpartition(".")[0]
        prefix = f"{around}." if around in sections() else ""
        keys = [key.name.removeprefix(prefix) for key in all_keys() if key.name.startswith(prefix)]
        return Guess("", f"one of {', '.join(dict.fromkeys(key.split('.')[0] for key in keys))}")
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    return meant._replace(key=meant.key.replace(ITEM, number[0] if number else "0"))


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


def _near(general: str, last: str) -> Guess | None:
    """Return the most similar name: another trainer's, the last part of our keys, or a full name.

    Another trainer's name must be nearly the same, since our key for it may have a very different
    name.
    """
    section = general.rpartition(".")[0]
    names = _candidates(general)
    beside = [name for name in names if name.startswith(f"{section}.")]
    ours = {name.rpartition(".")[2]: Guess(name) for name in [*reversed(names), *beside]}
    whole = {name: Guess(name) for name in names}
    places = ((last, foreign(), _NEARLY_THE_SAME), (last, ours, _NEAR), (general, whole, 0.8))
    for written, known, cutoff in places:
        for match in difflib.get_close_matches(written, known, n=1, cutoff=cutoff):
            return known[match]
    return None
