import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import ModelConfig
from llmtrain.errors import UserError
from llmtrain.model.base import Base
from llmtrain.model.build import build, model_config, rebuild, skeleton, stored_config
from llmtrain.model.tokenizer import SpecialTokens
from llmtrain.training.start.frozen import find_base

TOKENS = SpecialTokens(length=300, bos=0, eos=0, pad=0)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def refusal(fields, seq_len=16):
    with pytest.raises(UserError) as raised:
        model_config(ModelConfig(config=fields), TOKENS, seq_len)
    return str(raised.value)


def test_vocabulary_and_special_tokens_come_from_the_tokenizer():
    config = model_config(ModelConfig(config=LLAMA), TOKENS, 16)
    assert config.vocab_size == 300
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)
    assert (
        model_config(ModelConfig(config={**LLAMA, "vocab_size": 512}), TOKENS, 16).vocab_size == 512
    )


def test_an_unknown_architecture_is_refused_with_near_names():
    message = refusal({"model_type": "lama"})
    assert "model.config.model_type = lama" in message
    assert "llama" in message


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hiden_size", 32, "did you mean hidden_size?"),
        ("attention_bias", "perhaps", "expected bool, got str"),
        ("vocab_size", 299, "300"),  # entries of the tokenizer
        ("max_position_embeddings", 15, "data.seq_len = 16"),
    ],
)
def test_a_field_that_cannot_be_is_refused_and_named(field, value, said):
    message = refusal({**LLAMA, field: value})
    assert f"model.config.{field} = {json.dumps(value)}" in message or f"{field} {value}" in message
    assert said in message


def test_a_division_by_zero_within_transformers_is_refused():
    assert "llama accepts" in refusal({**LLAMA, "num_attention_heads": 0})


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({"hidden_size": "abc"}, "hidden_size = abc"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
        ({"vocab_size": None}, "vocab_size = null"),
        ({"model_type": ["llama"]}, "model_type = ['llama']"),
    ],
)
def test_a_wrong_field_of_weights_from_elsewhere_is_named(tmp_path, changed, value):
    fields = {**LLAMA, "vocab_size": 300, **changed}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = ModelConfig.model_validate({"from": str(tmp_path)})
    with pytest.raises(UserError) as raised:
        model_config(asked, TOKENS, 16, find_base(asked))
    assert f"{tmp_path / 'config.json'}: {value}" in str(raised.value)


def test_an_encoder_is_no_causal_language_model():
    assert "causal" in refusal({"model_type": "t5"})


def test_a_model_with_two_models_of_texts_is_refused():
    assert "an architecture with one model of texts" in refusal({"model_type": "musicgen"})


def test_a_fresh_model_is_in_fp32_in_training_mode_and_decided_by_the_seed():
    asked = ModelConfig(config=LLAMA)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(rebuild(model_config(asked, TOKENS, 16), asked))
    heads = [model.lm_head.weight for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert models[0].training
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}


def test_an_encoder_becomes_a_decoder_and_sees_nothing_ahead():
    fields = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    asked = ModelConfig(config=fields)
    model = rebuild(model_config(asked, TOKENS, 16), asked).eval()
    ids = torch.arange(10)[None]
    other = ids.clone()
    other[0, -1] = 99
    assert torch.allclose(model(ids).logits[0, :-1], model(other).logits[0, :-1], atol=1e-5)


