import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llmtrain.errors import UserError
from llmtrain.model.trainable import freeze


def tiny(*, tied=False):
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_what_matches_any_pattern_is_frozen_and_nothing_else():
    model = tiny()
    freeze(model, ("model.embed_tokens.weight", "model.layers.0.mlp.*"))
    assert frozen(model) == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }


def test_a_tied_parameter_is_frozen_by_any_of_its_names():
    for name in ("lm_head.*", "model.embed_tokens.*"):
        model = tiny(tied=True)
        freeze(model, (name,))
        assert frozen(model) == {"model.embed_tokens.weight"}
        assert not model.lm_head.weight.requires_grad


def test_frozen_weights_get_no_gradient_and_the_others_do():
    model = tiny()
    freeze(model, ("model.layers.0.*",))
    model(torch.arange(8)[None], use_cache=False).logits.sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == frozen(model) != set()


def test_every_pattern_that_matches_nothing_is_named_with_near_names():
    with pytest.raises(UserError) as raised:
        freeze(tiny(), ("model.embed_token.weight", "lm_head.*", "*layers.7.mlp*"))
    message = str(raised.value)
    assert "2 problems" in message
    assert "model.freeze = model.embed_token.weight" in message
    assert "model.embed_tokens.weight" in message
    assert "model.freeze = *layers.7.mlp*" in message
    assert "model.freeze = lm_head.*" not in message


def test_a_pattern_that_only_lacks_its_stars_is_shown_what_it_is_part_of():
    with pytest.raises(UserError, match=r"like model\.layers\.1\.self_attn\.q_proj\.weight"):
        freeze(tiny(), ("layers.1.self_attn",))


def test_something_must_be_left_to_train():
    with pytest.raises(UserError, match=r"model\.freeze = \*"):
        freeze(tiny(), ("*",))


def test_no_pattern_freezes_nothing():
    model = tiny()
    freeze(model, ())
    assert not frozen(model)
