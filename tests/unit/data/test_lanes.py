import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from helpers import chats, corpus

from llmtrain.batch_size import BatchSize
from llmtrain.data.audit.count import epoch
from llmtrain.data.audit.first_rows import with_marks
from llmtrain.data.audit.ledger import replay
from llmtrain.data.batches import batch_of
from llmtrain.data.chat.rows import to_example
from llmtrain.data.documents.reader import Reader, Reading, units_of
from llmtrain.data.heldout import load, prepare
from llmtrain.data.lanes import START, Lane, Lanes, default_lanes, shares, source_of
from llmtrain.data.manifest import load as load_manifest
from llmtrain.data.state import DataState, carry_over, check, differing
from llmtrain.data.stream import open_stream
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.types import NOT_TRAINED


def test_what_was_met_is_counted_with_one_document_alone(tmp_path):
    """Several texts are tokenized in one call; what is met behind one of them is not its own."""
    rows = corpus.articles(40)
    for n in (10, 20, 21):
        rows[n]["text"] = " "
    path = corpus.write_parquet(tmp_path / "a.parquet", rows, group=40)
    tokenizer_dir = corpus.write_tokenizer(tmp_path / "tokenizer")
    source = {"path": str(path), "max_epochs": 1}
    manifest = corpus.manifest_of(tokenizer_dir, source, lanes=1, seq_len=64)
    parts = (manifest, DocumentEncoder(open_tokenizer(tokenizer_dir)), Reader(Reading(60)))
    documents = list(Lane(*parts, 0, 0, [START]).walk(0, START, again=False))
    assert len(documents) == 37 + 1
    assert sum(document.counts["dropped"] for document in documents) == 3


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_everything_is_counted_once_wherever_the_lanes_are_opened_again(tmp_path, packing):
    """What is met twice by a lane that is opened again, was counted before it was closed."""
    rows = corpus.articles(60)
    for n in (5, 6, 31, 59):
        rows[n]["text"] = " "
    lines = [json.dumps(row).encode() for row in rows]
    lines[12] = b'{"text": '
    lines[40] = lines[40].replace(b"river", b"ri\xffer").replace(b"towns", b"t\xffwns")
    for part in range(3):
        corpus.write_lines(tmp_path / "a" / f"{part}.jsonl", lines[20 * part : 20 * part + 20])
    corpus.write_jsonl(tmp_path / "few.jsonl", [{"text": "moss"}, {"text": ""}])
    tokenizer = corpus.write_tokenizer(tmp_path / "tokenizer")
    sources = [
        {"path": str(tmp_path / "a"), "max_epochs": 2},
        {"path": str(tmp_path / "few.jsonl"), "max_epochs": 1},
    ]
    data = {"lanes": 2, "heldout": 0.2, "packing": packing, "on_bad_unit": "skip"}
    manifest = corpus.manifest_of(tokenizer, *sources, **data)
    encoder = DocumentEncoder(open_tokenizer(tokenizer))

    def lanes(cursors, g):
        reader = Reader(Reading(60, run_dir=tmp_path, skip_bad_units=True))
        return Lanes(manifest, encoder, reader, cursors, g)

    straight, cursors = lanes(np.zeros((2, 2, 4), np.int64), 0), [np.zeros((2, 2, 4), np.int64)]
    blocks = []
    while [block.source for block in blocks[-2:]] != [-1, -1]:
        blocks.append(straight.take(len(blocks)))
        cursors.append(cursors[-1].copy())
        cursors[-1][(len(blocks) - 1) % 2] = blocks[-1].cursors
    total = {k: Counter() for k in (0, 1)}
    for block in blocks:
        for k, counts in block.counts.items():
            total[k].update(counts)
    left_over = total[0].pop("left_over_tokens", 0), total[1].pop("left_over_tokens", 0)
    assert (min(left_over) > 0) == (packing == "concat")
    heldout = total[0].pop("heldout")
    assert heldout % 2 == 0
    assert heldout > 2
    assert total[0] == {"dropped": 2 * 4, "skipped": 2, "replaced": 2}
    assert total[1] == {"dropped": 1}
    for g in range(0, len(blocks), 3):
        again = lanes(cursors[g], g)
        found = [again.take(n) for n in range(g, len(blocks))]
        assert [one.counts for one in found] == [one.counts for one in blocks[g:]], g
        assert all((a.ids == b.ids).all() for a, b in zip(found, blocks[g:], strict=True))


