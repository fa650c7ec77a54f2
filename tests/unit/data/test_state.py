import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from helpers import corpus, reference_stream
from helpers.streams import BLOCKS, Run, lane_documents, named, whole_epochs

from llmtrain.data.state import DataState, carry_over, check, last_block
from llmtrain.data.stream import item_blocks, prefetch_factor
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.hashing import mix


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


# Failures of other libraries at a resume: what was lost, repeated or out of order there.
STEPS = 100


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources of uneven units, a tokenizer."""
    root = tmp_path_factory.mktemp("resume")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a" / "1.parquet", corpus.articles(50))
    corpus.write_jsonl(root / "b.jsonl", corpus.articles(31, 500))
    return root


@pytest.fixture(scope="module")
def tokenizer(place):
    return open_tokenizer(place / "tokenizer")


@pytest.fixture(scope="module")
def single(place):
    return corpus.manifest_of(place / "tokenizer", place / "a", lanes=4)


@pytest.fixture(scope="module")
def mixed(place):
    sources = ({"path": str(place / "a"), "weight": 2.0}, {"path": str(place / "b.jsonl")})
    return corpus.manifest_of(place / "tokenizer", *sources, lanes=6, heldout=0.1)


@pytest.fixture(scope="module")
def straight(single, place):
    """Four epochs and more in one start."""
    return Run(single, place).start(1, STEPS)


@pytest.fixture(scope="module")
def straight_mixed(mixed, place):
    return Run(mixed, place).start(1, STEPS)


@pytest.fixture(scope="module")
def packed(place):
    """`bestfit`: windows of 512 tokens."""
    return corpus.manifest_of(place / "tokenizer", place / "a", lanes=4, packing="bestfit")


@pytest.fixture(scope="module")
def straight_packed(packed, place):
    return Run(packed, place).start(1, 40)


def everything(single, tokenizer, rows):
    """The documents of each whole epoch, after a look that none is there twice."""
    epochs = whole_epochs(single, lane_documents(single, tokenizer, rows))
    for epoch in epochs:
        assert Counter(n for lane in epoch for n in named(lane)) == Counter(range(50))
    return epochs


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2))])
@pytest.mark.parametrize("of", ["straight", "straight_mixed"])
def test_kills_at_random_blocks_lose_and_repeat_no_document(place, tokenizer, request, of, seed):
    straight = request.getfixturevalue(of)
    run = Run(straight.manifest, place)
    kills = 0
    while len(run.digests) < STEPS:
        drawn = mix(seed, kills)
        steps = min(drawn % 12, STEPS - len(run.digests))
        run.start(1 + drawn // 12 % 5, steps, lost=1 + drawn // 60 % 4)
        kills += 1
        assert np.array_equal(run.states[-1].cursors, straight.states[len(run.digests)].cursors)
    assert kills > 8
    assert run.rows == straight.rows
    assert run.digests == straight.digests
    assert run.states[-1].stream_digest == straight.states[-1].stream_digest
    assert ((run.states[-1].cursors[:, :, 0] >= 1).sum(axis=0) > 2).all()  # each source rolled over
    if of == "straight":
        assert len(everything(run.manifest, tokenizer, run.rows)) >= 4


@pytest.fixture(scope="module")
def ahead(single, place, straight):
    """0, 1, 2 and 0 workers: (the run, steps of each start)."""
    begin = straight.first_step_in(1) // 2
    steps = (begin, straight.first_step_in(2) - begin + 3, 6, 5)
    run = Run(single, place)
    for count, workers in zip(steps, (0, 1, 2, 0), strict=True):
        run.start(1, count, workers=workers)
    return run, steps


@pytest.mark.launches
def test_the_saved_state_has_every_lane_and_workers_share_none(single, tokenizer, ahead):
    run, steps = ahead
    spread = Run(single, run.place).start(3, 8)
    assert np.array_equal(spread.states[-1].cursors, run.states[8].cursors)
    assert (spread.states[-1].cursors[:, :, :3].sum(axis=2) > 0).all()
    # Two workers: the first gives every other block. Each lane's come from one of them.
    first = (steps[0] + steps[1]) * BLOCKS
    rows = run.rows[first : first + steps[2] * BLOCKS]
    documents = [
        set(named([tokenizer.decode(row.ids[:-1]) for row in rows[worker::2]])) for worker in (0, 1)
    ]
    assert all(documents)
    assert not documents[0] & documents[1]


@pytest.mark.launches
def test_what_was_read_ahead_is_not_lost_with_a_killed_worker(place, single, straight):
    run = Run(single, place)
    with ExitStack() as stack:
        stream = run.open(0, 1, 1, stack)
        size = item_blocks(single, BLOCKS, 1)
        assert prefetch_factor(single, BLOCKS, 1, size) * size >= 8
        run.ranks = [[next(stream) for _ in range(3)]]
        stream._items.processes[0].kill()
    assert run.taken(3).start(1, 3).rows == straight.rows[: 6 * BLOCKS]


@pytest.fixture(scope="module")
def lettered(place):
    """(texts, tokens of an epoch, a manifest of one lane) for documents of known lengths."""

    def made(name, lengths, **data):
        path = corpus.write_parquet(place / f"{name}.parquet", corpus.letters(lengths))
        return corpus.manifest_of(place / "tokenizer", path, lanes=1, **data)

    return made


@pytest.mark.parametrize("total", [63, 64, 65, 66])
def test_a_save_at_the_very_end_of_an_epoch_replays_and_drops_nothing(
    lettered, place, tokenizer, total
):
    manifest = lettered(f"cut{total}", [9, 20, 5, total - 34])
    run = Run(manifest, place, blocks_per_step=1).start(1, 12)
    expected = [block.ids for block in reference_stream.blocks(manifest, tokenizer, 12)]
    assert [list(row.ids) for row in run.rows] == expected
    ends = [tuple(state.cursors[0, 0].tolist()) for state in run.states]
    if total == 64:  # blocks 4, 8 and 12 begin where an epoch does
        assert [ends[step] for step in (4, 8, 12)] == [(1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]
    for step in range(1, 10):
        assert run.resumed(step).start(1, 3).rows == run.after(step, 3)


def test_a_save_behind_the_last_window_of_an_epoch_replays_and_drops_nothing(
    lettered, place, tokenizer
):
    manifest = lettered("windows", [32] * 16, packing="bestfit")  # one window holds an epoch
    run = Run(manifest, place, blocks_per_step=1).start(1, 100)
    window = next(s for s in range(1, 100) if run.states[s].cursors[0, 0, 3] == 0)
    end = run.states[window].cursors[0, 0].tolist()
    assert end[0] == 0
    assert end[2] > 0  # behind the last row, not at the next epoch's beginning
    again = run.resumed(window).start(1, window)
    assert again.rows == run.after(window, window)
    for rows in (run.rows[:window], again.rows):
        targets = Counter(label for row in rows for label in row.labels)
        assert targets[tokenizer.eos] == 16
        assert (
            sorted(targets[tokenizer.encode(chr(ord("B") + n))[0]] for n in range(16)) == [30] * 16
        )


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_a_save_at_the_end_of_the_data_is_the_end_after_a_resume_too(lettered, place, packing):
    path = str(place / "windows.parquet")
    corpus.write_parquet(place / "windows.parquet", corpus.letters([32] * 16))
    manifest = corpus.manifest_of(
        place / "tokenizer", {"path": path, "max_epochs": 2}, lanes=1, packing=packing
    )
    run = Run(manifest, place, blocks_per_step=1).start(1, 100)
    end = next(step for step, batch in enumerate(run.ranks[0]) if batch.ended)
    assert 60 <= end < 90
    for before in (1, 0):
        resumed = run.resumed(end - before).start(1, 4)
        assert [batch.ended for batch in resumed.ranks[0]] == [False] * before + [True] * (
            4 - before
        )
        assert [batch.trained_tokens > 0 for batch in resumed.ranks[0]] == [True] * before + [
            False
        ] * (4 - before)


@pytest.mark.launches
def test_resumes_with_none_one_and_two_workers_go_on_alike(straight, ahead):
    run, steps = ahead
    assert run.rows == straight.rows[: sum(steps) * BLOCKS]
    assert run.digests == straight.digests[: sum(steps)]
    assert np.array_equal(run.states[-1].cursors, straight.states[sum(steps)].cursors)


def test_packed_windows_are_gone_on_with_where_a_kill_cut_them(straight_packed):
    run = straight_packed
    inside = [s for s, state in enumerate(run.states[:-2]) if (state.cursors[:, 0, 3] > 0).any()]
    assert len(inside) > 20
    for step in inside:
        assert run.resumed(step).start(1 + step % 4, 2, lost=1).rows == run.after(step, 2)
    assert len({row.labels.count(-100) for row in run.rows}) > 3  # borders and padding, too
