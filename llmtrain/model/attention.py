"""`llmtrain`: one attention function for every model whose attention is plain and causal.

transformers finds the function by its name. As no mask function has that name, transformers builds
no mask tensor. The kernel depends on the arguments:

    documents    device and dtype       kernel
    none         any                    SDPA with is_causal
    given        CUDA, bf16 or fp16     varlen_attn, all documents of the micro-batch at once
    given        other                  SDPA with is_causal, once a document: exact, Σ len²

`model.attention_backend` chooses the kernel of SDPA; without flash attention there is no
`varlen_attn` either. It is chosen for the whole process, so also for transformers' own attention,
for what the backward computes again, and for compiled code.

Models with sliding windows, sinks, soft caps or masks of their own keep transformers' attention,
which hides documents from each other where `position_ids` restart. It does so only without a cache
and without an `attention_mask`. Our function supports neither, so a model uses it only after
`install` has compared the two.

What else depends on the borders of documents is here, too: the arguments that tell a model where
they are (`document_tensors`), those that tell it what is padding (`padding_tensors`), and ropes
that choose their frequencies by the length of a document (`rope_by_document`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from llmtrain.errors import Problem, raise_any
from llmtrain.model.scorer import outputs
from llmtrain.torch_private import unset_fake_temporarily
from llmtrain.types import NOT_TRAINED, MicroBatch

_ARGUMENTS = ("x", "position_ids", "layer_type")  # of each forward that `dynamic_rope_update` wraps
_BY_DOCUMENT: WeakSet[nn.Module] = WeakSet()  # modules that have the hook already


def rope_by_document(model: PreTrainedModel) -> None:
    """Let LongRoPE choose its factors for each document by itself. Other models are left alone.

    A document begins where `position_ids` restart at 0. Without `position_ids` each row is one.

    LongRoPE has short factors for up to `original_max_position_embeddings` tokens, and long ones
    beyond. transformers chooses by the largest position of the whole micro-batch:

        alone          24 tokens → short factors     40 tokens → long factors    (original: 32)
        side by side   24 and 40 tokens → long factors for both: other logits for the shorter one

    The config and the weights stay what they are: whoever opens the model in transformers finds the
    same choice for a text by itself.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if "longrope" in named and module not in _BY_DOCUMENT:
            module.register_forward_hook(_choose, with_kwargs=True)
            _BY_DOCUMENT.add(module)


def rope_change(model: PreTrainedModel) -> tuple[str, int] | None:
    """Return the kind of rope whose frequencies depend on length, and up to how many tokens not.

    Returns None for a model whose frequencies are always the same.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # A model may have a rope for each type of layer.
    ropes = [parameters] if "rope_type" in parameters else parameters.values()
    changes = []
    for rope in ropes:
        kind = rope["rope_type"] if isinstance(rope, Mapping) else ""
        if kind == "longrope":
            changes.append((kind, int(rope["original_max_position_embeddings"])))
        elif "dynamic" in kind:
            changes.append((kind, int(config.max_position_embeddings)))
    return min(changes, key=lambda one: one[1], default=None)


def _choose(module: nn.Module, args: tuple[Any, ...], keywords: Any, output: Any) -> Any:
    """Return cosines and sines, (B, T, D) each, with short factors in every short document.

    output: with long factors everywhere, if any document is long; else with short ones.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False)) | keywords
    config: Any = module.config
    layer = given.get("layer_type")
    rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
    if rope["rope_type"] != "longrope":
        return output
    # Whether each position's document has more than `original` tokens, (B, T) bool.
    positions = given["position_ids"]
    original = rope["original_max_position_embeddings"]
    count = positions.shape[-1]
    # Where a document that is long enough has the position `original`.
    place = torch.arange(count, device=positions.device) - positions + original
    at_original = positions.gather(-1, place.clamp(0, count - 1)) == original
    long = (positions >= original) | ((place < count) & at_original)
    short = module.forward(**given | {"position_ids": given["position_ids"].masked_fill(long, 0)})

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(long[..., None], one, other)

    # Two tensors, or one of complex numbers.
    return pick(output, short) if isinstance(output, Tensor) else tuple(map(pick, output, short))


