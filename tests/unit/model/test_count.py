"""Counted on fake tensors against what real forwards save, and against formulas by hand."""

from typing import Any

import pytest
import torch
import transformers
from helpers.bases import small_fields
from helpers.rings import diagonal
from helpers.saved_bytes import saved_bytes
from packaging.version import Version
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.config.schema import AdapterConfig
from llmtrain.errors import UserError
from llmtrain.model import count
from llmtrain.model.count import CannotCountError, count_saved

ARITHMETICS = ("fp32", "bf16", "autocast")
SEQ_LEN = 40
SMALL = small_fields(64, 3, 4, vocab_size=128, pad_token_id=0, bos_token_id=0, eos_token_id=0)
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
WIDER_GPT2 = GPT2 | {"n_embd": 384, "n_head": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama grouped": GROUPED | {"tie_word_embeddings": True},
    "llama odd": SMALL
    | {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 18}
    | {"intermediate_size": 163, "vocab_size": 509},
    "gpt2": GPT2,
    "gpt2 of two": GPT2 | {"n_layer": 2, "n_embd": 96},
    "qwen3": GROUPED | {"head_dim": 24},
    "mistral": GROUPED | {"sliding_window": None},
    "mistral with a window": GROUPED | {"sliding_window": 8},
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 8},
    "gpt_neox": SMALL,
    "mixtral": GROUPED | {"num_local_experts": 3},
    "opt": {"hidden_size": 64, "num_hidden_layers": 3, "ffn_dim": 96, "num_attention_heads": 4}
    | {"vocab_size": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 1},
}


def config(name, **changes):
    return CONFIG_MAPPING[name.split()[0]](**CONFIGS[name] | changes)


def ids(rows=1):
    return torch.arange(rows * SEQ_LEN).reshape(rows, SEQ_LEN) % 100


def total(described, seq_len, arithmetic, checkpointing="none"):
    saved = count_saved(described, seq_len, arithmetic, checkpointing)
    return saved.blocks + saved.once


@pytest.mark.parametrize(
    ("name", "arithmetic", "checkpointing"), diagonal(CONFIGS, ARITHMETICS, ["none", "full"])
)
def test_the_count_is_what_a_real_forward_saves_to_the_byte(name, arithmetic, checkpointing):
    if name == "opt" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("the code of opt in transformers before 5.23 reads values of fake tensors")
    kept, cast = saved_bytes(config(name), ids(), arithmetic, checkpointing)
    saved = count_saved(config(name), SEQ_LEN, arithmetic, checkpointing)
    assert saved.blocks + saved.once == kept
    assert (saved.casts > 0) == (arithmetic == "autocast")
    if checkpointing == "none" and arithmetic == "autocast":
        assert cast <= saved.casts


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_batch_keeps_that_for_each_of_its_sequences(checkpointing):
    """But for the angles of the rotation, which its rows share: little in any model of use."""
    described = llama(384, 512, 8, 8, 4, vocab_size=128)
    kept, _ = saved_bytes(described, ids(4), "bf16", checkpointing)
    assert 4 * total(described, SEQ_LEN, "bf16", checkpointing) == pytest.approx(kept, rel=0.03)


def llama(h, f, layers, heads, kv, **changes):
    return LlamaConfig(
        hidden_size=h,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        **changes,
    )


