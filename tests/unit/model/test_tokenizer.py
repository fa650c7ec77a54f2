"""The run's tokenizer: what transformers saves is what the data room opens."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.corpus import with_hole, write_tokenizer
from helpers.vocabularies import SMALL, shared
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
)

from llmtrain.data.chat.template import open_template
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.model.shape import on_meta
from llmtrain.model.tokenizer import (
    add_template,
    grow,
    new_entries,
    rows_for,
    save_tokenizer,
    set_rows,
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


# Rows of embeddings: what they grow by, for every kind of head, without a random number.
NARROW = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
NARROW |= {"intermediate_size": 12, "vocab_size": 50, "pad_token_id": 0}
KINDS: dict[str, Any] = {
    "tied": LlamaConfig(**NARROW, tie_word_embeddings=True),
    "untied": LlamaConfig(**NARROW),
    "a head with a bias": PhiConfig(**NARROW),
    "a bias with two names": BertConfig(**NARROW, is_decoder=True),
    "Conv1D": GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50),
}


def made(kind):
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(KINDS[kind]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    return model.eval()


@pytest.mark.parametrize("kind", list(KINDS))
def test_new_rows_are_the_mean_of_the_old_and_nothing_else_changes(kind):
    model, before = made(kind), made(kind)
    ids = torch.arange(12)[None]
    state = torch.get_rng_state()
    grow(model, 57)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, new), (_, old) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert torch.equal(new[: len(old)], old), name
        mean = (old.detach().double().sum(0) / 50).float()
        assert all(torch.equal(row, mean) for row in new[len(old) :].detach()), name
    assert model.get_input_embeddings().weight.shape == (57, 8)
    with torch.no_grad():
        one, two = (each(ids, use_cache=False).logits for each in (model, before))
    assert one.shape[-1] == 57
    torch.testing.assert_close(one[..., :50], two)
    # The logits of a new token are the mean of the others'.
    torch.testing.assert_close(one[..., 50], two.mean(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_that_grew_has_the_form_that_its_config_gives(kind):
    model = made(kind)
    grow(model, 57)
    skeleton = on_meta(model.config)
    assert model.config.vocab_size == 57
    for duplicates in (False, True):
        one, other = (
            {n: p.shape for n, p in each.named_parameters(remove_duplicate=duplicates)}
            for each in (model, skeleton)
        )
        assert one == other


def test_the_shapes_are_those_that_transformers_resizes_to():
    for kind in KINDS:
        ours, theirs = made(kind), made(kind)
        grow(ours, 64)
        theirs.resize_token_embeddings(64, mean_resizing=False)
        shapes = [{n: p.shape for n, p in one.named_parameters()} for one in (ours, theirs)]
        assert shapes[0] == shapes[1], kind


def test_frozen_rows_stay_frozen_and_half_precision_stays_half():
    model = made("tied").to(torch.bfloat16)
    model.get_input_embeddings().weight.requires_grad_(False)
    exact = model.get_input_embeddings().weight.double().mean(0).to(torch.bfloat16)
    grow(model, 51)
    grown = model.get_input_embeddings().weight
    assert not grown.requires_grad
    assert grown.dtype == torch.bfloat16
    assert torch.equal(grown[50], exact)


def test_rows_are_counted_from_entries_and_the_padding():
    assert rows_for(300, None) == 300
    assert rows_for(300, 256) == 300
    assert rows_for(300, 512) == 512
    for entries, pad_to, rows in ((49, 64, 50), (50, 64, 50), (51, None, 51), (51, 64, 64)):
        config = LlamaConfig(**NARROW)
        set_rows(config, entries, pad_to)
        assert config.vocab_size == rows
