import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import corpus
from helpers.reference_stream import is_heldout, unit_rows
from safetensors import safe_open
from safetensors.numpy import save_file

from llmtrain.config.binding import data_settings
from llmtrain.data.documents.reader import Reader, Reading, reading_of
from llmtrain.data.heldout import HeldOut, load, prepare
from llmtrain.data.survey import evaluation_sources, freeze, survey
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError


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
    return survey(data_settings(corpus.config(path, heldout=fraction, **data)), 1).sources[0]


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


def prepared(place, tmp_path, *, limit=10_000, heldout=0.05, tokenizer=None, **data):
    sources = (place / "a.parquet", place / "b.parquet")
    manifest = corpus.manifest_of(place / "tokenizer", *sources, heldout=heldout, **data)
    tokenizer = tokenizer or open_tokenizer(place / "tokenizer")
    prepare(manifest, DocumentEncoder(tokenizer), tmp_path / "eval.safetensors", limit, Reading(60))
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
    assert tokenizer.decode(held.ids).split("<|endoftext|>")[1:-1] == expected


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
        ids, target, _ = held.block(g, seq_len)
        assert (ids.shape, ids.dtype) == ((seq_len + 1,), np.int32)
        assert (target.shape, target.dtype) == ((seq_len,), np.int64)
        kept = target != -100
        assert np.array_equal(ids[1:][kept], target[kept])
        labels += target[kept].tolist()
    assert labels == held.ids[held.scored].tolist()


def test_no_block_is_padding_alone():
    held = HeldOut(np.arange(9, dtype=np.int32), np.arange(9) > 0, np.array([1]), 1, 9, 0)
    assert [held.num_blocks(seq_len) for seq_len in (2, 4, 7, 8, 9)] == [4, 2, 2, 1, 1]


def test_nothing_held_out_is_no_file(place, tmp_path):
    assert prepared(place, tmp_path, heldout=0.0)[2] is None


@pytest.mark.parametrize("begin", [None, 7])
@pytest.mark.parametrize("seq_len", [2, 7, 64, 100_000])
def test_blocks_say_where_documents_begin(place, tmp_path, seq_len, begin):
    tokenizer = replace(open_tokenizer(place / "tokenizer"), bos=begin)
    _, _, held = prepared(place, tmp_path, limit=20, tokenizer=tokenizer)
    ends = np.flatnonzero(held.ids == tokenizer.eos)
    borders = {0, *(ends + 1).tolist()}  # behind the last end of text there is padding
    for g in range(held.num_blocks(seq_len) + 2):
        _, _, starts = held.block(g, seq_len)
        inside = {p - g * seq_len for p in borders if 0 < p - g * seq_len < seq_len}
        assert starts.dtype == np.int32
        assert starts.tolist() == sorted({0, *inside})


def test_under_a_document_mask_only_what_has_a_context_is_scored(place, tmp_path):
    manifest, tokenizer, held = prepared(place, tmp_path, document_mask=True)
    assert manifest.document_mask
    texts = [text for part in texts_of(manifest) for text in part]
    first = [tokenizer.decode(tokenizer.encode(text)[:1]) for text in texts]
    assert held.bytes == sum(len(t.encode()) for t in texts) - sum(map(len, first))
    assert held.scored.sum() == sum(len(tokenizer.encode(text)) - 1 for text in texts)
    assert not held.scored[held.starts].any()
    assert held.scored[held.starts + 1].all()


def test_a_first_character_of_several_tokens_is_left_out_as_a_whole(tmp_path, place):
    texts = ["\u4e2d\u6587 words", "\U0001f600 smile"]
    path = corpus.write_parquet(tmp_path / "a.parquet", [{"text": text} for text in texts])
    config = with_evaluation(place, path, document_mask=True)
    held = own(config, place, tmp_path)
    assert held.bytes == sum(len(text[1:].encode()) for text in texts)
    assert held.scored[held.starts].tolist() == [False, False]


