from dataclasses import replace

import numpy as np
import pytest
from helpers import corpus
from helpers.reference_stream import is_heldout, unit_rows

from llmtrain.data.heldout import HeldOut, load, prepare
from llmtrain.data.readers import Reading
from llmtrain.data.tokenizer import open_tokenizer
from llmtrain.data.units import survey


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("heldout")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a.parquet", corpus.articles(4000), group=40)
    corpus.write_parquet(root / "b.parquet", corpus.articles(60, 9000), group=5)
    return root


def held_names(source, seed=42):
    return [
        name
        for u in source.heldout_units
        for name, _ in unit_rows(source, source.units[u])
        if is_heldout(source, u, name, seed)
    ]


def split(path, fraction, **data):
    return survey(corpus.config(path, heldout=fraction, **data), 1).sources[0]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2])
def test_about_the_asked_share_is_held_out(place, fraction):
    source = split(place / "a.parquet", fraction)
    share = len(held_names(source)) / 4000
    assert abs(share - fraction) < 4 * (fraction / 4000) ** 0.5 + 0.3 * fraction


def test_evaluation_needs_few_units(place):
    source = split(place / "a.parquet", 0.01)
    assert len(source.heldout_units) == max(8, round(0.04 * len(source.units) + 0.5))


def test_a_tiny_share_still_holds_out_some_but_not_many(place):
    source = split(place / "a.parquet", 1e-6)
    in_units = sum(len(unit_rows(source, source.units[u])) for u in source.heldout_units)
    assert len(held_names(source)) == min(16, -(-in_units // 10))


def test_the_split_depends_on_the_seed_and_nothing_else(place):
    one, again = split(place / "a.parquet", 0.05), split(place / "a.parquet", 0.05)
    other = split(place / "a.parquet", 0.05, seed=1)
    assert held_names(one) == held_names(again)
    assert set(held_names(one)) != set(held_names(other, seed=1))


@pytest.mark.parametrize("count", [2, 3, 11])
def test_a_small_source_keeps_a_training_document(tmp_path, count):
    path = corpus.write_parquet(tmp_path / "few.parquet", corpus.articles(count), group=1)
    assert 1 <= len(held_names(split(path, 0.001))) < count


def test_a_source_of_one_document_is_trained_on(tmp_path):
    path = corpus.write_parquet(tmp_path / "one.parquet", corpus.articles(1))
    assert held_names(split(path, 0.001)) == []


def test_documents_with_equal_ids_are_never_all_held_out(tmp_path):
    rows = [{"id": "same", "text": f"text {n}"} for n in range(5)]
    assert held_names(split(corpus.write_parquet(tmp_path / "a.parquet", rows), 0.001)) == []


def prepared(place, tmp_path, *, limit=10_000, heldout=0.05, tokenizer=None):
    sources = (place / "a.parquet", place / "b.parquet")
    manifest = corpus.manifest_of(place / "tokenizer", *sources, heldout=heldout)
    tokenizer = tokenizer or open_tokenizer(place / "tokenizer")
    prepare(manifest, tokenizer, tmp_path / "eval.safetensors", limit, Reading(60))
    return manifest, tokenizer, load(tmp_path / "eval.safetensors")


def texts_of(manifest):
    """Held-out texts, by source."""
    return [
        [
            text
            for u in source.heldout_units
            for name, text in unit_rows(source, source.units[u])
            if is_heldout(source, u, name, 42)
        ]
        for source in manifest.sources
    ]


def test_every_token_of_every_held_out_document_is_scored_once(place, tmp_path):
    manifest, tokenizer, held = prepared(place, tmp_path)
    texts = [text for part in texts_of(manifest) for text in part]
    assert held.documents == len(texts)
    assert held.bytes == sum(len(text.encode()) for text in texts)
    scored = held.ids[held.scored]
    assert len(scored) == sum(len(tokenizer.encode(text)) for text in texts)
    assert tokenizer.eos not in scored
    assert held.ids[0] == tokenizer.eos
    pieces = np.split(held.ids, np.flatnonzero(held.ids == tokenizer.eos))[1:-1]
    assert sorted(tokenizer.decode(piece[1:]) for piece in pieces) == sorted(texts)


def test_sources_take_turns_until_there_are_enough(place, tmp_path):
    manifest, tokenizer, held = prepared(place, tmp_path, limit=5)
    one, two = texts_of(manifest)
    expected = [one[0], two[0], one[1], two[1], one[2]]
    found = tokenizer.decode(held.ids).split("<|endoftext|>")[1:-1]
    assert found == expected


def test_a_begin_token_takes_the_place_of_the_first_end_of_text(place, tmp_path):
    with_begin = replace(open_tokenizer(place / "tokenizer"), bos=7)
    _, _, held = prepared(place, tmp_path, tokenizer=with_begin)
    begins = np.flatnonzero((held.ids == 7) & ~held.scored)
    ends = np.flatnonzero((held.ids == with_begin.eos) & ~held.scored)
    assert begins[0] == 0
    assert begins[1:].tolist() == (ends[:-1] + 1).tolist()
    assert len(begins) == held.documents


@pytest.mark.parametrize("seq_len", [2, 7, 64, 100_000])
def test_blocks_hold_each_scored_token_as_a_label_once(place, tmp_path, seq_len):
    _, _, held = prepared(place, tmp_path, limit=20)
    labels = []
    for g in range(held.num_blocks(seq_len) + 2):
        ids, target = held.block(g, seq_len)
        assert (ids.shape, ids.dtype) == ((seq_len + 1,), np.int32)
        assert (target.shape, target.dtype) == ((seq_len,), np.int64)
        kept = target != -100
        assert np.array_equal(ids[1:][kept], target[kept])
        labels += target[kept].tolist()
    assert labels == held.ids[held.scored].tolist()


def test_no_block_is_padding_alone():
    held = HeldOut(np.arange(9, dtype=np.int32), np.arange(9) > 0, 1, 9, 0)
    assert [held.num_blocks(seq_len) for seq_len in (2, 4, 7, 8, 9)] == [4, 2, 2, 1, 1]


def test_nothing_held_out_is_no_file(place, tmp_path):
    assert prepared(place, tmp_path, heldout=0.0)[2] is None
