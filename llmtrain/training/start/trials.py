"""Trials of a model before it is trained: does it hide documents from each other, and does it fit?

Attention that should keep documents apart may fail to do so without an error: a model may ignore
positions, carry a state along the row, or drop the keywords before they reach its attention. So a
few rows are packed with small documents, and their logits are compared in two ways: with those of
each document alone, and with those of the same document after other documents. The second test is
more sensitive: it compares equal shapes, so rounding does not differ. A model may also choose
something for the whole micro-batch, as ropes do that depend on the longest document. So one row has
the last positions of a block, which only a long document reaches; in the second test only once.

A forward and backward are made and discarded before a run's state is loaded. DDP orders its buckets
by the first backward it sees. Without this pass, a resumed run would sum the gradients of its first
step in another order than an uninterrupted run, and with three or more processes the last bits
would differ. Also, a lack of memory is noticed before the first step.
"""

import collections
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain import system
from llmtrain.agreement import agreed
from llmtrain.config.schema import PreferenceConfig
from llmtrain.data.manifest import DataManifest
from llmtrain.distributed.engines import sequence
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.engine import trained_loss
from llmtrain.distributed.engines.pipeline import PipelineEngine
from llmtrain.distributed.launch.environment import family
from llmtrain.distributed.ranks import lost_peer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.metrics import memory
from llmtrain.model import attention
from llmtrain.model.attention import (
    JOINED,
    STEP,
    backend,
    document_tensors,
    in_parts,
    model_keywords,
)
from llmtrain.model.compile import uncompiled
from llmtrain.model.loss import made_up_batch
from llmtrain.model.scorer import outputs
from llmtrain.pairs import Pairs
from llmtrain.text import first_line
from llmtrain.training.pairs import in_halves, pair_tensors
from llmtrain.training.step import target_keywords
from llmtrain.types import NOT_TRAINED, MicroBatch

_log = logging.getLogger(__name__)

Forward = Callable[..., Tensor]


class Tried(NamedTuple):
    """A model whose rows are tried.

    model: the bare model, with its attention installed, in evaluation mode without gradients
    forward: ids (B, T) and the tensors of documents → logits (B, T, V) fp32
    seq_len: positions of a block

    Under DDP, `forward` is that of the bare model: the wrapper's forward is collective, and one
    rank may fail alone. Where each rank holds a part of the weights, it is that of the prepared
    module, which is collective: every rank makes the same number of forwards.
    """

    model: PreTrainedModel
    forward: Forward
    device: torch.device
    precision: str
    seq_len: int


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
    manifest: DataManifest,
    precision: str,
    launched: Launched,
) -> str | None:
    """Return what hides documents in this run, as for `document_tensors`, tried on every rank.

    Returns None if there is nothing to hide: documents may attend to each other, or each has a
    block of its own. Raises UserError as `find_hiding` and `check_padding` do, and unless processes
    that share the rows of the model can do so.

    model: the bare model
    prepared: the module that the engine made of it
    """
    forward = _forward(model, prepared, precision, launched)
    tried = Tried(model, forward, launched.device, precision, manifest.seq_len)
    if launched.groups.sequence is not None:
        with launched.engine.evaluating(), uncompiled():
            reason = why_not_in_parts(tried, launched)
        agreed(launched.ranks, lambda: raise_any(sequence.refusal(reason, launched.cut)))
    if not manifest.document_mask:
        return None

    def check() -> str | None:
        with launched.engine.evaluating(), uncompiled():  # its shapes never come again
            if manifest.hides_documents:
                return find_hiding(tried, chat=manifest.chat is not None)
            check_padding(tried)
            return None

    return agreed(launched.ranks, check)


def _forward(
    model: PreTrainedModel, prepared: nn.Module, precision: str, launched: Launched
) -> Forward:
    """Return the forward of a whole model, or where ranks have parts of it that of all of them."""
    in_stages = isinstance(launched.engine, PipelineEngine)
    if family(launched.strategy) == "ddp" and not in_stages:
        return bare_forward(model, launched.device, precision)
    return partial(prepared, all_logits=True)


