"""Adapters against peft itself, and against formulas by hand."""

import copy
import importlib.util
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from helpers.bases import small_fields
from helpers.rings import needs
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from llmtrain.config.schema import AdapterConfig
from llmtrain.distributed.engines import state
from llmtrain.errors import UserError
from llmtrain.model import shape, trainable
from llmtrain.model.base import Base
from llmtrain.model.build import rebuild
from llmtrain.model.loss import LossModule
from llmtrain.model.shape import describe_parameters, on_meta
from llmtrain.model.trainable import freeze

SMALL = small_fields(16, 2, 2, num_key_value_heads=1, vocab_size=61)
SMALL |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1, **NO_DROPOUT
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=3, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(
        **SMALL, num_experts=3, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_experts=3, moe_intermediate_size=8, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
}  # fmt: skip
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
BASE = Base("a/b", "1f3c0123456789ab", None)
KINDS = ("lora", "dora", "rslora")

# peft asks a model for what has another name now; a run does not load adapters through it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def asked(kind="lora", **fields):
    return AdapterConfig(**{"kind": kind, "r": 4, "alpha": 8, **fields})


def config(name):
    return copy.deepcopy(CONFIGS[name])  # building a model changes it


def bare(name="tied"):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config(name)).train()


def adapted(name="tied", kind="lora", tokens=(), **fields):
    """With every trained value moved a little, as training does."""
    model = bare(name)
    trainable.attach(model, asked(kind, **fields), tokens)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for one in state.named_parameters(model).values():
            one += 0.1 * torch.randn(one.shape, generator=generator)
    return model


def logits(model):
    ids = torch.arange(24).reshape(2, 12) * 7 % 61
    model.eval()
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def written(model, folder):
    """What a checkpoint holds for peft."""
    tensors = {name: one.detach() for name, one in state.named_tensors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    for name, content in trainable.adapter_files(model, BASE).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "tokens"),
    [
        ("tied", "lora", ()),
        ("untied", "dora", ()),
        ("gpt2", "rslora", ()),
        ("gpt2", "dora", ()),
        ("tied", "lora", (3, 60)),
        ("untied", "lora", (3, 60)),
        ("mixtral", "lora", ()),
        ("qwen2_moe", "lora", ()),
        ("qwen3_moe", "lora", ()),
    ],
)
def test_peft_loads_what_is_saved_as_it_is(tmp_path, name, kind, tokens):
    model = adapted(name, kind, tokens)
    expected = get_peft_model_state_dict(model)
    found = state.named_tensors(model)
    assert found.keys() == {f"base_model.model.{key}" for key in expected}
    loaded = PeftModel.from_pretrained(bare(name), written(model, tmp_path))
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.allclose(logits(model), logits(bare(name)), atol=1e-3)


def test_every_linear_layer_but_the_head_has_an_adapter():
    for name in ("tied", "untied", "gpt2"):
        model = bare(name)
        head = model.get_output_embeddings()
        kinds = ("Linear", "Conv1D")
        every = [n for n, m in model.named_modules() if type(m).__name__ in kinds and m is not head]
        assert len(every) == (8 if name == "gpt2" else 14)
        assert list(trainable.find_targets(model, "auto")) == every
        trainable.attach(model, asked())
        assert trainable.adapted_layers(model) == every


