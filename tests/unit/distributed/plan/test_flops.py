"""The operations of a step, against those that torch counts of a real forward and backward."""

import pytest
import torch
from helpers.on_paper import gpus, llama, work
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.config.schema import AdapterConfig
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.distributed.plan.speed import flops, head_flops, seconds_at_peak
from llmtrain.model import trainable
from llmtrain.model.loss import Head, LossModule
from llmtrain.model.shape import shape
from llmtrain.model.trainable import freeze
from llmtrain.types import NOT_TRAINED

BLOCKS, TOKENS = 2, 64
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 500, "n_positions": 64}
SPECIAL = {"bos_token_id": None, "eos_token_id": None}


def built(model_type, **fields):
    """Attention without a kernel of its own, so that torch counts its products."""
    described = CONFIG_MAPPING[model_type](**fields, **SPECIAL)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager")
    return model.train()


def counted(model):
    """Per token, by torch."""
    ids = torch.zeros(BLOCKS, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        logits.sum().backward()
    return counter.get_total_flops() / (BLOCKS * TOKENS)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", LLAMA),
        ("llama", LLAMA | {"tie_word_embeddings": True}),
        ("gpt2", GPT2),
    ],
    ids=["llama", "llama, tied", "gpt2"],
)
def test_operations_are_those_that_torch_counts(model_type, fields):
    model = built(model_type, **fields)
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.embed_tokens.*"],
        ["*.mlp.*"],
        ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"],
        ["model.embed_tokens.*", "model.layers.*", "model.norm.*"],
    ],
    ids=["the embedding", "matrices between", "the lower half", "all but the head"],
)
def test_frozen_matrices_have_fewer(patterns):
    model = built("llama", **LLAMA)
    whole = flops(shape(model), TOKENS)
    freeze(model, patterns)
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)
    assert flops(shape(model), TOKENS) <= whole


def test_below_adapters_weights_have_no_gradient_of_their_own():
    model = built("llama", **LLAMA | {"num_hidden_layers": 12})
    trainable.attach(model, AdapterConfig(kind="lora", r=8), ())
    # What reads the input of the first block needs no gradient of it, which is not taken off.
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


def test_of_experts_those_that_are_chosen_count():
    fields = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = built("mixtral", **fields, experts_implementation="eager")
    assert flops(shape(model), TOKENS) == pytest.approx(counted(model), rel=0.01)


def test_a_step_at_the_peak_takes_its_operations_through_all_devices():
    small = llama(64, 160, 3, 4, 4, 500)
    matrices = 3 * (4 * 64 * 64 + 3 * 64 * 160) + 500 * 64
    operations = (6 * matrices + 12 * 3 * 64 * 128) * 128 * 16
    h100 = gpus(8, 80, nodes=2, device="NVIDIA H100 80GB HBM3")
    assert seconds_at_peak(small, work(128, 16), h100) == pytest.approx(operations / (16 * 989e12))
    assert seconds_at_peak(small, work(128, 16, precision="fp32"), h100) == pytest.approx(
        operations / (16 * 67e12)
    )


@pytest.mark.parametrize(
    ("tied", "frozen"),
    [(True, []), (False, []), (False, ["lm_head.*"]), (False, ["model.*"])],
    ids=["tied", "untied", "a frozen head", "the head alone"],
)
def test_the_head_is_computed_for_trained_positions_alone(tied, frozen):
    """Beside torch's count of the same step through the loss module, at a quarter of the rows."""
    model = built("llama", **LLAMA | {"tie_word_embeddings": tied})
    freeze(model, frozen)
    module, ids = LossModule(model, Head()), torch.zeros(BLOCKS, TOKENS, dtype=torch.long)
    labels = torch.full_like(ids, NOT_TRAINED)
    labels[:, : TOKENS // 4] = 0
    with FlopCounterMode(display=False) as counter:
        module(ids, labels).backward()
    found = flops(shape(model), TOKENS) - 0.75 * head_flops(shape(model))
    assert found == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.01)
    small, h100 = shape(model), gpus(8, 80, nodes=2, device="NVIDIA H100 80GB HBM3")
    few, all_ = (seconds_at_peak(small, work(TOKENS, 16), h100, share) for share in (0.25, 1.0))
    assert few is not None
    assert all_ is not None
    assert few / all_ == pytest.approx(found / flops(small, TOKENS))
    half = seconds_at_peak(small, work(TOKENS, 16), h100, 0.5, 0.5)  # the rest is padding
    assert half == pytest.approx(all_ / 2)


def test_without_a_known_peak_there_is_no_share_of_it():
    small = llama(64, 160, 3, 4, 4, 500)
    assert seconds_at_peak(small, work(128, 16), gpus(1, 16, device="Tesla V100")) is None
    assert seconds_at_peak(small, work(128, 16), Hardware(1, 1, 2, 1, None, cpu=True)) is None
