"""Rows that processes share: which positions, with which labels, and what is refused."""

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_config
from transformers import LlamaConfig, MixtralConfig

from llmtrain.config.schema import Config
from llmtrain.distributed.engines import sequence
from llmtrain.model.attention import document_tensors, in_parts, model_keywords
from llmtrain.training.step import target_keywords
from llmtrain.types import ModelCut, rank_layout

CPU = torch.device("cpu")


def test_the_positions_of_a_group_are_all_of_a_row_in_their_order():
    layouts = [rank_layout(rank, 8, ModelCut(sequence=4)) for rank in range(8)]
    assert [one.positions(12) for one in layouts[:4]] == [slice(n, n + 3) for n in (0, 3, 6, 9)]
    assert [one.positions(12) for one in layouts[4:]] == [one.positions(12) for one in layouts[:4]]
    assert rank_layout(3, 4).positions(7) == slice(0, 7)


def test_a_part_has_the_labels_places_and_borders_of_its_rows():
    """A label is that of the next position, also where another process has that one."""
    ids = np.arange(16, dtype=np.int64).reshape(2, 8)
    labels = ids + 1
    labels[0, 5:] = -100
    starts = [np.array([0, 3]), np.array([0, 6])]
    whole = document_tensors(starts, 8, "llmtrain", CPU)
    for rank in range(2):
        own = rank_layout(rank, 2, ModelCut(sequence=2)).positions(8)
        targets = target_keywords(labels[:, own], CPU, whole=False)
        row = {"input_ids": torch.from_numpy(ids[:, own])} | targets | whole
        part = in_parts(row, own)
        assert part["labels"].tolist() == labels[:, own].tolist()
        assert part["position_ids"].tolist() == whole["position_ids"][:, own].tolist()
        assert part["cu_seq_lens"] is whole["cu_seq_lens"]
        assert part["in_parts"]
        if rank:  # flat: of the eight labels of this part
            assert part["trained"].tolist() == [0, 4, 5, 6, 7]
        else:
            assert part["all_trained"]
        plain = in_parts({"input_ids": row["input_ids"]}, own)
        assert plain["position_ids"].tolist() == [[*range(own.start, own.stop)]] * 2


def test_whole_rows_have_no_keyword_more():
    assert "in_parts" not in model_keywords()
    assert model_keywords(in_parts=True)["in_parts"] is True


def problems(model, cut, **changes):
    made = tiny_config("runs/x", **changes)
    return [*sequence.problems(Config.model_validate(made), model, cut)]


LLAMA = LlamaConfig(num_attention_heads=6, hidden_size=48)
ROUTED = MixtralConfig(
    num_attention_heads=6, hidden_size=48, num_key_value_heads=6, output_router_logits=True
)


@pytest.mark.parametrize(
    ("model", "cut", "changes", "key", "value", "remedy"),
    [
        (LLAMA, ModelCut(tensor=2, sequence=2), {}, sequence.KEY, 2, f"{sequence.KEY}=1"),
        (LLAMA, ModelCut(pipeline=2, sequence=2), {}, sequence.KEY, 2, f"{sequence.KEY}=1"),
        (LLAMA, ModelCut(sequence=4), {}, sequence.KEY, 4, "1, 2, 3, 6"),
        (LLAMA, ModelCut(sequence=3), {}, "data.seq_len", 32, "30 or 33"),
        (
            *(LLAMA, ModelCut(sequence=2), {"training__compile": "blocks"}),
            *("training.compile", "blocks", "training.compile=auto"),
        ),
        (
            *(ROUTED, ModelCut(sequence=2), {}, "model.config.output_router_logits", True),
            "model.config.output_router_logits=false",
        ),
    ],
)
def test_what_rows_cannot_be_shared_with_is_named(model, cut, changes, key, value, remedy):
    (found,) = problems(model, cut, **changes)
    assert (found.key, found.value, found.remedy) == (key, value, remedy)


def test_shared_rows_have_no_problem_of_their_own():
    assert problems(LLAMA, ModelCut(sequence=2)) == []
