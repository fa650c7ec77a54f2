import json
import logging
from collections import Counter

import numpy as np
import pytest
import xxhash
from helpers import corpus, megatron

from llmtrain.config.binding import data_settings
from llmtrain.data import heldout
from llmtrain.data.audit.count import count_documents, epoch
from llmtrain.data.audit.ledger import document_of, origins
from llmtrain.data.documents.reader import Reader, Reading, units_of
from llmtrain.data.lanes import START, Lane
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.sources.token_cache import TokenFile
from llmtrain.data.survey import check
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

SEQ_LEN = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two pairs of files, with empty documents and one of several sequences; a tokenizer."""
    root = tmp_path_factory.mktemp("cache")
    tokenizer = open_tokenizer(corpus.write_tokenizer(root / "tokenizer"))
    texts = [row["text"] for row in corpus.articles(60)]
    documents = [[ids.tolist()] for ids in tokenizer.documents(texts)]
    documents[7] = [documents[7][0][:5], [], documents[7][0][5:]]
    documents[20] = [[]]
    documents[40] = []
    megatron.write(root / "cache" / "b.idx", documents[45:], code=4)
    megatron.write(root / "cache" / "a.idx", documents[:45])
    return root


@pytest.fixture(scope="module")
def manifest(place):
    return corpus.manifest_of(place / "tokenizer", place / "cache", lanes=5, heldout=0.1)


def all_documents(place):
    """Every document's tokens, by the independent reader, in order of files."""
    return [ids for name in "ab" for ids in megatron.read(place / "cache" / f"{name}.idx")[1]]


def held_out(manifest, place):
    """Numbers of the held-out documents, by the rule."""
    (source,) = manifest.sources
    first = {0: 0, 2: 45}  # a.idx and b.idx are files 1 and 3 of a.bin, a.idx, b.bin, b.idx
    found = set()
    for u in source.heldout_units:
        unit = source.units[u]
        for number in range(first[unit.file - 1] + unit.start, first[unit.file - 1] + unit.stop):
            digest = xxhash.xxh3_64_intdigest(str(number).encode(), seed=manifest.seed)
            if digest < source.threshold and all_documents(place)[number]:
                found.add(number)
    return found


