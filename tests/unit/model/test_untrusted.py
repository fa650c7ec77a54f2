"""Model directories of others: what is wrong with each is one message, and nothing in it is run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmtrain.config.schema import ModelConfig
from llmtrain.errors import UserError
from llmtrain.model import untrusted
from llmtrain.training.start.frozen import find_base

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 300,
}


@pytest.fixture
def base(tmp_path):
    """What looks like a model directory; nobody builds the model."""
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.zeros(2)}, directory / "model.safetensors")
    return directory


def sharded(base, weight_map):
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    (base / untrusted.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refusal(path):
    with pytest.raises(UserError) as raised:
        find_base(ModelConfig.model_validate({"from": str(path)}))
    said = str(raised.value)
    assert said.splitlines()[1].startswith("  model.from = ")
    assert "expected: " in said
    return said


def test_a_whole_directory_passes_and_so_does_a_name_of_the_hub(base):
    untrusted.check(str(base))
    sharded(base, {"a": "model-00001-of-00001.safetensors"})
    untrusted.check(str(base))
    untrusted.check("someone/some-model")


def test_a_plan_needs_no_weights(base):
    (base / "model.safetensors").unlink()
    untrusted.check(str(base))


@pytest.mark.parametrize("suffix", untrusted.PICKLED)
def test_a_pickled_file_is_answered_with_how_to_convert_it(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"not even looked at")
    said = refusal(path)
    assert "no pickled file" in said
    assert "save_pretrained(DIR) writes safetensors" in said


def test_a_directory_of_pickled_weights_too(base):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    said = refusal(base)
    assert "not the pickled pytorch_model.bin" in said
    assert "save_pretrained" in said


def test_a_dcp_checkpoint_is_recognised(tmp_path):
    (tmp_path / ".metadata").touch()
    (tmp_path / "__0_0.distcp").touch()
    said = refusal(tmp_path)
    assert "DCP checkpoint" in said
    assert "torch.distributed.checkpoint.format_utils" in said


def test_a_state_of_accelerate_lacks_its_config(base):
    (base / "config.json").unlink()
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (base / name).touch()
    said = refusal(base)
    assert "this is a state of accelerate" in said
    assert "copy config.json" in said


def test_of_a_trainer_directory_its_safetensors_are_taken(base):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (base / name).touch()
    untrusted.check(str(base))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../outside.safetensors"]
)
def test_an_index_that_leads_out_of_the_directory_is_refused(base, name):
    shutil.copy(base / "model.safetensors", base.parent / "outside.safetensors")
    sharded(base, {"a": name})
    assert f"{name!r} is not a plain path inside the directory" in refusal(base)


def test_a_link_that_leads_out_of_the_directory_is_refused(base):
    (base / "model.safetensors").rename(base.parent / "elsewhere.safetensors")
    (base / "model.safetensors").symlink_to(base.parent / "elsewhere.safetensors")
    assert "model.safetensors leads out of the directory" in refusal(base)


def test_what_is_no_regular_file_is_not_opened(base):
    (base / "model.safetensors").unlink()
    os.mkfifo(base / "model.safetensors")
    assert "model.safetensors is not a regular file" in refusal(base)


def test_a_weight_that_stands_twice_in_an_index_is_refused(base):
    sharded(base, {})
    (base / untrusted.INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert "a occurs twice" in refusal(base)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', "{", "{}"])
def test_an_index_that_is_none_is_refused(base, index):
    sharded(base, {})
    (base / untrusted.INDEX).write_text(index)
    assert "an index that maps each weight to a file" in refusal(base)


def test_a_file_that_the_index_names_must_be_there(base):
    sharded(base, {"a": "gone.safetensors"})
    assert "gone.safetensors is not there" in refusal(base)


def test_links_of_the_hubs_own_cache_are_its_own(tmp_path, base):
    cached = tmp_path / "models--a--b" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).rename(blobs / name)
        (cached / name).symlink_to(Path("..") / ".." / "blobs" / name)
    untrusted.check(str(cached))


def test_a_type_that_transformers_does_not_have_is_refused(base):
    code = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    config = {**CONFIG, "model_type": "zzz", "auto_map": code}
    (base / "config.json").write_text(json.dumps(config))
    (base / "modeling_x.py").write_text("raise SystemExit('it was run')")
    assert "it needs its own code (type 'zzz')" in refusal(base)


def test_code_beside_a_type_of_transformers_is_one_warning(base, caplog):
    code = {"AutoModelForCausalLM": "modeling_x.XForCausalLM", "AutoConfig": "x.Y"}
    (base / "config.json").write_text(json.dumps({**CONFIG, "auto_map": code}))
    (base / "modeling_x.py").write_text("raise SystemExit('it was run')")
    find_base(ModelConfig.model_validate({"from": str(base)}))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "code of its own (AutoConfig, AutoModelForCausalLM), which is not run" in said


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "model.safetensors"])
def test_an_adapter_is_no_model_even_beside_one(base, weights):
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    (base / "model.safetensors").rename(base / weights)
    said = refusal(base)
    assert "this is an adapter of someone/base" in said
    assert "--merge-adapters" in said


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"base_model_name_or_path": null}'])
def test_an_adapter_that_does_not_name_its_base_is_one_all_the_same(base, body):
    (base / "adapter_config.json").write_text(body)
    assert "this is an adapter of another model" in refusal(base)


def test_weights_in_a_dtype_that_would_lose_its_scales_are_refused(base):
    save_file({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, base / "model.safetensors")
    assert "holds F8_E4M3" in refusal(base)


def test_a_config_of_any_size_is_not_read(base, monkeypatch):
    monkeypatch.setattr(untrusted, "_MAX_JSON_BYTES", 10)
    assert "larger than 10 bytes" in refusal(base)


def test_a_directory_of_too_many_files_is_none(base, monkeypatch):
    monkeypatch.setattr(untrusted, "_MAX_FILES", 1)
    assert "2 entries" in refusal(base)


def test_every_problem_is_told_at_once(base):
    (base / "config.json").write_text("{")
    (base / "model.safetensors").write_bytes(b"\0" * 10)
    assert refusal(base).startswith("2 problems")


@pytest.mark.parametrize("body", ["[1, 2]", '"x"', "{", "null"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_settings_that_are_no_object_are_refused(base, name, body):
    (base / name).write_text(body)
    assert f"a {name} that can be read" in refusal(base)


@pytest.mark.parametrize("ends", [{"a": 1}, "x", [1, None], 1.5, True])
def test_an_end_that_is_no_id_is_refused(base, ends):
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert f"an id, or a list of ids, as eos_token_id; it is {json.dumps(ends)}" in refusal(base)


@pytest.mark.parametrize("ends", [None, 0, [0, 1]])
def test_ids_that_end_a_text_pass(base, ends):
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    untrusted.check(str(base))


@pytest.mark.parametrize("asked", [{"quant_method": "gptq", "bits": 4}, {}, 5])
def test_a_quantization_of_plain_weights_is_refused(base, asked):
    fields = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(fields | {"quantization_config": asked}))
    said = refusal(base)
    assert "plain weights; the quantization_config of its config.json" in said
    assert "take that key out of config.json" in said
