"""The rows of the embeddings, one for each token: how many a model has, and how they grow.

A model often has more rows than its tokenizer has entries (padding to a round number), so rows are
never taken away. They are added only where the tokenizer has entries that have no row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS_AT_ONCE = 8192  # in double precision


def rows_for(entries: int, pad_to: int | None) -> int:
    """Return the rows of a model whose rows the tokenizer decides. pad_to: `model.pad_vocab_to`."""
    return max(entries, pad_to or 0)


def set_rows(config: Any, entries: int, pad_to: int | None) -> None:
    """Change the config of weights so that each entry of the tokenizer has a row."""
    text = config.get_text_config()
    if entries > text.vocab_size:
        text.vocab_size = rows_for(entries, pad_to)


def grow(model: PreTrainedModel, rows: int) -> None:
    """Give the input embeddings and the output head `rows` rows, and set them in the config.

    Each new row is the mean of the old ones, so that the new tokens begin as likely as an average
    token. No random numbers are drawn. Tied parameters stay tied, and a bias grows as well.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [one for one in (embedding, head) if one is not None]
    own = {id(p): p for one in ends for p in one.parameters(recurse=False)}
    grown = {key: _longer(p, rows) for key, p in own.items()}
    for module in model.modules():  # a parameter may have several names
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in grown:
                setattr(module, name, grown[id(parameter)])
    sizes = (embedding, "num_embeddings"), (head, "out_features"), (model, "vocab_size")
    for module, size in sizes:
        if hasattr(module, size):
            setattr(module, size, rows)
    model.config.get_text_config().vocab_size = rows


def _longer(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    """Return a parameter (V, …) with `rows` rows."""
    return nn.Parameter(longer(parameter.detach(), rows), requires_grad=parameter.requires_grad)


def longer(old: Tensor, rows: int) -> Tensor:
    """Return a tensor (V, …) with `rows` rows: its own, then their mean."""
    if rows <= len(old):
        return old
    mean = _mean(old).to(old.dtype)
    return torch.cat([old, mean.expand(rows - len(old), *mean.shape)])


def _mean(rows: Tensor) -> Tensor:
    """Return the mean of rows (V, …) in fp64, whatever their order of summation rounds to."""
    parts = (part.double().sum(0) for part in torch.split(rows, _ROWS_AT_ONCE))
    return torch.stack(list(parts)).sum(0) / len(rows)
