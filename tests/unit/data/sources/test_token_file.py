import struct

import numpy as np
import pytest
from helpers import megatron

from llmtrain.data.sources import token_cache
from llmtrain.data.sources.token_cache import check_tokens, dtype_code, open_tokens
from llmtrain.errors import UserError

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10]], [[11]]]
FLAT = [token for document in DOCUMENTS for sequence in document for token in sequence]


@pytest.fixture
def index(tmp_path):
    return megatron.write(tmp_path / "a.idx", DOCUMENTS)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_files_of_every_integer_type_are_read(tmp_path, code):
    found = open_tokens(megatron.write(tmp_path / "a.idx", DOCUMENTS, code))
    check_tokens(found)
    assert found.documents == 4
    assert [found.begin(d) for d in range(5)] == [0, 3, 6, 10, 11]
    assert found.ids(0, 11, 12).tolist() == FLAT
    assert found.ids(3, 6, 12).dtype == np.int32


def test_every_token_knows_its_document(index):
    found = open_tokens(index)
    assert [found.at(position) for position in range(11)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3]


def test_an_empty_document_has_no_token(tmp_path):
    found = open_tokens(megatron.write(tmp_path / "a.idx", [[[1, 2]], [[]], [], [[3]]]))
    check_tokens(found)
    assert [found.begin(d) for d in range(5)] == [0, 2, 2, 2, 3]
    assert [found.at(position) for position in range(3)] == [0, 0, 3]


def test_files_without_documents_are_read(tmp_path):
    found = open_tokens(megatron.write(tmp_path / "a.idx", []))
    check_tokens(found)
    assert (found.documents, len(found.tokens)) == (0, 0)


@pytest.mark.parametrize(("vocabulary", "code"), [(65_499, 8), (65_500, 4), (151_669, 4)])
def test_small_vocabularies_take_two_bytes_a_token(vocabulary, code):
    assert dtype_code(vocabulary) == code


@pytest.mark.parametrize("code", [4, 5])
@pytest.mark.parametrize("bad", [12, -1, 2**31 - 1])
def test_an_id_that_the_tokenizer_does_not_know_is_named_with_its_place(tmp_path, code, bad):
    found = open_tokens(megatron.write(tmp_path / "a.idx", [[[1, 2]], [[3, bad, 4]]], code))
    assert found.ids(0, 3, 12).tolist() == [1, 2, 3]
    with pytest.raises(UserError) as refused:
        found.ids(2, 5, 12)
    (problem,) = refused.value.problems
    assert problem.key == f"{tmp_path / 'a.bin'}, token 3"
    assert problem.value == bad
    assert "12 entries" in problem.expected


def damaged(index, offset, data):
    content = bytearray(index.read_bytes())
    content[offset : offset + len(data)] = data
    index.write_bytes(content)


LENGTHS, OFFSETS, BORDERS = 34, 34 + 4 * 5, 34 + 12 * 5


@pytest.mark.parametrize(
    ("offset", "data", "told"),
    [
        (0, b"MMIDIDY", "a header beginning"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "dtype code 6"),
        (17, b"\x09", "dtype code 9"),
        (18, struct.pack("<Q", 6), "make"),
        (26, struct.pack("<Q", 0), "make"),
        (LENGTHS + 16, struct.pack("<i", 2), "where the last document of"),
        (LENGTHS, struct.pack("<ii", 2, 2), "sequence 1 does not"),
        (LENGTHS, struct.pack("<ii", -3, 7), "sequence 0 does not"),
        (OFFSETS + 8, struct.pack("<q", 4), "sequence 1 does not"),
        (BORDERS, struct.pack("<q", 1), "document indices from 1"),
        (BORDERS + 8, struct.pack("<q", 4), "document indices that go back"),
        (BORDERS + 32, struct.pack("<q", 4), "to 4"),
    ],
)
def test_a_damaged_index_is_refused_with_what_is_wrong(index, offset, data, told):
    damaged(index, offset, data)
    with pytest.raises(UserError, match=told):
        check_tokens(open_tokens(index))


@pytest.mark.parametrize("size", [0, 20, 33, 34, 100])
def test_an_index_that_was_cut_off_is_refused(index, size):
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(UserError, match=f"{size} bytes"):
        open_tokens(index)


@pytest.mark.parametrize(("size", "told"), [(21, "tokens of 2 bytes"), (20, "ends"), (24, "ends")])
def test_tokens_that_do_not_fit_the_index_are_refused(index, size, told):
    data = index.with_suffix(".bin").read_bytes() + b"\0" * 2
    index.with_suffix(".bin").write_bytes(data[:size])
    with pytest.raises(UserError, match=told):
        open_tokens(index)


def test_a_missing_half_of_the_pair_is_refused(index):
    index.with_suffix(".bin").unlink()
    with pytest.raises(UserError, match=r"no a\.bin beside it"):
        open_tokens(index)


def test_a_long_index_is_checked_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CHECKED_AT_ONCE", 3)
    documents = [[[n] * (n % 4)] for n in range(20)]
    index = megatron.write(tmp_path / "a.idx", documents)
    check_tokens(open_tokens(index))
    damaged(index, 34 + 4 * 20 + 8 * 13, struct.pack("<q", 1))
    with pytest.raises(UserError, match="sequence 13 does not"):
        check_tokens(open_tokens(index))