def test_with_a_begin_token_a_document_mask_changes_nothing(place, tmp_path):
    tokenizer = replace(open_tokenizer(place / "tokenizer"), bos=7)
    _, _, plain = prepared(place, tmp_path, tokenizer=tokenizer)
    _, _, masked = prepared(place, tmp_path, tokenizer=tokenizer, document_mask=True)
    assert np.array_equal(plain.scored, masked.scored)
    assert plain.bytes == masked.bytes


def with_evaluation(place, *paths, limit=2000, **data):
    config = corpus.config(place / "a.parquet", heldout=0.05, **data)
    fields = config.model_dump(by_alias=True, exclude_unset=True)
    fields["evaluation"] = {"sources": [{"path": str(p)} for p in paths], "max_documents": limit}
    return type(config).model_validate(fields)


def own(config, place, tmp_path, reading=None):
    reading = reading or reading_of(data_settings(config), None)
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    sources = evaluation_sources(data_settings(config), reading)
    path = tmp_path / "eval.safetensors"
    prepare(
        manifest,
        DocumentEncoder(tokenizer),
        path,
        config.evaluation.max_documents,
        reading,
        sources,
    )
    return load(path)


def test_with_evaluation_sources_nothing_is_held_out_of_the_others(place):
    found = survey(data_settings(with_evaluation(place, place / "b.parquet")), 1)
    assert freeze(found, open_tokenizer(place / "tokenizer")).own_evaluation
    assert [(source.heldout_units, source.threshold) for source in found.sources] == [((), 0)]


def test_every_document_of_the_evaluation_sources_is_evaluated_on_once(place, tmp_path):
    held = own(with_evaluation(place, place / "b.parquet"), place, tmp_path)
    tokenizer = open_tokenizer(place / "tokenizer")
    found = tokenizer.decode(held.ids).split("<|endoftext|>")[1:-1]
    assert sorted(found) == sorted(row["text"] for row in corpus.articles(60, 9000))


def test_evaluation_reads_no_more_units_than_it_needs(place, tmp_path, monkeypatch):
    read = []
    original = Reader.rows

    def counting(self, source, unit, *more, **named):
        read.append(source.label)
        return original(self, source, unit, *more, **named)

    config = with_evaluation(place, place / "a.parquet", place / "b.parquet", limit=30)
    sources = evaluation_sources(data_settings(config), Reading(60))
    assert [len(source.units) for source in sources] == [100, 12]
    tokenizer = open_tokenizer(place / "tokenizer")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    monkeypatch.setattr(Reader, "rows", counting)
    prepare(manifest, DocumentEncoder(tokenizer), tmp_path / "e", 30, Reading(60), sources)
    # 15 documents of each: one unit of 40, and three of 5.
    assert sorted(read) == ["evaluation/a.parquet"] + ["evaluation/b.parquet"] * 3


def test_the_choice_among_evaluation_documents_follows_the_seed_alone(place, tmp_path):
    one = own(with_evaluation(place, place / "a.parquet", limit=5), place, tmp_path)
    again = own(with_evaluation(place, place / "a.parquet", limit=5, lanes=7), place, tmp_path)
    other = own(with_evaluation(place, place / "a.parquet", limit=5, seed=1), place, tmp_path)
    assert np.array_equal(one.ids, again.ids)
    assert not np.array_equal(one.ids, other.ids)


def test_problems_of_evaluation_sources_are_told_with_the_others(place, tmp_path):
    config = with_evaluation(place, tmp_path / "missing.jsonl", tmp_path / "none" / "*.txt")
    with pytest.raises(UserError) as raised:
        survey(data_settings(config), 1)
    keys = [problem.key for problem in raised.value.problems]
    assert keys == ["evaluation.sources.0.path", "evaluation.sources.1.path"]


