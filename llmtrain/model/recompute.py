"""`model.activation_checkpointing`: activations that the backward recomputes.

    none        nothing is recomputed: every tensor that the backward needs is kept
    selective   the results of matrix products and attention, which are expensive, are kept
    full        whole blocks are recomputed: only the input of each block is kept

The random state is restored for the second forward, so dropout is the same and gradients do not
change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from llmtrain.errors import Problem, UserError

KEY = "model.activation_checkpointing"
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,  # experts of a mixture
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.torch_attn._varlen_attn.default,  # attention of documents
]


def apply(model: PreTrainedModel, checkpointing: str) -> None:
    """Set up `none`, `selective` or `full` in place for the training forwards of a bare model.

    Call it before the optimizer is made and before the model is sharded. Raises UserError for a
    model whose code does not support it.
    """
    if checkpointing == "none":
        return
    if not model.supports_gradient_checkpointing:
        kind = model.config.model_type
        expected = f"none: the code of {kind} does not support activation checkpointing"
        raise UserError(Problem(KEY, checkpointing, expected))
    keywords: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "selective":
        keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(keywords)
    else:  # its name in older releases of transformers (5.12)
        model.gradient_checkpointing_enable(keywords)
    # transformers makes the embeddings' output require a gradient, which only reentrant
    # checkpoints need. Frozen first blocks would then keep activations that are never used.
    model.disable_input_require_grads()
