"""The module that is trained: a Hugging Face causal LM that returns only its summed loss.

It is the sum, not the mean, because the step divides once by the trained tokens of all
micro-batches and ranks. Logits are not returned, because under mixed precision accelerate copies
every output tensor to fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from llmtrain.model.attention import model_keywords
from llmtrain.types import NOT_TRAINED


class LossModule(nn.Module):
    """A wrapper of a causal LM (`.model`). Parameter names in files are those of `.model`."""

    # By this and `base_model`, accelerate's wrapping by block finds the same units as in `.model`.
    base_model_prefix = "base_model"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                part.warn_if_padding_and_no_attention_mask = _say_nothing

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
        max_length: int | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Compute the summed loss, or the logits where there are no labels.

        input_ids: (B, T) int64.
        labels: (B, T) int64, already shifted; `NOT_TRAINED` where a position has no loss.
        position_ids: (B, T) int64, from 0 with each document; only where documents are hidden from
            each other.
        cu_seq_lens: (n + 1,) int32, borders of the documents in the flat rows; only for `llmtrain`
            attention.
        max_length: at least the longest document's length; only for `llmtrain` attention.

        Returns the summed cross-entropy in nats, () fp32. Without labels it returns the logits of
        the last position, (B, V) fp32, or with `all_logits` of all positions, (B, T, V) fp32.
        """
        keywords = model_keywords(position_ids, cu_seq_lens, max_length)
        logits: Tensor = self.model(input_ids, **keywords).logits
        if labels is None:
            return logits.float() if all_logits else logits[:, -1].float()
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, labels.flatten(), ignore_index=NOT_TRAINED, reduction="sum")

    @property
    def config(self) -> Any:
        """The model's config, which accelerate reads from the root module."""
        return self.model.config

    @property
    def base_model(self) -> nn.Module:
        """The decoder without its head."""
        decoder: nn.Module = self.model.base_model
        return decoder

    @property
    def _no_split_modules(self) -> Any:
        return self.model._no_split_modules

    def tie_weights(self) -> None:
        """Tie the parameters that the model ties."""
        self.model.tie_weights()

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the input embeddings of the model; None if rows of them are trained apart."""
        return _bare(self.model.get_input_embeddings())

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output head of the model; None if rows of it are trained apart."""
        return _bare(self.model.get_output_embeddings())


def _say_nothing(_ids: Tensor, _mask: Tensor | None) -> None:
    """Do not look for padding in the ids, as GPT-2 does: a GPU would be waited for."""


def _bare(module: nn.Module | None) -> nn.Module | None:
    """Return a module without peft's wrapper around it, else None.

    accelerate finds out whether embedding and head are tied by comparing their weights, to shard
    tied ones together. A wrapper makes a new weight each time it is asked. With None, accelerate
    leaves both with the rest of the model.
    """
    return None if hasattr(module, "original_module") else module


def made_up_batch(rows: int, seq_len: int, vocabulary: int, device: torch.device) -> Tensor:
    """Return (rows, seq_len) int64 meaningless token ids, made without random numbers."""
    count = torch.arange(rows * seq_len, device=device).reshape(rows, seq_len)
    return (count * 7919 + 13) % vocabulary
