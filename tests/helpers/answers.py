"""Made-up pairs of answers, laid out as a run lays them out, and plain sums over each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.model.attention import document_tensors
from llmtrain.pairs import PairTensors
from llmtrain.types import NOT_TRAINED, MicroBatch


@dataclass(frozen=True)
class Half:
    """A prompt and an answer, ids of both."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


Pair = tuple[Half, Half]


def pairs(count: int, vocabulary: int, seed: int = 0, longest: int = 6) -> list[Pair]:
    """Pairs of 4 to 4 · `longest` ids."""
    draw = np.random.default_rng(seed)

    def some() -> tuple[int, ...]:
        return tuple(draw.integers(3, vocabulary, draw.integers(1, longest + 1)).tolist())

    found = []
    for _ in range(count):
        prompt = some()
        found.append((Half(prompt, some()), Half(prompt, some())))
    return found


def packed(rows: Sequence[Sequence[Pair]], seq_len: int) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """ids and labels, (B, T) int64, and where each row's documents and its padding begin."""
    ids = np.zeros((len(rows), seq_len), np.int64)
    labels = np.full((len(rows), seq_len), NOT_TRAINED, np.int64)
    starts = []
    for row, own in enumerate(rows):
        at, begins = 0, []
        for half in (half for pair in own for half in pair):
            begins.append(at)
            stop, first = at + len(half.ids), at + len(half.prompt)
            ids[row, at:stop] = half.ids
            labels[row, first - 1 : stop - 1] = half.answer
            at = stop
        starts.append(np.array(begins + [at] * (at < seq_len), np.int64))
    return torch.from_numpy(ids), torch.from_numpy(labels), starts


def alone(own: Sequence[Pair], width: int) -> tuple[Tensor, Tensor]:
    """ids and labels with each half in a row of its own."""
    halves = [half for pair in own for half in pair]
    ids = torch.zeros(len(halves), width, dtype=torch.int64)
    labels = torch.full_like(ids, NOT_TRAINED)
    for row, half in enumerate(halves):
        ids[row, : len(half.ids)] = torch.tensor(half.ids)
        labels[row, len(half.prompt) - 1 : len(half.ids) - 1] = torch.tensor(half.answer)
    return ids, labels


def tensors(
    rows: Sequence[Sequence[Pair]],
    reference: Tensor | None = None,
    seq_len: int = 0,
    own: slice = slice(None),
    **more: Tensor,
) -> PairTensors:
    """own: positions of each row of `seq_len` that this process has"""
    sizes = [len(half.answer) for one in rows for pair in one for half in pair]
    lengths = sizes
    if own != slice(None):
        labels, lengths = packed(rows, seq_len)[1].numpy(), []
        for row, each in enumerate(rows):
            at = 0
            for half in (half for pair in each for half in pair):
                stop = at + len(half.ids)
                here = labels[row, max(at, own.start) : max(0, min(stop, own.stop))]
                lengths.append(int((here != NOT_TRAINED).sum()))
                at = stop
    given = torch.tensor(sizes, dtype=torch.float64).view(-1, 2)
    zeros = torch.zeros_like(given)
    of = zeros if reference is None else reference
    return PairTensors(torch.tensor(lengths, dtype=torch.int64), given, of, **more)


def micro_batch(
    rows: Sequence[Sequence[Pair]], seq_len: int, name: str, pairs: PairTensors
) -> MicroBatch:
    """What `LossModule` is called with. name: of the model's attention"""
    ids, labels, starts = packed(rows, seq_len)
    trained = (labels.view(-1) != NOT_TRAINED).nonzero()[:, 0]
    row: MicroBatch = {"input_ids": ids, "labels": labels, "trained": trained, "pairs": pairs}
    return row | document_tensors(starts, seq_len, name, torch.device("cpu"))


def plain_sums(model: Any, own: Sequence[Pair]) -> Tensor:
    """Σ log p of the answers, (N, 2), a sequence at a time by transformers alone."""
    sums = []
    for half in (half for pair in own for half in pair):
        logits = model(torch.tensor([half.ids]), use_cache=False).logits[0]
        each = logits.log_softmax(-1)
        at = range(len(half.prompt) - 1, len(half.ids) - 1)
        sums.append(sum(each[n, id_] for n, id_ in zip(at, half.answer, strict=True)))
    return torch.stack(sums).view(-1, 2)