class Noting:
    """A reader of files here that notes which units a lane expects of a remote source."""

    def __init__(self):
        self.reading, self.units, self.expected = Reading(60), self, []
        self._reader = Reader(self.reading)

    def documents(self, source, unit, epoch, *, needed):
        return self._reader.documents(replace(source, remote=False), unit, epoch, needed=needed)

    def expect(self, source, unit):
        self.expected.append(unit)


def test_the_next_unit_is_expected_in_the_next_epoch_too_but_not_behind_the_last(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(40), group=10)
    tokenizer = corpus.write_tokenizer(tmp_path / "tokenizer")
    source = {"path": str(path), "max_epochs": 2}
    manifest = corpus.manifest_of(tokenizer, source, lanes=1, seq_len=64)
    manifest = replace(manifest, sources=(replace(manifest.sources[0], remote=True),))
    reader = Noting()
    lane = Lane(manifest, DocumentEncoder(open_tokenizer(tokenizer)), reader, 0, 0, [START])
    documents = list(lane.walk(0, START, again=False))[:-1]
    read = list(dict.fromkeys((one.epoch, one.unit) for one in documents))
    assert len(read) == 8
    order = [units_of(manifest, 0, epoch, 0)[unit] for epoch, unit in read]
    assert reader.expected == [manifest.sources[0].units[u] for u in order[1:]]


def test_lanes_of_texts_are_a_multiple_of_24_or_48():
    assert [default_lanes(1, units) for units in (1, 767, 768)] == [24, 24, 48]
    assert [default_lanes(n, 10) for n in (5, 8, 16)] == [120, 24, 48]


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (1, 1, 1), (0.9, 0.1), (5, 3, 1, 0.5)])
def test_any_stretch_of_blocks_holds_each_sources_share(weights):
    integers = shares(weights)
    drawn = [source_of(g, integers) for g in range(20_000)]
    for length, slack in ((32, 2), (1024, 2.8), (20_000, 3.1)):
        for start in range(0, len(drawn) - length + 1, 97):
            part = drawn[start : start + length]
            for k, weight in enumerate(weights):
                expected = length * weight / sum(weights)
                assert abs(part.count(k) - expected) <= slack


def test_one_source_feeds_every_block():
    assert {source_of(g, shares((0.3,))) for g in range(100)} == {0}


def test_the_choice_is_a_contract():
    assert [source_of(g, shares((2, 1))) for g in range(12)] == [0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]


def test_a_tiny_weight_is_never_lost():
    assert shares((1e-12, 1.0)) == (1, 2**32)


def test_sources_that_have_ended_leave_their_blocks_to_the_others_by_weight():
    left = list(shares((2, 1, 1)))
    left[1] = 0
    drawn = [source_of(g, left) for g in range(3000)]
    assert set(drawn) == {0, 2}
    assert abs(drawn.count(0) - 2000) <= 3
    assert {source_of(g, [0, 0, 7]) for g in range(100)} == {2}


# Conversations through the lanes, the held-out set and epochs, against the template alone.
COUNT = 60
SEQ_LEN = 256  # of `chats.data_of`


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("chats")
    chats.make(root / "tokenizer", "chatml")
    rows = chats.rows_of(COUNT)
    corpus.write_jsonl(root / "a.jsonl", rows)
    corpus.write_parquet(root / "a.parquet", rows, group=7)
    corpus.write_jsonl(root / "text.jsonl", corpus.articles(40))
    return root


def data_of(place, *names, **data):
    return chats.data_of(place / "tokenizer", *[place / name for name in names], **data)


def sequences_of(encoder, rows):
    """Every sequence of the rows: its ids, and which are trained."""
    for row in rows:
        for one in encoder.chat.sequences(to_example(json.dumps(row), "messages")).sequences:
            yield tuple(one.ids), tuple(one.trained)


def blocks_of(manifest, encoder, count):
    state = DataState.fresh(manifest)
    return list(replay(manifest, encoder, Reader(Reading(60)), state, 0, count))


def until_end(manifest, encoder):
    state = DataState.fresh(manifest)
    return epoch(manifest, encoder, Reading(60), (), state).until_end


