"""What is asked, what an earlier start froze, and what this machine can have."""

import os
from types import SimpleNamespace

import pytest
import torch
from helpers.config import loaded

from llmtrain.agreement import Alone
from llmtrain.errors import UserError
from llmtrain.model import compile as compiling
from llmtrain.rundir.status import FrozenChoices
from llmtrain.training.start.frozen import (
    Kernels,
    check_kernels,
    decide_compile,
    decide_kernels,
    using,
)

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
    launched = SimpleNamespace(strategy=strategy, device=torch.device(device), ranks=Alone())
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
