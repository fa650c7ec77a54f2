"""What `model.from` means: looked up once, pinned, and the same for all that read it."""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.checkpoints import flip, on_ranks, saved_run
from helpers.config import loaded
from helpers.corpus import with_hole, write_tokenizer
from helpers.hub import read_files
from helpers.model_hub import MODEL, NEW, OLD, serving_model, take_for_hub
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmtrain.agreement import Alone
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.schema import ModelConfig, TrainingConfig
from llmtrain.data.chat.template import NAMED, template_text
from llmtrain.distributed.engines import state
from llmtrain.errors import RunError, UserError
from llmtrain.model import build as building, compile as compiling, trainable
from llmtrain.model.base import Base
from llmtrain.model.loss import Head
from llmtrain.model.tokenizer import add_template, save_tokenizer, special_tokens, token_ids
from llmtrain.rundir.status import FrozenChoices
from llmtrain.training.start import frozen as bases
from llmtrain.training.start.frozen import (
    Kernels,
    adapter_files,
    asked_kernel,
    check_base,
    check_kernels,
    check_unchanged,
    choose_kernel,
    decide_base,
    decide_compile,
    decide_kernels,
    find_base,
    known_base,
    resolve_adapter,
    trained_tokens,
    using,
)
from llmtrain.types import WHOLE, Piece


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
    assert f"hf download {MODEL} --revision v2" in refusal(asked(MODEL, revision="v2"))
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


# What a start decides and checks of its adapters.
BASE = Base("a/b", "ab", None)


def config(folder, *overrides):
    return loaded(folder, f"model={{from: {folder / 'base'}}}", "adapter.kind=lora", *overrides)


def test_layers_that_auto_meant_when_a_run_began_are_meant_at_a_resume(tmp_path):
    auto = FrozenChoices(tmp_path, "")
    assert resolve_adapter(config(tmp_path), auto).targets == "auto"
    auto.run["adapter_targets"] = ["q_proj", "v_proj"]
    assert resolve_adapter(config(tmp_path), auto).targets == ("q_proj", "v_proj")
    named = config(tmp_path, "adapter.targets=[o_proj]")
    assert resolve_adapter(named, auto).targets == ("o_proj",)


def test_tokens_that_the_run_added_are_trained_or_those_that_are_named(tmp_path):
    write_tokenizer(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    length = len(tokenizer)
    tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
    own = tmp_path / "own"
    tokenizer.save_pretrained(own)
    base = Base(str(tmp_path / "base"), None, None)
    assert trained_tokens(config(tmp_path), base, own) == (length, length + 1)
    assert trained_tokens(config(tmp_path), base, tmp_path / "base") == ()
    assert trained_tokens(config(tmp_path), base, None) == ()
    named = config(tmp_path, "adapter.train_tokens=['<|two|>', '<|endoftext|>']")
    assert trained_tokens(named, base, own) == (0, length + 1)
    assert trained_tokens(config(tmp_path, "adapter.train_tokens=[]"), base, own) == ()
    with pytest.raises(UserError, match=r"adapter\.train_tokens = <\|two\|>"):
        trained_tokens(named, base, None)  # by the tokenizer of the base, which does not have it
    sample = config(tmp_path, "model.tokenizer=sample", "adapter.train_tokens=['<|endoftext|>']")
    assert trained_tokens(sample, base, None) == (0,)


def test_tokens_that_a_named_template_will_add_have_the_ids_that_they_will_get(tmp_path):
    write_tokenizer(tmp_path / "base")
    write_tokenizer(tmp_path / "own")
    base, asked = Base(str(tmp_path / "base"), None, None), config(tmp_path, "chat.template=chatml")
    before = trained_tokens(asked, base, None)
    add_template(tmp_path / "own", *template_text("chatml"))
    assert trained_tokens(asked, base, tmp_path / "own") == before
    assert token_ids(tmp_path / "own", NAMED["chatml"]) == before
    assert len(before) == 2
    named = config(tmp_path, "chat.template=chatml", "adapter.train_tokens=['<|im_end|>']")
    assert trained_tokens(named, base, None) == trained_tokens(named, base, tmp_path / "own")
    assert set(trained_tokens(named, base, None)) < set(before)
    reserved = Base(str(tmp_path / "own"), None, None)  # a base that has them already
    assert trained_tokens(asked, reserved, None) == ()


def test_tokens_that_were_added_are_trained_by_the_ids_that_they_got(tmp_path):
    """Of a tokenizer that leaves out ids, these are not the ones behind its last."""
    for name in ("base", "own"):
        with_hole(write_tokenizer(tmp_path / name), 500)
    add_template(tmp_path / "own", *template_text("chatml"))
    base, asked = Base(str(tmp_path / "base"), None, None), config(tmp_path, "chat.template=chatml")
    found = trained_tokens(asked, base, tmp_path / "own")
    assert found == token_ids(tmp_path / "own", NAMED["chatml"])
    assert max(found) < 500


def test_a_run_without_adapters_trains_no_rows(tmp_path):
    plain = loaded(tmp_path, "adapter.train_tokens=[a]")
    assert trained_tokens(plain, None, tmp_path / "nowhere") == ()


def weights(folder, seed=0):
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape))
    model.save_pretrained(folder)
    return model