def trained_of(block):
    """The sequences in a block, each with the flags of its ids but the first."""
    for span in block.spans:
        at, stop = span.at, span.at + span.stop - span.start
        ids = tuple(block.ids[at:stop].tolist())
        yield ids, (False, *block.trained[at : stop - 1].tolist())


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_every_sequence_is_trained_exactly_as_often_as_asked(place, name):
    manifest, encoder = data_of(place, name, epochs=2, lanes=5)
    assert manifest.sources[0].max_epochs == 2
    end = until_end(manifest, encoder)
    blocks = blocks_of(manifest, encoder, end + 2 * manifest.lanes)
    found = Counter(one for _, block in blocks for one in trained_of(block))
    expected = Counter(sequences_of(encoder, chats.rows_of(COUNT)))
    assert found == {one: 2 * count for one, count in expected.items()}
    assert blocks[end - 1][1].source == 0
    assert {block.source for _, block in blocks[end:]} == {-1}


def test_parquet_and_json_lines_of_the_same_rows_give_the_same_sequences(place):
    found = []
    for name in ("a.jsonl", "a.parquet"):
        manifest, encoder = data_of(place, name, epochs=1, lanes=1)
        end = until_end(manifest, encoder)
        blocks = blocks_of(manifest, encoder, end)
        found.append(Counter(one for _, block in blocks for one in trained_of(block)))
    assert found[0] == found[1]


def test_packing_keeps_the_mask_and_no_label_crosses_a_border(place):
    manifest, encoder = data_of(place, "a.jsonl", lanes=3)
    assert (manifest.packing, manifest.document_mask) == ("bestfit", True)
    numbered = blocks_of(manifest, encoder, 12)
    batch = batch_of(numbered, manifest, first_block=0, wait_seconds=0.0, ended=False)
    known = dict(sequences_of(encoder, chats.rows_of(COUNT)))
    trained = 0
    for row, (_, block) in enumerate(numbered):
        labels = batch.labels[row]
        for span in block.spans:
            at, stop = span.at, span.at + span.stop - span.start
            ids = tuple(block.ids[at:stop].tolist())
            expected = [
                n if is_trained else NOT_TRAINED
                for n, is_trained in zip(ids[1:], known[ids][1:], strict=True)
            ]
            assert labels[at : stop - 1].tolist() == expected
            trained += sum(known[ids])
    assert batch.trained_tokens == trained == np.count_nonzero(batch.labels != NOT_TRAINED)
    assert batch.starts is not None


def test_a_state_in_the_middle_gives_the_same_blocks(place):
    manifest, encoder = data_of(place, "a.jsonl", lanes=2)
    blocks = blocks_of(manifest, encoder, 20)
    cursors = np.zeros((2, 1, 4), np.int64)
    for g, block in blocks[:9]:
        cursors[g % 2] = block.cursors
    from llmtrain.data.lanes import Lanes

    lanes = Lanes(manifest, encoder, Reader(Reading(60)), cursors, 9)
    for g, expected in blocks[9:]:
        found = lanes.take(g)
        assert (found.ids == expected.ids).all()
        assert (found.trained == expected.trained).all()


def test_held_out_conversations_are_whole_and_only_answers_are_scored(place, tmp_path):
    manifest, encoder = data_of(place, "a.jsonl", heldout=0.3)
    prepare(manifest, encoder, tmp_path / "eval", 1000, Reading(60))
    held = load(tmp_path / "eval")
    known = Counter(sequences_of(encoder, chats.rows_of(COUNT)))
    assert held.bytes == 0
    found: Counter = Counter()
    for g in range(held.num_blocks(SEQ_LEN)):
        ids, labels, starts = held.block(g, SEQ_LEN)
        for first, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
            part = tuple(ids[first:stop].tolist())
            if (labels[first : stop - 1] == NOT_TRAINED).all() and part not in dict(known):
                assert set(part) == {encoder.tokenizer.pad}
                continue
            flags = (False, *(labels[first : stop - 1] != NOT_TRAINED).tolist())
            found[part, flags] += 1
            assert labels[stop - 1] == NOT_TRAINED
    assert found.keys() <= known.keys()
    assert found.total() >= held.documents > 5
    assert held.num_blocks(SEQ_LEN) * SEQ_LEN == len(held.ids)


