"""The check at start: models that hide documents pass, those that do not are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers.bases import small_fields
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.agreement import Alone
from llmtrain.errors import UserError
from llmtrain.metrics import memory
from llmtrain.model import attention
from llmtrain.model.attention import JOINED
from llmtrain.training.start import trials
from llmtrain.training.start.trials import Trial, Tried, bare_forward, find_hiding

CPU = torch.device("cpu")
SEQ_LEN = 32
SMALL = small_fields(32, 3, 4)
APART: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "mistral": {**SMALL, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma2": {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 3},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "eos_token_id": 0},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    # Its fresh weights carry so little from document to document that packed logits alone would
    # differ by less than a thousandth.
    "jamba": {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts": 2},
}
# Before transformers 5.24 it made its masks without positions.
mended = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
(APART if mended else TOGETHER)["falcon"] = SMALL


def build(kind, fields):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](vocab_size=64, pad_token_id=0, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    attention.install(model, SEQ_LEN)
    return model.train()


def check(model, precision="fp32", seq_len=SEQ_LEN):
    forward = bare_forward(model, CPU, precision)
    model.eval()
    with torch.no_grad():
        find_hiding(Tried(model, forward, CPU, precision, seq_len))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", APART)
def test_a_model_that_hides_documents_passes(kind, precision):
    check(build(kind, APART[kind]), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TOGETHER)
def test_a_model_that_does_not_is_refused_by_name(kind, precision):
    model = build(kind, TOGETHER[kind])
    with pytest.raises(UserError) as caught:
        check(model, precision)
    (problem,) = caught.value.problems
    assert problem.key == "data.document_mask"
    assert f"with {kind} (attention: {attention.backend(model)})" in problem.expected
    assert "data.document_mask=false" in problem.remedy


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_kernel_that_does_not_cut_is_noticed(precision, monkeypatch):
    def uncut(heads, _, dropout, scaling):
        return attention._causal(heads, dropout, scaling).transpose(1, 2)

    model = build("llama", APART["llama"])
    monkeypatch.setattr(attention, "_each_document", uncut)
    with pytest.raises(UserError, match="attention: llmtrain"):
        check(model, precision)


class Carries(torch.nn.Module):
    """A model with a state along the row, which borders of documents reset if all rows are one."""

    def __init__(self, *, takes_borders):
        super().__init__()
        torch.manual_seed(0)
        self.config = LlamaConfig(vocab_size=64)
        self.config._attn_implementation = "sdpa"
        self.embed = torch.nn.Embedding(64, 64)
        self.takes_borders = takes_borders
        self.asked: list[set[str]] = []

    def forward(self, ids, **given):
        self.asked.append(set(given))
        embedded = self.embed(ids)
        if not self.takes_borders or "cu_seq_lens_q" not in given:
            return SimpleNamespace(logits=embedded.cumsum(1))
        if len(ids) > 1:
            raise ValueError("one row is expected with cu_seqlens")
        assert given["seq_idx"].shape == ids.shape
        lengths = given["cu_seq_lens_q"].diff().tolist()
        parts = [one.cumsum(1) for one in embedded.split(lengths, 1)]
        return SimpleNamespace(logits=torch.cat(parts, 1))


@pytest.mark.parametrize("takes_borders", [True, False])
def test_rows_are_joined_for_kernels_that_take_borders(monkeypatch, takes_borders):
    """On a GPU with such kernels installed; here a stand-in for them."""
    model: Any = Carries(takes_borders=takes_borders)
    tried = Tried(model, bare_forward(model, CPU, "fp32"), CPU, "fp32", SEQ_LEN)
    with torch.no_grad(), pytest.raises(UserError, match="hide documents"):
        find_hiding(tried)
    assert not any("seq_idx" in asked for asked in model.asked)
    monkeypatch.setattr(trials, "_BORDERS", {"cpu"})
    if takes_borders:
        with torch.no_grad():
            assert find_hiding(tried) == JOINED
    else:
        with torch.no_grad(), pytest.raises(UserError, match="hide documents"):
            find_hiding(tried)


def test_logits_that_are_not_finite_are_refused():
    model = build("llama", APART["llama"])
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"data\.document_mask"):
        check(model)


@pytest.mark.parametrize("seq_len", [2, 3, 7])
def test_short_blocks_are_checked_too(seq_len):
    check(build("llama", APART["llama"]), seq_len=seq_len)


@pytest.mark.parametrize("kinds", [APART, TOGETHER], ids=["passed", "refused"])
def test_the_check_leaves_no_trace(kinds):
    for kind, fields in kinds.items():
        model = build(kind, fields)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        buffers = [buffer.clone() for buffer in model.buffers()]
        try:
            check(model)
        except UserError:
            assert kinds is TOGETHER
        assert not any(module.training for module in model.modules())  # as `check` left it
        assert all(parameter.grad is None for parameter in model.parameters())
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        for buffer, was in zip(model.buffers(), buffers, strict=True):
            assert torch.equal(buffer, was)


CUDA = torch.device("cuda")


class Counting(nn.Module):
    """A buffer that each forward changes, as batch norm's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))


@pytest.fixture
def tried(monkeypatch):
    """A device that is not there: micro-batches over `fits` run out of memory in the backward."""
    seen = SimpleNamespace(
        sizes=[], peaks=[], cleared=0, emptied=0, fits=0, model=Counting(), ranks=Alone()
    )

    def one_pass(trial, rows, **_):
        torch.rand(3)
        trial.model.passes.add_(1)
        seen.sizes.append(rows)
        if rows > seen.fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    def clear():
        seen.cleared += 1

    def empty_cache():
        seen.emptied += 1

    def fitting(candidates):
        engine = SimpleNamespace(clear=clear)
        launched: Any = SimpleNamespace(engine=engine, ranks=seen.ranks, device=CUDA)
        return trials.fitting_micro_batch(Trial(seen.model, launched, 8, 5), candidates)

    seen.fitting = fitting
    monkeypatch.setattr(trials, "_pass", one_pass)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(memory, "reset_peak", lambda device: seen.peaks.append(device) or 0)
    return seen


def test_the_largest_micro_batch_that_runs_twice_is_taken(tried):
    tried.fits = 3
    assert tried.fitting([8, 4, 2, 1]) == 2
    assert tried.sizes == [8, 4, 2, 2]
    assert (tried.cleared, tried.emptied) == (3, 3)


def test_what_did_not_fit_is_not_in_the_peak_of_memory(tried):
    tried.fits = 2
    tried.fitting([8, 4, 2, 1])
    assert tried.peaks == [CUDA, CUDA]


def test_a_trial_leaves_buffers_alone(tried):
    tried.fits = 2
    tried.fitting([4, 2])
    assert tried.model.passes == 0


def test_none_that_fits_is_a_problem_of_the_config(tried):
    with pytest.raises(UserError, match=r"training\.micro_batch_size"):
        tried.fitting([2, 1])


def test_on_a_cpu_nothing_is_tried():
    launched: Any = SimpleNamespace(device=torch.device("cpu"))
    assert trials.fitting_micro_batch(Trial(nn.Module(), launched, 8, 5), [8, 4]) == 8