def test_the_base_of_a_checkpoint_is_that_of_the_run_or_the_start_is_refused(tmp_path):
    checkpoint = tmp_path / "step-00000004"
    checkpoint.mkdir()
    found = ResumePoint(checkpoint, checkpoint.name, 4, {})
    check_base(config(tmp_path), BASE, found)  # a checkpoint of whole weights is refused later
    (checkpoint / "adapter.json").write_text(json.dumps({"base": asdict(BASE)}))
    check_base(config(tmp_path), BASE, found)
    with pytest.raises(UserError, match="on which the adapter in step-00000004 was trained"):
        check_base(config(tmp_path), replace(BASE, revision="cd"), found)
    with pytest.raises(UserError, match=r"LoRA adapters \(adapter_config\.json\)"):
        check_base(loaded(tmp_path), None, found)


def llama():
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape))


def one_process(model, differing=None):
    """One process whose engine holds the model as it is."""

    def pieces(_spec, *, writing):
        assert not writing
        held = state.named_parameters(model).items()
        return [Piece(name, 0, one.detach().view(-1)) for name, one in held]

    engine = SimpleNamespace(pieces=pieces, unequal_replicas=lambda *, base: differing or {})
    return SimpleNamespace(launched=SimpleNamespace(ranks=Alone(), engine=engine), base=BASE)


def test_an_adapter_without_values_is_noticed_before_it_trains_in_vain(tmp_path):
    model = llama()
    trainable.attach(model, config(tmp_path).adapter)
    files = adapter_files(config(tmp_path), one_process(model), model, {})
    assert files.keys() == {"adapter_config.json", "adapter.json"}
    assert json.loads(files["adapter.json"])["base"] == asdict(BASE)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.lora_A.default.weight.zero_()
    with pytest.raises(RuntimeError, match=r"1 adapters have no values here, .*up_proj\.lora_A"):
        adapter_files(config(tmp_path), one_process(model), model, {})


def test_replicas_of_the_base_that_differ_end_the_start(tmp_path):
    model = llama()
    trainable.attach(model, config(tmp_path).adapter)
    differing = {"lm_head.weight": [1]}
    with pytest.raises(RunError, match=r"different weights at step 0: lm_head\.weight \(rank 1\)"):
        adapter_files(config(tmp_path), one_process(model, differing), model, {})


def test_a_run_of_all_weights_has_no_such_files(tmp_path):
    assert adapter_files(loaded(tmp_path), one_process(llama()), llama(), {}) == {}


# What is asked, what an earlier start froze, and what this machine can have.
AS_IT_IS = Kernels("auto", None, deterministic=False)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def config_in(folder, *overrides):
    return loaded(folder, f"run.dir={folder}", *overrides)


def frozen(folder, launch, **values):
    auto = FrozenChoices(folder, launch)
    auto.device.update(values)
    auto.launch["threads"] = 1
    auto.save()
    return auto


def processes(auto, strategy, device):
    kind = {"strategy": strategy, "device": torch.device(device), "cut": WHOLE}
    launched = SimpleNamespace(ranks=Alone(), **kind)
    return SimpleNamespace(auto=auto, launched=launched)


def test_a_new_run_decides_what_to_compile_when_its_length_is_known(tmp_path):
    assert decide_kernels(config_in(tmp_path)) == AS_IT_IS


def test_a_choice_is_frozen_while_the_type_of_device_stays(tmp_path):
    frozen(tmp_path, "ddp/cuda/8", compile="blocks", attention_backend="cudnn")
    assert decide_kernels(config_in(tmp_path)) == AS_IT_IS, "a CPU has not been decided on"
    frozen(tmp_path, "ddp/cpu/2", compile="blocks", attention_backend="math")
    found = decide_kernels(config_in(tmp_path))
    keys = ("model.attention_backend", "training.compile")
    assert found == Kernels("math", "blocks", deterministic=False, began_with=keys)
    found = decide_kernels(config_in(tmp_path, "training.compile=off"))
    assert (found.compiled, found.attention) == ("off", "math"), "what is asked comes first"


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_kernels_of_cuda_are_refused_without_it(tmp_path, backend):
    asked = decide_kernels(config_in(tmp_path, f"model.attention_backend={backend}"))
    with pytest.raises(UserError, match="need CUDA") as caught:
        check_kernels(asked)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"(?s)training.compile = .*C\+\+ compiler: no-such-comp"):
        check_kernels(decide_kernels(config_in(tmp_path, f"training.compile={mode}")))


