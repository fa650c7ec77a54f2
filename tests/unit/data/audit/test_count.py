from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import chats, corpus, megatron, vocabularies
from helpers.reference_stream import is_heldout, unit_rows

from llmtrain.data.audit import count
from llmtrain.data.audit.count import count_documents, epoch
from llmtrain.data.audit.ledger import replay
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Lane
from llmtrain.data.state import DataState
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.types import Cursor


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("count")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a.parquet", corpus.articles(4000), group=40)
    corpus.write_jsonl(root / "b.jsonl", corpus.articles(1500, 5000))
    corpus.write_jsonl(root / "mixed" / "c.jsonl.gz", corpus.articles(700, 7000))
    corpus.write_parquet(root / "mixed" / "d.parquet", corpus.articles(900, 8000), group=25)
    corpus.write_lines(root / "mixed" / "e.txt", [b"old stones lie"] * 500)
    rows = [*corpus.articles(900), {"id": "blank", "title": "", "text": " \n"}]
    corpus.write_parquet(root / "both" / "1.parquet", rows, group=20)
    corpus.write_jsonl(root / "both" / "2.jsonl", corpus.articles(300, 2000))
    return root


def manifest_of(place, *names, **data):
    return corpus.manifest_of(place / "tokenizer", *[place / name for name in names], **data)


def read(manifest, tokenizer):
    """Documents, bytes and tokens by the reference's reading: of those held out, and of others."""
    found = {False: np.zeros(3), True: np.zeros(3)}
    for source in manifest.sources:
        for u, unit in enumerate(source.units):
            for name, text in unit_rows(source, unit):
                if text.strip():
                    held = is_heldout(source, u, name, manifest.seed)
                    found[held] += 1, len(text.encode()), len(tokenizer.encode(text)) + 1
    return found[True], found[False]


def of_both(place, limit):
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = manifest_of(place, "both", heldout=0.05)
    reader = Reader(Reading(60))
    found = count_documents(manifest, 0, DocumentEncoder(tokenizer), reader, limit)
    return found, *read(manifest, tokenizer)


@pytest.mark.parametrize("limit", [0, 5000])
def test_all_rows_are_counted_by_what_is_trained_on_and_what_is_held_out(place, limit):
    found, held, training = of_both(place, limit)
    assert held[0] > 0
    assert found.exact
    assert (found.all, found.training) == (tuple(held + training), tuple(training))
    assert (found.dropped, found.looked_at) == (1, 1201)
    assert (sum(found.lengths.values()), found.duplicates) == (1200, 0)


def test_a_sample_of_rows_stands_for_all_of_its_format(place):
    found, held, training = of_both(place, 200)
    assert not found.exact
    assert 200 <= found.looked_at < 300
    assert found.all == pytest.approx(tuple(held + training), rel=0.15)
    assert found.training == pytest.approx(tuple(training), rel=0.15)


