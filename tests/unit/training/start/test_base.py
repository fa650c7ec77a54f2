"""What `model.from` means: looked up once, pinned, and the same for all that read it."""

import hashlib
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from helpers.bases import save_base
from helpers.checkpoints import RUN, flip, on_ranks, save, saved_run
from helpers.hub import read_files
from helpers.model_hub import MODEL, NEW, OLD, serving_model, take_for_hub
from transformers import AutoModelForCausalLM

from llmtrain.config.schema import ModelConfig
from llmtrain.errors import RunError, UserError
from llmtrain.model import build as building
from llmtrain.model.base import Base
from llmtrain.model.tokenizer import save_tokenizer, special_tokens
from llmtrain.rundir.status import FrozenChoices
from llmtrain.training.start import frozen as bases
from llmtrain.training.start.frozen import check_unchanged, decide_base, find_base, known_base


def asked(path, **more):
    return ModelConfig.model_validate({"from": str(path), **more})


def refusal(model):
    with pytest.raises(UserError) as caught:
        find_base(model)
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), hidden_size=8, intermediate_size=12)


@pytest.fixture
def directory(made, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "base"))


def test_a_directory_is_pinned_by_its_weights_wherever_it_is(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_base(asked("base"))
    assert found.path == str(tmp_path / "base")
    assert found.revision is None
    (directory / "tokenizer_config.json").write_text("{}")
    assert find_base(asked("base")) == found
    directory.rename(tmp_path / "moved")
    assert find_base(asked("moved")).digest == found.digest
    for offset in (-1, 8_000):
        flip(tmp_path / "moved" / "model.safetensors", offset)
        assert find_base(asked("moved")).digest != found.digest
        flip(tmp_path / "moved" / "model.safetensors", offset)


def test_weights_that_are_not_those_that_were_pinned_are_refused(directory):
    found = find_base(asked(directory))
    check_unchanged(found)
    flip(directory / "model.safetensors")
    with pytest.raises(UserError, match="has other weights now") as caught:
        check_unchanged(found)
    assert str(found) in str(caught.value)
    shutil.rmtree(directory)
    with pytest.raises(UserError, match="is gone"):
        check_unchanged(found)
    check_unchanged(Base("someone/model", OLD, None))


def test_a_directory_has_no_revision(directory):
    assert "model.revision = v2" in refusal(asked(directory, revision="v2"))


def test_of_a_run_the_best_checkpoint_is_taken(tmp_path):
    run = saved_run(tmp_path)
    found = find_base(asked(run))
    best = run / "checkpoints" / "step-00000012"
    manifest = hashlib.sha256((best / "manifest.json").read_bytes()).hexdigest()
    assert (found.path, found.digest) == (str(best), manifest[:32])
    assert find_base(asked(best)) == found
    (best / "optimizer-00001-of-00001.safetensors").unlink()  # not among the weights
    assert bases._digest(best) == found.digest


def test_a_damaged_checkpoint_and_that_of_another_run_are_passed_over(tmp_path):
    run = saved_run(tmp_path)
    save(run / "checkpoints", 32, loss=0.1, run_id="another")
    (run / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"short")
    assert find_base(asked(run)).path.endswith("step-00000020")


@pytest.mark.parametrize("losses", [{4: 3.0, 8: 2.0, 12: 2.0, 16: None}, {4: None, 8: None}])
def test_of_equal_losses_the_oldest_is_taken_and_without_any_the_newest(tmp_path, losses):
    for step, loss in losses.items():
        save(tmp_path / "checkpoints", step, loss=loss)
    (tmp_path / "status.json").write_text(json.dumps({"run_id": RUN}))
    assert find_base(asked(tmp_path)).path.endswith("step-00000008")


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "status.json").write_text("{}")
    assert "a run that has a whole checkpoint" in refusal(asked(tmp_path))