@pytest.mark.parametrize(
    ("described", "tokens", "rows", "bytes_of"),
    [
        (llama(384, 1024, 4, 6, 2), 256, 1, (31_362_048, 17_468_416, 21_662_720)),
        pytest.param(
            *(llama(256, 704, 6, 4, 4), 128, 2, (33_659_904, 18_553_856, None)),
            marks=pytest.mark.wide,
        ),
        (llama(256, 704, 6, 4, 4), 120, 2, (None, None, 21_234_240)),
        pytest.param(
            *(llama(512, 1408, 3, 8, 8), 64, 2, (17_089_024, 9_470_464, 11_584_000)),
            marks=pytest.mark.wide,
        ),
        (llama(4096, 14336, 32, 32, 8), 8192, 1, (None, 52_854_620_160, 63_663_341_568)),
        (CONFIG_MAPPING["gpt2"](**WIDER_GPT2), 200, 1, (26_140_800, 13_079_200, 14_160_000)),
    ],
)
def test_figures_measured_elsewhere_are_counted_again(described, tokens, rows, bytes_of):
    """Rows of a batch share the angles of their rotation, which the count has in each."""
    for arithmetic, expected in zip(ARITHMETICS, bytes_of, strict=True):
        if expected is not None:
            width = 2 if arithmetic == "bf16" else 4
            angles = 2 * tokens * 64 * width if rows > 1 else 0
            assert rows * total(described, tokens, arithmetic) - angles * (rows - 1) == expected


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_llama_is_counted_as_a_formula_says(arithmetic):
    h, f, layers, a, kv, size, tokens = 128, 320, 5, 8, 2, 24, 96
    h_q, h_k = a * size, kv * size
    wide = {
        "fp32": 24 * h + 4 * (2 * h_q + 2 * h_k + 4 * f),
        "bf16": 16 * h + 2 * (2 * h_q + 2 * h_k + 4 * f),
        "autocast": 26 * h + 2 * (2 * h_q + 2 * h_k + 4 * f),
    }[arithmetic]
    block = wide + 4 * a + 8
    once = (6 if arithmetic == "bf16" else 8) * h + 4 + 8
    angles = 2 * size * (2 if arithmetic == "bf16" else 4)
    described = llama(h, f, layers, a, kv, head_dim=size, vocab_size=128)
    assert total(described, tokens, arithmetic) == tokens * (layers * block + once + angles)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_gpt2_is_counted_as_a_formula_says(arithmetic):
    h, layers, a, tokens = 96, 4, 6, 64
    block = {"fp32": 112 * h + 4 * a + 16, "bf16": 56 * h + 4 * a + 8}
    block["autocast"] = 60 * h + 4 * a + 16
    # the last norm with its two statistics, and the ids; positions are shared by the rows
    once = (2 * h + 4 if arithmetic == "bf16" else 4 * h + 8) + 8 + 8
    described = config("gpt2", n_embd=h, n_layer=layers, n_head=a)
    assert total(described, tokens, arithmetic) == tokens * (layers * block[arithmetic] + once)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_full_checkpointing_keeps_the_input_of_each_block_and_computes_one_again(arithmetic):
    width, layers = (2 if arithmetic == "bf16" else 4), 7
    described = config("llama", num_hidden_layers=layers)
    none = count_saved(described, SEQ_LEN, arithmetic, "none")
    full = count_saved(described, SEQ_LEN, arithmetic, "full")
    given = width * 64 * SEQ_LEN
    assert full.blocks == layers * given
    again = none.blocks // layers - given
    assert 0.9 * again < full.recomputed <= again + none.recomputed


def test_selective_keeps_products_and_attention():
    """Outputs of seven products, attention's and its log-sum, and the block's input."""
    h, f, a, layers = 64, 96, 4, 3
    saved = count_saved(config("llama"), SEQ_LEN, "fp32", "selective")
    products = h * 3 + h + f * 2 + h
    block = 4 * (products + h + a + h)
    assert saved.blocks / (layers * SEQ_LEN * block) == pytest.approx(1, rel=0.15)
    none, full = (count_saved(config("llama"), SEQ_LEN, "fp32", c) for c in ("none", "full"))
    assert full.blocks < saved.blocks < none.blocks
    assert 0 < none.recomputed < saved.recomputed < full.recomputed


def test_casts_are_a_copy_of_every_linear_weight_and_of_the_head():
    saved = count_saved(config("llama"), SEQ_LEN, "autocast", "none")
    block = 4 * 64 * 64 + 3 * 64 * 96
    assert saved.casts == 2 * (3 * block + 64 * 128)


@pytest.mark.parametrize(
    "patterns", [("*layers.0.*", "*embed_tokens*"), ("*.mlp.*",), ("*layers.2.*",)]
)
def test_frozen_parameters_change_what_is_kept(patterns):
    kept, _ = saved_bytes(config("llama"), ids(), "fp32", "none", patterns)
    saved = count_saved(config("llama"), SEQ_LEN, "fp32", "none", patterns)
    assert saved.blocks + saved.once == kept < total(config("llama"), SEQ_LEN, "fp32")


def test_dropout_keeps_a_byte_an_element_and_attention_no_matrix_of_positions():
    """As on an accelerator; three dropouts outside of attention, one of them after embedding."""
    kept = {p: config("gpt2", attn_pdrop=p, resid_pdrop=p, embd_pdrop=p) for p in (0.0, 0.1)}
    more = total(kept[0.1], SEQ_LEN, "fp32") - total(kept[0.0], SEQ_LEN, "fp32")
    masks = (2 * 3 + 1) * 64 * SEQ_LEN
    assert more == pytest.approx(masks, rel=0.05)