def expected_blocks(manifest, place):
    """The blocks of any epoch as (ids, starts), in order of the stream, computed slowly."""
    held = held_out(manifest, place)
    kept = [ids for n, ids in enumerate(all_documents(place)) if n not in held]
    ring = [token for ids in kept for token in ids]
    begins = np.cumsum([0, *map(len, kept)])[:-1].tolist()
    count = -(-len(ring) // manifest.seq_len)
    found = []
    for block in range(count):
        positions = range(block * manifest.seq_len, (block + 1) * manifest.seq_len + 1)
        ids = [ring[position % len(ring)] for position in positions]
        starts = [at for at, p in enumerate(positions) if p % len(ring) in begins]
        found.append((ids, sorted({0, *starts})))
    return found


def lane_blocks(manifest, place, index, count, cursor=START):
    tokenizer = open_tokenizer(place / "tokenizer")
    lane = Lane(manifest, DocumentEncoder(tokenizer), Reader(Reading(60)), index, index, [cursor])
    return [lane.take() for _ in range(count)]


def test_each_epoch_is_a_permutation_of_all_blocks_dealt_to_the_lanes(manifest, place):
    blocks = expected_blocks(manifest, place)
    assert len(held_out(manifest, place)) >= 2
    for lane in range(5):
        expected = []
        for e in range(3):
            order = permutation(len(blocks), mix(manifest.seed, 5, 0, e)).tolist()
            expected += order[(lane + mix(manifest.seed, 6, 0, e)) % 5 :: 5]
        found = lane_blocks(manifest, place, lane, len(expected))
        assert [block.ids.tolist() for block in found] == [blocks[n][0] for n in expected]


def test_documents_borders_come_from_the_lengths(manifest, place):
    blocks = {tuple(ids): starts for ids, starts in expected_blocks(manifest, place)}
    documents = all_documents(place)
    for block in lane_blocks(manifest, place, 1, 30):
        assert block.starts.dtype == np.int32
        starts = blocks[tuple(block.ids.tolist())]
        assert [at for at in block.starts.tolist() if at < SEQ_LEN] == [
            at for at in starts if at < SEQ_LEN
        ]
        for span in block.spans:
            piece = block.ids[span.at : span.at + span.stop - span.start]
            assert piece.tolist() == documents[span.row][span.start : span.stop]


def test_every_training_token_is_a_target_and_no_held_out_one_ever(manifest, place):
    documents, held = all_documents(place), held_out(manifest, place)
    targets = Counter()
    for lane in range(5):
        cursor, blocks = START, []
        while cursor.epoch == 0:
            (block,) = lane_blocks(manifest, place, lane, 1, cursor)
            (cursor,) = block.cursors
            blocks.append(block)
        for block in blocks[: -1 if blocks[-1].spans[0].epoch else None]:
            for span in block.spans:
                for token in range(span.start, span.stop):
                    targets[span.row, token] += span.at + token - span.start > 0
    wanted = {(n, t) for n, ids in enumerate(documents) if n not in held for t in range(len(ids))}
    assert targets.keys() == wanted
    assert sum(targets.values()) < len(wanted) + SEQ_LEN
    assert all(count >= 1 for count in targets.values())


@pytest.mark.parametrize("steps", [1, 7, 23])
def test_a_lane_opened_at_any_cursor_goes_on_with_the_same_blocks(manifest, place, steps):
    straight = lane_blocks(manifest, place, 2, steps + 10)
    (cursor,) = straight[steps - 1].cursors
    again = lane_blocks(manifest, place, 2, 10, cursor)
    assert [b.ids.tolist() for b in again] == [b.ids.tolist() for b in straight[steps:]]
    assert [b.cursors for b in again] == [b.cursors for b in straight[steps:]]


def test_opening_far_into_the_run_reads_one_block(manifest, place, monkeypatch):
    read = []
    real = TokenFile.ids

    def counting(self, start, stop, length):
        read.append(stop - start)
        return real(self, start, stop, length)

    monkeypatch.setattr(TokenFile, "ids", counting)
    (block,) = lane_blocks(manifest, place, 3, 1, Cursor(50_000, 2, 0, 0))
    assert block.spans[0].epoch == 50_000
    assert sum(read) == SEQ_LEN + 1


def test_a_source_smaller_than_a_block_goes_round(place, tmp_path):
    megatron.write(tmp_path / "one.idx", [[[1, 2, 3]]])
    manifest = corpus.manifest_of(place / "tokenizer", tmp_path / "one.idx", lanes=2)
    (block,) = lane_blocks(manifest, place, 0, 1)
    assert block.ids.tolist() == ([1, 2, 3] * 6)[:17]
    assert [at for at in block.starts.tolist() if at < 16] == [0, 3, 6, 9, 12, 15]


def test_the_held_out_documents_are_those_that_are_evaluated(manifest, place, tmp_path):
    tokenizer = open_tokenizer(place / "tokenizer")
    heldout.prepare(manifest, DocumentEncoder(tokenizer), tmp_path / "eval", 1000, Reading(60))
    found = heldout.load(tmp_path / "eval")
    documents = [all_documents(place)[n] for n in held_out(manifest, place)]
    got = np.split(found.ids, found.starts)[1:]
    assert sorted(ids.tolist() for ids in got) == sorted(documents)
    texts = [tokenizer.decode(ids[:-1]) for ids in documents]
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert found.scored.sum() == sum(len(ids) - 1 for ids in documents)


def test_as_evaluation_source_every_document_counts(place, tmp_path):
    from llmtrain.config.schema import Config
    from llmtrain.data.survey import evaluation_sources

    values = corpus.config(place / "cache").model_dump(by_alias=True)
    values["evaluation"]["sources"] = [{"path": str(place / "cache")}]
    sources = evaluation_sources(data_settings(Config.model_validate(values)), Reading(60))
    manifest = corpus.manifest_of(place / "tokenizer", place / "cache")
    tokenizer = open_tokenizer(place / "tokenizer")
    heldout.prepare(
        manifest, DocumentEncoder(tokenizer), tmp_path / "eval", 1000, Reading(60), sources
    )
    documents = [ids for ids in all_documents(place) if ids]
    assert heldout.load(tmp_path / "eval").documents == len(documents) == 58


def test_a_document_without_an_end_is_evaluated_with_one(place, tmp_path):
    tokenizer = open_tokenizer(place / "tokenizer")
    ids = tokenizer.encode("some words").tolist()
    megatron.write(tmp_path / "x.idx", [[ids]] * 40)
    manifest = corpus.manifest_of(place / "tokenizer", tmp_path / "x.idx", heldout=0.5)
    heldout.prepare(manifest, DocumentEncoder(tokenizer), tmp_path / "eval", 3, Reading(60))
    found = heldout.load(tmp_path / "eval")
    assert found.ids.tolist() == [tokenizer.eos, *[*ids, tokenizer.eos] * 3]
    assert found.bytes == 3 * len("some words")


@pytest.mark.parametrize("path", ["cache", "cache/*.idx", "cache/*"])
def test_a_directory_and_a_glob_name_all_pairs(place, path):
    (source,) = corpus.manifest_of(place / "tokenizer", place / path).sources
    assert [file.name for file in source.files] == ["a.bin", "a.idx", "b.bin", "b.idx"]
    assert source.cached


def test_one_index_names_its_pair(place):
    (source,) = corpus.manifest_of(place / "tokenizer", place / "cache" / "b.idx").sources
    assert [file.name for file in source.files] == ["b.bin", "b.idx"]


def test_what_lies_beside_a_pair_is_no_data_but_other_data_is_refused(place, tmp_path):
    megatron.write(tmp_path / "a.idx", [[[1, 2]]])
    corpus.write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "merges.txt").write_text("a b")
    (source,) = corpus.manifest_of(place / "tokenizer", tmp_path).sources
    assert [file.name for file in source.files] == ["a.bin", "a.idx"]
    corpus.write_jsonl(tmp_path / "more.jsonl", corpus.articles(3))
    with pytest.raises(UserError, match=r"more\.jsonl"):
        corpus.manifest_of(place / "tokenizer", tmp_path)