def test_evaluation_sources_without_a_document_are_refused(place, tmp_path):
    path = corpus.write_parquet(tmp_path / "blank.parquet", [{"text": " "}, {"text": None}])
    with pytest.raises(UserError, match=r"evaluation\.sources = .*blank\.parquet"):
        own(with_evaluation(place, path), place, tmp_path)


def test_a_bad_unit_of_an_evaluation_source_is_skipped_if_bad_units_are(place, tmp_path):
    path = corpus.write_lines(tmp_path / "e.jsonl", [b'{"text": "one two"}', b"{half"])
    config = with_evaluation(place, path, on_bad_unit="skip")
    held = own(config, place, tmp_path, reading_of(data_settings(config), tmp_path))
    assert held.documents == 1
    with pytest.raises(UserError, match=r"e\.jsonl, line 2"):
        own(with_evaluation(place, path), place, tmp_path)


def test_a_file_that_is_trained_and_evaluated_on_is_warned_of(place, caplog):
    survey(data_settings(with_evaluation(place, place / "a.parquet")), 1)
    assert "of source evaluation/a.parquet is in source a.parquet too" in caplog.text


def test_of_several_sources_each_document_keeps_its_own(place, tmp_path):
    manifest, tokenizer, held = prepared(place, tmp_path, limit=30)
    texts = texts_of(manifest)
    assert [part.label for part in held.parts] == list(manifest.labels)
    assert not any(part.chat for part in held.parts)
    assert sum(part.documents for part in held.parts) == held.documents == 30
    assert sum(part.bytes for part in held.parts) == held.bytes
    borders = [*held.starts.tolist(), len(held.ids)]
    for k, part in enumerate(held.parts):
        mine = np.flatnonzero(held.owners == k)
        found = [tokenizer.decode(held.ids[borders[d] : borders[d + 1] - 1]) for d in mine]
        assert found == texts[k][: len(mine)]
        assert part.documents == len(mine)
        assert part.bytes == sum(len(text.encode()) for text in found)


@pytest.mark.parametrize("begin", [None, 7])
@pytest.mark.parametrize("seq_len", [2, 7, 64, 100_000])
def test_each_scored_label_of_a_block_has_the_source_of_its_document(
    place, tmp_path, seq_len, begin
):
    tokenizer = replace(open_tokenizer(place / "tokenizer"), bos=begin)
    _, _, held = prepared(place, tmp_path, limit=20, tokenizer=tokenizer)
    lengths = np.diff(held.starts, append=len(held.ids))
    expected = np.repeat(held.owners, lengths)[held.scored[held.starts[0] :]]
    found = []
    for g in range(held.num_blocks(seq_len) + 2):
        _, labels, _ = held.block(g, seq_len)
        owners = held.block_parts(g, seq_len)
        assert owners.shape == labels.shape
        found += owners[labels != -100].tolist()
    assert found == expected.tolist()


def test_the_file_of_a_single_source_is_as_it_was(place, tmp_path):
    config = with_evaluation(place, place / "b.parquet")
    held = own(config, place, tmp_path)
    assert (held.parts, held.owners) == ((), None)
    with safe_open(tmp_path / "eval.safetensors", "np") as file:
        assert set(file.keys()) == {"ids", "scored", "starts"}
        assert json.loads(file.metadata()["heldout"]).keys() == {"documents", "bytes", "pad"}


def test_a_file_of_several_sources_that_an_earlier_version_made_still_loads(place, tmp_path):
    _, _, held = prepared(place, tmp_path, limit=20)
    facts = {"documents": held.documents, "bytes": held.bytes, "pad": held.pad}
    tensors = {"ids": held.ids, "scored": held.scored, "starts": held.starts}
    save_file(tensors, tmp_path / "old", {"heldout": json.dumps(facts)})
    again = load(tmp_path / "old")
    assert (again.parts, again.owners) == ((), None)
    assert again.documents == 20