KEY = "model.attention_backend"
NAME = "llmtrain"
_TRIED = "llmtrain_tried"  # registered while a model is examined
_TRIED_TOKENS = 8
# Keywords of transformers' models that have no effect here: q and k include positions already.
_MEANINGLESS = {"position_ids", "position_embeddings", "layer_idx", "num_items_in_batch"}
_DOCUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}

# `model.attention_backend` → kernels, tried in this order: not every kernel supports every dtype,
# mask and size of heads.
_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
_OTHERS = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
_KERNELS = {
    "flash": (_FLASH, _CUDNN, *_OTHERS),
    "cudnn": (_CUDNN, _FLASH, *_OTHERS),
    "math": (SDPBackend.MATH,),
}

_Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value: (B, H, T, D)

_log = logging.getLogger(__name__)


def install(
    model: PreTrainedModel, seq_len: int, *, compare: bool = True, log_reason: bool = True
) -> str:
    """Let the model use our function if it computes the same as the model's own attention.

    Its rope chooses by document from now on (`model.rope`), whichever attention it uses.

    model: on the CPU in fp32.
    seq_len: positions of a block.
    compare: whether to compare logits, which is not possible on fake tensors. The other checks are
        always made. For 26 architectures the choice was the same without logits.
    log_reason: whether to log why a model keeps its own attention.

    Returns the name of the attention that the model uses now: `llmtrain`, or transformers' `sdpa`
    or `eager`. Raises ValueError for a model that rounds more than fp32, which hides what differs:
    adapters, below which weights may be bf16, are attached afterwards.
    """
    held = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if compare and not held <= {torch.float32, torch.float64}:
        raise ValueError(f"weights of {held}; install the attention before adapters")
    name = NAME
    if reason := why_not(model, seq_len, compare=compare):
        name = backend(model)
        if log_reason:
            _log.info("attention: transformers' %s, as %s", name, reason)
    use(model, name)
    return name


def use(
    model: PreTrainedModel,
    name: str,
    ours: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
) -> None:
    """Let a model, which may be on meta, use the attention that `install` has returned for it.

    ours: takes the place of our function, in all models of this process; None = nothing does
    """
    rope_by_document(model)
    AttentionInterface.register(NAME, ours or attention)
    if name == NAME:
        model.set_attn_implementation(NAME)


def kernels(asked: str) -> AbstractContextManager[None]:
    """Let SDPA try the kernel of `model.attention_backend` first, in the whole process.

    asked: auto = torch's own order.
    """
    if asked == "auto":
        return nullcontext()
    return sdpa_kernel(list(_KERNELS[asked]), set_priority=True)


def kernel_problems(asked: str, *, cpu: bool) -> Iterator[Problem]:
    """Yield a problem for a kernel of `model.attention_backend` that needs CUDA, without it."""
    if cpu and asked in ("flash", "cudnn"):
        expected = "auto or math on a CPU: flash and cudnn need CUDA"
        yield Problem(KEY, asked, expected, f"{KEY}=auto")


