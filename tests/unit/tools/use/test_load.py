"""A model that is loaded has the weights of its files; an adapter, those of its base too."""

import contextlib
import json
import math
import shutil

import pytest
import torch
from helpers import used
from helpers.checkpoints import flip
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.errors import UserError
from llmtrain.tools.use import load
from llmtrain.tools.use.load import base_directory, open_model
from llmtrain.tools.use.merge import merged_weights
from llmtrain.tools.use.target import find_target


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    files = used.tokenizer(folder / "tokenizer")
    return used.directory(folder / "base", used.model(request.param), files)


def parameters(directory, **options):
    """Those of a model by their names in its files; those of an adapter as peft names them."""
    model = open_model(find_target(str(directory)), **options).model
    named = {name.replace(".base_layer", ""): one for name, one in model.named_parameters()}
    prefix = "base_model.model."
    return {
        prefix + name.replace(".default", "") if "lora_" in name else name: one
        for name, one in named.items()
    }


def test_a_model_has_exactly_the_tensors_of_its_file(base):
    found, stored = parameters(base), load_file(base / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_has_its_own_tensors_and_those_of_its_base(base, tmp_path, precision):
    adapter = used.adapter(tmp_path / "adapter", base, base.parent / "tokenizer")
    found = parameters(adapter, precision=precision)
    whole = load_file(base / "model.safetensors")
    own = load_file(adapter / "adapter_model.safetensors")
    assert found.keys() == whole.keys() | own.keys()
    for name, tensor in own.items():
        assert torch.equal(found[name], tensor), name
    held = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, tensor in whole.items():
        assert found[name].dtype == held
        assert torch.equal(found[name], tensor.to(held)), name


def test_the_frequencies_of_positions_stay_fp32_on_a_bf16_base(tmp_path):
    """A run holds them so: rounded, they would turn late positions by another angle."""
    files = used.tokenizer(tmp_path / "tokenizer")
    base = used.directory(tmp_path / "base", used.model(), files)
    adapter = used.adapter(tmp_path / "adapter", base, files)
    buffers = dict(open_model(find_target(str(adapter)), precision="bf16").model.named_buffers())
    expected = dict(used.model().named_buffers())
    assert [name for name in expected if name.endswith("inv_freq")]
    for name, buffer in expected.items():
        assert buffers[name].dtype == torch.float32
        assert torch.equal(buffers[name], buffer)


def of_another_type(directory):
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"model_type": "zzz"}))


def with_fields(name, **fields):
    def spoil(directory):
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return spoil


def with_value(value):
    def spoil(directory):
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (of_another_type, "its own code (type 'zzz')"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "config.json").unlink(), "a run, a checkpoint, a model directory"),
        (lambda d: flip(d / "config.json", 0), "config.json"),
        (lambda d: (d / "tokenizer.json").unlink(), "a tokenizer directory"),
        (with_fields("config.json", hidden_act="foo"), "whole safetensors: 'foo'"),
        (with_fields("config.json", dtype="float99"), "float99"),
        (with_fields("tokenizer_config.json", chat_template=5), "is a string; it is 5"),
        (with_fields("tokenizer_config.json", chat_template=[1]), "a tokenizer directory"),
        (with_value(math.nan), "finite weights; 1 tensors have NaN or inf (model."),
        (with_value(-math.inf), "finite weights; 1 tensors have NaN or inf (model."),
    ],
)
def test_a_directory_that_is_no_model_is_one_problem_of_the_argument(tmp_path, spoil, said):
    files = used.tokenizer(tmp_path / "tokenizer")
    model = used.directory(tmp_path / "model", used.model(), files)
    spoil(model)
    with pytest.raises(UserError) as caught:
        open_model(find_target(str(model)))
    (problem,) = caught.value.problems
    assert problem.key == "MODEL_OR_RUN"
    assert said in f"{problem.expected} {problem.remedy}"


def test_a_base_that_changed_or_is_gone_is_refused(tmp_path):
    files = used.tokenizer(tmp_path / "tokenizer")
    base = used.directory(tmp_path / "base", used.model(), files)
    adapter = used.adapter(tmp_path / "adapter", base, files)
    assert base_directory(adapter) == base
    flip(base / "model.safetensors")
    with pytest.raises(UserError, match="that directory has other weights now") as caught:
        base_directory(adapter)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("base of adapter", str(base))
    assert problem.remedy == "put it back"
    known = json.loads((adapter / "adapter.json").read_text())["base"]
    (adapter / "adapter.json").write_text(json.dumps({"base": known | {"digest": None}}))
    assert base_directory(adapter) == base  # an adapter of peft alone, whose base has no digest
    shutil.rmtree(base)
    with pytest.raises(UserError, match="that directory is gone"):
        base_directory(adapter)


