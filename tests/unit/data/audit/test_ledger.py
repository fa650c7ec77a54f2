import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus, megatron, reference_stream

from llmtrain.batch_size import BatchSize
from llmtrain.data.audit.ledger import document_of, is_whole, origins, replay, text_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.state import DataState
from llmtrain.data.stream import open_stream
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer

BLOCKS = 700  # several epochs of each source


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory of parquet, JSONL, JSONL.gz and text, and a second source."""
    root = tmp_path_factory.mktemp("ledger")
    corpus.write_tokenizer(root / "tokenizer")
    wiki = [row | {"url": f"https://example.org/{row['id']}"} for row in corpus.articles(43)]
    corpus.write_parquet(root / "a" / "1.parquet", wiki)
    corpus.write_jsonl(root / "a" / "2.jsonl", corpus.articles(29, 100))
    corpus.write_jsonl(root / "a" / "3.jsonl.gz", corpus.articles(11, 200))
    texts = [row["text"].replace("\n", " ").encode() for row in corpus.articles(17, 300)]
    corpus.write_lines(root / "a" / "4.txt", texts)
    corpus.write_jsonl(root / "b.jsonl", corpus.articles(31, 500))
    return root


@pytest.fixture(scope="module")
def articles(place):
    """id → row, by ordinary means; of the text file by place."""
    rows = {row["id"]: row for row in pq.read_table(place / "a" / "1.parquet").to_pylist()}
    lines = (place / "a" / "2.jsonl").read_text() + (place / "b.jsonl").read_text()
    lines += gzip.decompress((place / "a" / "3.jsonl.gz").read_bytes()).decode()
    return rows | {row["id"]: row for row in map(json.loads, lines.splitlines())}


def manifest_of(place, packing):
    sources = ({"path": str(place / "a"), "weight": 2.0}, {"path": str(place / "b.jsonl")})
    return corpus.manifest_of(
        place / "tokenizer", *sources, lanes=5, heldout=0.1, packing=packing, seq_len=24
    )


def replayed(manifest, place, *, first=0, stop=BLOCKS, cursors=None, next_block=0):
    state = replace(DataState.fresh(manifest), next_block=next_block)
    state = state if cursors is None else replace(state, cursors=cursors)
    tokenizer = open_tokenizer(place / "tokenizer")
    return list(
        replay(manifest, DocumentEncoder(tokenizer), Reader(Reading(60)), state, first, stop)
    )


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_every_span_holds_the_tokens_of_the_document_that_is_named(place, articles, packing):
    manifest, tokenizer = manifest_of(place, packing), open_tokenizer(place / "tokenizer")
    placed = [
        (block, span, document_of(manifest, g, block, span))
        for g, block in replayed(manifest, place)
        for span in block.spans
    ]
    found = origins(manifest, Reader(Reading(60)), {document for *_, document in placed})
    assert {document.epoch for document in found} >= {0, 1}
    named = set()
    for block, span, document in placed:
        origin = found[document]
        named.add(origin.file)
        if origin.file == "4.txt":
            data = (place / "a" / "4.txt").read_bytes()
            text = data[origin.at : data.index(b"\n", origin.at)].decode()
            assert (origin.id, origin.title, origin.url, origin.group) == (None,) * 4
        else:
            row = articles[origin.id]
            text = row["text"]
            assert (origin.title, origin.url) == (row["title"], row.get("url"))
        tokens = [*tokenizer.encode(text), tokenizer.eos]
        stands = block.ids[span.at : span.at + span.stop - span.start].tolist()
        assert stands == tokens[span.start : span.stop]
    assert named == {"1.parquet", "2.jsonl", "3.jsonl.gz", "4.txt", "b.jsonl"}


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_spans_leave_no_token_of_a_block_without_a_document_but_padding(place, packing):
    pad = open_tokenizer(place / "tokenizer").pad
    for _, block in replayed(manifest_of(place, packing), place):
        held = [i for s in block.spans for i in range(s.at, s.at + s.stop - s.start)]
        assert held == list(range(len(held)))
        assert set(block.ids[len(held) :].tolist()) <= {pad}
        assert packing == "bestfit" or len(held) == 25


def test_the_place_of_a_document_is_where_its_row_lies_in_the_file(place):
    manifest = manifest_of(place, "concat")
    documents = {
        document_of(manifest, g, block, span)
        for g, block in replayed(manifest, place)
        for span in block.spans
    }
    files = set()
    for origin in origins(manifest, Reader(Reading(60)), documents).values():
        if origin.file == "1.parquet":
            table = pq.ParquetFile(place / "a" / "1.parquet").read_row_group(origin.group)
            assert table.column("id")[origin.at].as_py() == origin.id
        elif origin.file.endswith(".jsonl"):
            path = place / "b.jsonl" if origin.file == "b.jsonl" else place / "a" / origin.file
            assert json.loads(path.read_bytes()[origin.at :].split(b"\n")[0])["id"] == origin.id
        files.add(origin.file)
    assert len(files) == 5


def test_replayed_blocks_are_those_of_the_slow_walk(place, tmp_path):
    corpus.write_parquet(tmp_path / "a" / "1.parquet", corpus.articles(43))
    sources = ({"path": str(tmp_path / "a"), "weight": 2.0}, {"path": str(place / "b.jsonl")})
    manifest = corpus.manifest_of(place / "tokenizer", *sources, lanes=5, heldout=0.1)
    tokenizer = open_tokenizer(place / "tokenizer")
    expected = [block.ids for block in reference_stream.blocks(manifest, tokenizer, BLOCKS)]
    found = replayed(manifest, place, first=77)
    assert [g for g, _ in found] == list(range(77, BLOCKS))
    assert [block.ids.tolist() for _, block in found] == expected[77:]


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_a_replay_from_a_saved_state_gives_the_blocks_of_one_from_the_beginning(place, packing):
    manifest = manifest_of(place, packing)
    stream = open_stream(
        manifest,
        place / "tokenizer",
        batch=BatchSize.constant(7),
        rank=0,
        world_size=1,
        workers=0,
        reading=Reading(60),
    )
    cursors = DataState.fresh(manifest).cursors
    for _ in range(9):
        for lane, behind in next(stream).cursors.items():
            cursors[lane] = np.array(behind)
    stream.close()
    whole = replayed(manifest, place)
    part = replayed(manifest, place, first=81, cursors=cursors, next_block=63)
    assert [block.ids.tolist() for _, block in part] == [b.ids.tolist() for _, b in whole[81:]]
    assert [block.spans for _, block in part] == [block.spans for _, block in whole[81:]]


def test_only_the_lanes_that_are_asked_for_are_walked(place):
    manifest = manifest_of(place, "concat")
    reader = Reader(Reading(60))
    tokenizer = open_tokenizer(place / "tokenizer")
    list(
        replay(
            manifest, DocumentEncoder(tokenizer), reader, DataState.fresh(manifest), first=3, stop=4
        )
    )
    assert reader.units.reads == 1


def test_ids_that_are_numbers_are_named_as_text_and_missing_columns_are_none(tmp_path, place):
    table = pa.table({"id": [7, None, 9], "text": ["one", "two", "three"], "url": ["u", None, "w"]})
    pq.write_table(table, tmp_path / "n.parquet")
    manifest = corpus.manifest_of(place / "tokenizer", tmp_path / "n.parquet", lanes=1, seq_len=8)
    documents = {
        document_of(manifest, g, block, span)
        for g, block in replayed(manifest, place, stop=9)
        for span in block.spans
    }
    found = {
        origin.at: origin for origin in origins(manifest, Reader(Reading(60)), documents).values()
    }
    assert [found[at].id for at in range(3)] == ["7", None, "9"]
    assert [found[at].url for at in range(3)] == ["u", None, "w"]
    assert {origin.title for origin in found.values()} == {None}


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_documents_of_a_token_cache_are_named_by_file_and_number(tmp_path, place, packing):
    tokenizer = open_tokenizer(place / "tokenizer")
    texts = [row["text"] for row in corpus.articles(60)]
    stored = [[ids.tolist()] for ids in tokenizer.documents(texts)]
    stored[20] = [[]]
    megatron.write(tmp_path / "cache" / "a.idx", stored[:45])
    megatron.write(tmp_path / "cache" / "b.idx", stored[45:], code=4)
    manifest = corpus.manifest_of(
        place / "tokenizer", tmp_path / "cache", lanes=5, heldout=0.1, packing=packing
    )
    placed = [
        (block, span, document_of(manifest, g, block, span))
        for g, block in replayed(manifest, place, stop=400)
        for span in block.spans
    ]
    found = origins(manifest, Reader(Reading(60)), {document for *_, document in placed})
    assert {origin.file for origin in found.values()} == {"a.idx", "b.idx"}
    for block, span, document in placed:
        origin = found[document]
        number = origin.at + (45 if origin.file == "b.idx" else 0)
        assert origin == (origin.file, None, origin.at, str(number), None, None)
        stands = block.ids[span.at : span.at + span.stop - span.start].tolist()
        assert stands == stored[number][0][span.start : span.stop]
        whole = (span.start, span.stop) == (0, len(stored[number][0]))
        if span.start == 0:
            assert is_whole(manifest, tokenizer, document, block, span) == whole
        expected = texts[number] if whole else None
        assert expected in (None, text_of(tokenizer, np.array(stands)))


def test_a_document_is_whole_where_all_of_it_stands_in_one_block(place, articles):
    manifest, tokenizer = manifest_of(place, "concat"), open_tokenizer(place / "tokenizer")
    seen = set()
    for g, block in replayed(manifest, place, stop=100):
        for span in block.spans:
            document = document_of(manifest, g, block, span)
            origin = origins(manifest, Reader(Reading(60)), [document])[document]
            if origin.id is not None and span.start == 0:
                length = len(tokenizer.encode(articles[origin.id]["text"])) + 1
                whole = is_whole(manifest, tokenizer, document, block, span)
                assert whole == (span.stop == length)
                seen.add(whole)
    assert seen == {True, False}
