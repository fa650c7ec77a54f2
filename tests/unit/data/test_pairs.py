"""Pairs of answers and judged answers: through lanes, batches and the held-out set."""

import json
from collections import Counter

import numpy as np
import pytest
import xxhash
from helpers import chats, corpus

from llmtrain.batch_size import BatchSize
from llmtrain.data.audit.count import count_documents, epoch
from llmtrain.data.audit.ledger import document_of, origins, replay
from llmtrain.data.batches import NO_PAIRS, batch_of, pairs_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.heldout import load, prepare
from llmtrain.data.lanes import START, Lane, Lanes
from llmtrain.data.packing import Document, PlacedPair, window_tokens, with_others
from llmtrain.data.state import DataState
from llmtrain.data.stream import open_stream
from llmtrain.errors import UserError
from llmtrain.types import NOT_TRAINED

COUNT = 160
SEQ_LEN = 160
READING = Reading(60)


def pair_rows(count=COUNT):
    rows = []
    for n, row in enumerate(chats.rows_of(count)):
        *prompt, chosen = row["messages"]
        rejected = {"role": "assistant", "content": f"No {n}." + " moss" * (n % 9)}
        rows.append({"id": str(n), "prompt": prompt[-1:], "chosen": [chosen],
                     "rejected": [rejected]})  # fmt: skip
    return rows


