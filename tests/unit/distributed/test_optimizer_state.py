"""What the table says of an optimizer's state, and what real optimizers keep."""

from functools import partial

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


def eight_bit(parameters):
    from bitsandbytes import optim

    return optim.AdamW8bit(parameters)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", partial(torch.optim.AdamW, fused=True)),
        ("muon", torch.optim.Muon),
        pytest.param("adamw_8bit", eight_bit, marks=needs("bitsandbytes")),
    ],
)
def test_an_optimizer_keeps_what_the_table_says(name, make):
    for shape in SHAPES:
        if name != "muon" or len(shape) == 2:
            parameter = torch.nn.Parameter(torch.zeros(shape))
            assert kept(make([parameter]), parameter) == said(name, shape), shape


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