def backend(model: PreTrainedModel) -> str:
    """Return the name of the attention function that the model uses."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


class OtherAttentionError(Exception):
    """A model's attention is not causal attention inside each document."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each document, as a function for transformers' interface.

    query: (B, H, T, D).
    key, value: (B, H or a divisor of it, T, D).
    cu_seq_lens_q: (n + 1,) int32, borders of the documents in the B·T positions of the rows joined
        end to end. Without it each row is one document.
    max_length_q: at least the longest document's length.

    Returns (B, T, H, D). Raises OtherAttentionError for an attention that it cannot compute.
    """
    heads = query, key, value
    borders: Tensor | None = keywords.get("cu_seq_lens_q")
    longest = query.shape[2] if borders is None else int(keywords["max_length_q"])
    _refuse(module, heads, attention_mask, longest, keywords)
    if borders is None:
        out = _causal(heads, dropout, scaling)
        return out.transpose(1, 2).contiguous(), None
    if takes_varlen(query.device, _dtype(query), query.shape[-1], value.shape[-1], dropout):
        out = _varlen(heads, borders, longest, scaling)
    else:
        out = _each_document(heads, borders, dropout, scaling)
    return out.view(query.shape[0], query.shape[2], query.shape[1], -1), None


def _refuse(
    module: nn.Module, heads: _Heads, mask: Tensor | None, longest: int, keywords: dict[str, Any]
) -> None:
    """Raise OtherAttentionError for every argument that is not known to have no effect."""
    causal = keywords.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise OtherAttentionError("it is not causal")
    if mask is not None:
        raise OtherAttentionError("it brings a mask of its own")
    if heads[0].shape[2] != heads[1].shape[2]:
        raise OtherAttentionError("queries and keys differ in number")
    window = keywords.get("sliding_window")
    if window is not None and window < longest:
        raise OtherAttentionError(f"it has a sliding window of {window} positions")
    for name in keywords.keys() - _MEANINGLESS - _DOCUMENTS - {"is_causal", "sliding_window"}:
        if keywords[name] is not None and keywords[name] is not False:
            raise OtherAttentionError(f"it needs {name}")


def _causal(heads: _Heads, dropout: float, scaling: float | None) -> Tensor:
    grouped = heads[0].shape[1] != heads[1].shape[1]
    return F.scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def takes_varlen(
    device: torch.device, dtype: torch.dtype, head: int, value_head: int, dropout: float
) -> bool:
    """Whether torch's kernel for documents supports these heads. It has no dropout."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or dropout > 0:
        return False
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    return head == value_head and head % 8 == 0 and head <= 256 and _has_flash(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def _has_flash(device: torch.device) -> bool:
    """Whether the device supports flash attention, which needs Ampere or newer."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of SDPA. Under autocast it differs from that of q and k, which are fp32."""
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _varlen(heads: _Heads, borders: Tensor, longest: int, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, _ = heads
    dtype = _dtype(query)  # autocast does not cast for this kernel
    q, k, v = (_in_a_row(one).to(dtype) for one in heads)
    return varlen_attn(  # type: ignore[return-value]  # a tuple only where more is asked for
        *(q, k, v, borders, borders, longest, longest),
        scale=scaling,
        window_size=(-1, 0),  # causal: torch 2.13 has no argument of that name
        enable_gqa=query.shape[1] != key.shape[1],
    )


@torch.compiler.disable(reason="reads borders")  # type: ignore[no-untyped-call, untyped-decorator]
def _each_document(heads: _Heads, borders: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Compute the attention of one document after the other.

    It uses `split`, because the backward of a slice fills a tensor of the whole size. On CUDA it
    waits for the device once a layer, to read the borders. Empty documents, with which the borders
    are padded for a compiled model, are left out.
    """
    lengths = [length for length in borders.diff().tolist() if length]
    # For each document a view: (len, H, D) → (1, H, len, D).
    q, k, v = (
        [document.transpose(0, 1)[None] for document in torch.split(_in_a_row(one), lengths)]
        for one in heads
    )
    outs = [_causal(document, dropout, scaling) for document in zip(q, k, v, strict=True)]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def _in_a_row(heads: Tensor) -> Tensor:
    """Return (B, H, T, D) as (B·T, H, D), a view if the memory is laid out as by projections."""
    return heads.transpose(1, 2).flatten(0, 1)


def model_keywords(
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    max_length: int | None = None,
    seq_idx: Tensor | None = None,
    in_parts: bool = False,
) -> dict[str, Any]:
    """Return the keywords that a transformers model passes on to its attention.

    The arguments are those of `LossModule`. There is never an attention_mask: with one, documents
    would no longer be hidden from each other.
    """
    keywords: dict[str, Any] = {"use_cache": False}  # with a cache it would ignore documents
    if position_ids is not None:
        keywords["position_ids"] = position_ids
    if cu_seq_lens is not None:
        keywords |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
        keywords |= {"max_length_q": max_length, "max_length_k": max_length}
    if seq_idx is not None:
        keywords["seq_idx"] = seq_idx
    if in_parts:
        keywords["in_parts"] = True
    return keywords


def _unequal_heads(model: PreTrainedModel) -> Iterator[Problem]:
    """Yield the problem of keys that queries cannot share: such a model builds, but never runs.

    A field that a config leaves out has transformers' default, which is meant for a large model.
    """
    described = model.config.get_text_config()
    if getattr(described, "is_heterogeneous", False):  # each layer has heads of its own
        return
    heads = getattr(described, "num_attention_heads", None)
    shared = getattr(described, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        path, name = model.config.name_or_path, "num_key_value_heads"
        key = f"{path}/config.json: {name}" if path else f"model.config.{name}"
        expected = f"a divisor of num_attention_heads, {heads}: queries share keys and values"
        yield Problem(key, shared, expected, "" if path else f"{key}={heads}")


def why_not(model: PreTrainedModel, seq_len: int, *, compare: bool) -> str:
    """Return why the model must keep its own attention; "" if ours computes the same.

    It runs forwards on a few tokens with both. They are too short to show masks with a window or
    chunks, so the mask functions that the model requests are tried on `seq_len` positions. Raises
    UserError for heads that no attention works with.
    """
    if not type(model)._can_set_attn_implementation():  # private, but the public function logs
        return "it does not go through transformers' attention interface"
    before, training = backend(model), model.training
    handed_down: list[bool] = []  # for each call, whether it was passed documents
    left_out = set() if compare else _DOCUMENTS  # fake tensors have no values for their borders

    def attend(*arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        handed_down.append(keywords.get("cu_seq_lens_q") is not None)
        return attention(*arguments, **{k: v for k, v in keywords.items() if k not in left_out})

    AttentionInterface.register(_TRIED, attend)
    AttentionMaskInterface.register(_TRIED, partial(_refuse_other_masks, seq_len))
    count = min(_TRIED_TOKENS, seq_len)
    ids = torch.arange(count)[None] % model.config.get_text_config().vocab_size
    borders = torch.tensor([0, count], dtype=torch.int32)
    one_document = model_keywords(cu_seq_lens=borders, max_length=count)
    model.eval()
    try:
        with torch.no_grad():
            expected = outputs(model, ids, use_cache=False) if compare else None
            model.set_attn_implementation(_TRIED)
            logits = outputs(model, ids, **one_document)
    except OtherAttentionError as error:
        return str(error)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise_any(_unequal_heads(model))
        return f"with ours its code fails: {type(error).__name__}: {error}"
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    if not handed_down:
        return "it has no attention layer that asks transformers' interface"
    if not all(handed_down):
        return "it does not hand keywords down to its attention"
    if expected is None:
        return ""
    same = torch.allclose(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    return "" if same else "ours gives other logits"


def _refuse_other_masks(seq_len: int, *, mask_function: Callable[..., Tensor], **_: object) -> None:
    """Raise OtherAttentionError for a mask that is not plainly causal, in place of making it."""
    with unset_fake_temporarily():  # the masks are computed on real tensors
        zero, count = torch.zeros((), dtype=torch.int64), torch.arange(seq_len)
        try:
            last_sees = mask_function(zero, zero, zero + seq_len - 1, count)
            first_is_seen = mask_function(zero, zero, count, zero)
            sees_ahead = mask_function(zero, zero, zero, zero + 1)
        except (AssertionError, IndexError) as error:  # fake tensors, or fewer positions
            raise OtherAttentionError("its masks depend on the rows of a batch") from error
        if not (last_sees.all() and first_is_seen.all() and not sees_ahead):
            raise OtherAttentionError("its masks are not plainly causal")


JOINED = "joined"  # in place of an attention's name: borders for all kernels, rows end to end
STEP = 64  # positions: kernels are no slower for a row rounded up to it


def document_tensors(
    starts: Sequence[np.ndarray],
    seq_len: int,
    name: str,
    device: torch.device,
    *,
    compiled: bool = False,
) -> MicroBatch:
    """Return the arguments of `LossModule.forward` that hide documents from each other.

    starts: as in `Batch`, one array a row.
    name: the model's attention, or `JOINED`.
    compiled: whether the model is compiled.

    The result has position_ids, (B, T) int64, and for `llmtrain` attention also cu_seq_lens,
    (n + 1,) int32, and max_length. For `JOINED` it has these too, position_ids as (1, B·T), and
    seq_idx, (1, B·T) int32, the number of each position's document: kernels of state-space and
    linear attention layers take such borders on CUDA, if all rows are one. Copies to CUDA do not
    wait for the device.

        starts         [0, 3] [0]               two rows of five tokens
        position_ids   [0 1 2 0 1] [0 1 2 3 4]
        cu_seq_lens    0 3 5 10                 borders in the rows joined end to end
        max_length     5
        compiled       0 3 5 10 10 10 10 10     cu_seq_lens up to a power of two: few lengths occur

    A compiled model's max_length is seq_len. Computed in numpy: torch would start its threads for
    arrays of this size, which takes up to milliseconds on busy cores.
    """
    total = len(starts) * seq_len
    # The documents of the rows joined end to end.
    first = np.concatenate([row.astype(np.int64) + i * seq_len for i, row in enumerate(starts)])
    lengths = np.diff(first, append=total)
    positions = np.arange(total) - np.repeat(first, lengths)
    rows = 1 if name == JOINED else len(starts)
    tensors: MicroBatch = {"position_ids": on_device(device, positions.reshape(rows, -1))}
    if name == JOINED:
        numbers = np.repeat(np.arange(len(first), dtype=np.int32), lengths)
        tensors["seq_idx"] = on_device(device, numbers[None])
    if name in (NAME, JOINED):
        borders = np.append(first, total).astype(np.int32)
        if compiled:
            empty = _power_of_two(len(borders)) - len(borders)
            borders = np.pad(borders, (0, empty), constant_values=total)
        tensors["cu_seq_lens"] = on_device(device, borders)
        tensors["max_length"] = seq_len if compiled else round_up(int(lengths.max()), seq_len)
    return tensors


def needed_rows(labels: np.ndarray, *, compiled: bool = False) -> int:
    """Return how many positions of rows that end with padding a forward needs.

    labels: (B, T) int64; behind the last one that has a loss there is padding.
    compiled: whether the model is compiled, which takes time for each new shape.
    """
    (columns,) = np.nonzero((labels != NOT_TRAINED).any(axis=0))
    last = int(columns[-1]) + 1 if len(columns) else 1
    up = _power_of_two(max(last, STEP)) if compiled else -(-last // STEP) * STEP
    return min(up, int(labels.shape[1]))


def padding_tensors(
    labels: np.ndarray, device: torch.device, *, by_length: bool, routed: bool
) -> MicroBatch:
    """Return the arguments of `LossModule.forward` for rows that end with padding.

    Such rows (packing single) need no borders: padding is behind the document, where a causal model
    does not see it. Only what a model computes of whole rows needs to know of it.

    labels: (B, T) int64; behind the last one of a row that has a loss there is padding.
    by_length: whether the model's rope depends on the length of a document: position_ids, (B, T)
        int64, with padding at position 0.
    routed: whether the model is trained with the loss of a router: real, (n,) int64.
    """
    trained = labels != NOT_TRAINED
    real = np.flip(np.maximum.accumulate(np.flip(trained, 1), 1), 1)  # one follows, or it is one
    tensors: MicroBatch = {}
    if by_length:
        tensors["position_ids"] = on_device(device, np.where(real, np.arange(labels.shape[1]), 0))
    if routed:
        tensors["real"] = on_device(device, np.flatnonzero(real))
    return tensors


def in_parts(row: MicroBatch, own: slice) -> MicroBatch:
    """Return the arguments of `LossModule.forward` for some positions of rows.

    row: those for these positions, without their places; but position_ids, if any, of whole rows
    own: which positions of the rows they are
    """
    ids = row["input_ids"]
    positions = row.get("position_ids")
    if positions is None:
        positions = torch.arange(own.stop, device=ids.device).expand(len(ids), -1)
    return row | {"position_ids": positions[:, own], "in_parts": True}


def round_up(longest: int, seq_len: int) -> int:
    """Round up to a power of two, at most seq_len, so that kernels see few different lengths."""
    return min(_power_of_two(longest), seq_len)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def on_device(device: torch.device, array: np.ndarray) -> Tensor:
    """Return the array on the device. A copy to CUDA does not wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