def test_damaged_files_are_refused_before_the_first_step(place, tmp_path):
    index = megatron.write(tmp_path / "a.idx", [[[1, 2]], [[3]]])
    index.with_suffix(".bin").write_bytes(b"123")
    with pytest.raises(UserError, match="3 bytes"):
        corpus.manifest_of(place / "tokenizer", index)


def test_changed_tokens_are_refused_at_a_later_start(place, tmp_path):
    index = megatron.write(tmp_path / "a.idx", [[[1, 2]], [[3]]])
    manifest = corpus.manifest_of(place / "tokenizer", index)
    config, tokenizer = corpus.config(index), open_tokenizer(place / "tokenizer")
    check(manifest, data_settings(config), DocumentEncoder(tokenizer))
    megatron.write(index, [[[1, 2]], [[4]]])
    with pytest.raises(UserError, match=r"a\.bin"):
        check(manifest, data_settings(config), DocumentEncoder(tokenizer))


def test_an_id_beyond_the_tokenizer_is_named_when_it_is_met(place, tmp_path):
    index = megatron.write(tmp_path / "a.idx", [[[1, 2, 300, 4]]])
    manifest = corpus.manifest_of(place / "tokenizer", index, lanes=1)
    with pytest.raises(UserError, match=r"a\.bin, token 2 = 300"):
        lane_blocks(manifest, place, 0, 1)


def test_files_without_a_description_are_taken_with_one_warning(place, caplog):
    with caplog.at_level(logging.WARNING):
        corpus.manifest_of(place / "tokenizer", place / "cache" / "a.idx")
    (said,) = [r.message for r in caplog.records if "a.json" in r.message]
    assert "cannot be checked" in said


