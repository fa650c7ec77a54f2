"""Conversations through the lanes, the held-out set and epochs, against the template alone."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from helpers import chats, corpus

from llmtrain.data.audit.count import epoch
from llmtrain.data.audit.first_rows import with_marks
from llmtrain.data.audit.ledger import replay
from llmtrain.data.batches import batch_of
from llmtrain.data.chat.rows import to_example
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.heldout import load, prepare
from llmtrain.data.manifest import load as load_manifest
from llmtrain.data.state import DataState, carry_over, check, differing
from llmtrain.data.stream import open_stream
from llmtrain.errors import UserError
from llmtrain.types import NOT_TRAINED

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
    how = {"blocks_per_step": 4, "rank": 0, "world_size": 1, "workers": 0}
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