def test_only_adapters_are_trained_and_the_first_output_is_that_of_the_base():
    for kind in KINDS:
        model, before = bare(), bare()
        trainable.attach(model, asked(kind))
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        assert all(".lora_" in name for name in trained)
        per_layer = 3 if kind == "dora" else 2
        assert len(trained) == per_layer * len(trainable.adapted_layers(model))
        assert torch.allclose(logits(model), logits(before), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_weights_changed_by_hand(kind):
    model, by_hand = adapted("untied", kind), bare("untied")
    held = state.named_tensors(model)
    for name in trainable.adapted_layers(model):
        weight = by_hand.get_submodule(name).weight.data
        a, b = (held[f"base_model.model.{name}.lora_{one}.weight"].detach() for one in "AB")
        changed = weight + (8 / 4**0.5 if kind == "rslora" else 8 / 4) * b @ a
        if kind == "dora":
            lengths = held[f"base_model.model.{name}.lora_magnitude_vector"].detach()
            changed *= (lengths / changed.norm(dim=1))[:, None]
        weight.copy_(changed)
    assert torch.allclose(logits(model), logits(by_hand), atol=1e-5)


def test_a_frozen_base_is_held_in_bf16_and_ties_stay():
    model = bare("tied")
    exact = {name: one.detach().clone() for name, one in model.named_parameters()}
    trainable.attach(model, asked("dora"), dtype=torch.bfloat16)
    assert {one.dtype for one in state.named_parameters(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    held = dict(model.named_parameters())
    q_proj = "model.layers.0.self_attn.q_proj"
    weight = exact[f"{q_proj}.weight"]
    assert torch.equal(held[f"{q_proj}.base_layer.weight"], weight.bfloat16())
    lengths = held[f"{q_proj}.lora_magnitude_vector.default.weight"]
    assert torch.equal(lengths, weight.norm(dim=1))  # of the exact weights


@pytest.mark.parametrize("kind", KINDS)
def test_on_meta_it_is_the_same_model(kind):
    for name, tokens in (("tied", ()), ("untied", (5, 7)), ("tied", (5, 7))):
        empty, whole = on_meta(config(name)), bare(name)
        trainable.attach(empty, asked(kind), tokens, meta=True, dtype=torch.bfloat16)
        trainable.attach(whole, asked(kind), tokens, dtype=torch.bfloat16)
        found, expected = (dict(one.named_parameters()) for one in (empty, whole))
        assert list(found) == list(expected)
        for key, one in expected.items():
            assert found[key].is_meta
            assert (found[key].shape, found[key].dtype) == (one.shape, one.dtype)
            assert found[key].requires_grad == one.requires_grad


def test_patterns_match_names_and_their_ends():
    model = bare()
    assert {name.rpartition(".")[2] for name in trainable.find_targets(model, "*_proj")} == LINEAR
    some = trainable.find_targets(model, ["q_proj", "layers.1.mlp.*", "model.layers.0.*.v_proj"])
    assert set(some) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_a_pattern_without_a_layer_is_refused_with_the_nearest_names():
    with pytest.raises(UserError) as raised:
        trainable.attach(bare(), asked(targets=["q_projj", "o_proj", "fc1"]))
    first, second = raised.value.problems
    assert (first.key, first.value) == ("adapter.targets", "q_projj")
    assert first.expected == "a pattern that matches the name of a linear layer"
    assert first.remedy.startswith("nearest: q_proj")
    assert second.value == "fc1"


def test_a_part_of_a_name_is_no_pattern_of_it():
    with pytest.raises(UserError, match="nearest: "):
        trainable.find_targets(bare(), "proj")


@pytest.mark.parametrize("named", ["lm_head", "embed_tokens", "model.layers.0.mlp"])
def test_naming_what_gets_no_adapter_is_refused(named):
    with pytest.raises(UserError, match="get no adapter"):
        trainable.find_targets(bare(), named)


def test_layers_whose_weights_a_kernel_reads_get_no_adapter():
    """The kernels of a state-space mixer take the weights themselves, and would ignore adapters."""
    small = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 61}
    model = AutoModelForCausalLM.from_config(MambaConfig(**small))
    linear = {name for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    mixer = "backbone.layers.0.mixer"
    assert {"x_proj", "dt_proj", "out_proj"} <= {name.rpartition(".")[2] for name in linear}
    assert trainable.find_targets(model, "auto") == (f"{mixer}.in_proj",)
    with pytest.raises(UserError, match="get no adapter"):
        trainable.find_targets(model, "x_proj")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_routers_and_stacked_experts_are_left_out_and_their_share_is_told(name, caplog):
    model = bare(name)
    named = dict(model.named_parameters())
    gates = ("mlp.gate.weight", "shared_expert_gate.weight")
    left = sum(one.numel() for n, one in named.items() if one.ndim == 3 or n.endswith(gates))
    for one in ("gate", "experts", "experts.gate_up_proj", "mlp.experts.down_proj"):
        with pytest.raises(UserError, match="get no adapter"):
            trainable.find_targets(model, one)
    with caplog.at_level("INFO"):
        trainable.attach(model, asked(targets="auto"))
    ends = {one.rpartition(".")[2] for one in trainable.adapted_layers(model)}
    assert ends == (LINEAR - {"gate_proj", "up_proj", "down_proj"} if name == "mixtral" else LINEAR)
    share = 100 * left / sum(one.numel() for one in model.parameters())
    assert f"routers and stacked experts, {share:.0f} % of the weights, have none" in caplog.text


def test_a_dense_layer_named_as_experts_once_were_is_left_out_as_peft_would_mean_experts():
    model = bare("qwen3_moe")
    named = [name for name, _ in model.named_modules() if name.endswith("up_proj")]
    assert named == ["model.layers.0.mlp.up_proj"]
    assert not set(named) & set(trainable.find_targets(model, "auto"))
    with pytest.raises(UserError, match="get no adapter"):
        trainable.find_targets(model, "up_proj")


def test_trained_rows_of_tokens_serve_the_embedding_and_a_tied_head():
    before, model = bare("tied"), adapted("tied", tokens=(3, 60))
    held = state.named_tensors(model)
    (name,) = (one for one in held if "token" in one)
    assert name == "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = held[name].detach()
    assert rows.shape == (2, 16)
    table = before.model.embed_tokens.weight.detach()
    assert not torch.equal(rows, table[[3, 60]])
    base = model.get_input_embeddings().original_module.weight
    assert torch.equal(base, table)
    found = model.get_input_embeddings()(torch.tensor([3, 4, 60]))
    assert torch.equal(found, torch.stack([rows[0], table[4], rows[1]]))
    hidden = torch.randn(1, 16)
    scores = model.get_output_embeddings()(hidden)[0]
    assert torch.allclose(scores[[3, 60]], (hidden @ rows.T)[0])


def test_an_untied_head_trains_its_own_rows():
    names = [
        name for name in state.named_tensors(adapted("untied", tokens=(3,))) if "token" in name
    ]
    assert [name.split(".")[-3] for name in names] == ["embed_tokens", "lm_head"]


def test_a_head_with_a_bias_trains_no_rows_as_they_would_lose_it():
    model = AutoModelForCausalLM.from_config(PhiConfig(**SMALL))
    assert model.lm_head.bias is not None
    trainable.attach(model, asked(), (3,))
    (name,) = (one for one in state.named_tensors(model) if "token" in one)
    assert "embed_tokens" in name


def test_a_loss_module_shows_accelerate_no_wrapped_embedding():
    module = LossModule(adapted("tied", tokens=(3,)))
    assert module.get_input_embeddings() is None
    assert module.get_output_embeddings() is None
    plain = LossModule(adapted("tied"))
    assert plain.get_input_embeddings() is plain.model.model.embed_tokens


def test_the_files_name_the_base_and_layers_by_their_ends():
    files = trainable.adapter_files(adapted("untied", "dora", dropout=0.25), BASE)
    settings = json.loads(files["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "a/b"
    assert settings["revision"] == "1f3c0123456789ab"
    assert set(settings["target_modules"]) == LINEAR
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8, 0.25)
    assert settings["use_dora"] is True
    assert settings["inference_mode"] is True
    assert json.loads(files["adapter.json"]) == {"base": asdict(BASE)}
    some = adapted(targets=["*layers.1.*.q_proj"])
    assert trainable.short_names(some) == ["model.layers.1.self_attn.q_proj"]


def test_an_adapter_of_another_base_is_refused():
    saved = trainable.adapter_files(adapted(), BASE)["adapter.json"]
    trainable.refuse_other_base(saved, BASE, "step-00000004")
    for alone in ({"path": "c/d"}, {"revision": "9e0d0123456789ab"}):
        with pytest.raises(UserError, match=r"a/b@1f3c01234567"):
            trainable.refuse_other_base(saved, replace(BASE, **alone), "step-00000004")
    other = Base("c/d", "9e0d0123456789ab", None)
    with pytest.raises(UserError) as raised:
        trainable.refuse_other_base(saved, other, "step-00000004")
    (problem,) = raised.value.problems
    assert (problem.key, str(problem.value)) == ("model.from", "c/d@9e0d01234567")
    assert problem.expected == (
        "a/b@1f3c01234567, on which the adapter in step-00000004 was trained"
    )


def test_a_directory_that_was_moved_is_the_same_base_and_a_changed_one_is_not():
    was = Base("/old", None, "aa")
    saved = json.dumps({"base": asdict(was)}).encode()
    trainable.refuse_other_base(saved, replace(was, path="/new"), "step-00000004")
    with pytest.raises(UserError, match="/old@aa"):
        trainable.refuse_other_base(saved, replace(was, digest="bb"), "step-00000004")


@pytest.mark.parametrize("kind", KINDS)
def test_the_census_counts_adapters_and_what_is_trained(kind):
    model = bare("tied")
    shapes = [
        tuple(model.get_submodule(n).weight.shape) for n in trainable.find_targets(model, "auto")
    ]
    expected = sum(4 * (rows + columns) for rows, columns in shapes)
    expected += sum(rows for rows, _ in shapes) if kind == "dora" else 0
    found = describe_parameters(config("tied"), (), asked(kind))
    assert found.trainable == expected
    assert found.count == expected + sum(one.numel() for one in model.parameters())
    assert found.adapted
    assert found.tied
    plain = describe_parameters(config("tied"))
    assert (found.embedding, found.head, found.blocks) == (
        plain.embedding,
        plain.head,
        plain.blocks,
    )
    rows = describe_parameters(config("tied"), (), asked(kind), (3, 60))
    assert rows.trainable == expected + 2 * 16
    assert (rows.embedding, rows.head, rows.token_rows) == (plain.embedding, plain.head, 2)


def test_no_adapter_leaves_a_model_as_it_is():
    model = bare()
    trainable.attach(model, AdapterConfig())
    assert not state.has_adapters(model)
    assert describe_parameters(config("tied"), (), AdapterConfig()) == describe_parameters(
        config("tied")
    )


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_generation_is_the_same_with_activation_checkpointing(checkpointing):
    texts = []
    for how in ("none", checkpointing):
        model = adapted("untied")
        shape.apply_checkpointing(model, how)
        loss = LossModule(model)(torch.arange(12)[None] * 5 % 61, torch.arange(12)[None] * 5 % 61)
        loss.backward()
        model.eval()
        ids = torch.tensor([[3, 5, 8]])
        texts.append(model.generate(ids, max_new_tokens=12, do_sample=False).tolist())
        found = [one.grad for one in state.named_parameters(model).values()]
        assert all(one is not None and one.any() for one in found)
    assert texts[0] == texts[1]


def test_weights_that_are_loaded_get_adapters_that_depend_on_the_seed_alone(tmp_path):
    from llmtrain.config.schema import ModelConfig

    bare("tied").save_pretrained(tmp_path)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        model = rebuild(config("tied"), ModelConfig(**{"from": str(tmp_path)}))
        trainable.attach(model, asked())
        drawn.append([one.detach() for one in state.named_parameters(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


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


# Four-bit layers on a CPU.


def llama():
    torch.manual_seed(4)
    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)
    )


def four_bit_logits(model):
    return model(torch.arange(12)[None] * 5 % 61, use_cache=False).logits


@needs("bitsandbytes")
def test_adapters_on_four_bits_are_adapters_on_the_weights_that_these_stand_for():
    import bitsandbytes as bnb

    model, dense = llama(), llama()
    trainable.attach(model, AdapterConfig(kind="qlora", r=4), dtype=torch.float32)
    assert not hasattr(model, "is_loaded_in_4bit")
    model.to("cpu")  # which quantizes, as any move to a device does
    held = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(held) == 7
    for name in trainable.adapted_layers(model):
        four = model.get_submodule(name).base_layer
        assert four.weight.dtype == torch.uint8
        assert four.weight.quant_state.nested
        exact = bnb.functional.dequantize_4bit(four.weight.data, four.weight.quant_state)
        weight = dense.get_submodule(name).weight
        assert 0 < (exact - weight).abs().max() < 0.2 * weight.abs().max()
        weight.data.copy_(exact)
    assert torch.allclose(four_bit_logits(model), four_bit_logits(dense), atol=1e-5)
    trained = state.named_parameters(model)
    assert {one.dtype for one in trained.values()} == {torch.float32}
    four_bit_logits(model).sum().backward()
    assert all(one.grad is not None for one in trained.values())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


def test_the_layers_in_four_bits_are_linear_and_not_the_head():
    assert {name.rpartition(".")[2] for name in trainable.linear_layers(llama())} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_what_is_missing_for_four_bits_has_a_remedy(monkeypatch):
    (problem,) = trainable.missing_for_four_bits(cpu=True)
    assert (problem.key, problem.value, problem.remedy) == (
        "adapter.kind", "qlora", "adapter.kind=lora",
    )  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (problem,) = trainable.missing_for_four_bits(cpu=False)
    assert "llmtrain[quantized]" in problem.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    assert list(trainable.missing_for_four_bits(cpu=False)) == []
