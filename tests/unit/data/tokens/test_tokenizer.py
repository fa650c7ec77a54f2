import json
import logging
import os
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import psutil
import pytest
from helpers import corpus, vocabularies
from helpers.rings import diagonal
from helpers.vocabularies import SMALL, edited, library_ids, saved, shared, word_pieces

from llmtrain.config.binding import data_settings
from llmtrain.data.survey import some_texts, survey
from llmtrain.data.tokens.convert import PROBES, byte_symbols
from llmtrain.data.tokens.tokenizer import (
    END_OF_TEXT,
    PART_CHARACTERS,
    choose_tokenizer,
    first_difference,
    open_tokenizer,
    split_long,
    tokenizer_config,
    train_bpe,
)
from llmtrain.errors import UserError

BACKENDS = ("tokenizers", "tiktoken")
KINDS = ("unigram", "bpe", "prepend")
PROSE = " ".join(row["text"] for row in corpus.articles(60))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(scope="module", params=KINDS)
def marked(request, tmp_path_factory):
    """A tokenizer that puts a mark in front of a text."""
    return word_pieces(tmp_path_factory.mktemp("marked") / request.param, request.param)


def with_settings(small, tmp_path, **settings):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_text_comes_back(small, backend):
    tokenizer = open_tokenizer(small, backend)
    for text, ids in zip(PROBES, tokenizer.encode_batch(PROBES), strict=True):
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert ids.tolist() == library_ids(small, text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_tokens_inside_a_text_are_text(small, backend):
    tokenizer = open_tokenizer(small, backend)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.documents(["x"])[0].tolist() == [*tokenizer.encode("x"), tokenizer.eos]


def test_control_tokens_that_a_model_makes_of_text_are_text_too(marked):
    tokenizer = open_tokenizer(marked)
    for text in ("a</s>b", "</s>", "</s></s> <s>x", "moss <s> and </s>"):
        ids = tokenizer.encode(text)
        assert {1, 2}.isdisjoint(ids.tolist())  # 0 says unknown: "<" is no entry
    if marked.name == "unigram":
        assert 2 in library_ids(marked, "a</s>b")


@pytest.mark.parametrize("backend", BACKENDS)
def test_added_tokens_that_are_not_special_are_text_too(backend):
    tokenizer = open_tokenizer(SMALL / "thinking", backend)
    for word in ("<tool_call>", "</think>", "<|im_end|>", "<|endoftext|>"):
        ids = tokenizer.encode(f"a {word} b")
        assert len(ids) > 3
        assert ids.max() < 1200  # the first added token
        assert tokenizer.decode(ids) == f"a {word} b"
    assert (tokenizer.eos, tokenizer.bos, tokenizer.length) == (1202, None, 1209)


def test_a_begin_token_is_there_iff_the_tokenizer_adds_one(small):
    tokenizer = open_tokenizer(SMALL / "fallback")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 2)
    (document,) = tokenizer.documents(["Hello"])
    assert document[0] == 1
    assert document[-1] == 2
    assert (document == 1).sum() == 1
    assert open_tokenizer(small).bos is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("before", "begins"), [(["<s>"], True), ([], False), (["x"], False)])
