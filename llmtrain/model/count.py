"""The saved activations of a forward, counted on fake tensors for any model of transformers.

A copy of the model with one block and a copy with two, at full width, run forward under
`FakeTensorMode`, which tracks shapes and types and computes nothing. Then only the autograd graph
is kept, and the storages that are still alive are those that the backward needs. The difference
between the two copies is one block. If blocks are of several kinds, all of them run instead.

The count is for an accelerator but runs on the CPU. Attention on the CPU has no dropout and
requires values as wide as its queries, and dropout there keeps four bytes an element.
`_Accelerator` corrects that.

Head and loss are not included: `distributed.plan.memory` has their formulas. It is only found out
whether the loss can be computed in chunks, as `model.loss` does on the real model.
"""

import copy
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from llmtrain import torch_private
from llmtrain.config.schema import AdapterConfig
from llmtrain.model import attention, shape, tensor, trainable
from llmtrain.model.loss import Head, examine
from llmtrain.model.scorer import is_scorer
from llmtrain.model.shape import CANNOT_BUILD, blocks, from_config, on_meta
from llmtrain.text import first_line
from llmtrain.types import Saved

_BF16_BYTES = 2
# The dtype of frozen weights beside adapters.
_HELD = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_known: dict[tuple[object, ...], Saved] = {}  # counts by everything they depend on


class CannotCountError(Exception):
    """The model's code fails on fake tensors, for example because it reads their values."""


def count_saved(
    model_config: PreTrainedConfig,
    seq_len: int,
    arithmetic: str,
    checkpointing: str,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    new_tokens: Sequence[int] = (),
    tensor_parallel: int = 1,
) -> Saved:
    """Return what the forward of one sequence of `seq_len` tokens keeps for its backward.

    arithmetic: `fp32`, `bf16` (parameters are bf16 while computing) or `autocast`.
    checkpointing: `none`, `selective` or `full`.
    freeze: patterns of `model.freeze`.
    adapter, new_tokens: as of `trainable.attach`; None = no adapter.
    tensor_parallel: processes that share each matrix; what one of them keeps is counted.

    Raises CannotCountError, and UserError for a model that cannot be checkpointed or patterns that
    match nothing.

    A count takes about half a second. Counts are cached, because a process that plans several
    layouts of one model needs the same count several times.
    """
    try:
        described = json.dumps(model_config, default=_fields)
        beside = AdapterConfig() if adapter is None else adapter
        trained = (*freeze, beside.model_dump_json(), *new_tokens, tensor_parallel)
        key = (described, seq_len, arithmetic, checkpointing, trained)
        if key not in _known:
            # building a model from a config changes its fields, so use a copy
            copied = copy.deepcopy(model_config)
            what = (freeze, beside, new_tokens, tensor_parallel)
            _known[key] = _count(copied, seq_len, arithmetic, checkpointing, *what)
        return _known[key]
    except CANNOT_BUILD as error:
        raise CannotCountError(f"{type(error).__name__}: {first_line(error)}") from error


def _fields(value: object) -> object:
    """Return the class of a config and all its fields, private ones too; of others the text."""
    is_config = isinstance(value, PreTrainedConfig)
    return [type(value).__name__, vars(value)] if is_config else repr(value)


