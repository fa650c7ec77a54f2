"""A model that is loaded has the weights of its files; an adapter, those of its base too."""

import json
import math
import shutil

import pytest
import torch
from helpers import used
from helpers.checkpoints import flip
from safetensors.torch import load_file, save_file

from llmtrain.errors import UserError
from llmtrain.tools.use.load import base_directory, open_model
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