def test_a_document_is_begin_text_end_as_the_post_processor_says(
    small, tmp_path, backend, before, begins
):
    def template(found):
        text = {"Sequence": {"id": "A", "type_id": 0}}
        around = [{"SpecialToken": {"id": n, "type_id": 0}} for n in (*before, "<|endoftext|>")]
        steps = [*around[:-1], text, around[-1]]
        ids = {"<s>": 900, "x": 901, "<|endoftext|>": 0}
        found["added_tokens"].append(found["added_tokens"][0] | {"id": 900, "content": "<s>"})
        found["post_processor"] = {
            "type": "TemplateProcessing",
            "single": steps,
            "pair": steps,
            "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for n, i in ids.items()},
        }

    directory = vocabularies.edited(small, tmp_path / "edited", template)
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_tokenizer(directory, backend)
    (document,) = tokenizer.documents(["river"])
    text = library_ids(small, "river")
    assert document.tolist() == ([900] if begins else []) + text + [0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["thinking", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_same_ids_as_transformers_gives(backend, name):
    from transformers import AutoTokenizer

    directory = SMALL / name if name == "thinking" else shared(f"tokenizers/{name}")
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = open_tokenizer(directory, backend)
    for row in corpus.articles(20):
        assert ours.encode(row["text"]).tolist() == theirs(row["text"])["input_ids"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_its_texts_one_by_one(small, backend):
    tokenizer = open_tokenizer(small, backend)
    texts = [row["text"] for row in corpus.articles(5)]
    for one, batch in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert np.array_equal(tokenizer.encode(one), batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_document_in_a_batch_is_its_parts_joined(small, backend, monkeypatch):
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 20)
    tokenizer = open_tokenizer(small, backend)
    texts = ["short", "a longer text that is cut into parts of twenty", "", "short again"]
    for text, ids in zip(texts, tokenizer.documents(texts), strict=True):
        assert ids.tolist() == [*library_ids(small, text), tokenizer.eos]


def test_parts_of_a_long_document_begin_with_no_mark_of_their_own(marked, monkeypatch):
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 50)
    assert open_tokenizer(marked).encode(PROSE).tolist() == library_ids(marked, PROSE)


def test_long_texts_are_cut_where_a_word_begins():
    assert split_long("one two three fourfivesix", 10) == ["one two", " three", " fourfives", "ix"]
    assert split_long("one\ntwothree", 9) == ["one\n", "twothree"]
    assert split_long("one  two\n\nthree", 11) == ["one  two", "\n\nthree"]
    assert split_long("abc", 10) == ["abc"]
    assert split_long("", 10) == [""]


@pytest.mark.parametrize(
    ("backend", "unit"), diagonal(BACKENDS, ["river under moss ", "river\nunder\nmoss. "])
)
def test_a_document_of_more_than_a_mi_characters_has_the_ids_of_the_whole(small, backend, unit):
    tokenizer = open_tokenizer(small, backend)
    text = unit * 70_000
    assert len(text) > 2 * PART_CHARACTERS
    assert tokenizer.encode(text).tolist() == library_ids(small, text)


@pytest.mark.parametrize(
    "character", [" ", "中", *(pytest.param(one, marks=pytest.mark.wide) for one in "\na\u00a0")]
)
def test_a_million_of_one_character_are_encoded(small, character):
    """tiktoken's own limit is 999,936 spaces: beyond, it panics."""
    one, other = (open_tokenizer(small, backend) for backend in BACKENDS)
    text = character * (1 << 20) + "x"
    assert np.array_equal(one.encode(text), other.encode(text))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_with_varied_text(small, backend):
    tokenizer = open_tokenizer(small, backend)
    letters = np.random.default_rng(0)
    process = psutil.Process()

    def encode(batches):
        for _ in range(batches):
            drawn = letters.integers(97, 123, (64, 600)).astype(np.uint8)
            drawn[letters.random(drawn.shape) < 0.15] = 32
            tokenizer.documents([row.tobytes().decode() for row in drawn])

    encode(30)
    before = process.memory_info().rss
    encode(60)
    assert process.memory_info().rss - before < 8 << 20


def test_no_end_of_text_token_is_refused(small, tmp_path):
    with pytest.raises(UserError, match="end-of-text token"):
        open_tokenizer(with_settings(small, tmp_path))


def test_tokens_may_be_written_as_objects(small, tmp_path):
    token = {"content": "<|endoftext|>", "lstrip": False}
    assert open_tokenizer(with_settings(small, tmp_path, eos_token=token, pad_token=token)).pad == 0


def test_no_pad_token_is_not_the_entry_none(tmp_path):
    def name_an_entry_none(found):
        found["model"]["vocab"]["None"] = len(found["model"]["vocab"])

    directory = vocabularies.edited(SMALL / "fallback", tmp_path / "edited", name_an_entry_none)
    tokenizer = open_tokenizer(directory)
    assert tokenizer.length == 1001
    assert tokenizer.pad == tokenizer.eos


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_refused(small, tmp_path, content):
    directory = with_settings(small, tmp_path, eos_token="<|endoftext|>")
    if content is None:
        (directory / "tokenizer.json").unlink()
    else:
        (directory / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        open_tokenizer(directory)


def test_digest_and_probe_tell_tokenizers_apart(small, tmp_path):
    one, again = open_tokenizer(small), open_tokenizer(small)
    other = open_tokenizer(corpus.write_tokenizer(tmp_path / "other", entries=258))
    assert (one.digest, one.probe) == (again.digest, again.probe)
    assert one.digest != other.digest
    assert one.probe != other.probe


def test_both_back_ends_say_the_same_of_a_tokenizer(small):
    one, other = (open_tokenizer(small, backend) for backend in BACKENDS)
    for name in ("eos", "bos", "pad", "length", "digest", "probe"):
        assert getattr(one, name) == getattr(other, name)
    assert (one.backend, other.backend) == BACKENDS


def test_a_back_end_that_is_not_installed_is_one_message(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="tokenizer backend = tiktoken") as raised:
        open_tokenizer(small, "tiktoken")
    (problem,) = raised.value.problems
    assert "tiktoken in the version that the run began with" in problem.remedy


def test_a_back_end_that_cannot_be_made_of_the_files_is_one_message(marked):
    with pytest.raises(UserError, match="as when the run began"):
        open_tokenizer(marked, "tiktoken")


@pytest.mark.launches
def test_the_small_tokenizers_are_what_their_program_writes(tmp_path):
    program = SMALL.parents[1] / "scripts" / "make_test_tokenizers.py"
    command = [sys.executable, program, "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    names = [path.relative_to(SMALL) for path in SMALL.rglob("*") if path.is_file()]
    assert len(names) == 7
    assert sum((SMALL / name).stat().st_size for name in names) <= 300_000
    for name in names:
        assert (tmp_path / name).read_bytes() == (SMALL / name).read_bytes(), name


ARTICLES = [row["text"] for row in corpus.articles(20)]


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
    assert choose_tokenizer(small, ARTICLES).backend == "tiktoken"
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
    assert choose_tokenizer(directory, ARTICLES).backend == "tokenizers"
    assert "with tokenizers, because its model is Unigram, not BPE" in log.text


def test_an_entry_that_merges_do_not_lead_to_keeps_tokenizers(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", hiding_an_entry)
    differing = [
        open_tokenizer(directory, name).encode("abc") for name in ("tokenizers", "tiktoken")
    ]
    assert [len(ids) for ids in differing] == [2, 1]
    assert choose_tokenizer(directory, ARTICLES).backend == "tokenizers"
    assert "its merges do not lead to the entry 'abc'" in log.text


def test_a_pattern_that_leaves_characters_out_is_found_by_the_awkward_texts(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"[\p{L}\p{N}]+|\s+"))
    assert choose_tokenizer(directory, []).backend == "tokenizers"
    assert "tiktoken gives other ids at" in log.text


def test_what_only_a_document_shows_is_found_in_it(small, tmp_path, log):
    """tiktoken leaves out what its pattern does not match: here one word alone."""
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"(?!§§)[\s\S]|(?<=§)§"))
    assert choose_tokenizer(directory, ARTICLES).backend == "tiktoken"
    assert choose_tokenizer(directory, [*ARTICLES, "a law §§ 3 and 4"]).backend == "tokenizers"
    assert "tiktoken gives other ids at 'a law §§" in log.text


def test_a_pattern_that_tiktoken_cannot_read_keeps_tokenizers(small, tmp_path, log):
    directory = edited(small, tmp_path / "edited", lambda d: splitting(d, r"(?<name>a)\g<name>|."))
    assert choose_tokenizer(directory, ARTICLES).backend == "tokenizers"
    assert "with tokenizers, because" in log.text


def test_a_back_end_that_fails_on_a_long_text_is_not_taken(small, monkeypatch, log):
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 1 << 20)
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.PART_CHARACTERS", 1 << 20)
    assert choose_tokenizer(small, ARTICLES).backend == "tokenizers"
    assert "tiktoken fails on 1048576 characters" in log.text


def test_without_tiktoken_a_fresh_run_takes_tokenizers(small, monkeypatch, log):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert choose_tokenizer(small, ARTICLES).backend == "tokenizers"
    assert "tiktoken is not installed" in log.text


def test_the_first_difference_is_shown_in_its_place(small, tmp_path):
    one, other = (
        open_tokenizer(small),
        open_tokenizer(corpus.write_tokenizer(tmp_path / "o", 270)),
    )
    assert first_difference(one, one, ARTICLES) is None
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


# Training a byte-level BPE.
TEXTS = [f"The river number {n} flows past {n * n} houses; its water is cold." for n in range(300)]
ODD = "naïve 東京 🦊\r\n\t\x00 \u2028  <|endoftext|> e\u0301 don't 1234567\n\n"
PROGRAM = """
from llmtrain.data.tokens.tokenizer import train_bpe
texts = [f"The river number {n} flows past {n * n} houses; its water is cold." for n in range(300)]
print(train_bpe(texts, 400), end="")
"""


def directory(path, texts, entries):
    (path / "tokenizer.json").write_text(train_bpe(texts, entries), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(tokenizer_config(), encoding="utf-8")
    return path


def counts_of_pairs(words):
    counts: dict[tuple[str, str], int] = {}
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def merged(word, a, b):
    out: list[str] = []
    for symbol in word:
        if out and out[-1] == a and symbol == b:
            out[-1] = a + b
        else:
            out.append(symbol)
    return tuple(out)


def test_it_has_exactly_as_many_entries_as_asked_for_with_the_bytes_and_end_of_text():
    trained = json.loads(train_bpe(TEXTS, 300))
    vocabulary = trained["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(300))
    assert vocabulary[END_OF_TEXT] == 0
    assert sum(len(token) == 1 for token in vocabulary) == 256
    assert [token["content"] for token in trained["added_tokens"]] == [END_OF_TEXT]
    assert trained["added_tokens"][0]["special"] is True


def test_it_has_the_form_of_gpt2_and_adds_nothing_to_a_text():
    trained = json.loads(train_bpe(TEXTS, 300))
    pattern = trained["pre_tokenizer"]
    assert (pattern["type"], pattern["add_prefix_space"], pattern["use_regex"]) == (
        "ByteLevel",
        False,
        True,
    )
    assert trained["decoder"]["type"] == "ByteLevel"
    assert trained["normalizer"] is None
    assert trained["post_processor"] is None


def test_each_merge_is_a_most_frequent_pair():
    words = Counter(tuple(f"Ġ{word}") for word in ("low " * 50 + "lower " * 21).split())
    words += Counter(tuple(f"Ġ{word}") for word in ("newest " * 34 + "widest " * 13).split())
    text = "".join("".join(word).replace("Ġ", " ") * times for word, times in words.items())
    merges = json.loads(train_bpe([text], 257 + 8))["model"]["merges"]
    assert len(merges) == 8
    for a, b in merges:
        counts = counts_of_pairs(words)
        assert counts[a, b] == max(counts.values())
        words = Counter({merged(word, a, b): times for word, times in words.items()})


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.launches
def test_another_process_with_any_number_of_threads_gives_the_same_bytes(threads):
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": threads,
        "PYTHONHASHSEED": threads,
    }
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
    )
    assert there.stdout.decode() == train_bpe(iter(TEXTS), 400)


def test_transformers_loads_it_and_every_text_comes_back(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory(tmp_path, TEXTS, 300))
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length > 2**60
    for text in (ODD, *TEXTS[:3]):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_too_small_is_refused_with_what_it_reaches():
    with pytest.raises(UserError) as refused:
        train_bpe(["a b c"], 300)
    (problem,) = refused.value.problems
    assert problem.key == "model.tokenizer"
    assert problem.value == "{train: 300}"
    reached = int(problem.remedy.split("}")[0].split(" ")[1])
    assert len(json.loads(train_bpe(["a b c"], reached))["model"]["vocab"]) == reached


def test_fewer_entries_than_bytes_are_refused():
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(TEXTS, 256)
    assert len(json.loads(train_bpe([], 257))["model"]["vocab"]) == 257
