"""The model of a run: built by every rank, or by rank 0 for all where each holds a part of it.

One seed makes the same weights on every rank, so a copy for each costs nothing but host memory, of
which a sharded model may need more than a machine has. There rank 0 alone builds it, the others
have it on meta, and it is sent once everybody has room for its part.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.checkpoint.read import Found
from llmtrain.config.schema import Config
from llmtrain.distributed.engines import fsdp, weights
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.ranks import agreed, from_rank_zero
from llmtrain.model import attention
from llmtrain.model.build import build, model_config, rebuild, skeleton, stored_config
from llmtrain.model.loss import LossModule
from llmtrain.model.tokenizer import special_tokens
from llmtrain.training.start import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Built:
    """bare: what is trained · apart: it is on meta, and rank 0 has it `whole` with its weights."""

    bare: PreTrainedModel
    apart: bool
    whole: PreTrainedModel | None


def built(
    config: Config, run_dir: Path, launched: Launched, found: Found | None, revision: str | None
) -> Built:
    """The model from the run's seed, from `model.from`, or of a checkpoint, to be filled later.

    Collective. Raises UserError for a model that cannot be had.
    """
    ranks = launched.ranks
    torch.manual_seed(config.run.seed)
    described = agreed(ranks, lambda: _described(config, run_dir, found))

    def load() -> PreTrainedModel:
        mine = copy.deepcopy(described)
        if found and config.model.from_:  # the weights it began with may be gone by now
            model = rebuild(mine, config.model)
        else:
            model = build(mine, config.model, revision)
        attention.install(model, config.data.seq_len)
        return model

    if launched.sharding is None or ranks.world_size == 1:
        return Built(agreed(ranks, load), False, None)
    whole = agreed(ranks, lambda: load() if ranks.rank == 0 else None)
    name = from_rank_zero(ranks, lambda: attention.backend(whole).encode() if whole else b"")
    bare = skeleton(described, config.model)
    attention.use(bare, name.decode())
    if whole:
        bare.generation_config = whole.generation_config
    return Built(bare, True, whole)


def prepared(model: Built, launched: Launched, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module whose forward is called, spread out by the engine, with its weights. Collective.

    `model.whole` has none afterwards.
    """
    module: nn.Module = LossModule(model.bare)
    if model.apart:
        assert launched.sharding is not None
        module = fsdp.prepare_empty(launched.accelerator, module, optimizer, launched.sharding)
        weights.share(model.bare, model.whole, launched.device)
        if model.whole:
            model.whole.to("meta")
    return launched.engine.prepare(module, model.bare, optimizer)


def _described(config: Config, run_dir: Path, found: Found | None) -> Any:
    """The transformers config of the model."""
    if found and config.model.from_:
        return stored_config(found.path)
    tokens = special_tokens(run_dir / prepare.TOKENIZER)
    return model_config(config.model, tokens, config.data.seq_len)