def test_another_tokenizer_than_the_caches_is_refused(place, tmp_path):
    index = megatron.write(tmp_path / "a.idx", [[[1, 2]]])
    other = open_tokenizer(corpus.write_tokenizer(tmp_path / "other", 280))
    said = token_cache.describe_tokenizer(other)
    index.with_suffix(".json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="the tokenizer that wrote"):
        corpus.manifest_of(place / "tokenizer", index)
    corpus.manifest_of(tmp_path / "other", index)
    said["tokenizer"] = "saved again: other files, the same ids"
    index.with_suffix(".json").write_text(json.dumps(said))
    corpus.manifest_of(tmp_path / "other", index)
    index.with_suffix(".json").write_text("{}")
    with pytest.raises(UserError, match="the description that"):
        corpus.manifest_of(tmp_path / "other", index)


def test_no_tokenizer_can_be_trained_on_tokens(place):
    from llmtrain.data.survey import survey, training_texts

    found = survey(data_settings(corpus.config(place / "cache")), 1)
    with pytest.raises(UserError, match="sources of text"):
        next(training_texts(found, 100))


def test_whole_documents_are_packed_from_a_cache_too(place):
    more = {"lanes": 3, "heldout": 0.1, "packing": "bestfit", "seq_len": 64}
    manifest = corpus.manifest_of(place / "tokenizer", place / "cache", **more)
    documents, held = all_documents(place), held_out(manifest, place)
    (source,) = manifest.sources
    first = {1: 0, 3: 45}
    seen = Counter()
    for index in range(3):
        cursor = START
        while cursor.epoch == 0:
            (block,) = lane_blocks(manifest, place, index, 1, cursor)
            for span in block.spans:
                units = units_of(manifest, 0, span.epoch, index)
                u = int(units[span.unit])
                unit = source.units[u]
                key = mix(manifest.seed, 2, 0, span.epoch, u)
                row = int(permutation(unit.stop - unit.start, key)[span.row])
                number = first[unit.file] + unit.start + row
                piece = block.ids[span.at : span.at + span.stop - span.start].tolist()
                assert piece == documents[number][span.start : span.stop]
                assert len(documents[number]) > 65 or span.stop - span.start == len(piece)
                seen[number] += span.epoch == 0
            (cursor,) = block.cursors
    assert {n for n, ids in enumerate(documents) if ids} - held == {n for n in seen if seen[n]}


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_a_cache_ends_after_its_epochs(place, packing):
    path = {"path": str(place / "cache"), "max_epochs": 2}
    manifest = corpus.manifest_of(place / "tokenizer", path, lanes=3, packing=packing)
    tokens = Counter()
    for index in range(3):
        blocks = lane_blocks(manifest, place, index, 400)
        real = [block for block in blocks if block.source == 0]
        assert 0 < len(real) < 400
        assert [block.source for block in blocks[len(real) :]] == [-1] * (400 - len(real))
        for block in real:
            for span in block.spans:
                tokens[span.row if packing == "concat" else 0] += span.stop - span.start
    total = sum(map(len, all_documents(place)))
    assert 2 * total <= sum(tokens.values()) < 2 * total * 1.2


def test_an_epoch_of_a_cache_is_known_exactly(manifest, place):
    tokenizer = open_tokenizer(place / "tokenizer")
    found = epoch(manifest, DocumentEncoder(tokenizer), Reading(60))
    held = held_out(manifest, place)
    kept = [ids for n, ids in enumerate(all_documents(place)) if n not in held]
    assert found.tokens == sum(map(len, kept))
    assert found.blocks == len(expected_blocks(manifest, place))
    assert found.exact


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_the_documents_of_a_block_are_named_by_file_and_number(place, packing):
    more = {"lanes": 3, "heldout": 0.1, "packing": packing, "seq_len": 64}
    manifest = corpus.manifest_of(place / "tokenizer", place / "cache", **more)
    documents = all_documents(place)
    for block in lane_blocks(manifest, place, 1, 20):
        for span in block.spans:
            document = document_of(manifest, 1, block, span)
            origin = origins(manifest, Reader(Reading(60)), [document])[document]
            number = int(origin.id)
            piece = block.ids[span.at : span.at + span.stop - span.start].tolist()
            assert piece == documents[number][span.start : span.stop]
            assert (origin.file, origin.at) == (
                ("a.idx", number) if number < 45 else ("b.idx", number - 45)
            )


@pytest.mark.parametrize("limit", [0, 20])
def test_the_documents_of_a_cache_are_counted(manifest, place, limit):
    tokenizer = open_tokenizer(place / "tokenizer")
    found = count_documents(manifest, 0, DocumentEncoder(tokenizer), Reader(Reading(60)), limit)
    documents = [ids for ids in all_documents(place) if ids]
    if limit:
        assert found.looked_at >= limit
        assert found.all.documents == pytest.approx(len(documents), abs=6)
    else:
        assert (found.all.documents, found.dropped) == (len(documents), 2)
        assert found.all.tokens == sum(map(len, documents))
        assert found.training.documents == len(documents) - len(held_out(manifest, place))
        texts = [tokenizer.decode(ids[:-1]).encode() for ids in documents]
        assert found.all.bytes == sum(map(len, texts))
