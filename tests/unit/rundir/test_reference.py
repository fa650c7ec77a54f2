"""The column of reference values: found by content, whole or refused."""

import numpy as np
import pytest

from llmtrain.errors import UserError
from llmtrain.rundir import reference
from llmtrain.rundir.reference import Column, DamagedColumnError

MADE_WITH = {"base": "abc", "precision": "fp32"}


def column(numbers, blocks=None, offset=0.0):
    """Values that follow from the keys; some halves of keys are 0 and 2^64 − 1."""
    keys = np.array([[n % 3, 2**64 - 1 - n] for n in numbers], np.uint64).reshape(-1, 2)
    values = np.array([[-n - offset, -2.0 * n] for n in numbers]).reshape(-1, 2)
    where = np.array(range(len(numbers)) if blocks is None else blocks, np.int64)
    return Column(keys, values, where, MADE_WITH, {"steps": 4})


def test_values_are_found_by_key_in_any_order():
    known = column([5, 0, 3, 256, 7])
    asked = column([256, 5, 3])
    assert known.of(asked.keys).tolist() == asked.values.tolist()
    assert known.of(asked.keys[:0]).shape == (0, 2)


def test_a_key_that_is_not_there_is_refused_and_never_a_value():
    known = column([5, 0, 3])
    assert known.places(column([3, 4]).keys).tolist() == [2, -1]
    with pytest.raises(UserError, match="it has none for 1 of 2") as caught:
        known.of(column([3, 4]).keys)
    assert "checkpoint.accept_changes=[preference.reference]" in str(caught.value)
    with pytest.raises(UserError):
        reference.empty(MADE_WITH).of(known.keys)


def test_of_two_values_of_a_pair_that_of_the_earlier_block_is_kept():
    one, two = column([5, 9], blocks=[7, 2]), column([9, 5], blocks=[3, 1], offset=0.5)
    for both in (one.plus([two]), two.plus([one])):
        assert len(both) == 2
        assert both.of(column([5, 9]).keys).tolist() == [[-5.5, -10.0], [-9.0, -18.0]]
    assert one.plus([two]).digest == two.plus([one]).digest


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "reference.safetensors"
    column([5, 0, 3]).save(path)
    found = reference.load(path)
    assert found.digest == column([5, 0, 3]).digest
    assert found.made_with == MADE_WITH
    assert found.walked == {"steps": 4}
    assert found.to_json() == {"digest": found.digest, "pairs": 3, "seconds": 0.0}


def test_one_flipped_byte_anywhere_is_noticed(tmp_path):
    path = tmp_path / "reference.safetensors"
    column([5, 0, 3]).save(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = reference.load(path)
        except DamagedColumnError:
            continue
        assert found.digest == column([5, 0, 3]).digest, at  # white space of the header at most
    path.write_bytes(whole[:-5])
    with pytest.raises(DamagedColumnError):
        reference.load(path)
