"""Positions and borders of a micro-batch, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llmtrain.model.attention import NAME
from llmtrain.model.documents import document_tensors, round_up

STARTS = [np.array([0, 3], np.int32), np.array([0], np.int32)]


def tensors(name: str) -> dict[str, Any]:
    return document_tensors(STARTS, 5, name, torch.device("cpu"))


def test_positions_restart_with_each_document_and_row() -> None:
    found = tensors(NAME)["position_ids"]
    assert found.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert found.dtype == torch.int64


def test_borders_run_through_the_rows() -> None:
    found = tensors(NAME)["cu_seq_lens"]
    assert found.tolist() == [0, 3, 5, 10]
    assert found.dtype == torch.int32


def test_max_length_takes_few_values_and_covers_the_longest_document() -> None:
    found = {longest: round_up(longest, 100) for longest in range(1, 101)}
    assert all(value >= longest for longest, value in found.items())
    assert set(found.values()) == {1, 2, 4, 8, 16, 32, 64, 100}
    assert type(tensors(NAME)["max_length"]) is int
    assert tensors(NAME)["max_length"] == 5


def test_only_our_attention_is_told_the_borders() -> None:
    assert tensors(NAME).keys() == {"position_ids", "cu_seq_lens", "max_length"}
    for own in ("sdpa", "eager"):
        assert tensors(own).keys() == {"position_ids"}
