import json
from pathlib import Path

import numpy as np
import pytest
from helpers import corpus

from llmtrain.data.tokenizer import PROBES, open_tokenizer, split_long
from llmtrain.errors import UserError

SHARED = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


def shared(name):
    directory = SHARED / name
    if not directory.is_dir():
        pytest.skip(f"{directory} is not there")
    return directory


def edited(small, tmp_path, **settings):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("text", PROBES)
def test_every_text_comes_back(small, text):
    tokenizer = open_tokenizer(small)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


def test_special_tokens_inside_a_text_are_text(small):
    tokenizer = open_tokenizer(small)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.documents(["x"])[0].tolist() == [*tokenizer.encode("x"), tokenizer.eos]


def test_added_tokens_that_are_not_special_are_text_too():
    tokenizer = open_tokenizer(shared("qwen3"))
    for word in ("<tool_call>", "</think>", "<|im_end|>", "<|endoftext|>"):
        ids = tokenizer.encode(f"a {word} b")
        assert len(ids) > 3
        assert ids.max() < 151_643
        assert tokenizer.decode(ids) == f"a {word} b"
    assert tokenizer.encode("Hello world").tolist() == [9707, 1879]
    assert (tokenizer.eos, tokenizer.bos, tokenizer.length) == (151645, None, 151669)


def test_a_begin_token_is_there_iff_the_tokenizer_adds_one(small):
    tokenizer = open_tokenizer(shared("mistral-v1"))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 2)
    (document,) = tokenizer.documents(["Hello"])
    assert document[0] == 1
    assert document[-1] == 2
    assert (document == 1).sum() == 1
    assert open_tokenizer(small).bos is None


def test_the_same_ids_as_transformers_gives():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(shared("qwen3"))
    ours = open_tokenizer(shared("qwen3"))
    for row in corpus.articles(20):
        assert ours.encode(row["text"]).tolist() == theirs(row["text"])["input_ids"]


def test_a_batch_is_its_texts_one_by_one(small):
    tokenizer = open_tokenizer(small)
    texts = [row["text"] for row in corpus.articles(5)]
    for one, batch in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert np.array_equal(tokenizer.encode(one), batch)


def test_a_long_document_in_a_batch_is_its_parts_joined(small, monkeypatch):
    monkeypatch.setattr("llmtrain.data.tokenizer.PART_CHARACTERS", 20)
    tokenizer = open_tokenizer(small)
    texts = ["short", "a longer text that is cut into parts of twenty", "", "short again"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert [ids[-1] for ids in tokenizer.documents(texts)] == [tokenizer.eos] * 4


def test_long_texts_are_cut_before_a_newline_or_space():
    assert list(split_long("one two\nthree fourfivesix", 10)) == [
        "one two",
        "\nthree",
        " fourfives",
        "ix",
    ]
    assert list(split_long("abc", 10)) == ["abc"]


def test_a_document_of_more_than_a_mi_characters_comes_back(small):
    tokenizer = open_tokenizer(small)
    text = "river under moss " * 70_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_end_of_text_token_is_refused(small, tmp_path):
    with pytest.raises(UserError, match="end-of-text token"):
        open_tokenizer(edited(small, tmp_path))


def test_tokens_may_be_written_as_objects(small, tmp_path):
    token = {"content": "<|endoftext|>", "lstrip": False}
    assert open_tokenizer(edited(small, tmp_path, eos_token=token, pad_token=token)).pad == 0


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
    assert one.probe != open_tokenizer(shared("qwen3")).probe
