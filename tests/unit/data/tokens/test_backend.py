import logging
import sys
from itertools import islice

import pytest
from helpers import corpus, vocabularies
from helpers.vocabularies import SMALL, edited, saved, shared, word_pieces

from llmtrain.config.binding import data_settings
from llmtrain.data.survey import some_texts, survey
from llmtrain.data.tokens.convert import byte_symbols
from llmtrain.data.tokens.tokenizer import choose_tokenizer, first_difference, open_tokenizer

TEXTS = [row["text"] for row in corpus.articles(20)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("choice") / "small")


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    return caplog


def splitting(found, regex):
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    found["pre_tokenizer"] |= {"use_regex": False}
    steps = [step, found["pre_tokenizer"]]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def hiding_an_entry(found):
    symbols = {symbol: index for index, symbol in enumerate(byte_symbols())}
    vocab = symbols | {"bc": 256, "ab": 257, "abc": 258, "<|endoftext|>": 259}
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    found["model"] |= {"vocab": vocab, "merges": merges}
    found["added_tokens"][0]["id"] = 259


def test_tiktoken_is_taken_where_the_ids_are_equal(small, log):
    assert choose_tokenizer(small, TEXTS).backend == "tiktoken"
    assert "tiktoken: ids equal those of tokenizers on 20 documents" in log.text


@pytest.mark.parametrize("name", ["thinking", "bare"])
def test_byte_level_tokenizers_of_other_forms_get_tiktoken(tmp_path, name):
    directory = saved(SMALL / name, tmp_path)
    assert choose_tokenizer(directory, vocabularies.sample_texts(60)).backend == "tiktoken"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_real_byte_level_tokenizers_get_tiktoken(tmp_path, name):
    directory = saved(shared(f"tokenizers/{name}"), tmp_path)
    texts = [
        *vocabularies.real_texts("20140304.en", 60),
        *vocabularies.real_texts("20210520.vi", 60),
    ]
    assert choose_tokenizer(directory, texts).backend == "tiktoken"


def test_one_that_does_not_convert_keeps_tokenizers_and_the_reason_is_said(tmp_path, log):
    directory = word_pieces(tmp_path / "words", "unigram")
    assert choose_tokenizer(directory, TEXTS).backend == "tokenizers"
    assert "with tokenizers, because its model is Unigram, not BPE" in log.text


def test_an_entry_that_merges_do_not_lead_to_keeps_tokenizers(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", hiding_an_entry)
    differing = [
        open_tokenizer(directory, name).encode("abc") for name in ("tokenizers", "tiktoken")
    ]
    assert [len(ids) for ids in differing] == [2, 1]
    assert choose_tokenizer(directory, TEXTS).backend == "tokenizers"
    assert "its merges do not lead to the entry 'abc'" in log.text


def test_a_pattern_that_leaves_characters_out_is_found_by_the_awkward_texts(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"[\p{L}\p{N}]+|\s+"))
    assert choose_tokenizer(directory, []).backend == "tokenizers"
    assert "tiktoken gives other ids at" in log.text


def test_what_only_a_document_shows_is_found_in_it(small, tmp_path, log):
    """tiktoken leaves out what its pattern does not match: here one word alone."""
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"(?!§§)[\s\S]|(?<=§)§"))
    assert choose_tokenizer(directory, TEXTS).backend == "tiktoken"
    assert choose_tokenizer(directory, [*TEXTS, "a law §§ 3 and 4"]).backend == "tokenizers"
    assert "tiktoken gives other ids at 'a law §§" in log.text


def test_a_pattern_that_tiktoken_cannot_read_keeps_tokenizers(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"(?<name>a)\g<name>|."))
    assert choose_tokenizer(directory, TEXTS).backend == "tokenizers"
    assert "with tokenizers, because" in log.text


def test_a_back_end_that_fails_on_a_long_text_is_not_taken(small, monkeypatch, log):
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 1 << 20)
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 1 << 20)
    assert choose_tokenizer(small, TEXTS).backend == "tokenizers"
    assert "tiktoken fails on 1048576 characters" in log.text


def test_without_tiktoken_a_fresh_run_takes_tokenizers(small, monkeypatch, log):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert choose_tokenizer(small, TEXTS).backend == "tokenizers"
    assert "tiktoken is not installed" in log.text


def test_the_first_difference_is_shown_in_its_place(small, tmp_path):
    one, other = open_tokenizer(small), open_tokenizer(corpus.write_tokenizer(tmp_path / "o", 270))
    assert first_difference(one, one, TEXTS) is None
    assert "river" in str(first_difference(one, other, ["", "qqqq river qqqq"]))


def test_documents_to_compare_come_from_all_sources_in_turn(tmp_path):
    rows = corpus.articles(60)
    corpus.write_parquet(tmp_path / "a" / "0.parquet", rows[:40])
    corpus.write_jsonl(tmp_path / "b.jsonl", rows[40:])
    found = survey(data_settings(corpus.config(tmp_path / "a", tmp_path / "b.jsonl")), 1)
    texts = list(some_texts(found, 10, 1 << 20))
    first, second = ({row["text"] for row in part} for part in (rows[:40], rows[40:]))
    assert first.issuperset(texts[0::2])
    assert second.issuperset(texts[1::2])
    assert len(set(texts)) == 10
    assert len(list(some_texts(found, 256, 1 << 20))) == 60
    size = sum(len(text.encode()) for text in islice(texts, 3))
    assert list(some_texts(found, 10, size)) == texts[:3]
