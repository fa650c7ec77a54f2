"""Adapters that peft saved with its options: computed exactly as peft does, or refused by name."""

import contextlib
import json

import pytest
import torch
from helpers import used
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from llmtrain.errors import UserError
from llmtrain.tools.use import load
from llmtrain.tools.use.export.merge import merged_weights
from llmtrain.tools.use.load import open_model
from llmtrain.tools.use.target import find_target

Q = ["q_proj"]
EXACT = {
    "ranks by layer": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.0.*q_proj": 2},
        "alpha_pattern": {"v_proj": 32},
    },
    "bias of B": {"lora_bias": True},
    "biases": {"bias": "all"},
    "biases of its layers": {"bias": "lora_only"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "zero": {"init_lora_weights": False},
    "mica": {"init_lora_weights": "mica"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "but one": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "a whole module": {"modules_to_save": ["norm"]},
    "token rows": {"trainable_token_indices": [5, 6]},
}
CHANGED_BASE = ["pissa", "pissa_niter_4", "olora", "OLoRA"]
HOOKS = {
    "alora_invocation_tokens": [5, 6],
    "layer_replication": [[0, 2], [0, 2]],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2},
    "velora_config": {"rank": 1},
    "monteclora_config": {"n": 1},
    "kasa_config": {"beta": 1.0},
    "arrow_config": {"top_k": 1},
    "of_a_later_peft": {"a": 1},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    files = used.tokenizer(folder / "tokenizer")
    biased = used.model(tie_word_embeddings=False, attention_bias=True)
    return used.directory(folder / "base", biased, files)


def saved(folder, base, **settings):
    return used.adapter(
        folder, base, base.parent / "tokenizer", **({"target_modules": Q} | settings)
    )


def of_peft(base, adapter):
    made = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with used.quiet():
        return used.logits(PeftModel.from_pretrained(made, adapter).eval())


@pytest.mark.filterwarnings("ignore")  # peft's, of a bias that it takes for a shard
@pytest.mark.parametrize("case", EXACT)
def test_what_is_supported_is_exact(tmp_path, base, case):
    adapter = saved(tmp_path / "adapter", base, **EXACT[case])
    expected = of_peft(base, adapter)
    assert torch.equal(used.logits(open_model(find_target(str(adapter))).model), expected)
    assert not torch.equal(used.logits(open_model(find_target(str(base))).model), expected)


@pytest.mark.parametrize("init", CHANGED_BASE)
def test_an_adapter_whose_base_was_changed_is_refused(tmp_path, base, init):
    """Case 13: PiSSA and OLoRA were computed on the base as its files are, up to 0.087 away."""
    adapter = saved(tmp_path / "adapter", base, init_lora_weights=init)
    for work in (open_model, lambda target: merged_weights(target, 320, "F32")):
        with pytest.raises(UserError) as caught:
            work(find_target(str(adapter)))
        (problem,) = caught.value.problems
        assert problem.key == f"{adapter / 'adapter_config.json'}: init_lora_weights"
        assert problem.value == json.dumps(init)
        assert "path_initial_model_for_weight_conversion" in problem.remedy


def test_an_adapter_that_begins_at_some_tokens_is_refused(tmp_path, base):
    """Case 13: such an adapter was ignored, so that the base alone answered."""
    adapter = saved(tmp_path / "adapter", base, alora_invocation_tokens=[5, 6])
    with pytest.raises(UserError, match=r"alora_invocation_tokens = \[5, 6\]"):
        open_model(find_target(str(adapter)))


def change(adapter, **settings):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("key", HOOKS)
@pytest.mark.parametrize("merge", [False, True])
def test_what_changes_more_than_tensors_is_refused_by_name(tmp_path, base, key, merge):
    adapter = saved(tmp_path / "adapter", base)
    change(adapter, **{key: HOOKS[key]}, init_lora_weights="loftq")
    target = find_target(str(adapter))
    with pytest.raises(UserError) as caught:
        merged_weights(target, 320, "F32") if merge else open_model(target)
    keys = [problem.key.rpartition(": ")[2] for problem in caught.value.problems]
    assert keys == ["init_lora_weights", key]


def test_every_option_of_peft_is_known_or_is_refused():
    """A new option of peft is refused until it is on the list, with a test that it is exact."""
    known = set(LoraConfig.__dataclass_fields__)
    supported = set(load._AdapterSettings.model_fields)
    assert known >= supported
    assert known - supported - HOOKS.keys() == {"runtime_config"}


def test_empty_options_of_a_later_peft_are_none(tmp_path, base):
    adapter = saved(tmp_path / "adapter", base)
    expected = used.logits(open_model(find_target(str(adapter))).model)
    change(adapter, of_a_later_peft=None, another={}, a_third=False)
    assert torch.equal(used.logits(open_model(find_target(str(adapter))).model), expected)


def test_experts_that_an_adapter_changes_by_name_are_not_merged(tmp_path):
    """They were left out of the merged weights without a word, 0.067 away."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=320, **sizes, **more))
    files = used.tokenizer(tmp_path / "tokenizer")
    base = used.directory(tmp_path / "base", made, files)
    named = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapter = used.adapter(tmp_path / "adapter", base, files, **named)
    assert torch.equal(
        used.logits(open_model(find_target(str(adapter))).model), of_peft(base, adapter)
    )
    with pytest.raises(UserError, match="which can be merged"):
        merged_weights(find_target(str(adapter)), 320, "F32")


JUNK = [None, True, -1, 0, 1e300, "x", [], ["x"], {}, {"a": 1}, [[1]], "\ud800"]


@pytest.mark.filterwarnings("ignore")  # peft's, of patterns that match nothing
@pytest.mark.parametrize("key", sorted(set(LoraConfig.__dataclass_fields__)))
def test_junk_in_an_option_is_refused_or_means_nothing(tmp_path, base, key):
    adapter = saved(tmp_path / "adapter", base)
    before = (adapter / "adapter_config.json").read_text()
    for value in JUNK:
        (adapter / "adapter_config.json").write_text(before)
        change(adapter, **{key: value})
        with contextlib.suppress(UserError):
            open_model(find_target(str(adapter)))