def test_a_model_is_counted_once_and_another_one_by_itself(monkeypatch):
    runs = 0

    def counting(*asked):
        nonlocal runs
        runs += 1
        return of_a_forward(*asked)

    of_a_forward = count._count
    monkeypatch.setattr(count, "_count", counting)
    monkeypatch.setattr(count, "_known", {})
    described = config("llama")
    first = count_saved(described, 24, "fp32", "none")
    assert count_saved(described, 24, "fp32", "none") == first
    assert runs == 1
    wider = config("llama", intermediate_size=112)
    assert count_saved(wider, 24, "fp32", "none") != first
    assert count_saved(described, 25, "fp32", "none") != first
    assert count_saved(described, 24, "bf16", "none") != first
    assert count_saved(described, 24, "fp32", "full") != first
    count_saved(described, 24, "fp32", "none", ("model.norm.weight",))
    assert runs == 6


def test_what_fake_tensors_cannot_run_is_said():
    described = config("mixtral")
    count_saved(described, SEQ_LEN, "fp32", "none")  # only a private field of the next one differs
    described._experts_implementation = "eager"
    with pytest.raises(CannotCountError) as raised:
        count_saved(described, SEQ_LEN, "fp32", "none")
    assert str(raised.value)


def test_a_model_that_cannot_be_checkpointed_is_a_mistake_of_the_config():
    ctrl = CONFIG_MAPPING["ctrl"](n_embd=16, n_layer=2, n_head=2, dff=24, vocab_size=64)
    with pytest.raises(UserError, match=r"model\.activation_checkpointing"):
        count_saved(ctrl, SEQ_LEN, "fp32", "full")


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("llama grouped", {"kind": "lora", "dropout": 0.0}),
        pytest.param("gpt2", {"kind": "rslora"}, marks=pytest.mark.wide),
    ],
)
def test_adapters_and_their_frozen_base_are_counted_to_the_byte(name, adapter, arithmetic):
    asked = AdapterConfig(**adapter)
    kept, cast = saved_bytes(config(name), ids(), arithmetic, "none", (), asked)
    saved = count_saved(config(name), SEQ_LEN, arithmetic, "none", (), asked)
    assert saved.blocks + saved.once == kept
    assert cast <= saved.casts
    assert (saved.casts > 0) == (arithmetic == "autocast")


def test_dora_keeps_no_graph_of_the_lengths_that_it_divides_by():
    """The reference counts that graph, too: it is there for a moment, and nothing needs it."""
    asked = AdapterConfig(kind="dora", targets=["q_proj"])
    kept, _ = saved_bytes(config("llama"), ids(), "fp32", "none", (), asked)
    saved = count_saved(config("llama"), SEQ_LEN, "fp32", "none", (), asked)
    identity = 4 * 64 * 64
    assert 3 * identity < kept - saved.blocks - saved.once < 5 * identity


def test_adapters_of_some_blocks_alone_are_counted_block_by_block():
    asked = AdapterConfig(kind="lora", targets=["*layers.1.*"])
    kept, _ = saved_bytes(config("llama"), ids(), "fp32", "none", (), asked)
    saved = count_saved(config("llama"), SEQ_LEN, "fp32", "none", (), asked)
    assert saved.blocks + saved.once == kept


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_process_keeps_its_part_of_what_cut_matrices_make(arithmetic, tensor_parallel):
    h, f, layers, a, kv, size, tokens, t = 128, 320, 5, 8, 4, 16, 96, tensor_parallel
    h_q, h_k = a * size, kv * size
    wide, narrow = {"fp32": (24, 4), "bf16": (16, 2), "autocast": (26, 2)}[arithmetic]
    block = wide * h + 8 + (narrow * (2 * h_q + 2 * h_k + 4 * f) + 4 * a) // t
    described = llama(h, f, layers, a, kv, head_dim=size, vocab_size=509)
    whole, saved = (
        count_saved(described, tokens, arithmetic, "none", tensor_parallel=n) for n in (1, t)
    )
    assert saved.blocks == tokens * layers * block
    # Which ids are here, a byte each. What the last modules share is held until the backward;
    # autocast has saved only its cast.
    shared = 4 * h if arithmetic == "autocast" else 0
    assert saved.once - whole.once == (tokens * (1 + shared) if t > 1 else 0)
    linear = 2 * layers * (2 * h * h_q + 2 * h * h_k + 3 * h * f) // t
    assert saved.casts == (linear + 2 * h * -(-509 // t) if arithmetic == "autocast" else 0)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_other_models_that_are_cut_are_counted_too(name, checkpointing):
    whole, half = (
        count_saved(config(name), SEQ_LEN, "fp32", checkpointing, tensor_parallel=t) for t in (1, 2)
    )
    assert half.blocks < whole.blocks or checkpointing == "full"
    assert half.recomputed <= whole.recomputed