def test_a_model_that_sees_ahead_is_refused():
    asked = ModelConfig(config={"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2})
    config = model_config(asked, TOKENS, 16)
    config.is_decoder = False
    with pytest.raises(UserError, match="do not see later ones"):
        rebuild(config, asked)


def test_a_checkpoint_builds_its_model_without_what_it_began_with(saved):
    model = rebuild(stored_config(saved), ModelConfig(config=LLAMA))
    assert model.training
    assert model.config.hidden_size == 16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_skeleton_is_the_same_model_without_its_weights(saved):
    asked = ModelConfig(config=LLAMA)
    whole, empty = (make(stored_config(saved), asked) for make in (rebuild, skeleton))
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert all(p.is_meta and p.dtype == torch.float32 for p in empty.parameters())
    assert empty.training
    assert empty.config.to_dict() == whole.config.to_dict()


def test_patterns_freeze_a_model_however_it_is_built(saved):
    asked = ModelConfig(config=LLAMA, freeze=("*.embed_tokens.*", "*.layers.0.*"))
    fresh, again = (
        rebuild(model_config(asked, TOKENS, 16), asked),
        rebuild(stored_config(saved), asked),
    )
    for model in (fresh, again):
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {
            name
            for name, _ in model.named_parameters()
            if name.startswith(("model.embed_tokens.", "model.layers.0."))
        }
        assert model.lm_head.weight.requires_grad


@pytest.fixture
def saved(tmp_path):
    shape = {k: v for k, v in LLAMA.items() if k != "model_type"}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).to(torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    return tmp_path / "base"


def load(path, tokens=TOKENS, **asked):
    model = ModelConfig.model_validate({"from": str(path), **asked})
    base = Base(str(path), None, None)
    return build(model_config(model, tokens, 16, base), model, base)


def test_weights_of_a_directory_are_loaded_in_fp32(saved):
    model = load(saved)
    expected = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert model.training
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs), name


def test_a_truncated_file_of_weights_is_refused(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.from"):
        load(saved)


def test_pickled_weights_are_not_opened(saved):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load(saved)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_missing_weight_is_refused_instead_of_drawn(saved, name):
    """A head that no config ties is one, too."""
    tensors = load_file(saved / "model.safetensors")
    del tensors[name]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"1 missing \({re.escape(name)}\)"):
        load(saved)


def test_a_weight_of_another_shape_is_named_with_both_shapes(saved):
    config = json.loads((saved / "config.json").read_text())
    config["intermediate_size"] += 8
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as raised:
        load(saved)
    was, now = LLAMA["intermediate_size"], config["intermediate_size"]
    said = str(raised.value)
    assert f"{3 * LLAMA['num_hidden_layers']} of another shape" in said
    name = "model.layers.0.mlp.down_proj.weight"
    hidden = LLAMA["hidden_size"]
    assert f"{name}: [{hidden}, {was}] in the files, [{hidden}, {now}] by config.json" in said


def change(path, **fields):
    """Change fields of a model's config.json."""
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(found | fields))


def rows(model):
    """The rows of the embeddings, of the head, and by the config."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return (*(len(end.weight) for end in ends), model.config.vocab_size)


def test_rows_grow_where_the_tokenizer_has_more_entries(saved):
    more = SpecialTokens(length=303, bos=0, eos=0, pad=0)
    model, before = load(saved, more), load(saved)
    assert rows(model) == (303, 303, 303)
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one[:300] if len(one) == 303 else one, other)
        if len(one) == 303:
            mean = other.detach().double().mean(0).float()
            assert all(torch.equal(row, mean) for row in one[300:])
    assert model.training


def test_a_skeleton_has_the_rows_that_the_weights_will_have(saved):
    asked, base = ModelConfig.model_validate({"from": str(saved)}), Base(str(saved), None, None)
    config = model_config(asked, SpecialTokens(length=310, bos=0, eos=0, pad=0), 16, base)
    whole, empty = build(config, asked, base), skeleton(config, asked)
    shapes = [[(n, p.shape) for n, p in one.named_parameters()] for one in (whole, empty)]
    assert shapes[0] == shapes[1]
    assert whole.config.to_dict() == empty.config.to_dict()


def test_a_padded_vocabulary_is_not_cut(saved):
    few = SpecialTokens(length=297, bos=0, eos=0, pad=0)
    assert rows(load(saved, few)) == (300, 300, 300)
    assert rows(load(saved, few, pad_vocab_to=512)) == (300, 300, 300)
    expected = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(load(saved, few).lm_head.weight, expected.lm_head.weight)


def test_rows_are_padded_at_growth_and_in_a_new_model(saved):
    more = SpecialTokens(length=303, bos=0, eos=0, pad=0)
    assert rows(load(saved, more, pad_vocab_to=320)) == (320, 320, 320)
    assert rows(load(saved, more, pad_vocab_to=301)) == (303, 303, 303)
    asked = ModelConfig(config=LLAMA, pad_vocab_to=512)
    assert model_config(asked, TOKENS, 16).vocab_size == 512


def test_a_head_that_its_config_ties_to_other_weights_is_refused(saved):
    change(saved, tie_word_embeddings=True)
    with pytest.raises(UserError) as raised:
        load(saved)
    assert "lm_head.weight, which its config.json ties" in str(raised.value)
    assert "tie_word_embeddings: false" in str(raised.value)
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    model = load(saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_code_beside_a_type_of_transformers_is_not_named_by_the_model(saved):
    change(saved, auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    (saved / "modeling_x.py").write_text("raise SystemExit('it was run')")
    model = load(saved)
    assert type(model) is LlamaForCausalLM
    assert "auto_map" not in model.config.to_dict()
    assert "auto_map" not in stored_config(saved).to_dict()