def test_a_frozen_value_that_this_machine_cannot_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    frozen(tmp_path, "ddp/cpu/2", compile="blocks")
    with pytest.raises(UserError, match=r"auto.json has it.*accept_changes=\[training.compile\]"):
        check_kernels(decide_kernels(config_in(tmp_path)))


@pytest.mark.parametrize(
    ("steps", "device", "strategy", "missing", "expected"),
    [
        (2000, "cuda", "ddp", "", "blocks"),
        (1999, "cuda", "fsdp2", "", "off"),
        (2000, "cuda", "fsdp2", "a C compiler", "off"),
        (2000, "cuda", "zero2", "", "off"),
        (2000, "cpu", "ddp", "", "off"),
    ],
)
def test_long_runs_on_cuda_are_compiled(
    tmp_path, monkeypatch, steps, device, strategy, missing, expected
):
    monkeypatch.setattr(compiling, "missing_compiler", lambda cpu: missing)
    auto = FrozenChoices(tmp_path, f"{strategy}/{device}/1")
    config = config_in(tmp_path, f"training.steps={steps}")
    given = processes(auto, strategy, device)
    assert decide_compile(config, given, document_mask=False) == expected
    assert auto.device == {"compile": expected}


def test_a_whole_model_is_not_compiled_with_hidden_documents(tmp_path):
    auto = FrozenChoices(tmp_path, "ddp/cpu/1")
    auto.compile = "model"
    given = processes(auto, "ddp", "cpu")
    assert decide_compile(config_in(tmp_path), given, document_mask=False) == "model"
    with pytest.raises(UserError, match=r"training.compile = model"):
        decide_compile(config_in(tmp_path), given, document_mask=True)


def test_deterministic_kernels_hold_for_the_run_alone(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    asked = Kernels("auto", "off", deterministic=True)
    check_kernels(asked)
    target, index = torch.zeros(3), torch.tensor([0])
    with using(asked):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            target.put_(index, torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()
    target.put_(index, torch.ones(1))


def test_a_workspace_that_gives_other_bits_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    check_kernels(AS_IT_IS)
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG"):
        check_kernels(Kernels("auto", "off", deterministic=True))


CAPPED, WHY = Head(softcap=30.0), "it has no head"


def frozen_kernel(run_dir, **values):
    auto = FrozenChoices(run_dir, "")
    auto.run |= values
    auto.save()
    return run_dir


def test_a_new_run_chooses_and_a_begun_one_keeps_its_kernel(tmp_path):
    open_ = TrainingConfig(steps=1)
    assert asked_kernel(open_, None) == "auto"
    assert asked_kernel(open_, tmp_path) == "auto"
    assert (
        asked_kernel(open_, frozen_kernel(tmp_path, precision="fp32", loss_kernel="torch"))
        == "torch"
    )
    named = TrainingConfig(steps=1, loss_kernel="chunked")
    assert asked_kernel(named, tmp_path) == "chunked"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_takes_chunks_where_the_head_is_plain(precision):
    assert choose_kernel("auto", CAPPED, precision, 1e-4) == ("chunked", CAPPED)
    assert choose_kernel("auto", WHY, precision, 1e-4) == ("logits", None)
    assert choose_kernel("logits", CAPPED, precision, 1e-4) == ("logits", None)


@pytest.mark.parametrize("asked", ["chunked", "torch"])
def test_a_kernel_that_the_model_rules_out_is_refused_with_the_reason(asked):
    with pytest.raises(UserError) as caught:
        choose_kernel(asked, WHY, "fp32", 0.0)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("training.loss_kernel", asked)
    assert WHY in problem.expected


def test_torchs_kernel_is_right_in_fp32_and_not_in_bf16():
    assert choose_kernel("torch", Head(), "fp32", 0.0) == ("torch", Head())
    with pytest.raises(UserError, match="in bf16 torch's kernel is wrong by"):
        choose_kernel("torch", Head(), "bf16", 0.0)
    for head, z_loss in ((CAPPED, 0.0), (Head(), 1e-4)):
        with pytest.raises(UserError, match="no scale, cap or z-loss"):
            choose_kernel("torch", head, "fp32", z_loss)
