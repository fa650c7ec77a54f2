"""Score documents one by one, as lm-eval's tasks of output type `loglikelihood_rolling` do.

Each document stands alone behind the begin token (without one, the end-of-text token), so that its
first token is scored too. A document longer than the model's positions is scored in windows:

    window 4, stride 4     [b 1 2 3] → 1 2 3 4     [4 5 6 7] → 5 6 7 8     [6 7 8 9] → 10
    window 4, stride 2     [b 1 2 3] → 1 2 3 4     [2 3 4 5] → 5 6         [4 5 6 7] → 7 8 …

A smaller stride gives more context to each token and costs more time. Every token counts once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmtrain.errors import Problem, UserError
from llmtrain.model import rope
from llmtrain.model.loss import LossModule
from llmtrain.tools.use.load import Opened
from llmtrain.tools.use.packed import Told
from llmtrain.training.evaluate import figures
from llmtrain.types import NOT_TRAINED, Evaluation

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[list[int], int]  # ids of inputs and the last target; number of targets to score

_LOGITS_BYTES = 256 << 20  # of a batch; a single window may have more


def score(opened: Opened, texts: Iterable[str], stride: int | None, told: Told) -> Evaluation:
    """Score each text alone. bits_per_byte: over the UTF-8 bytes of the texts.

    stride: tokens that a window after the first scores; None = as many as the model has positions

    Raises UserError for a stride that is larger than that, and if no token can be scored.
    """
    import torch

    size = opened.positions
    if stride is not None and not 1 <= stride <= size:
        expected = f"1 to {size}, the model's positions"
        raise UserError(Problem("--stride", stride, expected))
    start = time.perf_counter()
    nll = torch.zeros((), dtype=torch.float64, device=opened.device)
    documents = num_bytes = tokens = 0

    def count_windows() -> Iterator[Window]:
        nonlocal documents, num_bytes, tokens
        for text in texts:
            told(documents, 0)
            ids = opened.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            documents, tokens = documents + 1, tokens + len(ids)
            num_bytes += len(text.encode())
            yield from windows(ids, opened.begin, size, stride or size)

    rope.by_document(opened.model)
    by_length = rope.change(opened.model) is not None
    module, vocabulary = LossModule(opened.model), opened.model.config.get_text_config().vocab_size
    with torch.no_grad():
        for batch in _batches(count_windows(), max(1, _LOGITS_BYTES // (4 * vocabulary))):
            inputs, targets, positions = (one.to(opened.device) for one in _tensors(batch))
            nll += module(inputs, targets, position_ids=positions if by_length else None)
    if not tokens:
        raise UserError(Problem("--data", None, "at least one document that is not empty"))
    found = figures((float(nll), tokens), documents, num_bytes)
    return replace(found, seconds=time.perf_counter() - start)


def windows(ids: Sequence[int], begin: int, size: int, stride: int) -> Iterator[Window]:
    """Yield windows of up to `size` inputs in which every id is scored once.

    begin: the id in front of them
    """
    line = [begin, *ids]
    done = 0
    while done < len(ids):
        count = min(stride if done else size, len(ids) - done)
        done += count
        yield line[max(0, done - size) : done + 1], count


def _batches(found: Iterable[Window], limit: int) -> Iterator[list[Window]]:
    """Group consecutive windows so that a batch has at most `limit` positions, padding included."""
    batch: list[Window] = []
    longest = 0
    for window in found:
        longest = max(longest, len(window[0]) - 1)
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], len(window[0]) - 1
        batch.append(window)
    if batch:
        yield batch


def _tensors(batch: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and positions, (B, T) int64.

    Padding is on the right, where causal attention does not see it. It has no target, and position
    0, so that it makes no window longer.
    """
    import torch

    longest = max(len(line) for line, _ in batch) - 1
    inputs = torch.zeros((len(batch), longest), dtype=torch.int64)
    targets, positions = torch.full_like(inputs, NOT_TRAINED), torch.zeros_like(inputs)
    for row, (line, count) in enumerate(batch):
        end = len(line) - 1
        inputs[row, :end] = torch.tensor(line[:-1])
        targets[row, end - count : end] = torch.tensor(line[-count:])
        positions[row, :end] = torch.arange(end)
    return inputs, targets, positions