def why_not_in_parts(tried: Tried, launched: Launched) -> str:
    """Return why processes cannot share the rows of a model; "" if they can. Collective.

    tried: its attention exchanges

    The logits of parts of rows, each at its positions, are compared with those of whole rows.
    """
    model, forward, device, precision, seq_len = tried
    kind, original = attention.rope_change(model) or ("", seq_len)
    if seq_len > original:
        return f"beyond {original} positions its {kind} rope depends on the length of a document"
    layout, vocabulary = launched.layout, model.config.get_text_config().vocab_size
    size = min(seq_len, max(1, _TOKENS // layout.sequence_size) * layout.sequence_size)
    ids, positions = made_up_batch(2, size, vocabulary, device), layout.positions(size)
    with keeping_buffers(model):
        try:
            whole = forward(ids)[:, positions]
            part = forward(**in_parts({"input_ids": ids[:, positions]}, positions))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if lost_peer(error):
                raise
            return f"its code fails: {type(error).__name__}: {first_line(error)}"
    most, wrong = float(whole.abs().max()), float((part - whole).abs().max())
    if wrong <= _BOUNDS[precision][0] * most:
        return ""
    return f"its logits differ by {wrong / most:.1e} of the largest from those of whole rows"


def find_hiding(tried: Tried, *, chat: bool = False) -> str:
    """Return what hides documents from each other: the model's attention, or joined rows.

    Kernels of state-space and linear attention layers take the borders of documents on CUDA, if
    they are installed. Raises UserError unless documents packed into rows get the same logits as
    alone.

    chat: whether the documents are conversations, which always are hidden from each other
    """
    if not (seen := what_is_seen(tried)):
        return backend(tried.model)
    if tried.device.type in _BORDERS:
        try:
            if not what_is_seen(tried, JOINED):
                return JOINED
        except (RuntimeError, TypeError, ValueError) as error:  # its layers do not take borders
            _log.debug("rows are not joined: %s", error)
    _refuse_length(tried.model, tried.seq_len, seen)
    expected = f"a model that can hide documents from each other: {seen}"
    remedy = "data.packing=single"
    if not chat:
        remedy = f"data.document_mask=false with data.packing=concat, or {remedy}"
    raise UserError(Problem("data.document_mask", True, expected, remedy))


def bare_forward(model: PreTrainedModel, device: torch.device, precision: str) -> Forward:
    """Return the forward of a whole model without its wrapper, with the keywords of `LossModule`.

    It returns logits, or hidden states of a model that scores, in fp32.
    """

    def forward(input_ids: Tensor, **documents: Any) -> Tensor:
        if (positions := documents.get("position_ids")) is not None:
            input_ids = input_ids.reshape(positions.shape)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return outputs(model, input_ids, **model_keywords(**documents)).float()

    return forward


def _refuse_length(model: PreTrainedModel, seq_len: int, seen: str) -> None:
    """Raise UserError if blocks are longer than a rope allows that depends on their length.

    seen: what was found.
    """
    kind, original = attention.rope_change(model) or ("", seq_len)
    if seq_len > original:
        expected = (
            f"at most {original}: beyond it the {kind} rope depends on the longest document of a "
            f"micro-batch; {seen}"
        )
        raise UserError(Problem("data.seq_len", seq_len, expected, f"data.seq_len={original}"))


def what_is_seen(tried: Tried, name: str | None = None) -> str:
    """Return how documents that are packed into rows see each other; "" if they do not.

    name: as for `document_tensors`; None = the model's attention
    """
    model, forward, device, precision, seq_len = tried
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
    with keeping_buffers(model):
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


def check_padding(tried: Tried) -> None:
    """Raise UserError unless a document gets the same logits with padding behind it as alone.

    A causal model does not see what is behind a position, so this finds models that choose
    something by a whole row or micro-batch.
    """
    model, forward, device, precision, seq_len = tried
    size = min(_TOKENS, seq_len)
    real, vocabulary = max(1, size // 2), model.config.get_text_config().vocab_size
    ids = made_up_batch(2, size, vocabulary, device)
    others = ids.clone()
    others[0, real:] = (ids[0, real:] + 1) % vocabulary
    placed: dict[str, Tensor] = {}
    # As `padding_tensors`, beside a row as long as a block.
    if attention.rope_change(model) is not None:
        positions = torch.arange(size, device=device).repeat(2, 1)
        positions[0, real:], positions[1] = 0, positions[1] + seq_len - size
        placed["position_ids"] = positions
    with keeping_buffers(model):
        _refuse_one_length(model, forward, made_up_batch(1, min(STEP, seq_len), vocabulary, device))
        padded, changed = (forward(rows, **placed)[0, :real] for rows in (ids, others))
        alone = forward(ids[:1, :real])[0]
    most = float(alone.abs().max())
    wrong, seen = (float((padded - one).abs().max()) for one in (alone, changed))
    equal_within, change_within = _BOUNDS[precision]
    if not (wrong <= equal_within * most and seen <= change_within * most):
        differences = (
            f"with {model.config.model_type} (attention: {backend(model)}) its logits differ by "
            f"{wrong / most:.1e} of the largest, and by {seen / most:.1e} when the padding changes"
        )
        _refuse_length(model, seq_len, differences)
        expected = f"a model that does not see padding behind a document: {differences}"
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


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


@dataclass(frozen=True, slots=True)
class Trial:
    """A prepared model, and what is needed to run it on made-up tokens.

    hiding: the attention that hides documents, None if they are not hidden
    compiled: whether the model is compiled
    rows: this rank's rows of a step
    preference: the loss of pairs of answers; None = the model is trained on texts
    halves: whether both answers of a pair have a row each, half as long
    """

    model: nn.Module
    launched: Launched
    seq_len: int
    vocabulary: int
    hiding: str | None = None
    compiled: bool = False
    rows: int = 1
    preference: PreferenceConfig | None = None
    halves: bool = False


def discarded_pass(trial: Trial, micro_batch_size: int) -> None:
    """Make a forward and backward with gradient synchronisation.

    Afterwards buffers are restored and gradients are cleared.
    """
    with keeping_buffers(trial.model):
        _pass(trial, micro_batch_size, last=True)
        trial.launched.engine.clear()


def fitting_micro_batch(trial: Trial, candidates: list[int]) -> int:
    """Return the first of `candidates` (in descending order) that fits the memory of every device.

    Each rank tries two micro-batches by itself without synchronisation, and then all vote: a rank
    that ran out of memory inside a collective would leave the others hanging. Nothing is tried on a
    CPU, which does not report that memory runs out. State is restored as by `discarded_pass`, and
    candidates that did not fit do not count in the run's peak memory. Raises UserError if none
    fits.
    """
    device = trial.launched.device
    if device.type != "cuda":
        return candidates[0]
    for micro_batch_size in candidates:
        system.beat("trying a micro-batch")
        failed = 0
        with keeping_buffers(trial.model):
            try:
                for _ in range(2):
                    _pass(trial, micro_batch_size, last=False)
            except torch.cuda.OutOfMemoryError:
                failed = 1
            trial.launched.engine.clear()
        torch.cuda.empty_cache()
        if not trial.launched.ranks.highest(failed):
            return micro_batch_size
        memory.reset_peak(device)
    expected = "a forward and backward that fit this device's memory"
    remedy = "a smaller model, a shorter data.seq_len or a device with more memory"
    raise UserError(Problem("training.micro_batch_size", candidates[-1], expected, remedy))


def _pass(trial: Trial, rows: int, *, last: bool) -> None:
    engine, device, seq_len = trial.launched.engine, trial.launched.device, trial.seq_len
    layout = trial.launched.layout
    positions = layout.positions(seq_len)
    ids = made_up_batch(rows, seq_len, trial.vocabulary, device)[:, positions]
    halves = [np.array([0, seq_len // 2])] * rows
    documents: MicroBatch = {}
    if trial.hiding:
        name, compiled = trial.hiding, trial.compiled
        documents = document_tensors(halves, seq_len, name, device, compiled=compiled)
    row: MicroBatch = {"input_ids": ids, "labels": ids, "all_trained": True}
    if trial.preference is not None:
        row = _made_up_pairs(trial, trial.preference, rows)
    row |= documents
    one = torch.ones((), device=device)
    if isinstance(engine, PipelineEngine):
        micro_batches = [row] * (trial.rows // rows)  # as many as in each step
        collections.deque(engine.forward_backward(micro_batches, one), maxlen=0)
        return
    with engine.micro(last=last):
        loss = trial.model(**(row if layout.sequence_size == 1 else in_parts(row, positions)))
        engine.backward(trained_loss(loss), one)


def _made_up_pairs(trial: Trial, preference: PreferenceConfig, rows: int) -> MicroBatch:
    """Return a micro-batch of blocks with one pair each, of which each token is trained."""
    device, seq_len = trial.launched.device, trial.seq_len
    ids = made_up_batch(rows, seq_len, trial.vocabulary, torch.device("cpu"))
    labels, half = ids.clone().numpy(), seq_len // 2
    labels[:, [half - 1, -1]] = NOT_TRAINED  # nothing follows the last token of an answer
    borders = np.tile([0, half, seq_len], (rows, 1))
    desirable, keys = np.ones(rows, np.bool_), np.zeros((rows, 2), np.uint64)
    pairs = Pairs(np.arange(rows), borders, keys, desirable)
    if trial.halves:
        ids, labels = in_halves(ids), in_halves(labels)
    positions, known = trial.launched.layout.positions(labels.shape[1]), np.zeros((rows, 2))
    asked = pair_tensors(pairs, labels, positions, known, preference, device, halves=trial.halves)
    row: MicroBatch = {"input_ids": ids[:, positions].to(device), "pairs": asked}
    return row | target_keywords(labels[:, positions], device, whole=False)
