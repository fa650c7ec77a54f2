"""A test of the loaded model, before it is trained: does it hide documents from each other?

Attention that should keep documents apart may fail to do so without an error: a model may ignore
positions, carry a state along the row, or drop the keywords before they reach its attention. So a
few rows are packed with small documents, and their logits are compared in two ways: with those of
each document alone, and with those of the same document after other documents. The second test is
more sensitive: it compares equal shapes, so rounding does not differ.

A model may also choose something for the whole micro-batch, as ropes do that depend on the longest
document. So one row has the last positions of a block, which only a long document reaches. In the
second test it has them only once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain.agreement import agreed
from llmtrain.data.manifest import Manifest
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import Problem, UserError, first_line
from llmtrain.model import rope
from llmtrain.model.attention import backend, model_keywords
from llmtrain.model.compile import uncompiled
from llmtrain.model.documents import JOINED, STEP, document_tensors
from llmtrain.model.loss import made_up_batch
from llmtrain.training.run.rng import leaving_no_trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

Forward = Callable[..., Tensor]

# Two bounds for each precision, relative to the largest logit: on the difference between packed and
# separate logits, and on the change when another document changes. Measured on 40 architectures:
# those that hide documents differed by up to 6e-7 in fp32 and 1.6e-2 in bf16 (which rounds each
# kernel's sums), and changed by at most 1.4e-7. Of those that do not hide documents, the one that
# changed least (a state-space model) changed by 1.7e-3 in fp32 and 4.3e-3 in bf16.
_BOUNDS = {"fp32": (1e-3, 1e-4), "bf16": (5e-2, 2e-3)}
_TOKENS = 16
_BORDERS = {"cuda"}  # devices with kernels of layers that take the borders of documents
_ONE = np.array([0])  # the starts of a row that is one document


def hiding_attention(
    model: PreTrainedModel,
    prepared: nn.Module,
    manifest: Manifest,
    precision: str,
    launched: Launched,
) -> str | None:
    """Return what hides documents in this run, as for `document_tensors`, tried on every rank.

    Returns None if there is nothing to hide: documents may attend to each other, or each has a
    block of its own. Raises UserError as `find_hiding` and `check_padding` do.

    model: the bare model
    prepared: the module that the engine made of it
    """
    if not manifest.document_mask:
        return None
    device = launched.device
    if family(launched.strategy) == "ddp":
        forward = bare_forward(model, device, precision)
    else:
        forward = partial(prepared, all_logits=True)

    tried = (model, forward, device, precision, manifest.seq_len)

    def check() -> str | None:
        with launched.engine.evaluating(), uncompiled():  # its shapes never come again
            if manifest.hides_documents:
                return find_hiding(*tried, chat=manifest.chat is not None)
            check_padding(*tried)
            return None

    return agreed(launched.ranks, check)


def find_hiding(
    model: PreTrainedModel,
    forward: Forward,
    device: torch.device,
    precision: str,
    seq_len: int,
    *,
    chat: bool = False,
) -> str:
    """Return what hides documents from each other: the model's attention, or joined rows.

    Kernels of state-space and linear attention layers take the borders of documents on CUDA, if
    they are installed. Raises UserError and takes arguments as `check_documents_apart` does.
    """
    try:
        check_documents_apart(model, forward, device, precision, seq_len, chat=chat)
    except UserError:
        if device.type not in _BORDERS:
            raise
        try:
            seen = what_is_seen(model, forward, device, precision, seq_len, JOINED)
        except (RuntimeError, TypeError, ValueError) as error:  # its layers do not take borders
            _log.debug("rows are not joined: %s", error)
            seen = str(error)
        if seen:
            raise
        return JOINED
    return backend(model)


def bare_forward(model: PreTrainedModel, device: torch.device, precision: str) -> Forward:
    """Return the forward of a whole model without its wrapper, with the keywords of `LossModule`.

    It returns logits in fp32.
    """

    def forward(input_ids: Tensor, **documents: Any) -> Tensor:
        if (positions := documents.get("position_ids")) is not None:
            input_ids = input_ids.reshape(positions.shape)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits: Tensor = model(input_ids, **model_keywords(**documents)).logits
        return logits.float()

    return forward


def check_documents_apart(
    model: PreTrainedModel,
    forward: Forward,
    device: torch.device,
    precision: str,
    seq_len: int,
    *,
    chat: bool = False,
) -> None:
    """Raise UserError unless documents packed into rows get the same logits as alone.

    model: the bare model, with its attention installed, in evaluation mode without gradients
    forward: ids (B, T) and the tensors of documents → logits (B, T, V) fp32
    chat: whether the documents are conversations, which always are hidden from each other

    Under DDP, `forward` is that of the bare model: the wrapper's forward is collective, and one
    rank may fail alone. Where each rank holds a part of the weights, it is that of the prepared
    module, which is collective: every rank makes the same number of forwards.
    """
    if seen := what_is_seen(model, forward, device, precision, seq_len):
        _refuse_length(model, seq_len, seen)
        expected = f"a model that can hide documents from each other: {seen}"
        remedy = "data.packing=single"
        if not chat:
            remedy = f"data.document_mask=false with data.packing=concat, or {remedy}"
        raise UserError(Problem("data.document_mask", True, expected, remedy))


def _refuse_length(model: PreTrainedModel, seq_len: int, seen: str) -> None:
    """Raise UserError if blocks are longer than a rope allows that depends on their length.

    seen: what was found.
    """
    kind, original = rope.change(model) or ("", seq_len)
    if seq_len > original:
        expected = (
            f"at most {original}: beyond it the {kind} rope depends on the longest document of a "
            f"micro-batch; {seen}"
        )
        raise UserError(Problem("data.seq_len", seq_len, expected, f"data.seq_len={original}"))


def what_is_seen(
    model: PreTrainedModel,
    forward: Forward,
    device: torch.device,
    precision: str,
    seq_len: int,
    name: str | None = None,
) -> str:
    """Return how documents that are packed into rows see each other; "" if they do not.

    The other arguments are those of `check_documents_apart`.

    name: as for `document_tensors`; None = the model's attention
    """
    size = min(_TOKENS, seq_len)
    starts = [np.unique([0, size // 3, size // 3 + 1]), np.array([0, size - size // 2]), _ONE]
    name, vocabulary = name or backend(model), model.config.get_text_config().vocab_size
    ids = made_up_batch(len(starts), size, vocabulary, device)
    others = ids.clone()  # the last document of each row is the same, those before it are not
    for row, first in enumerate(starts):
        others[row, : first[-1]] = (ids[row, : first[-1]] + 1) % vocabulary
    documents = document_tensors(starts, size, name, device)
    late = documents["position_ids"].clone()  # the last row's are those of a block's end
    late.view(len(starts), size)[-1] += seq_len - size
    with leaving_no_trace(model, device):
        packed, changed = (
            forward(rows, **documents | {"position_ids": placed}).view(*rows.shape, -1)
            for rows, placed in ((ids, late), (others, documents["position_ids"]))
        )
        alone = [
            torch.cat([forward(part[None])[0] for part in parts])
            for parts in (
                row.tensor_split(first[1:].tolist())
                for row, first in zip(ids[:-1], starts[:-1], strict=True)
            )
        ]
        alone.append(forward(ids[-1:], position_ids=late.view_as(ids)[-1:])[0])
    most = max(float(logits.abs().max()) for logits in alone)
    wrong = max(float((packed[row] - logits).abs().max()) for row, logits in enumerate(alone))
    seen = max(
        float((packed - changed)[row, first[-1] :].abs().max())
        for row, first in enumerate(starts[:-1])
    )
    equal_within, change_within = _BOUNDS[precision]
    if wrong <= equal_within * most and seen <= change_within * most:
        return ""
    return (
        f"with {model.config.model_type} (attention: {name}) the logits of packed documents "
        f"differ from those of each alone by {wrong / most:.1e} of the largest, and by "
        f"{seen / most:.1e} when another document changes"
    )


def check_padding(
    model: PreTrainedModel, forward: Forward, device: torch.device, precision: str, seq_len: int
) -> None:
    """Raise UserError unless a document gets the same logits with padding behind it as alone.

    The arguments are those of `check_documents_apart`. A causal model does not see what is behind a
    position, so this finds models that choose something by a whole row or micro-batch.
    """
    size = min(_TOKENS, seq_len)
    real, vocabulary = max(1, size // 2), model.config.get_text_config().vocab_size
    ids = made_up_batch(2, size, vocabulary, device)
    others = ids.clone()
    others[0, real:] = (ids[0, real:] + 1) % vocabulary
    placed: dict[str, Tensor] = {}
    if rope.change(model) is not None:  # as `padding_tensors`, beside a row as long as a block
        positions = torch.arange(size, device=device).repeat(2, 1)
        positions[0, real:], positions[1] = 0, positions[1] + seq_len - size
        placed["position_ids"] = positions
    with leaving_no_trace(model, device):
        _refuse_one_length(model, forward, made_up_batch(1, min(STEP, seq_len), vocabulary, device))
        padded, changed = (forward(rows, **placed)[0, :real] for rows in (ids, others))
        alone = forward(ids[:1, :real])[0]
    most = float(alone.abs().max())
    wrong, seen = (float((padded - one).abs().max()) for one in (alone, changed))
    equal_within, change_within = _BOUNDS[precision]
    if not (wrong <= equal_within * most and seen <= change_within * most):
        found = (
            f"with {model.config.model_type} (attention: {backend(model)}) its logits differ by "
            f"{wrong / most:.1e} of the largest, and by {seen / most:.1e} when the padding changes"
        )
        _refuse_length(model, seq_len, found)
        expected = f"a model that does not see padding behind a document: {found}"
        raise UserError(Problem("data.packing", "single", expected, "another model"))


def _refuse_one_length(model: PreTrainedModel, forward: Forward, ids: Tensor) -> None:
    """Raise UserError for a model that trains on rows of one length alone, as Reformer does.

    ids: the shortest row that a micro-batch is cut to
    """
    training = model.training
    model.train()
    try:
        forward(ids)
    except (IndexError, RuntimeError, ValueError) as error:
        expected = f"a model that trains on rows of any length: {first_line(error)}"
        raise UserError(Problem("data.packing", "single", expected, "another model")) from error
    finally:
        model.train(training)