def _count(
    model_config: PreTrainedConfig,
    seq_len: int,
    arithmetic: str,
    checkpointing: str,
    freeze: Sequence[str],
    adapter: AdapterConfig,
    new_tokens: Sequence[int],
    tensor_parallel: int,
) -> Saved:
    whole = on_meta(model_config)
    trainable.freeze(whole, freeze)
    frozen = {name for name, p in whole.named_parameters() if not p.requires_grad}
    trainable.attach(whole, adapter, new_tokens, meta=True)
    targets, number = trainable.adapted_layers(whole), len(blocks(whole))
    short = number > 2 and _alike(model_config, blocks(whole))
    with fake_tensors():
        tried = from_config(shorten(model_config, number, 1 if short else number))
        name = attention.install(tried, seq_len, compare=False, log_reason=False)
        plain = not new_tokens and isinstance(examine(tried, compare=False), Head)

    def run(count: int, *, back: bool) -> Saved:
        # Of bf16 at once, as buffers are then too; adapters are cast with their base.
        dtype = torch.bfloat16 if arithmetic == "bf16" and not targets else torch.float32
        model = on_meta(shorten(model_config, number, count), dtype)
        attention.use(model, name)
        if tensor_parallel > 1:
            tensor.cut_on_paper(model, tensor_parallel)
        if targets:
            trainable.inject(model, adapter, targets, new_tokens, meta=True)
        else:
            for of, parameter in model.named_parameters():
                parameter.requires_grad = of not in frozen
        with fake_tensors():
            _fill(model)
            if targets:
                trainable.hold_base(model, _HELD[arithmetic], trained=arithmetic == "bf16")
            shape.apply_checkpointing(model, checkpointing)
            return _watch(model, seq_len, arithmetic, back=back)

    if short:
        body = _extrapolate(run(1, back=False), run(2, back=True), number)
    else:
        body = run(number, back=True)
    body = replace(body, plain_head=plain or is_scorer(model_config))
    head = whole.get_output_embeddings()
    if arithmetic == "autocast" and isinstance(head, nn.Linear) and not targets:
        rows = -(-head.out_features // tensor_parallel)
        return replace(body, casts=body.casts + _BF16_BYTES * rows * head.in_features)
    return body


def _extrapolate(one: Saved, two: Saved, number: int) -> Saved:
    """Return what `number` blocks keep, extrapolated from one block and two."""
    first = one.once + one.blocks
    block = two.once + two.blocks - first
    once = max(0, first - block)
    return Saved(
        blocks=first + (number - 1) * block - once,
        once=once,
        recomputed=two.recomputed,
        casts=one.casts + (number - 1) * (two.casts - one.casts),
    )


def _fill(model: PreTrainedModel) -> None:
    """Give a model on meta fake tensors, in place.

    A model is filled rather than built of them, because peft moves what it adds to it.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        registered = (module.named_parameters, module.named_buffers)
        named = (each(recurse=False, remove_duplicate=False) for each in registered)
        for name, one in [*chain(*named), *vars(module).items()]:
            if isinstance(one, Tensor) and one.is_meta:
                empty = torch.empty(one.shape, dtype=one.dtype)
                if isinstance(one, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=one.requires_grad)
                setattr(module, name, made.setdefault(id(one), empty))
    model.train()


def _watch(model: PreTrainedModel, seq_len: int, arithmetic: str, *, back: bool) -> Saved:
    """Run the decoder without its head, and return what its graph keeps alive.

    back: whether to run the backward too, for `recomputed`. It goes only to the first block's
        input. Gradients of weights do not grow with the tokens, and are planned elsewhere.
    """
    live = _Live(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast")

    def backward() -> None:
        if root is not None and live.first is not None:
            gradient = torch.empty(like.shape, dtype=like.dtype)
            torch.autograd.grad(GradientEdge(root, 0), live.first, gradient, allow_unused=True)

    with live, _Accelerator(), live.watching(blocks(model)):
        with autocast:
            root, like = _forward(model, seq_len)
            casts = live.casts()  # before autocast drops its cache
        once, of_blocks = live.bytes_alive()
        recomputed = live.most(backward) if back else 0
    return Saved(of_blocks, once, recomputed, casts)


def _forward(model: PreTrainedModel, seq_len: int) -> tuple[Node | None, Tensor]:
    """Return the root of the forward's graph and a tensor on meta that is like the output.

    All memory that the graph does not need is freed on return, the output's too.
    """
    ids = torch.zeros((1, seq_len), dtype=torch.int64)
    out: Tensor = model.base_model(ids, **attention.model_keywords())[0]
    return out.grad_fn, torch.empty_like(out, device="meta")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Enter `FakeTensorMode`, with changes by which models behave as on real tensors.

    transformers finds out from the positions whether a row has several documents. For fake
    positions it assumes so, and would build masks that no run has. Messages of fake tensors are
    not logged, since their failures are raised.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _positions: None
    silent, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        with torch_private.FakeTensorMode(), _Experts():  # type: ignore[no-untyped-call]  # as below
            yield
    finally:
        masking_utils.find_packed_sequence_indices = original
        _FAKE_LOG.disabled = silent


class _Experts(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """The product of a mixture's experts in fp32; on fake tensors torch supports only bf16."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch_private.GROUPED_PRODUCT and args[0].dtype == torch.float32:
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return operation(*args, **(kwargs or {}))


def _leaves(result: object) -> Iterator[Tensor]:
    """Yield the tensors that an operation has returned."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from _leaves(one)


class _Live(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """The storages that operations have made and that are still alive.

    first: the edge of the graph into the first block; None if nothing before it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no stub for it
        self.first: GradientEdge | None = None
        self._weights = {id(p.untyped_storage()) for p in model.parameters()}
        self._known = self._weights | {id(b.untyped_storage()) for b in model.buffers()}
        self._alive: dict[int, tuple[bool, int]] = {}
        self._casts: dict[int, int] = {}  # copies of weights, not in _alive
        self._in_block = False
        self._size = self._most = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        is_cast = operation is torch_private.CAST
        if is_cast and id(args[0].untyped_storage()) in self._weights:
            storage = result.untyped_storage()
            self._casts[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self._casts.pop, id(storage))
        for leaf in _leaves(result):
            storage = leaf.untyped_storage()
            key = id(storage)
            if leaf.is_meta or key in self._alive or key in self._casts or key in self._known:
                continue
            self._alive[key] = (self._in_block, storage.nbytes())
            self._size += storage.nbytes()
            self._most = max(self._most, self._size)
            weakref.finalize(storage, self._forget, key)
        return result

    def _forget(self, key: int) -> None:
        self._size -= self._alive.pop(key)[1]

    def bytes_alive(self) -> tuple[int, int]:
        """Return the bytes that are alive: those made outside of blocks, and those made inside."""
        sizes = [0, 0]
        for in_block, size in self._alive.values():
            sizes[in_block] += size
        return sizes[0], sizes[1]

    def casts(self) -> int:
        """Return the bytes of the copies of weights."""
        return sum(self._casts.values())

    def most(self, work: Callable[[], None]) -> int:
        """Return the most bytes by which living storages grow while `work` runs."""
        before = self._most = self._size
        work()
        return self._most - before

    @contextmanager
    def watching(self, repeated: Sequence[nn.Module]) -> Iterator[None]:
        """Record in this context when a block runs."""
        hooks = [one.register_forward_pre_hook(self._enter) for one in repeated]
        hooks += [one.register_forward_hook(self._leave) for one in repeated]
        yield
        for hook in hooks:
            hook.remove()

    def _enter(self, _block: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._in_block = True
        if self.first is None and args and args[0].requires_grad:
            self.first = get_gradient_edge(args[0])

    def _leave(self, *_: object) -> None:
        self._in_block = False


class _Accelerator(TorchFunctionMode):
    """A mode in which attention and dropout keep what they would keep on an accelerator."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        replaced = {F.scaled_dot_product_attention: _attention, F.dropout: _dropout}
        return replaced.get(function, function)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **given: Any,
) -> Tensor:
    """Run SDPA without dropout, and with values padded to the width of the queries.

    No kernel keeps the mask of dropout.
    """
    surplus = query.shape[-1] - value.shape[-1]
    out = F.scaled_dot_product_attention(
        query, key, F.pad(value, (0, surplus)) if surplus > 0 else value, attn_mask, **given
    )
    return out[..., : value.shape[-1]] if surplus > 0 else out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run a dropout that keeps a mask of one byte an element, as it also does in place."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _alike(model_config: PreTrainedConfig, repeated: Sequence[nn.Module]) -> bool:
    """Whether all blocks have the same code, shapes and values in the config's lists by layer."""
    described = model_config.get_text_config()
    lists = by_layer(model_config, len(repeated)).values()
    unlike = any(one != value[0] for value in lists for one in value)
    if unlike or getattr(described, "is_heterogeneous", False):
        return False
    first, *others = (
        (repr(one), [(name, p.shape, p.requires_grad) for name, p in one.named_parameters()])
        for one in repeated
    )
    return all(other == first for other in others)


def by_layer(model_config: PreTrainedConfig, number: int) -> dict[str, list[object]]:
    """Return the fields of a config that are lists with a value for each of its `number` blocks."""
    fields: dict[str, object] = model_config.get_text_config().to_dict()
    lists = {key: value for key, value in fields.items() if isinstance(value, list)}
    return {key: value for key, value in lists.items() if len(value) == number}


def shorten(model_config: PreTrainedConfig, number: int, count: int) -> PreTrainedConfig:
    """Return the config with `count` of its `number` blocks, and its lists by layer shortened."""
    short = copy.deepcopy(model_config)
    if count == number:
        return short
    described = short.get_text_config()
    for key, value in by_layer(short, number).items():
        setattr(described, key, value[:count])
    described.num_hidden_layers = count
    return short