def test_the_first_start_decides_and_later_ones_repeat_it(directory, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    model = asked(directory)
    found = decide_base(model, run, on_ranks(1, lambda ranks: ranks)[0])
    assert found is not None
    auto = FrozenChoices(run, "")
    bases.keep_base(auto, model, found)
    auto.save()
    assert json.loads((run / "auto.json").read_text())["run"]["base"]["path"] == str(directory)
    shutil.rmtree(directory)
    assert known_base(model, run) == found
    other = save_base(tmp_path / "other", hidden_size=8, intermediate_size=12, seed=4)
    assert known_base(asked(other), run) == find_base(asked(other)) != found


def test_rank_0_alone_looks_and_all_have_what_it_found(directory, tmp_path, monkeypatch):
    looked: list[ModelConfig] = []
    find = bases.find_base
    monkeypatch.setattr(bases, "find_base", lambda model: looked.append(model) or find(model))
    found = on_ranks(3, lambda ranks: decide_base(asked(directory), tmp_path, ranks))
    assert len(looked) == 1
    assert found == [find(asked(directory))] * 3
    assert on_ranks(2, lambda ranks: decide_base(ModelConfig(), tmp_path, ranks)) == [None, None]


@pytest.fixture
def hub(made, tmp_path, monkeypatch):
    """The model on the Hub, and a later commit with other weights."""
    later = save_base(tmp_path / "later", hidden_size=8, intermediate_size=12, seed=4)
    with serving_model({OLD: read_files(made), NEW: read_files(later)}) as server:
        take_for_hub(monkeypatch, server, tmp_path / "home")
        yield server


def offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_config_tokenizer_and_weights_are_of_one_commit_though_the_branch_moves(
    hub, made, tmp_path
):
    model = asked(MODEL)
    base = find_base(model)
    assert base == Base(MODEL, OLD, None)
    hub.main = NEW
    save_tokenizer(base.path, base.revision, tmp_path / "tokenizer")
    tokens = special_tokens(base.path, base.revision)
    loaded = building.build(building.model_config(model, tokens, 16, base), model, base)
    expected = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    for one, other in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert {commit for commit, _ in hub.read} == {OLD}
    assert find_base(model).revision == NEW
    assert find_base(asked(MODEL, revision=OLD)) == base


def test_offline_the_cache_alone_is_read(hub, made, tmp_path, monkeypatch):
    model = asked(MODEL)
    base = find_base(model)
    tokens = special_tokens(base.path, base.revision)
    building.build(building.model_config(model, tokens, 16, base), model, base)
    hub.requests.clear()
    offline(monkeypatch)
    assert find_base(model) == base
    assert special_tokens(base.path, base.revision) == tokens
    building.build(building.model_config(model, tokens, 16, base), model, base)
    assert not hub.requests
    said = refusal(asked(MODEL, revision="v2"))
    assert f"hf download {MODEL} --revision v2" in said
    assert "HF_HUB_OFFLINE" in refusal(asked("someone/else"))


def test_a_hub_that_does_not_answer_is_worth_a_restart(hub):
    hub.down = True
    with pytest.raises(RunError, match=f"does not answer for model.from = {MODEL}") as caught:
        find_base(asked(MODEL))
    assert caught.value.exit_code == 75
    hub.down = False
    assert find_base(asked(MODEL)).revision == OLD
    hub.down = True  # what is in the cache may be old by now
    with pytest.raises(RunError):
        find_base(asked(MODEL))


@pytest.mark.parametrize("more", [{}, {"revision": "v2"}])
def test_what_the_hub_does_not_have_is_refused(hub, more):
    said = refusal(asked(MODEL if more else "someone/else", **more))
    assert "a directory, a run, or a model of the Hub" in said


@pytest.mark.parametrize("name", ["not/a/model", "./nowhere", "two words"])
def test_what_is_no_id_is_refused(hub, name):
    assert "a directory, a run, or a model of the Hub" in refusal(asked(name))
    assert not hub.requests


def test_a_gated_model_says_how_to_get_it(hub):
    hub.gated = True
    said = refusal(asked(MODEL))
    assert f"{MODEL} is gated" in said
    assert "HF_TOKEN" in said


def test_a_model_of_the_hub_with_pickled_weights_alone_is_refused(hub):
    hub.commits[OLD]["pytorch_model.bin"] = hub.commits[OLD].pop("model.safetensors")
    said = refusal(asked(MODEL))
    assert "safetensors, not the pickled pytorch_model.bin" in said
    assert "convert it" in said
    assert hub.read == []


def test_an_adapter_of_the_hub_is_refused_with_its_base(hub):
    config = {"base_model_name_or_path": "someone/base", "peft_type": "LORA"}
    hub.commits[OLD] = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": b"",
    }
    assert "this is an adapter of someone/base" in refusal(asked(MODEL))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b'{"model_type": "zzz", "auto_map": {}}', "it needs its own code (type 'zzz')"),
        (b"[]", "a config.json that can be read (config.json is not a JSON object)"),
        (b'{"a": 1, "a": 2}', "a config.json that can be read (a occurs twice)"),
    ],
)
def test_a_config_of_the_hub_that_cannot_be_used_is_refused(hub, config, said):
    hub.commits[OLD]["config.json"] = config
    assert said in refusal(asked(MODEL))


def test_code_beside_a_type_of_transformers_is_one_warning(hub, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    config = json.loads(hub.commits[OLD]["config.json"]) | {"auto_map": {"AutoConfig": "x.Y"}}
    hub.commits[OLD]["config.json"] = json.dumps(config).encode()
    model = asked(MODEL)
    base = find_base(model)
    loaded = building.model_config(model, special_tokens(base.path, base.revision), 16, base)
    assert "auto_map" not in loaded.to_dict()
    assert sum("code of its own" in one.getMessage() for one in caplog.records) == 1