def test_texts_are_held_out_before_conversations(place, tmp_path):
    manifest, encoder = data_of(place, "text.jsonl", "a.jsonl", heldout=0.3)
    alone, tokens = data_of(place, "text.jsonl", heldout=0.3)
    prepare(manifest, encoder, tmp_path / "both", 1000, Reading(60))
    prepare(alone, tokens, tmp_path / "text", 1000, Reading(60))
    both, text = load(tmp_path / "both"), load(tmp_path / "text")
    assert (both.ids[: len(text.ids)] == text.ids).all()
    first = -(-len(text.ids) // SEQ_LEN) * SEQ_LEN
    assert both.starts[text.documents] in (len(text.ids), first)
    assert not both.scored[len(text.ids) : first + 1].any()


def test_the_manifest_keeps_what_decides_and_a_changed_template_is_refused(place, tmp_path):
    manifest, _ = data_of(place, "a.jsonl")
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    from llmtrain.config.schema import SourceConfig

    again = load_manifest(tmp_path / "manifest.json", [SourceConfig(path=str(place / "a.jsonl"))])
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    other, _ = data_of(place, "a.jsonl", chat={"train_turns": "last"})
    state = DataState.fresh(manifest)
    assert differing(state, other) == ["chat"]
    with pytest.raises(UserError, match="data: chat"):
        check(state, other, ())
    check(state, other, ("chat",))
    assert not carry_over(state, other).cursors.any()


def test_text_and_conversations_share_a_run(place):
    manifest, encoder = data_of(place, "text.jsonl", "a.jsonl", lanes=2)
    blocks = blocks_of(manifest, encoder, 16)
    assert {block.source for _, block in blocks} == {0, 1}
    for _, block in blocks:
        if block.source == 0 and block.trained is not None:
            stop = sum(span.stop - span.start for span in block.spans)
            assert block.trained[: stop - 1].all()


def test_a_later_bad_row_is_named_by_file_and_line(place, tmp_path):
    rows = chats.rows_of(30)
    rows[17]["messages"][0]["role"] = "bot"
    path = corpus.write_jsonl(tmp_path / "bad.jsonl", rows)
    manifest, encoder = chats.data_of(place / "tokenizer", path, lanes=1)
    how = {"batch": BatchSize.constant(4), "rank": 0, "world_size": 1, "workers": 0}
    stream = open_stream(manifest, place / "tokenizer", **how, reading=Reading(60))
    with pytest.raises(UserError) as error:
        list(islice(stream, 30))
    stream.close()
    assert f"{path}, line 18" in str(error.value)
    assert "role 'bot'" in str(error.value)
    assert "chat.bad_rows=skip" in str(error.value)
    skipping = Reader(Reading(60, skip_bad_rows=True))
    state = DataState.fresh(manifest)
    counts: Counter = Counter()
    for _, block in replay(manifest, encoder, skipping, state, 0, 20):
        counts.update(block.counts.get(0, {}))
    assert counts["rejected"] >= 1


def test_a_bad_row_is_counted_once_wherever_it_is(place, tmp_path):
    """Behind the last good one, too: rows are shuffled, so each of them is tried."""
    reader = Reader(Reading(60, skip_bad_rows=True))
    for bad in range(5):
        rows = chats.rows_of(5)
        rows[bad]["messages"][0]["role"] = "bot"
        path = corpus.write_jsonl(tmp_path / f"{bad}.jsonl", rows)
        manifest, encoder = chats.data_of(place / "tokenizer", path, lanes=1, epochs=1)
        counts: Counter = Counter()
        for _, block in replay(manifest, encoder, reader, DataState.fresh(manifest), 0, 9):
            counts.update(block.counts.get(0, {}))
        assert counts["rejected"] == 1, bad


def test_the_first_conversation_is_shown_with_what_is_trained(place):
    _, encoder = data_of(place, "a.jsonl")
    source = data_of(place, "a.jsonl")[0].sources[0]
    row = {"messages": chats.talk("Hi?", "Yes.")}
    (encoded,) = encoder.documents(source, [json.dumps(row)])
    text = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>⟧"
    assert with_marks(encoded, encoder.tokenizer).endswith(text)
