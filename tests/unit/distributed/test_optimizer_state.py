"""What the table says of an optimizer's state, and what real optimizers keep."""

import pytest
import torch
from helpers.rings import needs

from llmtrain.distributed.plan import memory
from llmtrain.distributed.plan.memory import missing_package, state_bytes, states
from llmtrain.types import DTYPES

SHAPES = [(64, 65), (64, 64), (63, 65), (8,), (4096,), (1, 5000)]


def kept(optimizer, parameter):
    """Name → dtype and shape, of a real update."""
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {torch_name: name for name, (_, torch_name) in DTYPES.items()}
    return {
        name: (names[str(value.dtype)], tuple(value.shape))
        for name, value in optimizer.state[parameter].items()
        if name != "step"
    }


def said(algorithm, shape):
    return {name: (one.dtype, one.shape) for name, one in states(algorithm, shape).items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_adamw_keeps_what_the_table_says(shape):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    assert kept(torch.optim.AdamW([parameter], fused=True), parameter) == said("adamw", shape)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) == 2])
def test_muon_keeps_what_the_table_says(shape):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    assert kept(torch.optim.Muon([parameter]), parameter) == said("muon", shape)


@needs("bitsandbytes")
@pytest.mark.parametrize("shape", SHAPES)
def test_8_bit_adamw_keeps_what_the_table_says(shape):
    from bitsandbytes import optim

    parameter = torch.nn.Parameter(torch.zeros(shape))
    assert kept(optim.AdamW8bit([parameter]), parameter) == said("adamw_8bit", shape)


def test_bytes_are_those_of_all_tensors():
    assert state_bytes("adamw", (7, 3)) == 2 * 4 * 21
    assert state_bytes("muon", (7, 3)) == 4 * 21
    assert state_bytes("adamw_8bit", (7, 3)) == 2 * 4 * 21
    assert state_bytes("adamw_8bit", (64, 65)) == 2 * (4160 + 4 * 17 + 4 * 256)
    assert state_bytes("adamw", ()) == 8


def test_a_missing_package_is_one_sentence_with_its_cure(monkeypatch):
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    assert missing_package("adamw") == missing_package("muon") == []
    (problem,) = missing_package("adamw_8bit")
    assert (problem.key, problem.value) == ("optimizer.name", "adamw_8bit")
    assert "pip install 'llmtrain[quantized]'" in str(problem)
