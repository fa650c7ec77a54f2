"""The run's tokenizer: what transformers saves is what the data room opens."""

import json

import pytest
from helpers.corpus import with_hole, write_tokenizer
from helpers.vocabularies import SMALL, shared
from transformers import AutoTokenizer

from llmtrain.data.chat.template import open_template
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.model.tokenizer import (
    add_template,
    new_entries,
    save_tokenizer,
    special_tokens,
    token_ids,
)

FAR = 500  # an id
TEXTS = [
    "Hello world",
    "  spaces,\n\nnewlines\tand tabs ",
    "Zürich, Đà Nẵng, 東京, 👩‍👩‍👧 and e\u0301",
    "a<|endoftext|>b and </s> and <|im_end|> are text",
    "1234567890 3.14159 don't I'll",
]


@pytest.mark.parametrize(
    "name",
    [
        *("thinking", "fallback", "bare"),
        *(
            pytest.param(f"real {n}", marks=pytest.mark.slow)
            for n in ("gpt2", "qwen3", "mistral-v1")
        ),
    ],
)
def test_a_saved_tokenizer_gives_transformers_ids(tmp_path, name):
    real = name.startswith("real")
    source = shared(f"tokenizers/{name.split()[1]}") if real else SMALL / name
    save_tokenizer(str(source), None, tmp_path / name)
    ours = open_tokenizer(tmp_path / name)
    theirs = AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text).tolist() == plain, text


def test_a_saved_tokenizer_without_begin_and_pad_tokens_has_none(tmp_path):
    """Its class has both unless the settings say otherwise."""
    save_tokenizer(str(SMALL / "bare"), None, tmp_path)
    tokens = special_tokens(tmp_path)
    assert (tokens.length, tokens.bos, tokens.eos, tokens.pad) == (600, None, 0, None)
    ours = open_tokenizer(tmp_path)
    assert (ours.length, ours.bos, ours.eos, ours.pad) == (600, None, 0, 0)


@pytest.mark.slow
def test_gpt2_gives_the_ids_that_everybody_knows(tmp_path):
    save_tokenizer(str(shared("tokenizers/gpt2")), None, tmp_path)
    assert open_tokenizer(tmp_path).encode("Hello world").tolist() == [15496, 995]
    tokens = special_tokens(tmp_path)
    assert (tokens.length, tokens.bos, tokens.eos, tokens.pad) == (50257, 50256, 50256, None)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        save_tokenizer(str(tmp_path / "empty"), None, tmp_path / "out")


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="end-of-text"):
        special_tokens(tmp_path)


@pytest.mark.parametrize("read", [special_tokens, open_tokenizer])
def test_a_tokenizer_nested_without_end_is_refused(tmp_path, read):
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        read(tmp_path)


def test_a_models_config_that_cannot_be_read_beside_the_tokenizer_is_one_message(tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    fields = {"model_type": "llama", "vocab_size": None}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"config\.json .*'vocab_size'.*None") as refused:
        special_tokens(folder)
    assert refused.value.problems[0].key == "model.tokenizer"


def test_entries_have_ids_and_others_are_refused(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer")
    known = AutoTokenizer.from_pretrained(directory).get_vocab()
    assert token_ids(directory, ["b", "<|endoftext|>", "b"]) == tuple(sorted({known["b"], 0}))
    with pytest.raises(UserError) as raised:
        token_ids(directory, ["b", "<|nobody|>", "<|none|>"])
    assert [one.value for one in raised.value.problems] == ["<|nobody|>", "<|none|>"]
    assert {one.key for one in raised.value.problems} == {"adapter.train_tokens"}


def test_a_template_replaces_all_that_the_tokenizer_had(tmp_path):
    """transformers keeps further templates, as for tools, in a directory of their own."""
    directory = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = {"default": "old", "tool_use": "old, with tools"}
    tokenizer.save_pretrained(directory)
    assert (directory / "additional_chat_templates").is_dir()
    add_template(directory, "{{ new }}", ["<|one|>", "<|endoftext|>"])
    assert not (directory / "additional_chat_templates").exists()
    found = AutoTokenizer.from_pretrained(directory)
    assert found.chat_template == "{{ new }}"
    assert found.convert_tokens_to_ids("<|one|>") == len(tokenizer)
    assert len(found) == len(tokenizer) + 1
    assert found.added_tokens_decoder[len(tokenizer)].special
    assert open_template(directory, {}, "2024-07-26").sources == {"default": "{{ new }}"}


def test_new_entries_have_the_ids_that_they_got_also_where_ids_were_left_out(tmp_path):
    base, own = (with_hole(write_tokenizer(tmp_path / name), FAR) for name in ("base", "own"))
    known = AutoTokenizer.from_pretrained(base).get_vocab()
    assert max(known.values()) == FAR > len(known)
    assert new_entries(own, str(base), None) == ()
    add_template(own, "{{ new }}", ["<|one|>", "<|two|>", "<|endoftext|>"])
    ids = AutoTokenizer.from_pretrained(own).convert_tokens_to_ids(["<|one|>", "<|two|>"])
    assert new_entries(own, str(base), None) == tuple(ids) == (len(known), len(known) + 1)


def test_every_id_is_below_the_length_of_a_tokenizer(tmp_path):
    whole = write_tokenizer(tmp_path / "whole")
    holed = with_hole(write_tokenizer(tmp_path / "holed"), FAR)
    tokens = ["<|one|>", "<|endoftext|>"]
    for directory, before, after in ((whole, 300, 301), (holed, FAR + 1, FAR + 1)):
        assert special_tokens(directory).length == before
        assert special_tokens(directory, added=tokens).length == after
        add_template(directory, "{{ new }}", tokens)
        assert special_tokens(directory).length == after == open_tokenizer(directory).length
