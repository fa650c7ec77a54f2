import json

import numpy as np
import pytest
from helpers import corpus

from llmtrain.data.state import DataState, check, last_block
from llmtrain.errors import UserError


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    root = tmp_path_factory.mktemp("state")
    corpus.write_tokenizer(root / "tokenizer")
    path = corpus.write_parquet(root / "a.parquet", corpus.articles(30))
    other = corpus.write_parquet(root / "b.parquet", corpus.articles(31))
    tokenizer = root / "tokenizer"
    return [
        corpus.manifest_of(tokenizer, path, lanes=24),
        corpus.manifest_of(tokenizer, other, lanes=24, seq_len=8),
    ]


def test_a_state_comes_back_from_json_as_it_was(manifests):
    cursors = np.arange(24 * 4).reshape(24, 1, 4)
    counts = {"a": {"dropped": 3, "replaced": 1}}
    state = DataState.fresh(manifests[0]).after(480, cursors, 2**64 - 1, counts)
    again = DataState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.to_json() == state.to_json()
    assert np.array_equal(again.cursors, cursors)
    assert (again.next_block, again.stream_digest) == (480, 2**64 - 1)
    check(again, manifests[0])


def test_a_state_is_small(manifests):
    cursors = np.tile([12, 345, 678, 901], (24, 1, 1))
    state = DataState.fresh(manifests[0]).after(10**9, cursors, 1, {})
    text = json.dumps(state.to_json(), separators=(",", ":"))
    assert len(text) <= 1024 + 24 * 24


def test_a_state_of_other_data_is_refused_with_what_differs(manifests):
    with pytest.raises(UserError) as raised:
        check(DataState.fresh(manifests[0]), manifests[1])
    keys = {problem.key for problem in raised.value.problems}
    assert keys == {"data: files", "data: units", "data: seq_len"}


@pytest.mark.parametrize("lanes", [1, 3, 24])
def test_the_last_block_of_a_lane_is_known_by_arithmetic(lanes):
    for next_block in range(60):
        for lane in range(lanes):
            blocks = [g for g in range(next_block) if g % lanes == lane]
            assert max(last_block(lane, lanes, next_block), -1) == max(blocks, default=-1)