def test_a_source_of_little_text_is_counted(place):
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = manifest_of(place, "a.parquet", "b.jsonl", heldout=0.05, seq_len=100)
    found = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    documents, _, tokens = read(manifest, tokenizer)[1]
    assert (found.documents, found.tokens) == (documents, tokens)
    assert found.blocks == -(-tokens // 100)
    assert found.exact


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl", "mixed"])
@pytest.mark.parametrize("heldout", [0.0, 0.1])
def test_a_sample_tells_the_rest_within_some_percent(place, monkeypatch, name, heldout):
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = manifest_of(place, name, heldout=heldout)
    exact = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    monkeypatch.setattr(count, "SAMPLED_UNITS", 30)
    monkeypatch.setattr(count, "SAMPLED_BYTES", 4000)
    estimate = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    assert exact.exact
    assert not estimate.exact
    assert estimate.documents == pytest.approx(exact.documents, rel=0.05)
    assert estimate.tokens == pytest.approx(exact.tokens, rel=0.05)


def test_an_estimate_reads_no_more_than_its_sample(place, monkeypatch):
    read = set()
    original = Reader.rows

    def counting(self, source, unit, *more, **named):
        read.add((source.files[unit.file].name, unit.group))
        return original(self, source, unit, *more, **named)

    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = manifest_of(place, "mixed", lanes=48)
    assert len(manifest.sources[0].units) > 40
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    monkeypatch.setattr(count, "SAMPLED_UNITS", 10)
    monkeypatch.setattr(Reader, "rows", counting)
    first = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    names = [name for name, _ in read]
    assert (names.count("c.jsonl.gz"), names.count("d.parquet"), names.count("e.txt")) == (1, 10, 1)
    assert epoch(manifest, DocumentEncoder(tokenizer), Reading(60)) == first


def test_begin_tokens_count_too(place, monkeypatch):
    plain = open_tokenizer(place / "tokenizer")
    begins = replace(plain, bos=7)
    manifest = manifest_of(place, "a.parquet")
    one, two = (epoch(manifest, DocumentEncoder(t), Reading(60)) for t in (plain, begins))
    assert two.tokens == one.tokens + one.documents
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    one, two = (epoch(manifest, DocumentEncoder(t), Reading(60)) for t in (plain, begins))
    assert two.tokens == pytest.approx(one.tokens + one.documents, abs=1)


def test_best_fit_takes_the_blocks_that_its_padding_takes(place):
    """The blocks of one lane that walks the whole source once, packed for real."""
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = manifest_of(place, "a.parquet", packing="bestfit", seq_len=64, lanes=1)
    found = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    lane = Lane(
        manifest, DocumentEncoder(tokenizer), Reader(Reading(60)), 0, 0, [Cursor(0, 0, 0, 0)]
    )
    blocks = 0
    while lane.cursors[0].epoch < 1:
        lane.take()
        blocks += 1
    assert found.exact
    assert found.blocks > found.tokens / 64
    assert found.blocks == pytest.approx(blocks, rel=0.02)


def test_padding_is_measured_on_no_more_of_a_unit_than_it_needs(place, monkeypatch):
    asked = []
    encode = DocumentEncoder.documents

    def counted(self, source, texts):
        asked.append(len(texts))
        return encode(self, source, texts)

    monkeypatch.setattr(DocumentEncoder, "documents", counted)
    monkeypatch.setattr(count, "BATCH", 4)
    monkeypatch.setattr(count, "window_tokens", lambda seq_len: seq_len)
    manifest = manifest_of(place, "b.jsonl", packing="bestfit", seq_len=16)
    encoder = DocumentEncoder(open_tokenizer(place / "tokenizer"))
    found = epoch(manifest, encoder, Reading(60))
    assert found.documents == 1500
    assert 1500 < sum(asked) <= 1500 + 16  # some 70 documents are in a unit


def test_a_token_cache_is_counted_beside_text(place):
    tokenizer = open_tokenizer(place / "tokenizer")
    texts = [row["text"] for row in corpus.articles(300, 9000)]
    documents = [[ids.tolist()] for ids in tokenizer.documents(texts)]
    megatron.write(place / "cache" / "a.idx", documents)
    tokens = sum(len(ids) for (ids,) in documents)
    alone = epoch(manifest_of(place, "cache", seq_len=100), DocumentEncoder(tokenizer), Reading(60))
    assert (alone.documents, alone.tokens, alone.exact) == (300, tokens, True)
    assert alone.blocks == -(-tokens // 100)
    text = epoch(
        manifest_of(place, "b.jsonl", seq_len=100), DocumentEncoder(tokenizer), Reading(60)
    )
    both = epoch(
        manifest_of(place, "b.jsonl", "cache", seq_len=100), DocumentEncoder(tokenizer), Reading(60)
    )
    assert both.tokens == alone.tokens + text.tokens
    assert both.blocks == -(-both.tokens // 100)
    fitted = epoch(
        manifest_of(place, "cache", packing="bestfit"), DocumentEncoder(tokenizer), Reading(60)
    )
    assert tokens / 16 < fitted.blocks < 1.3 * tokens / 16


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations in files of three formats and very unequal sizes; each names itself."""
    root = tmp_path_factory.mktemp("talks")
    chats.make(root / "tokenizer", "chatml")
    corpus.write_parquet(root / "chat" / "1.parquet", chats.rows_of(60), group=3)
    corpus.write_jsonl(root / "chat" / "2.jsonl", chats.rows_of(23, 100))
    corpus.write_jsonl(root / "chat" / "3.jsonl.gz", chats.rows_of(9, 200))
    corpus.write_jsonl(root / "more.jsonl", chats.rows_of(5, 300))
    return root


def talks_of(talks, **data):
    """Two sources for five lanes, of which the second has fewer units than there are lanes."""
    sources = (talks / "chat", talks / "more.jsonl")
    return chats.data_of(talks / "tokenizer", *sources, lanes=5, epochs=2, **data)


def test_conversations_above_what_is_counted_of_text_are_counted_to_their_end(talks, monkeypatch):
    manifest, encoder = talks_of(talks)
    state = DataState.fresh(manifest)
    whole = epoch(manifest, encoder, Reading(60), (), state)
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    monkeypatch.setattr(count, "SAMPLED_UNITS", 2)
    monkeypatch.setattr(count, "SAMPLED_BYTES", 100)
    assert epoch(manifest, encoder, Reading(60), (), state) == whole
    assert whole.exact
    read, last = Counter(), [0] * manifest.lanes
    stop = whole.until_end + manifest.lanes
    for g, block in replay(manifest, encoder, Reader(Reading(60)), state, 0, stop):
        if block.source >= 0:
            last[g % manifest.lanes] = g
        for span in block.spans:
            read[tuple(block.ids[span.at : span.at + span.stop - span.start].tolist())] += 1
    assert max(last) == whole.until_end - 1
    assert max(last) - min(last) > manifest.lanes  # one ends at least a block before another
    assert len(read) == whole.documents == 60 + 23 + 9 + 5
    assert set(read.values()) == {2}


def test_the_end_is_counted_from_where_the_run_is(talks):
    """As at a resume under another number of epochs, which begins after some blocks."""
    manifest, encoder = talks_of(talks)
    state = DataState.fresh(manifest)
    whole = epoch(manifest, encoder, Reading(60), (), state)
    cursors = state.cursors.copy()
    for g, block in replay(manifest, encoder, Reader(Reading(60)), state, 0, 8):
        cursors[g % manifest.lanes] = np.array(block.cursors)
    later = replace(state, cursors=cursors, next_block=8)
    found = epoch(manifest, encoder, Reading(60), (), later)
    assert (whole.first, whole.passes, found.first) == (0, 2, 8)
    assert replace(found, first=0) == whole


def test_more_conversations_than_can_be_counted_have_no_counted_end(talks, monkeypatch):
    manifest, encoder = talks_of(talks)
    state = DataState.fresh(manifest)
    assert epoch(manifest, encoder, Reading(60)).until_end is None  # there is no run
    monkeypatch.setattr(count, "SAMPLED_UNITS", 2)
    monkeypatch.setattr(count, "SAMPLED_BYTES", 100)
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    assert not epoch(manifest, encoder, Reading(60)).exact
    monkeypatch.setattr(count, "COUNTED_CHAT_BYTES", 0)
    found = epoch(manifest, encoder, Reading(60), (), state)
    assert (found.exact, found.until_end) == (False, None)


@pytest.mark.parametrize(
    ("name", "documents"),
    [("sample", 4 * 591), pytest.param("20140304.en", 64_183, marks=pytest.mark.slow)],
)
def test_documents_of_articles_are_estimated_within_two_percent(
    place, monkeypatch, name, documents
):
    tokenizer = open_tokenizer(place / "tokenizer")
    source = name if name == "sample" else vocabularies.shared(f"wikipedia/{name}")
    manifest = corpus.manifest_of(place / "tokenizer", source, heldout=0.005)
    monkeypatch.setattr(count, "SAMPLED_BYTES", 4096)
    monkeypatch.setattr(count, "COUNTED_BYTES", 0)
    found = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    assert not found.exact
    assert found.documents == pytest.approx(documents * 0.995, rel=0.02)
