"""AdamW with weight decay only on matrices.

Of adapters A alone is decayed: B begins at zero, and trained rows of an embedding are an embedding.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from llmtrain.config.schema import OptimizerConfig

_UNDECAYED = re.compile(r"\.(lora_B|trainable_tokens_delta)\.")  # of adapters, by peft's names


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, fused: bool = True
) -> torch.optim.AdamW:
    """Make AdamW for the trainable parameters, in two groups: with and without weight decay.

    Parameters with fewer than two dimensions (norms, biases) are not decayed, nor are embeddings,
    even if the head is tied to them. fused=False is for tests that compare shardings bit by bit.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    kept = embeddings | {id(p) for name, p in model.named_parameters() if _UNDECAYED.search(name)}
    decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in kept]
    rest = [p for p in trainable if p.ndim < 2 or id(p) in kept]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        fused=fused,
    )
