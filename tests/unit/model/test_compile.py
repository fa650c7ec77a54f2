"""Compiled blocks against the same blocks as they are: graphs counted, numbers compared."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bases import small_fields
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.model import attention, compile, shape
from llmtrain.model.attention import document_tensors
from llmtrain.model.loss import LossModule, made_up_batch

# torch's compiler hides its own warnings where they are shown, which is too late if they are errors
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
SEQ_LEN = 16
SMALL = small_fields(16, 2, 2, num_key_value_heads=1, head_dim=8)
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, **WITHOUT_DROPOUT},
}
IDS = made_up_batch(2, SEQ_LEN, 61, CPU)
# Five documents and three: with the end of the rows six borders and four.
STARTS = ([np.array([0, 5, 6]), np.array([0, 1])], [np.array([0, 9]), np.array([0])])


class Graphs:
    """A backend that keeps the graphs it is given, and runs them as they are."""

    def __init__(self):
        self.kept: list[torch.fx.GraphModule] = []

    def __call__(self, graph, _):
        self.kept.append(graph)
        return graph.forward

    def masks(self):
        """The mask that each call of SDPA in the graphs gets."""
        sdpa = F.scaled_dot_product_attention
        parts = [part for graph in self.kept for part in graph.modules()]
        graphs = [part.graph for part in parts if isinstance(part, torch.fx.GraphModule)]
        calls = [node for graph in graphs for node in graph.nodes if node.target is sdpa]
        assert all(node.kwargs["is_causal"] for node in calls)
        assert all(len(node.args) == 3 for node in calls)
        return [node.kwargs.get("attn_mask") for node in calls]


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled in this test goes here instead of to torch's inductor."""
    torch._dynamo.reset()
    found, real = Graphs(), nn.Module.compile

    def compiled(self, **options):
        real(self, backend=found, **options)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    yield found
    torch._dynamo.reset()


def build(kind, mode, checkpointing="none", **changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0, **MODELS[kind], **changes}
    config = CONFIG_MAPPING[kind](**fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert attention.install(model, SEQ_LEN) == attention.NAME
    shape.apply_checkpointing(model, checkpointing)
    compile.compile_blocks(model, mode)
    return LossModule(model).train()


def step(module, **documents):
    """The loss of a step and its gradients."""
    loss = module(IDS, IDS, **documents)
    loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found | {"loss": loss.detach()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def evaluate(module, **documents):
    with torch.no_grad():
        loss: Tensor = module.eval()(IDS, IDS, **documents)
    module.train()
    return loss


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("llama", "none"),
        pytest.param("qwen3", "selective", marks=pytest.mark.wide),
        ("gpt2", "full"),
    ],
)
def test_blocks_share_one_graph_an_evaluation_adds_one_and_samples_none(
    kind, checkpointing, graphs
):
    plain, compiled = (build(kind, mode, checkpointing) for mode in ("off", "blocks"))
    before = compile.graphs()
    for _ in range(3):
        assert_equal(step(compiled), step(plain))
        assert len(graphs.kept) == 1
    for _ in range(2):
        assert torch.equal(evaluate(compiled), evaluate(plain))
        assert len(graphs.kept) == 2
    with torch.no_grad(), compile.uncompiled():
        for length in range(1, SEQ_LEN):
            compiled.eval()(IDS[:1, :length])
    assert_equal(step(compiled.train()), step(plain))
    assert len(graphs.kept) == 2
    assert compile.graphs() - before == 2


@pytest.mark.parametrize("mode", ["off", "blocks", "model"])
def test_parameters_keep_their_names_and_order(mode, graphs):
    expected = build("llama", "off")
    assert [*build("llama", mode).state_dict()] == [*expected.state_dict()]


@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_no_mask_reaches_sdpa_in_a_graph(mode, graphs):
    compiled = build("llama", mode)
    assert_equal(step(compiled), step(build("llama", "off")))
    evaluate(compiled)
    layers = 2 * (1 if mode == "blocks" else SMALL["num_hidden_layers"])
    assert graphs.masks() == [None] * layers, "a graph for training and one for an evaluation"


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.wide), "full"])
def test_documents_are_hidden_in_compiled_blocks_too(checkpointing, graphs):
    plain, compiled = (build("llama", mode, checkpointing) for mode in ("off", "blocks"))

    def hidden(starts, *, padded):
        return document_tensors(starts, SEQ_LEN, attention.NAME, CPU, compiled=padded)

    for starts in (STARTS[0], STARTS[1]) * 2:
        found = step(compiled, **hidden(starts, padded=True))
        assert_equal(found, step(plain, **hidden(starts, padded=False)))
    count = len(graphs.kept)
    step(compiled, **hidden(STARTS[0], padded=True))
    assert len(graphs.kept) == count, "as many documents have come before"


def test_shapes_that_change_each_time_do_not_end_a_run(graphs, monkeypatch):
    monkeypatch.setattr(compile, "_SPARE_GRAPHS", 0)
    plain, compiled = (build("llama", mode, num_hidden_layers=1) for mode in ("off", "blocks"))
    with torch.no_grad():
        for length in range(2, 7):
            ids = IDS[:, :length]
            assert torch.equal(compiled(ids, ids), plain(ids, ids))
    assert len(graphs.kept) == 2, "the others ran as they are"


@pytest.mark.wide
def test_blocks_that_depend_on_their_number_have_a_graph_each(graphs):
    """More of them than torch's own limit, 8, allows."""
    many = {"n_layer": 9, "scale_attn_by_inverse_layer_idx": True}
    plain, compiled = (build("gpt2", mode, **many) for mode in ("off", "blocks"))
    assert_equal(step(compiled), step(plain))
    assert len(graphs.kept) == many["n_layer"]


def test_the_number_of_compiled_modules_is_told(graphs):
    counts = {}
    for mode in ("off", "blocks", "model"):
        model = build("llama", "off").model
        counts[mode] = compile.compile_blocks(model, mode)
    assert counts == {"off": 0, "blocks": 2, "model": 1}


@pytest.mark.parametrize(
    ("env", "cpu", "missing"),
    [
        ({"CXX": "no-such-compiler"}, True, "no-such-compiler is not on PATH (CXX"),
        ({"PATH": "/nowhere"}, True, "a C++ compiler: "),
        ({"CC": "no-such-compiler"}, False, "no-such-compiler is not on PATH (CC"),
        ({"PATH": "/nowhere"}, False, "a C compiler for Triton: gcc or clang"),
        ({}, True, ""),
        ({}, False, ""),
    ],
)
def test_a_compiler_is_looked_for_where_torch_looks(env, cpu, missing, tmp_path, monkeypatch):
    for name in ("c++", "g++", "clang++", "gcc", "clang"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: object())
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ | {"PATH": str(tmp_path)} | env)
    found = compile.missing_compiler(cpu=cpu)
    assert missing in found
    assert bool(found) == bool(missing)
    assert len(list(compile.problems("blocks", cpu=cpu))) == bool(missing)
    assert not list(compile.problems("off", cpu=cpu))


def test_cuda_needs_triton(monkeypatch):
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    assert "triton" in compile.missing_compiler(cpu=False)
