"""Positions and borders of a micro-batch, by hand; conversations of a block, each alone."""

import numpy as np
import pytest
import torch
from helpers import chats, corpus, used
from transformers import AutoTokenizer

from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Lanes
from llmtrain.data.state import DataState
from llmtrain.model import attention
from llmtrain.model.attention import NAME, document_tensors, round_up
from llmtrain.model.loss import LossModule

CPU = torch.device("cpu")
STARTS = [np.array([0, 3], np.int32), np.array([0], np.int32)]


def tensors(name):
    return document_tensors(STARTS, 5, name, CPU)


def test_positions_restart_with_each_document_and_row():
    found = tensors(NAME)["position_ids"]
    assert found.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert found.dtype == torch.int64


def test_borders_run_through_the_rows():
    found = tensors(NAME)["cu_seq_lens"]
    assert found.tolist() == [0, 3, 5, 10]
    assert found.dtype == torch.int32


def test_max_length_takes_few_values_and_covers_the_longest_document():
    found = {longest: round_up(longest, 100) for longest in range(1, 101)}
    assert all(value >= longest for longest, value in found.items())
    assert set(found.values()) == {1, 2, 4, 8, 16, 32, 64, 100}
    assert type(tensors(NAME)["max_length"]) is int
    assert tensors(NAME)["max_length"] == 5


def test_a_compiled_model_gets_few_shapes_and_one_length():
    """Empty documents at the end fill the borders up to a power of two."""
    found = {}
    for count in range(1, 16):
        starts = [np.arange(count), np.array([0])]
        given = document_tensors(starts, 16, NAME, CPU, compiled=True)
        plain = document_tensors(starts, 16, NAME, CPU)
        borders = given["cu_seq_lens"]
        real = len(plain["cu_seq_lens"])
        assert torch.equal(borders[:real], plain["cu_seq_lens"])
        assert (borders[real:] == 2 * 16).all()
        assert torch.equal(given["position_ids"], plain["position_ids"])
        found[len(borders)] = given["max_length"]
    assert all(size & (size - 1) == 0 for size in found)
    assert set(found.values()) == {16}


def test_only_our_attention_is_told_the_borders():
    assert tensors(NAME).keys() == {"position_ids", "cu_seq_lens", "max_length"}
    for own in ("sdpa", "eager"):
        assert tensors(own).keys() == {"position_ids"}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_conversations_of_a_block_do_not_see_each_other(tmp_path, kind):
    """Each has the logits that plain transformers computes for it alone."""
    tokenizer = chats.make(tmp_path / "tokenizer", "chatml")
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(40))
    manifest, encoder = chats.data_of(tokenizer, path, lanes=1)
    lanes = Lanes(manifest, encoder, Reader(Reading(60)), DataState.fresh(manifest).cursors, 0)
    numbered = [(g, lanes.take(g)) for g in range(4)]
    batch = batch_of(numbered, manifest, first_block=0, wait_seconds=0.0, ended=False)
    assert batch.starts is not None

    length = {"llama": "max_position_embeddings", "gpt2": "n_positions"}[kind]
    sizes = {"rows": len(AutoTokenizer.from_pretrained(tokenizer)), length: manifest.seq_len}
    alone, packed = (used.model(kind, **sizes) for _ in range(2))
    assert attention.install(packed, manifest.seq_len) == NAME
    inputs = torch.from_numpy(batch.ids[:, :-1].astype(np.int64))
    hidden = document_tensors(batch.starts, manifest.seq_len, NAME, CPU)
    with torch.no_grad():
        found = LossModule(packed)(inputs, all_logits=True, **hidden)
        seeing = LossModule(packed)(inputs, all_logits=True)
        spans = [(row, span) for row, (_, block) in enumerate(numbered) for span in block.spans]
        assert len(spans) > 2 * len(numbered)
        for row, span in spans:
            part = slice(span.at, min(span.at + span.stop - span.start, manifest.seq_len))
            expected = alone(inputs[row, part][None]).logits[0]
            assert torch.allclose(found[row, part], expected, atol=1e-5), span
            same = torch.allclose(seeing[row, part], expected, atol=1e-3)
            assert same == (span.at == 0)  # without a mask, all but the first see others
