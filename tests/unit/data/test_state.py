import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import corpus

from llmtrain.data.state import DataState, carry_over, check, last_block
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


def after(state, next_block, cursors, stream_digest, counts):
    moved = {"cursors": cursors, "stream_digest": stream_digest, "counts": counts}
    return replace(state, next_block=next_block, **moved)


def test_a_state_comes_back_from_json_as_it_was(manifests):
    cursors = np.arange(24 * 4).reshape(24, 1, 4)
    counts = {"a": {"dropped": 3, "replaced": 1}}
    state = after(DataState.fresh(manifests[0]), 480, cursors, 2**64 - 1, counts)
    again = DataState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.to_json() == state.to_json()
    assert np.array_equal(again.cursors, cursors)
    assert (again.next_block, again.stream_digest) == (480, 2**64 - 1)
    check(again, manifests[0], ())


@pytest.mark.parametrize("lanes", [24, 48])
@pytest.mark.parametrize("sources", [1, 2, 5])
def test_a_state_is_at_most_1_kb_and_24_bytes_a_lane_and_source(manifests, lanes, sources):
    source = replace(manifests[0].sources[0], max_epochs=4)
    named = tuple(replace(source, label=f"a-name-of-usual-length-{k}") for k in range(sources))
    manifest = replace(manifests[0], sources=named, lanes=lanes)
    cursors = np.tile([12, 41025, 999, 4096], (lanes, sources, 1))
    met = {"dropped": 12345, "replaced": 1234, "heldout": 123456, "left_over_tokens": 12345}
    counts = dict.fromkeys(manifest.labels, met)
    state = after(DataState.fresh(manifest), 10**9, cursors, 2**64 - 1, counts)
    text = json.dumps(state.to_json(), separators=(",", ":"))
    assert len(text) <= 1024 + 24 * lanes * sources


def test_a_state_of_other_data_is_refused_with_what_differs(manifests):
    with pytest.raises(UserError) as raised:
        check(DataState.fresh(manifests[0]), manifests[1], ())
    keys = {problem.key for problem in raised.value.problems}
    assert keys == {"data: files", "data: units", "data: seq_len"}


@pytest.mark.parametrize("lanes", [1, 3, 24])
def test_the_last_block_of_a_lane_is_known_by_arithmetic(lanes):
    for next_block in range(60):
        for lane in range(lanes):
            blocks = [g for g in range(next_block) if g % lanes == lane]
            assert max(last_block(lane, lanes, next_block), -1) == max(blocks, default=-1)


def test_what_accept_changes_names_is_no_mismatch(manifests):
    state = DataState.fresh(manifests[0])
    check(state, manifests[1], ("data.sources.0.path", "data.seq_len"))
    with pytest.raises(UserError) as raised:
        check(state, manifests[1], ("data.sources",))
    (problem,) = raised.value.problems
    assert problem.key == "data: seq_len"
    assert "checkpoint.accept_changes=[data.seq_len]" in str(problem)


def test_other_blocks_of_the_same_order_begin_each_lanes_document_again(manifests):
    cursors = np.tile([1, 2, 3, 4], (24, 1, 1))
    state = after(DataState.fresh(manifests[0]), 48, cursors, 1, {})
    longer = replace(manifests[0], seq_len=32)
    again = carry_over(state, longer)
    assert (again.cursors == [1, 2, 3, 0]).all()
    check(again, longer, ())


def test_another_order_begins_at_its_beginning(manifests):
    cursors = np.tile([1, 2, 3, 4], (24, 1, 1))
    state = after(DataState.fresh(manifests[0]), 48, cursors, 1, {"a": {"dropped": 1}})
    again = carry_over(state, manifests[1])
    assert not again.cursors.any()
    assert (again.next_block, again.counts) == (48, {"a": {"dropped": 1}})
