"""What moves in a step: consumed blocks, a stream that breaks, and the way back."""

import numpy as np

from llmtrain.batch_size import BatchSize
from llmtrain.training.run import Feed
from llmtrain.types import Batch, Cursor

ROWS, SEQ_LEN = 2, 4


def batch(step):
    """The blocks of a step: its cursor says which, and one document was dropped."""
    ids = np.full((ROWS, SEQ_LEN + 1), step, np.int32)
    labels = ids[:, 1:].astype(np.int64)
    cursors = {0: (Cursor(0, 0, step, 0),)}
    return Batch(ids, labels, labels.size, None, cursors, step, 0, {}, {"a": {"dropped": 1}}, 0.0)


def blocks(broken_at):
    """The batches of steps 1, 2 …; the stream breaks at one of them."""
    for step in range(1, broken_at):
        yield batch(step)
    raise OSError("the disk is gone")


def feed(stream):
    return Feed(stream, 0, BatchSize(((1, ROWS), (4, 2 * ROWS))), 1, SEQ_LEN)


def test_only_a_step_that_is_done_counts_as_consumed():
    one = feed(blocks(9))
    one.begin(1)
    first = one.next_batch()
    assert (one.step, one.cursors, one.counts) == (0, {}, {})
    one.advance(1, first)
    assert (one.step, one.cursors) == (1, {0: (Cursor(0, 0, 1, 0),)})
    assert one.counts == {"a": {"dropped": 1}}


def test_a_broken_stream_is_asked_once_and_padding_is_handed_out_from_then_on():
    one = feed(blocks(2))
    one.begin(1)
    one.advance(1, one.next_batch())
    assert one.error is None
    for step, rows in ((2, ROWS), (3, ROWS), (4, 2 * ROWS)):  # where the batch has grown
        one.begin(step)
        padding = one.next_batch()
        assert padding.ids.shape == (rows, SEQ_LEN + 1)
        assert (padding.labels == -100).all()
        assert (padding.trained_tokens, padding.sources, padding.cursors) == (0, {}, {})
    assert one.error is not None
    assert str(one.error) == "the disk is gone"


def test_the_state_goes_back_in_front_of_the_step_whose_data_failed():
    one = feed(blocks(3))
    states = {}
    for step in (1, 2, 3, 4):
        states[step] = (one.step, dict(one.cursors), {k: dict(v) for k, v in one.counts.items()})
        one.begin(step)
        one.advance(step, one.next_batch())
    one.put_back(3)  # the one behind it, step 4, was under way when the vector of 3 arrived
    back = (one.step, one.cursors, one.counts)
    assert back == states[3]
