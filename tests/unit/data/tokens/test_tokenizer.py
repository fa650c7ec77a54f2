import json
import subprocess
import sys

import numpy as np
import psutil
import pytest
from helpers import corpus, vocabularies
from helpers.rings import diagonal
from helpers.vocabularies import SMALL, library_ids, shared, word_pieces

from llmtrain.data.tokens.convert import PROBES
from llmtrain.data.tokens.tokenizer import PART_CHARACTERS, open_tokenizer, split_long
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


def edited(small, tmp_path, **settings):
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
    tokenizer = open_tokenizer(marked)
    assert tokenizer.encode(PROSE).tolist() == library_ids(marked, PROSE)


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
        open_tokenizer(edited(small, tmp_path))


def test_tokens_may_be_written_as_objects(small, tmp_path):
    token = {"content": "<|endoftext|>", "lstrip": False}
    assert open_tokenizer(edited(small, tmp_path, eos_token=token, pad_token=token)).pad == 0


def test_no_pad_token_is_not_the_entry_none(tmp_path):
    def name_an_entry_none(found):
        found["model"]["vocab"]["None"] = len(found["model"]["vocab"])

    directory = vocabularies.edited(SMALL / "fallback", tmp_path / "edited", name_an_entry_none)
    tokenizer = open_tokenizer(directory)
    assert tokenizer.length == 1001
    assert tokenizer.pad == tokenizer.eos


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_refused(small, tmp_path, content):
    directory = edited(small, tmp_path, eos_token="<|endoftext|>")
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