# Adapters that peft saved with its options: computed exactly as peft does, or refused by name.
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
def biased_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    files = used.tokenizer(folder / "tokenizer")
    biased = used.model(tie_word_embeddings=False, attention_bias=True)
    return used.directory(folder / "base", biased, files)


def saved(folder, biased_base, **settings):
    return used.adapter(
        folder, biased_base, biased_base.parent / "tokenizer", **({"target_modules": Q} | settings)
    )


def of_peft(biased_base, adapter):
    made = AutoModelForCausalLM.from_pretrained(biased_base, dtype=torch.float32)
    with used.quiet():
        return used.logits(PeftModel.from_pretrained(made, adapter).eval())


@pytest.mark.filterwarnings("ignore")  # peft's, of a bias that it takes for a shard
@pytest.mark.parametrize("case", EXACT)
def test_what_is_supported_is_exact(tmp_path, biased_base, case):
    adapter = saved(tmp_path / "adapter", biased_base, **EXACT[case])
    expected = of_peft(biased_base, adapter)
    assert torch.equal(used.logits(open_model(find_target(str(adapter))).model), expected)
    assert not torch.equal(used.logits(open_model(find_target(str(biased_base))).model), expected)


@pytest.mark.parametrize("init", CHANGED_BASE)
def test_an_adapter_whose_base_was_changed_is_refused(tmp_path, biased_base, init):
    """Case 13: PiSSA and OLoRA were computed on the base as its files are, up to 0.087 away."""
    adapter = saved(tmp_path / "adapter", biased_base, init_lora_weights=init)
    for work in (open_model, lambda target: merged_weights(target, 320, "F32")):
        with pytest.raises(UserError) as caught:
            work(find_target(str(adapter)))
        (problem,) = caught.value.problems
        assert problem.key == f"{adapter / 'adapter_config.json'}: init_lora_weights"
        assert problem.value == json.dumps(init)
        assert "path_initial_model_for_weight_conversion" in problem.remedy


def test_an_adapter_that_begins_at_some_tokens_is_refused(tmp_path, biased_base):
    """Case 13: such an adapter was ignored, so that the base alone answered."""
    adapter = saved(tmp_path / "adapter", biased_base, alora_invocation_tokens=[5, 6])
    with pytest.raises(UserError, match=r"alora_invocation_tokens = \[5, 6\]"):
        open_model(find_target(str(adapter)))


def change(adapter, **settings):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("key", HOOKS)
@pytest.mark.parametrize("merge", [False, True])
def test_what_changes_more_than_tensors_is_refused_by_name(tmp_path, biased_base, key, merge):
    adapter = saved(tmp_path / "adapter", biased_base)
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


def test_empty_options_of_a_later_peft_are_none(tmp_path, biased_base):
    adapter = saved(tmp_path / "adapter", biased_base)
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
    biased_base = used.directory(tmp_path / "base", made, files)
    named = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapter = used.adapter(tmp_path / "adapter", biased_base, files, **named)
    assert torch.equal(
        used.logits(open_model(find_target(str(adapter))).model), of_peft(biased_base, adapter)
    )
    with pytest.raises(UserError, match="which can be merged"):
        merged_weights(find_target(str(adapter)), 320, "F32")


JUNK = [None, True, -1, 0, 1e300, "x", [], ["x"], {}, {"a": 1}, [[1]], "\ud800"]


@pytest.mark.filterwarnings("ignore")  # peft's, of patterns that match nothing
@pytest.mark.parametrize("key", sorted(set(LoraConfig.__dataclass_fields__)))
def test_junk_in_an_option_is_refused_or_means_nothing(tmp_path, biased_base, key):
    adapter = saved(tmp_path / "adapter", biased_base)
    before = (adapter / "adapter_config.json").read_text()
    for value in JUNK:
        (adapter / "adapter_config.json").write_text(before)
        change(adapter, **{key: value})
        with contextlib.suppress(UserError):
            open_model(find_target(str(adapter)))
