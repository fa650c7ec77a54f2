"""The module that is trained: a Hugging Face causal LM that returns only its summed loss.

It is the sum, not the mean, because the step divides once by the trained tokens of all
micro-batches and ranks. Logits are not returned, because under mixed precision accelerate copies
every output tensor to fp32.

    head given     decoder ─► hidden ─► cross-entropy of the head, in chunks or by torch's kernel
    None           model ─► logits ─► cross-entropy

What else is trained (the z-loss, the loss of a mixture's router) adds its gradient to that of the
sum, and not its value: a loss is nats of the trained tokens. The router's is kept in `router_loss`.
It is a function of all tokens of a micro-batch together, so it depends on how a step is split.

It all happens inside this module's forward, where every strategy has the head's weight whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from llmtrain.model.attention import model_keywords
from llmtrain.model.cross_entropy import linear_cross_entropy, token_losses
from llmtrain.model.head import Head, has_router_loss
from llmtrain.types import NOT_TRAINED


class LossModule(nn.Module):
    """A wrapper of a causal LM (`.model`). Parameter names in files are those of `.model`."""

    # By this and `base_model`, accelerate's wrapping by block finds the same units as in `.model`.
    base_model_prefix = "base_model"

    def __init__(
        self,
        model: PreTrainedModel,
        head: Head | None = None,
        *,
        kernel: str = "chunked",
        z_loss: float = 0.0,
    ) -> None:
        """Wrap a model.

        head: what `examine` has found; None = the loss is computed from logits.
        kernel: chunked, or torch for its `linear_cross_entropy`; only where there is a head.
        z_loss: factor of logsumexp², whose gradient is added, but not its value.
        """
        super().__init__()
        self.model = model
        self.head = head
        self._kernel = kernel
        self._z_loss = z_loss
        self.has_router_loss = has_router_loss(model)
        self._real: Tensor | None = None  # of this forward
        if self.has_router_loss:
            model.base_model.register_forward_hook(self._leave_padding_out)
        # Of the last forward whose loss is trained: () fp32, detached. None without a router loss.
        self.router_loss: Tensor | None = None
        # The linear layer from hidden to logits. To ask in each step takes as long as its product;
        # the tuple keeps torch from registering it twice.
        self._projection = (model.get_output_embeddings(),)
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
        each: bool = False,
        all_trained: bool = False,
        trained: Tensor | None = None,
        real: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Compute the summed loss, or the logits where there are no labels.

        input_ids: (B, T) int64.
        labels: (B, T) int64, already shifted; `NOT_TRAINED` where a position has no loss.
        position_ids: (B, T) or (1, B·T) int64, from 0 with each document; only where documents are
            hidden from each other. The model gets the ids in that shape.
        cu_seq_lens: (n + 1,) int32, borders of the documents in the flat rows; only for `llmtrain`
            attention.
        max_length: at least the longest document's length; only for `llmtrain` attention.
        all_trained: whether no label is `NOT_TRAINED`, where the caller knows it.
        trained: (n,) int64, the positions in the flat labels that have a loss, where the caller
            knows them. No other reaches the head.
        seq_idx: (1, B·T) int32, the number of each position's document; only for joined rows.
        real: (n,) int64, the positions in the flat rows that are not padding; None = all. Only they
            count in the loss of a router.

        Returns the summed cross-entropy in nats, () fp32; with `each`, which has no gradient, that
        of each position, (B, T) fp32, 0 where it has no loss. Without labels it returns the logits
        of the last position, (B, V) fp32, or with `all_logits` of all positions, (B, T, V) fp32.

        Where a model has a router loss and is trained, `router_loss` is it afterwards, times its
        coefficient and the number of trained tokens: () fp32, in the unit of the sum.
        """
        keywords = model_keywords(position_ids, cu_seq_lens, max_length, seq_idx)
        if position_ids is not None:  # in which rows may be joined end to end
            input_ids = input_ids.reshape(position_ids.shape)
        if self.head is None or all_logits:
            self._real = real
            try:
                output = self.model(input_ids, **keywords)
            finally:
                self._real = None  # samples are written with the bare model
            return self._from_logits(output, labels, all_logits, each)
        hidden: Tensor = self.model.base_model(input_ids, **keywords)[0]
        if labels is None:
            return self.head.apply(self._projection[0](hidden[:, -1:]))[:, 0].float()
        known: dict[str, Any] = {"all_trained": all_trained, "trained": trained}
        return self._from_hidden(hidden, labels, each, known)

    def _from_hidden(
        self, hidden: Tensor, labels: Tensor, each: bool, known: dict[str, Any]
    ) -> Tensor:
        """Return the loss of the decoder's output, (B, T, h). known: of which positions."""
        assert self.head is not None
        head, projection = self.head, self._projection[0]
        weight, bias = projection.weight, projection.bias
        plain: dict[str, Any] = {"bias": bias, "scale": head.scale, "softcap": head.softcap}
        if each:
            return token_losses(hidden, weight, labels, **known, **plain)
        if self._kernel == "torch":
            return F.linear_cross_entropy(
                hidden.flatten(0, -2),
                weight,
                labels.flatten(),
                linear_bias=bias,
                reduction="sum",
                ignore_index=NOT_TRAINED,
            )
        return linear_cross_entropy(hidden, weight, labels, z_loss=self._z_loss, **known, **plain)

    def _from_logits(
        self, output: Any, labels: Tensor | None, all_logits: bool, each: bool
    ) -> Tensor:
        """Return what `forward` does, from the output of the whole model."""
        logits: Tensor = output.logits
        if labels is None:
            return logits.float() if all_logits else logits[:, -1].float()
        flat, targets = logits.float().flatten(0, 1), labels.flatten()
        reduction = "none" if each else "sum"
        loss = F.cross_entropy(flat, targets, ignore_index=NOT_TRAINED, reduction=reduction)
        if each:
            return loss.view(labels.shape)
        if self._z_loss:
            added = self._z_loss * (flat.logsumexp(-1).square() * (targets != NOT_TRAINED)).sum()
            loss = loss + (added - added.detach())
        if self.training and self.has_router_loss:
            share = self.model.config.get_text_config().router_aux_loss_coef
            added = share * output.aux_loss * (targets != NOT_TRAINED).sum()
            self.router_loss = added.detach().float()
            loss = loss + (added - added.detach())
        return loss

    @torch.compiler.disable(reason="positions of any number")  # type: ignore[no-untyped-call, untyped-decorator]
    def _leave_padding_out(self, _decoder: nn.Module, _arguments: object, output: Any) -> Any:
        """Keep the router's logits of `real` positions, of which the model computes its loss."""
        if self._real is not None:
            output.router_logits = tuple(one[self._real] for one in output.router_logits)
        return output

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
