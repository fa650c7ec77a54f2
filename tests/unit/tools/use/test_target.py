"""Which weights a MODEL_OR_RUN means."""

import importlib.util
import json

import pytest
import torch
from helpers.checkpoints import RUN, flip, save
from helpers.rings import needs
from helpers.runs import status, write_run

from llmtrain.errors import UserError
from llmtrain.tools.use import target
from llmtrain.tools.use.target import KEY, find_target


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [], status(run_id=RUN))


def named(path):
    return find_target(str(path)).directory.name


def test_a_run_is_its_best_checkpoint_else_the_newest(run):
    for step in (4, 8):
        save(run / "checkpoints", step)
    assert named(run) == "step-00000008"
    for step, loss in {12: 3.0, 16: 2.5, 20: 2.5, 24: 2.75}.items():
        save(run / "checkpoints", step, loss=loss)
    found = find_target(str(run))
    assert (found.directory.name, found.step, found.run_dir) == ("step-00000016", 16, run)
    assert named(run / "checkpoints") == "step-00000016"


def test_a_checkpoint_is_itself_and_knows_its_run(run):
    save(run / "checkpoints", 4)
    save(run / "checkpoints", 8, loss=1.0)
    found = find_target(str(run / "checkpoints" / "step-00000004"))
    assert (found.step, found.run_dir) == (4, run)


def test_a_checkpoint_that_looks_damaged_is_passed_over(run):
    save(run / "checkpoints", 4, loss=3.0)
    save(run / "checkpoints", 8, loss=2.0)
    (run / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(bytes(3))
    assert named(run) == "step-00000004"


def test_a_model_directory_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = find_target(str(tmp_path))
    assert (found.directory, found.run_dir, found.step) == (tmp_path, None, None)


@pytest.mark.parametrize("given", ["absent/at/all", "./absent", "no model here", "file"])
def test_what_is_nothing_is_one_message(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        find_target(given)
    assert [problem.key for problem in caught.value.problems] == [KEY]


def test_an_empty_run_an_empty_directory_and_a_partial_checkpoint_are_refused(run, tmp_path):
    save(run / "checkpoints", 4)
    partial = run / "checkpoints" / "step-00000008.partial"
    partial.mkdir()
    empty = write_run(tmp_path / "other", [])
    (tmp_path / "nothing").mkdir()
    for path in (partial, empty, tmp_path / "nothing"):
        with pytest.raises(UserError, match=KEY):
            find_target(str(path))


def test_a_state_that_is_no_json_is_refused(run):
    save(run / "checkpoints", 4)
    flip(run / "checkpoints" / "step-00000004" / "trainer_state.json", 0)
    with pytest.raises(UserError, match="whole checkpoint"):
        find_target(str(run / "checkpoints" / "step-00000004"))


def test_a_hub_id_is_its_snapshot(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        target,
        "snapshot_download",
        lambda name, **options: asked.append((name, options["revision"])) or str(tmp_path),
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    found = find_target("owner/name")
    assert (found.directory, found.is_adapter) == (tmp_path, True)
    assert asked == [("owner/name", None)]


# What a run with four-bit weights holds, against the layer that computes with them.
QLORA = {"config": {"adapter.kind": "qlora"}}


def test_only_the_base_of_qlora_is_held_in_four_bits(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert target.are_held(QLORA)
    assert not target.are_held({"config": {"adapter.kind": "lora"}})
    assert not target.are_held({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llmtrain\[quantized\]"):
        target.are_held(QLORA)


@needs("bitsandbytes")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_rounded_weights_compute_what_the_four_bit_layer_does(precision, bound):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 128, bias=False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    packed = bnb.nn.Linear4bit(64, 128, bias=False, compute_dtype=dtype, quant_type="nf4")
    weight = dense.weight.detach().to(dtype)
    packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    x = torch.randn(3, 64)
    expected = packed.to("cpu")(x.to(dtype)).float()
    rounded = target.round_weight(
        dense.weight.detach(), {"auto": {"run": {"precision": precision}}}
    )
    assert float((x @ rounded.T - expected).abs().max()) <= bound
    assert float((rounded - dense.weight.detach()).abs().max()) > 1e-3
