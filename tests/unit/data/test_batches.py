from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from llmtrain.data.batches import batch_of
from llmtrain.data.lanes import Block
from llmtrain.types import Cursor

BEHIND = (Cursor(1, 2, 3, 4),)


def manifest(document_mask):
    names = {"document_mask": document_mask, "hides_documents": document_mask, "chat": None}
    return SimpleNamespace(seq_len=4, lanes=5, labels=("a", "b"), **names)


def block(ids, starts, trained=None, source=0, counts=None):
    marks = None if trained is None else np.array(trained, bool)
    place = np.array(starts, np.int32)
    return Block(np.array(ids, np.int32), place, marks, (), source, counts or {}, BEHIND)


def batch(*blocks, first=7, step=2, mask=True):
    numbered = [(first + step * n, one) for n, one in enumerate(blocks)]
    return batch_of(numbered, manifest(mask), first_block=6, wait_seconds=0.5, ended=False)


def number_bytes(numbers):
    return b"".join((n % 2**32).to_bytes(4, "little") for n in numbers)


def test_no_label_crosses_a_border_under_the_document_mask():
    made = batch(block([1, 2, 3, 4, 5], [0, 2, 4]), block([5, 6, 7, 8, 9], [0]))
    assert made.labels.tolist() == [[2, -100, 4, -100], [6, 7, 8, 9]]
    assert [starts.tolist() for starts in made.starts] == [[0, 2], [0]]  # of ids[:-1]
    assert made.trained_tokens == 6


def test_labels_cross_borders_where_documents_see_each_other():
    made = batch(block([1, 2, 3, 4, 5], [0, 2, 4]), mask=False)
    assert made.labels.tolist() == [[2, 3, 4, 5]]
    assert made.starts is None


@pytest.mark.parametrize("mask", [True, False])
def test_what_is_not_trained_has_no_label(mask):
    made = batch(block([1, 2, 3, 0, 0], [0, 3], [True, True, False, False]), mask=mask)
    assert made.labels.tolist() == [[2, 3, -100, -100]]


def test_the_digest_holds_the_labels_of_blocks_that_are_not_wholly_trained():
    made = batch(block([1, 2, 3, 4, 5], [0]), block([5, 6, 7, 8, 9], [0, 1]))
    full = number_bytes([1, 2, 3, 4, 5])
    part = number_bytes([5, 6, 7, 8, 9, -100, 7, 8, 9])
    one, other = xxhash.xxh3_64_intdigest(full, 7), xxhash.xxh3_64_intdigest(part, 9)
    assert made.digest == (one + other) % 2**64


def test_trained_tokens_are_counted_by_source_and_padding_is_of_none():
    padding = block([0] * 5, [0], [False] * 4, source=-1)
    made = batch(block([1, 2, 3, 4, 5], [0, 2], source=1), padding, block([1] * 5, [0]))
    assert made.sources == {"b": 3, "a": 4}
    assert batch(padding, padding).sources == {}
    silent = block([1, 2, 3, 4, 5], [0], [False] * 4)  # of a source, with nothing to train
    assert batch(silent).sources == {"a": 0}


def test_what_was_met_is_counted_by_the_source_that_it_was_met_in():
    counts = ({1: {"left_over_tokens": 3}}, {0: {"dropped": 1}, 1: {"dropped": 2}})
    made = batch(*(block([1] * 5, [0], counts=one) for one in counts))
    assert made.counts == {"a": {"dropped": 1}, "b": {"left_over_tokens": 3, "dropped": 2}}


def test_blocks_of_a_source_with_nothing_to_train_are_counted_and_padding_is_not():
    silent = [block([1] * 5, [0], [False] * 4, counts={0: {"dropped": 1}}) for _ in range(2)]
    padding = block([0] * 5, [0], [False] * 4, source=-1)
    trained = block([1] * 5, [0], [False, True, False, False], source=1)
    made = batch(*silent, padding, trained)
    assert made.counts == {"a": {"dropped": 2, "untrained_blocks": 2}}


def test_the_cursors_are_those_behind_the_last_block_of_each_lane():
    later = (Cursor(9, 9, 9, 9),)
    blocks = [block([1] * 5, [0]) for _ in range(6)]
    made = batch(*blocks[:-1], replace(blocks[-1], cursors=later), first=3, step=1)
    assert made.cursors == {0: BEHIND, 1: BEHIND, 2: BEHIND, 3: later, 4: BEHIND}
    assert (made.first_block, made.wait_seconds, made.ended) == (6, 0.5, False)
