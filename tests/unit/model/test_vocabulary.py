"""Rows of embeddings: what they grow by, for every kind of head, without a random number."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
)

from llmtrain.model.shape import on_meta
from llmtrain.model.tokenizer import grow, rows_for, set_rows

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 12, "vocab_size": 50, "pad_token_id": 0}
KINDS: dict[str, Any] = {
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "untied": LlamaConfig(**SMALL),
    "a head with a bias": PhiConfig(**SMALL),
    "a bias with two names": BertConfig(**SMALL, is_decoder=True),
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
        config = LlamaConfig(**SMALL)
        set_rows(config, entries, pad_to)
        assert config.vocab_size == rows