def judged_rows(count=COUNT):
    return [
        {"id": row["id"], "messages": [*row["prompt"], *row["chosen"]], "label": n % 3 == 0}
        for n, row in enumerate(pair_rows(count))
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    chats.make(root / "tokenizer", "chatml")
    corpus.write_jsonl(root / "pairs.jsonl", pair_rows())
    corpus.write_parquet(root / "pairs.parquet", pair_rows(), group=9)
    corpus.write_jsonl(root / "judged.jsonl", judged_rows())
    corpus.write_parquet(root / "judged.parquet", judged_rows(), group=9)
    return root


def data_of(place, name, **data):
    loss = "kto" if "judged" in name else "dpo"
    described = {"seq_len": SEQ_LEN, "chat": {"too_long": "drop"}, "loss": loss} | data
    return chats.data_of(place / "tokenizer", place / name, **described)


def lanes_of(manifest, encoder, cursors=None, g=0):
    state = DataState.fresh(manifest)
    return Lanes(
        manifest, encoder, Reader(READING), state.cursors if cursors is None else cursors, g
    )


def batch(manifest, numbered):
    return batch_of(numbered, manifest, first_block=0, wait_seconds=0.0, ended=False)


def halves_of(found, n, apart=False):
    """Ids and trained flags of both halves of pair n of a batch, by its borders and labels."""
    row, (begin, second, stop) = found.pairs.rows[n], found.pairs.borders[n]
    halves = []
    for first, last in ((begin, second), (second, stop)):
        ids, labels = found.ids[row, first:last], found.labels[row, first:last]
        if apart and first == begin:  # what is behind the last label but one is padding
            ids = ids[: np.flatnonzero(labels != NOT_TRAINED)[-1] + 2]
            labels = labels[: len(ids)]
        assert labels[-1] == NOT_TRAINED or len(labels) < len(ids)
        flags = (False, *(labels[: len(ids) - 1] != NOT_TRAINED).tolist())
        assert [n for n, t in zip(ids[1:], flags[1:], strict=True) if t] == [
            n for n in labels if n != NOT_TRAINED
        ]
        halves.append((tuple(ids.tolist()), flags))
    return tuple(halves)


def expected_halves(place, encoder, rows):
    """Both halves of each row that is not left out, by the template alone."""
    for row in rows:
        halves = []
        for name in ("chosen", "rejected"):
            asked = encoder.chat.prompt_ids(row["prompt"])
            text = encoder.chat.render([*row["prompt"], *row[name]])
            whole = chats.plain(place / "tokenizer").encode(text, add_special_tokens=False).ids
            ids = whole[: len(whole) - whole[::-1].index(encoder.chat.check().id)]
            assert ids[: len(asked)] == asked
            halves.append((tuple(ids), tuple(n >= len(asked) for n in range(len(ids)))))
        if sum(len(ids) for ids, _ in halves) <= SEQ_LEN:
            yield tuple(halves)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
@pytest.mark.parametrize("packing", ["bestfit", "single"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_pair_is_trained_exactly_as_often_as_there_are_epochs(
    place, name, packing, world_size
):
    manifest, encoder = data_of(place, name, epochs=2, lanes=6, packing=packing)
    assert manifest.answers == "pairs"
    found = Counter()
    for rank in range(world_size):
        lanes = lanes_of(manifest, encoder)
        for g in range(rank, 12 * COUNT, world_size):
            block = lanes.take(g)
            one = batch(manifest, [(g, block)])
            found.update(halves_of(one, n, packing == "single") for n in range(len(one.pairs.rows)))
            assert len(one.pairs.rows) == len(block.pairs) == len(block.spans)
    apart = packing == "single"
    expected = [
        halves
        for halves in expected_halves(place, encoder, pair_rows())
        if not apart or max(len(ids) for ids, _ in halves) <= SEQ_LEN // 2
    ]
    assert len(expected) > COUNT / 2
    assert found == dict.fromkeys(expected, 2)


@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl"])
@pytest.mark.parametrize("packing", ["bestfit", "single"])
def test_a_resume_in_the_middle_of_a_window_gives_the_same_blocks(place, name, packing):
    manifest, encoder = data_of(place, name, lanes=2, packing=packing)
    state = DataState.fresh(manifest)
    blocks = list(replay(manifest, encoder, Reader(READING), state, 0, 24))
    middle = 0
    for at in range(1, 20):
        cursors = np.zeros((2, 1, 4), np.int64)
        for g, block in blocks[:at]:
            cursors[g % 2] = block.cursors
        middle += bool(cursors[:, 0, 3].any())
        lanes = lanes_of(manifest, encoder, cursors, at)
        for g, expected in blocks[at:]:
            one = lanes.take(g)
            assert (one.ids == expected.ids).all()
            assert (one.trained == expected.trained).all()
            assert one.pairs == expected.pairs
            assert one.cursors == expected.cursors
    assert middle > 10


@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl"])
def test_both_halves_are_in_one_block_and_hidden_from_each_other(place, name):
    manifest, encoder = data_of(place, name, lanes=1)
    assert manifest.packing == "bestfit"
    assert manifest.hides_documents
    most = 0
    for g, block in replay(manifest, encoder, Reader(READING), DataState.fresh(manifest), 0, 80):
        one = batch(manifest, [(g, block)])
        edges = [edge for pair in block.pairs for edge in (pair.begin, pair.second)]
        padding = [block.pairs[-1].stop]
        assert block.starts.tolist() == edges + padding
        assert one.starts[0].tolist() == [n for n in edges + padding if n < SEQ_LEN]
        assert all(one.labels[0, edge - 1] == NOT_TRAINED for edge in (edges + padding)[1:])
        for pair, following in zip(block.pairs, block.pairs[1:], strict=False):
            assert pair.begin < pair.end == pair.second < pair.stop == following.begin
        assert block.pairs[-1].stop <= SEQ_LEN  # also the last token of a pair is an input
        pair = block.pairs[0]
        both = zip(block.ids[pair.begin :], block.ids[pair.second :], strict=False)
        first = next(n for n, (a, b) in enumerate(both) if a != b)
        assert first > 5  # they share a prompt
        most = max(most, len(block.pairs))
    assert most > 1


@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl"])
def test_with_single_a_block_is_two_rows_of_half_its_length(place, name):
    manifest, encoder = data_of(place, name, lanes=1, packing="single")
    numbered = list(replay(manifest, encoder, Reader(READING), DataState.fresh(manifest), 0, 9))
    found = batch(manifest, numbered)
    assert found.starts is None
    assert found.pairs.rows.tolist() == list(range(9))
    assert (found.pairs.borders[:, :2] == (0, SEQ_LEN // 2)).all()
    rows = found.ids[:, :SEQ_LEN].reshape(18, -1)
    labels = found.labels.reshape(18, -1)
    for n, (_, block) in enumerate(numbered):
        (pair,) = block.pairs
        for row, size in ((2 * n, pair.end), (2 * n + 1, pair.stop - pair.second)):
            assert (rows[row, size:] == encoder.tokenizer.pad).all()
            assert (labels[row, size - 1 :] == NOT_TRAINED).all()
            assert (labels[row, : size - 1] != NOT_TRAINED).any()
        assert pair.begin == 0
        assert block.starts.tolist() == sorted({0, pair.end, SEQ_LEN // 2, pair.stop})
    real = sum(span.stop - span.start for _, block in numbered for span in block.spans)
    assert found.real_tokens == real


def test_a_block_without_a_pair_has_none(place):
    manifest, encoder = data_of(place, "pairs.jsonl", lanes=2, epochs=1)
    lanes = lanes_of(manifest, encoder)
    last = [lanes.take(g) for g in range(300)][-1]
    assert (last.source, last.pairs) == (-1, ())
    found = batch(manifest, [(299, last)])
    assert len(found.pairs.rows) == 0
    for name in ("rows", "borders", "keys", "desirable"):
        one, none = getattr(found.pairs, name), getattr(NO_PAIRS, name)
        assert (one.shape, one.dtype) == (none.shape, none.dtype)


def test_batches_of_other_data_have_no_pairs(tmp_path, place):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", chats.rows_of(20))
    manifest, encoder = chats.data_of(place / "tokenizer", path, lanes=1)
    block = lanes_of(manifest, encoder).take(0)
    assert manifest.answers is None
    assert batch(manifest, [(0, block)]).pairs is None


def key_by_hand(halves):
    digest = xxhash.xxh3_128()
    for ids, flags in halves:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(b"".join(n.to_bytes(4, "little") for n in ids))
        digest.update(bytes(flags[1:]))
    return divmod(digest.intdigest(), 1 << 64)


@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl"])
def test_keys_are_those_of_the_content_wherever_a_pair_is(place, tmp_path, name):
    known = {}
    for packing in ("bestfit", "single"):
        manifest, encoder = data_of(place, name, lanes=1, packing=packing, epochs=1)
        numbered = list(replay(manifest, encoder, Reader(READING), DataState.fresh(manifest), 0, 9))
        found = batch(manifest, numbered)
        for n, key in enumerate(found.pairs.keys.tolist()):
            halves = halves_of(found, n, packing == "single")
            assert tuple(key) == key_by_hand(halves)
            known.setdefault(tuple(key), halves)
            assert known[tuple(key)] == halves
    assert len(set(known.values())) == len(known) > 9


def test_a_key_tells_ids_masks_and_halves_apart():
    ids, labels = np.arange(9, dtype=np.int32), np.arange(1, 9)
    places = [PlacedPair(0, 3, 3, 6), PlacedPair(0, 2, 2, 6), PlacedPair(0, 3, 3, 7)]
    masked = labels.copy()
    masked[1] = NOT_TRAINED
    other = ids.copy()
    other[5] = 7
    rows = [(ids, labels, places), (ids, masked, places[:1]), (other, labels, places[:1])]
    keys = pairs_of(rows).keys.tolist()
    assert len({tuple(key) for key in keys}) == 5
    shifted = (np.roll(ids, 1), np.roll(labels, 1), [places[0].shifted(1)])
    assert pairs_of([shifted]).keys.tolist() == keys[:1]


def test_the_digest_of_pairs_is_that_of_ids_and_labels_and_of_feedback_covers_the_label(place):
    for name, covers in (("pairs.jsonl", False), ("judged.jsonl", True)):
        manifest, encoder = data_of(place, name, lanes=1)
        block = lanes_of(manifest, encoder).take(0)
        found = batch(manifest, [(0, block)])
        covered = [found.ids[0].astype("<i4").tobytes(), found.labels[0].astype("<i4").tobytes()]
        if covers:
            covered.append(bytes(pair.desirable for pair in block.pairs))
        assert found.digest == xxhash.xxh3_64_intdigest(b"".join(covered), seed=0)


# Judged answers: the other half is the answer of the next row of the window.
def slow_others(window, seq_len, apart):
    """What `with_others` returns, by lists."""
    found = []
    for n, one in enumerate(window):
        ids, answer = one.ids.tolist(), one.ids[one.answer :].tolist()
        others = [other.ids[other.answer :].tolist() for other in [*window[n + 1 :], *window[:n]]]
        most = seq_len // 2 if apart else seq_len - len(ids)
        other = next((other for other in others if other != answer), [])
        found.append((ids, ids[: one.answer] + other[: most - one.answer]))
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_a_judged_answer_is_paired_with_the_next_one_that_differs(apart):
    """PT-17: never its own, also where rows repeat it."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        window = []
        for row in range(rng.integers(1, 7)):
            prompt = rng.integers(0, 9, rng.integers(1, 6))
            answer = rng.integers(0, 2, rng.integers(1, 10 - len(prompt))) + 10
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            trained = np.arange(len(ids)) >= len(prompt)
            window.append(Document(0, 0, row, ids, Counter(), (0, len(ids)), trained, 0,
                                   len(prompt), bool(rng.integers(2))))  # fmt: skip
        paired = with_others(window, 18, apart=apart)
        for one, made, (first, second) in zip(
            window, paired, slow_others(window, 18, apart), strict=True
        ):
            assert made.ids.tolist() == first + second
            assert made.second == len(first)
            assert made.trained.tolist() == one.trained.tolist() + [
                n >= one.answer for n in range(len(second))
            ]
            assert made.cuts == (0, len(made.ids))
            assert made[:3] == one[:3]
            assert made.desirable is one.desirable
            own = one.ids[one.answer :].tolist()
            is_cut = len(second) == (9 if apart else 18 - len(first))
            assert second[one.answer :] != own or is_cut
            assert len(made.ids) <= 18


@pytest.mark.parametrize("packing", ["bestfit", "single"])
def test_judged_answers_of_a_lane_are_paired_within_their_window(place, packing):
    """PT-17: by a slow walk over the rows of the lane; each is there once, with its label."""
    manifest, encoder = data_of(place, "judged.jsonl", lanes=1, packing=packing, epochs=1)
    walk = list(Lane(manifest, encoder, Reader(READING), 0, 0, [START]).walk(0, START, False))[:-1]
    windows, tokens = [[]], 0
    for one in walk:
        if tokens >= window_tokens(SEQ_LEN):
            windows, tokens = [*windows, []], 0
        windows[-1].append(one)
        tokens += len(one.ids)
    assert len(windows) > 1
    apart = packing == "single"
    expected = Counter()
    for window in windows:
        for one, halves in zip(window, slow_others(window, SEQ_LEN, apart), strict=True):
            expected[tuple(map(tuple, halves)), one.desirable] += 1
    found, lanes = Counter(), lanes_of(manifest, encoder)
    for g in range(COUNT):
        one = batch(manifest, [(g, lanes.take(g))])
        for n, good in enumerate(one.pairs.desirable.tolist()):
            (first, _), (second, _) = halves_of(one, n, apart)
            found[(first, second), good] += 1
    assert found == expected
    assert found.total() > COUNT / 2
    labels = {n: row["label"] for n, row in enumerate(judged_rows())}
    assert sum(good for (_, good), n in found.items() for _ in range(n)) <= sum(labels.values())


def test_a_row_without_another_answer_has_a_second_half_without_a_trained_token(place, tmp_path):
    rows = [{"messages": chats.talk(f"Question {n}?", "Yes."), "label": True} for n in range(3)]
    path = corpus.write_jsonl(tmp_path / "same.jsonl", rows)
    manifest, encoder = chats.data_of(
        place / "tokenizer", path, loss="kto", seq_len=SEQ_LEN, epochs=1, lanes=1
    )
    found = batch(manifest, [(0, lanes_of(manifest, encoder).take(0))])
    assert len(found.pairs.rows) == 3
    for begin, second, stop in found.pairs.borders.tolist():
        assert (found.labels[0, second:stop] == NOT_TRAINED).all()
        assert (found.labels[0, begin:second] != NOT_TRAINED).any()
        prompt = found.ids[0, second:stop]
        assert (found.ids[0, begin : begin + len(prompt)] == prompt).all()


@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl", "judged.parquet"])
@pytest.mark.parametrize("packing", ["bestfit", "single"])
def test_the_blocks_of_the_run_are_counted_exactly(place, name, packing):
    manifest, encoder = data_of(place, name, epochs=2, lanes=4, packing=packing)
    counted = epoch(manifest, encoder, READING, (), DataState.fresh(manifest))
    lanes = lanes_of(manifest, encoder)
    blocks = [lanes.take(g) for g in range(counted.until_end + 8)]
    assert blocks[counted.until_end - 1].source == 0
    assert {block.source for block in blocks[counted.until_end :]} == {-1}
    assert counted.passes == 2
    (found,) = [count_documents(manifest, 0, encoder, Reader(READING), 0)]
    assert len(found.answers) == found.chat["pairs"]
    assert found.chat["pairs"] + found.chat["too_long"] == COUNT
    assert {len(one) for one in found.answers} == {3 if "pairs" in name else 2}


def test_the_ledger_has_one_document_a_pair(place):
    manifest, encoder = data_of(place, "pairs.parquet", lanes=2)
    numbered = list(replay(manifest, encoder, Reader(READING), DataState.fresh(manifest), 0, 8))
    spans = [(document_of(manifest, g, b, s), b, s) for g, b in numbered for s in b.spans]
    known = origins(manifest, Reader(READING), {document for document, _, _ in spans})
    rows = {row["id"]: row for row in pair_rows()}
    for document, block, span in spans:
        pair = next(pair for pair in block.pairs if pair.begin == span.at)
        row = rows[known[document].id]
        text = encoder.tokenizer.decode(block.ids[pair.begin : pair.end])
        assert row["chosen"][0]["content"] in text
        text = encoder.tokenizer.decode(block.ids[pair.second : pair.stop])
        assert row["rejected"][0]["content"] in text
        assert span.stop - span.start == pair.stop - pair.begin


@pytest.mark.launches
def test_workers_send_pairs_as_they_are(place):
    manifest, _ = data_of(place, "judged.jsonl", lanes=2)
    how = {"batch": BatchSize.constant(4), "rank": 0, "world_size": 1, "reading": READING}
    found = []
    for workers in (0, 2):
        stream = open_stream(manifest, place / "tokenizer", workers=workers, **how)
        found.append([next(stream) for _ in range(4)])
        stream.close()
    for one, other in zip(*found, strict=True):
        assert one.digest == other.digest
        for name in ("rows", "borders", "keys", "desirable"):
            assert (getattr(one.pairs, name) == getattr(other.pairs, name)).all()


# The held-out set.
@pytest.mark.parametrize("name", ["pairs.jsonl", "judged.jsonl"])
@pytest.mark.parametrize("packing", ["bestfit", "single"])
def test_held_out_pairs_are_whole_and_known_by_block_and_source(place, tmp_path, name, packing):
    manifest, encoder = data_of(place, name, heldout=0.3, packing=packing)
    prepare(manifest, encoder, tmp_path / "held", 1000, READING)
    held = load(tmp_path / "held")
    blocks = list(range(held.num_blocks(SEQ_LEN)))
    pairs = held.pairs_of(blocks, SEQ_LEN)
    assert len(pairs.rows) == held.documents == len(held.pairs) > 5
    assert held.pair_parts(blocks, SEQ_LEN).tolist() == [0] * held.documents
    apart = packing == "single"
    served = [held.block(g, SEQ_LEN) for g in blocks]
    one = SimpleBatch(np.stack([s[0] for s in served]), np.stack([s[1] for s in served]), pairs)
    found = [halves_of(one, n, apart) for n in range(len(pairs.rows))]
    assert [tuple(key) for key in pairs.keys.tolist()] == [*map(key_by_hand, found)]
    if "pairs" in name:
        assert set(found) <= set(expected_halves(place, encoder, pair_rows()))
    else:
        known = {
            encoder.documents(manifest.sources[0], [json.dumps(row)])[0].ids.tobytes(): row
            for row in judged_rows()
        }
        answers = Counter()
        for (first, _), (second, flags), good in [(*f, g) for f, g in zip(
            found, pairs.desirable.tolist(), strict=True)]:  # fmt: skip
            assert known[np.array(first, np.int32).tobytes()]["label"] is good
            assert first[flags.index(True) :] != second[flags.index(True) :]
            answers[second[flags.index(True) :]] += 1
        assert max(answers.values()) <= 2
    for row in sorted(set(pairs.rows.tolist())):
        _, _, starts = served[row]
        mine = pairs.borders[pairs.rows == row]
        assert set(mine[:, :2].ravel().tolist()) <= set(starts.tolist())
        assert (mine[:, 2] <= SEQ_LEN).all()
        if apart:
            assert mine[:, :2].tolist() == [[0, SEQ_LEN // 2]]
    alone = held.pairs_of(blocks[1:3], SEQ_LEN)
    assert set(alone.rows.tolist()) <= {0, 1}
    assert alone.keys.tolist() == pairs.keys[np.isin(pairs.rows, (1, 2))].tolist()
    assert held.pairs_of([len(blocks) + 3], SEQ_LEN).rows.shape == (0,)


class SimpleBatch:
    def __init__(self, ids, labels, pairs):
        self.ids, self.labels, self.pairs = ids, labels, pairs


def test_held_out_pairs_belong_to_their_source(place, tmp_path):
    other = corpus.write_jsonl(tmp_path / "other.jsonl", pair_rows(30))
    manifest, encoder = chats.data_of(
        place / "tokenizer",
        place / "pairs.jsonl",
        other,
        heldout=0.3,
        seq_len=SEQ_LEN,
        loss="dpo",
        chat={"too_long": "drop"},
    )
    prepare(manifest, encoder, tmp_path / "held", 1000, READING)
    held = load(tmp_path / "held")
    blocks = list(range(held.num_blocks(SEQ_LEN)))
    counts = Counter(held.pair_parts(blocks, SEQ_LEN).tolist())
    assert [counts[0], counts[1]] == [part.documents for part in held.parts]
    assert min(counts.values()) > 2


def test_a_held_out_set_without_pairs_has_no_tensor_of_them(tmp_path, place):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", chats.rows_of(30))
    manifest, encoder = chats.data_of(place / "tokenizer", path, lanes=1, heldout=0.3)
    prepare(manifest, encoder, tmp_path / "held", 1000, READING)
    held = load(tmp_path / "held")
    assert held.pairs is None
    assert b'"pairs"' not in (tmp_path / "held").read_bytes()[:4096]
    assert held.pairs_of([0], 256).rows.shape == (0,)
    assert held.pair_parts([0], 256).shape == (0,)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("heldout", [0.0, 0.9])
def test_a_later_bad_row_is_named_by_file_and_line(place, tmp_path, loss, heldout):
    rows = judged_rows(40) if loss == "kto" else pair_rows(40)
    rows[17]["label" if loss == "kto" else "rejected"] = None
    path = corpus.write_jsonl(tmp_path / "bad.jsonl", rows)
    manifest, encoder = chats.data_of(
        place / "tokenizer", path, loss=loss, seq_len=256, lanes=1, heldout=heldout
    )

    def read():
        if heldout:
            prepare(manifest, encoder, tmp_path / "held", 1000, READING)
        lanes = lanes_of(manifest, encoder)
        return [lanes.take(g) for g in range(40)]

    with pytest.raises(UserError) as caught:
        read()
    (problem,) = caught.value.problems
    assert problem.key == f"{path}, line 18"
    assert problem.expected == (
        "a judged answer that can be trained on: label is null, not true or false"
        if loss == "kto"
        else "a pair of answers that can be trained on: rejected is null"
    )
    assert problem.remedy == "repair or remove the row, or chat.bad_rows=skip"
    skipping = Reader(Reading(60, skip_bad_rows=True))
    lanes = Lanes(manifest, encoder, skipping, np.zeros((1, 1, 4), np.int64), 0)
    blocks = [lanes.take(g) for g in range(40)]
    counts = sum((Counter(block.counts.get(0, {})) for block in blocks), Counter())
    assert heldout or counts["rejected"] >= 1
