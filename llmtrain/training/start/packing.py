"""How conversations are packed, decided before a run's manifest is made.

Conversations share blocks where the model can hide those of a block from each other; else each has
a block of its own. Which of both holds is a property of the model's code, so it is tried on a small
random model of the same config, on the CPU: the same on every machine, and without any weights. The
start tries the loaded model again (`trials/isolation.py`).
"""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.errors import UserError
from llmtrain.model import attention
from llmtrain.model.count import shorten
from llmtrain.model.shape import CANNOT_BUILD, blocks, from_config, on_meta
from llmtrain.training.start.trials.isolation import bare_forward, what_is_seen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_VOCABULARY = 256
_CHUNK = 16  # of a state-space layer
_MOST_PARAMETERS = 400_000_000  # of a model that is tried: 1.6 GB
_FACTORS = (16, 8, 4, 2, 1)  # by which widths are divided; not every config can be built smaller
_NARROWEST = 64  # hidden size that is not divided
_SPREAD = 3.0  # larger weights than a fresh model's, which let little through from token to token
_WIDTH = re.compile(r"(_size|dim|_rank|d_model|d_head|d_ssm|d_state|n_embd|n_inner)$")
_NO_WIDTH = re.compile(r"vocab|chunk|block|window|kernel|conv|num_")
_known: dict[str, str] = {}  # what `why_apart` has found, by all that it depends on


def why_apart(config: Any, seq_len: int) -> str:
    """Return why the conversations of a new run cannot share blocks; "" if they can.

    config: of transformers; it is not changed

    A model that cannot be built small is tried only when it is loaded.
    """
    key = f"{seq_len} {config.to_json_string()}"
    if key not in _known:
        _known[key] = _tried(config, seq_len)
    return _known[key]


def _tried(config: Any, seq_len: int) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small_model(config)
    if model is None:
        return ""
    attention.install(model, seq_len, tell=False)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(_SPREAD)
        return what_is_seen(model, bare_forward(model, _CPU, "fp32"), _CPU, "fp32", seq_len)


def small_model(config: Any) -> PreTrainedModel | None:
    """Return a small random model with each kind of block of a config; None if none can be built.

    config: of transformers; it is not changed
    """
    width = getattr(config.get_text_config(), "hidden_size", _NARROWEST)
    for factor in _FACTORS:
        if factor > 1 and width < _NARROWEST * factor:
            continue
        try:
            small = _narrow(config, factor)
            whole = blocks(on_meta(copy.deepcopy(small)))
            for count in dict.fromkeys((_kinds(small, whole), len(whole))):
                short = shorten(small, len(whole), count)
                parameters = on_meta(copy.deepcopy(short)).parameters()
                if sum(one.numel() for one in parameters) > _MOST_PARAMETERS:
                    continue
                model = from_config(short)
                with torch.no_grad():
                    model.eval()(torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
                return model
        except (*CANNOT_BUILD, UserError) as error:
            _log.debug("not built with widths divided by %d: %s", factor, error)
    return None


def _narrow(config: Any, factor: int) -> Any:
    """Return a copy of a config with few tokens, and widths divided by a factor."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for name, value in text.to_dict().items():
        if type(value) is not int:
            continue
        if name.endswith("_token_id"):
            setattr(text, name, min(value, _VOCABULARY - 1))
        elif name.endswith("chunk_size") and value > _CHUNK:  # rows are filled up to it
            setattr(text, name, _CHUNK)
        elif _WIDTH.search(name) and not _NO_WIDTH.search(name) and value % factor == 0:
            setattr(text, name, value // factor)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    return small


def _kinds(config: Any, whole: list[torch.nn.Module]) -> int:
    """Return how many blocks, from the first one on, have all kinds of blocks among them."""
    number = len(whole)
    lists = [
        value
        for value in config.get_text_config().to_dict().values()
        if isinstance(value, list) and len(value) == number
    ]
    kinds = [
        (repr(block), *(str(values[at]) for values in lists)) for at, block in enumerate(whole)
    ]
    last = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return min(number, max(2, last + 1))
