"""Trials of a small random model of a config, before the weights of the model are read.

How conversations are packed is decided before the manifest is made: they share blocks only where
the model can hide them from each other. Whether a model can be cut over processes, or these can
share its rows, is decided before its weights are read. All of that is a property of its code, so a
small random model of the same config is tried: the same on every machine. The start tries the
loaded model again, for what may depend on its weights.
"""

import copy
import logging
import re
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.agreement import agreed
from llmtrain.distributed.engines import pipeline, sequence
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.stages import Anatomy, CannotCutError, examine
from llmtrain.distributed.ranks import lost_peer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import attention
from llmtrain.model.attention import backend
from llmtrain.model.count import by_layer, shorten
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.model.shape import CANNOT_BUILD, blocks, from_config, on_meta
from llmtrain.model.tensor import KEY, cut_model
from llmtrain.text import first_few, first_line
from llmtrain.training.start import trials
from llmtrain.types import Cut, ModelCut

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_VOCABULARY = 256
_CHUNK = 16  # of a state-space layer
_MOST_PARAMETERS = 400_000_000  # of a model that is tried: 1.6 GB
_FACTORS = (16, 8, 4, 2, 1)  # by which widths are divided; not every config can be built smaller
_CUT_WITHIN = 1e-3  # of the largest element of a gradient
_NARROWEST = 64  # hidden size that is not divided
_SPREAD = 3.0  # larger weights than a fresh model's, which let little through from token to token
_WIDTH = re.compile(r"(_size|dim|_rank|d_model|d_head|d_ssm|d_state|n_embd|n_inner)$")
_NO_WIDTH = re.compile(r"vocab|chunk|block|window|kernel|conv|num_")
_known: dict[str, str] = {}  # what `why_apart` has found, by all that it depends on
_anatomies: dict[str, Anatomy | str] = {}  # by config; a reason where there is none


def why_apart(config: PreTrainedConfig, seq_len: int) -> str:
    """Return why the conversations of a new run cannot share blocks; "" if they can.

    config: of transformers; it is not changed

    A model that cannot be built small is tried only when it is loaded.
    """
    key = f"{seq_len} {config.to_json_string()}"
    if key in _known:
        return _known[key]
    seen, model = "", _tried(config, seq_len)
    if model is not None:
        forward = trials.bare_forward(model, _CPU, "fp32")
        with torch.no_grad():
            seen = trials.what_is_seen(trials.Tried(model, forward, _CPU, "fp32", seq_len))
    _known[key] = seen
    return seen


def check_small_parts(config: PreTrainedConfig, launched: Launched, seq_len: int) -> None:
    """Raise UserError unless processes can share the rows of a small model like it. Collective.

    config: of transformers; it is not changed

    A model that cannot be built small is tried only when it is loaded.
    """
    model, device, group = _tried(config, seq_len), launched.device, launched.groups.sequence
    if model is None or group is None:
        return
    if backend(model) == attention.NAME:
        attention.use(model, attention.NAME, sequence.exchanged(attention.attention, group))
        forward = trials.bare_forward(model.to(device), device, "fp32")
        tried = trials.Tried(model, forward, device, "fp32", seq_len)
        with torch.no_grad():
            reason = trials.why_not_in_parts(tried, launched)
    else:
        reason = attention.why_not(model, seq_len, compare=True)
    agreed(launched.ranks, lambda: raise_any(sequence.refusal(reason, launched.cut)))


def _tried(config: PreTrainedConfig, seq_len: int) -> PreTrainedModel | None:
    """Return a small random model, on whose logits earlier tokens have much influence.

    None as `small_model`.
    """
    model = small_model(config)
    if model is not None:
        attention.install(model, seq_len, log_reason=False)
        with torch.no_grad():
            for parameter in model.eval().parameters():
                if parameter.ndim > 1:
                    parameter.mul_(_SPREAD)
    return model


def check_cut(config: PreTrainedConfig, launched: Launched) -> None:
    """Raise UserError if a small random model of this kind computes something else once it is cut.

    The plan of a model says which matrices are cut, but not that its code works with a part of the
    heads. config: of transformers. Collective.
    """
    group, whole = launched.groups.tensor, small_model(config)
    if group is None or whole is None:
        return
    whole.to(launched.device).train()
    vocabulary = whole.config.get_text_config().vocab_size
    ids = made_up_batch(2, 16, vocabulary, launched.device)
    parted = LossModule(copy.deepcopy(whole))
    LossModule(whole)(ids, ids).backward()
    wrong = ""
    try:
        cuts = cut_model(parted, group)
        parted(ids, ids).backward()
    except CANNOT_BUILD as error:  # on all processes of the group, which have equal shapes
        if lost_peer(error):
            raise
        wrong = f"fails: {first_line(error)}"
    else:
        named = zip(whole.named_parameters(), parted.model.parameters(), strict=True)
        rank = launched.layout.tensor_rank
        if others := [name for (name, a), b in named if _differ(a, b, cuts.get(name), rank)]:
            wrong = f"has another gradient of {first_few(others, 2)}"

    def refuse() -> None:
        if wrong:
            expected = f"1: cut by its own plan, {type(whole).__name__} {wrong}"
            raise UserError(Problem(KEY, launched.cut.tensor, expected, f"{KEY}=1"))

    agreed(launched.ranks, refuse)


def _differ(whole: Tensor, part: Tensor, cut: Cut | None, rank: int) -> bool:
    """Whether the gradient of a part is not that part of the gradient. rank: number of the part."""
    if whole.grad is None or part.grad is None:
        return whole.grad is not part.grad
    expected = whole.grad if cut is None else cut.part(whole.grad, rank)
    within = (part.grad - expected).abs().max() <= _CUT_WITHIN * whole.grad.abs().max()
    return not bool(within)  # NaN is within nothing


def anatomy(config: PreTrainedConfig) -> Anatomy | str:
    """Return where a model can be cut into stages, by a small random one, or why it cannot be.

    config: of transformers; it is not changed
    """
    key = config.to_json_string()
    if key not in _anatomies:
        small, none = small_model(config), "no small model of its config can be built, to try it"
        try:
            _anatomies[key] = none if small is None else examine(small)
        except CannotCutError as error:  # its text alone: the error would keep the model alive
            _anatomies[key] = str(error)
    return _anatomies[key]


def stage_problems(config: PreTrainedConfig, cut: ModelCut) -> Iterator[Problem]:
    """Yield the problem of a model that cannot be cut into stages. config: of transformers"""
    if isinstance(reason := anatomy(config), str):
        expected = f"1: {config.model_type} cannot be cut into stages, as {reason}"
        yield Problem(pipeline.KEY, cut.pipeline, expected, f"{pipeline.KEY}=1")


@torch.random.fork_rng(devices=[])
def small_model(config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return a small random model with each kind of block of a config; None if none can be built.

    config: of transformers; it is not changed

    Its weights are the same each time, and nothing else that draws is changed.
    """
    torch.manual_seed(0)
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


def _narrow(config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
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


def _kinds(config: PreTrainedConfig, whole: list[torch.nn.Module]) -> int:
    """Return how many blocks, from the first one on, have all kinds of blocks among them."""
    lists = by_layer(config, len(whole)).values()
    kinds = [
        (repr(block), *(str(values[at]) for values in lists)) for at, block in enumerate(whole)
    ]
    last = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return min(len(whole), max(2, last + 1))
