"""The adapters of a run: where they are, which tokens they train, and what is checked of them.

A checkpoint holds them alone. So the base is read again at each start, and must be the same.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmtrain.agreement import agreed
from llmtrain.checkpoint import read
from llmtrain.checkpoint.read import Found
from llmtrain.config.schema import AdapterConfig, Config, TrainTokenizer
from llmtrain.data.chat.template import template_tokens
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.model.base import Base
from llmtrain.model.tokenizer import new_entries, special_tokens, token_ids
from llmtrain.model.trainable import adapters
from llmtrain.rundir import contents
from llmtrain.rundir.auto import Auto
from llmtrain.training.run.guards import check_replicas
from llmtrain.training.run.opened import Processes
from llmtrain.types import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TARGETS = "adapter_targets"  # in auto.json


def resolve_adapter(config: Config, auto: Auto) -> AdapterConfig:
    """Return the section `adapter`, with the layers that `auto` meant when the run began."""
    known = auto.run.get(_TARGETS)
    if known is None or config.adapter.targets != "auto":
        return config.adapter
    return config.adapter.model_copy(update={"targets": tuple(known)})


def attach(config: Config, processes: Processes, model: PreTrainedModel, *, meta: bool) -> None:
    """Attach the adapters that the config asks for to a model; nothing if it asks for none."""
    auto = processes.auto.run
    asked = resolve_adapter(config, processes.auto)
    tokens = trained_tokens(config, processes.base, config.run_dir / contents.TOKENIZER)
    dtype = torch.bfloat16 if auto["precision"] == "bf16" else torch.float32
    adapters.attach(model, asked, tokens, meta=meta, dtype=dtype)
    if asked.kind != "none":
        auto[_TARGETS] = adapters.short_names(model)


def trained_tokens(config: Config, base: Base | None, tokenizer: Path | None) -> tuple[int, ...]:
    """Return the ids whose embeddings are trained with the adapters (`adapter.train_tokens`).

    base: what the run begins with
    tokenizer: the directory of the run's tokenizer; None = it is not written yet

    Raises UserError for an entry that the tokenizer does not have.
    """
    asked, named = config.adapter.train_tokens, config.model.tokenizer
    if config.adapter.kind == "none" or base is None:
        return ()
    added = template_tokens(config.chat.template)  # unless the tokenizer has them
    if asked == "auto":  # what this run's tokenizer has beyond that of the base
        if named != "auto":
            return ()
        if tokenizer is not None:
            return new_entries(tokenizer, base.path, base.revision)
        first = special_tokens(base.path, base.revision).length
        return tuple(range(first, special_tokens(base.path, base.revision, added).length))
    if tokenizer is not None:
        return token_ids(tokenizer, asked)
    if isinstance(named, TrainTokenizer):
        return ()
    if named == "sample":
        with importlib.resources.as_file(importlib.resources.files("llmtrain.data.sample")) as at:
            return token_ids(at, asked, added=added)
    if named == "auto":
        return token_ids(base.path, asked, base.revision, added)
    return token_ids(named, asked, added=added)


def check_base(config: Config, base: Base | None, found: Found) -> None:
    """Refuse a base other than that on which a checkpoint's adapter was trained.

    In a run without adapters, refuse a checkpoint of adapters.
    """
    beside = found.path / adapters.BASE_FILE
    if not beside.is_file():
        return
    if config.adapter.kind == "none" or base is None:
        read.refuse_adapters(found, [adapters.CONFIG_FILE])
    else:
        adapters.refuse_other_base(beside.read_bytes(), base, found.name)


def adapter_files(
    config: Config, processes: Processes, model: PreTrainedModel, spec: Spec
) -> dict[str, bytes]:
    """Return the files beside an adapter's tensors, after checks of what every rank holds.

    Returns {} for a run of all weights. Collective. Raises RunError (75) if replicas of the base
    differ, which is compared only now, as it does not change.
    """
    launched, base = processes.launched, processes.base
    if config.adapter.kind == "none" or base is None:
        return {}
    agreed(launched.ranks, lambda: _check_filled(launched, spec))
    differing = launched.engine.unequal_replicas(base=True)
    check_replicas(differing, 0, lambda *_event, **_details: None)
    return adapters.files(model, base)


def _check_filled(launched: Launched, spec: Spec) -> None:
    """Raise RuntimeError if this rank's part of a matrix A is all zero: it would never train."""
    mine = launched.engine.pieces(spec, writing=False)
    matrices = (one for one in mine if one.name.endswith(".lora_A.weight") and one.data.numel())
    if empty := [one.name for one in matrices if not one.data.any()]:
        raise RuntimeError(f"{len(empty)} adapters have no values here, {empty[0]} among them")
