from collections import Counter
from itertools import islice

import numpy as np

from llmtrain.data.packing import START, Document, concat
from llmtrain.types import Cursor


def documents(lengths, start=0):
    """Documents of consecutive numbers as tokens."""
    token = 0
    for row, length in enumerate(lengths):
        if row >= start:
            ids = np.arange(token, token + length, dtype=np.int32)
            yield Document(0, 0, row, ids, Counter(dropped=row % 2))
        token += length


def test_every_token_is_a_target_once():
    lengths = [1, 2, 3, 10, 1, 1, 25, 4, 50]
    blocks = list(islice(concat(documents(lengths), 4, START), 20))
    targets = [token for block in blocks for token in block.ids[1:].tolist()]
    assert targets == list(range(1, 81))


def test_a_cursor_names_the_last_token_of_its_block():
    lengths = [1, 2, 3, 10, 1, 1, 25, 4, 50]
    for number, block in enumerate(islice(concat(documents(lengths), 4, START), 20)):
        row, offset = block.cursor.row, block.cursor.offset
        assert sum(lengths[:row]) + offset == 4 * (number + 1) == block.ids[-1]
        assert offset < lengths[row]


def test_a_stream_opened_at_a_cursor_goes_on_the_same():
    lengths = [3, 1, 9, 2, 2, 7, 30, 1, 40]
    blocks = list(islice(concat(documents(lengths), 4, START), 18))
    for number, block in enumerate(blocks[:-1]):
        cursor = block.cursor
        again = concat(documents(lengths, cursor.row), 4, cursor)
        assert next(again).ids.tolist() == blocks[number + 1].ids.tolist()


def test_what_was_met_goes_with_the_block_that_first_needs_the_document():
    blocks = list(islice(concat(documents([2, 2, 2, 2, 20]), 4, START), 3))
    assert [block.counts["dropped"] for block in blocks] == [1, 1, 0]
    assert blocks[0].cursor == Cursor(0, 0, 2, 0)
