"""Packed documents against each of them alone, in every attention that a CPU has."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers import chats, corpus, used
from helpers.bases import small_fields
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.config.schema import AdapterConfig
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Lanes
from llmtrain.data.state import DataState
from llmtrain.model import attention, shape, trainable
from llmtrain.model.attention import NAME, OtherAttentionError, document_tensors, install, round_up
from llmtrain.model.count import fake_tensors
from llmtrain.model.loss import LossModule, made_up_batch

CPU = torch.device("cpu")
VOCABULARY = 61
SEQ_LEN = 24
SMALL = small_fields(32, 2, 4)
GROUPED = {**SMALL, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "head_dim": 8, "sliding_window": 6}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama-gqa": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "mistral": WINDOW,
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
}
OWN = ("mistral", "gemma2", "gemma3_text")
# Rows with several, one and many documents, and with a document of one token.
STARTS = [np.array([0, 7, 8, 19]), np.array([0]), np.array([0, 1, 2, 12, 20])]


def build(kind, implementation=None, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind.split("-")[0]](
        vocab_size=VOCABULARY, pad_token_id=0, **{**MODELS[kind], **changes}
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    )
    return model.eval()


def documents(starts):
    for row, first in enumerate(starts):
        for start, stop in zip(first, [*first[1:], SEQ_LEN], strict=True):
            yield row, slice(int(start), int(stop))


def hidden(model, starts=STARTS):
    return document_tensors(starts, SEQ_LEN, attention.backend(model), CPU)


def logits(model, ids, starts=None):
    given = hidden(model, starts) if starts else {}
    return model(ids, **attention.model_keywords(**given)).logits


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(one, other, relative):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        most = float(other[name].abs().max())
        assert float((gradient - other[name]).abs().max()) <= relative * max(most, 1e-3), name


@pytest.fixture
def ids():
    return made_up_batch(len(STARTS), SEQ_LEN, VOCABULARY, CPU)


@pytest.fixture
def masks(monkeypatch):
    """The mask of every call of SDPA."""
    seen: list[Tensor | None] = []
    real = F.scaled_dot_product_attention

    def spy(*arguments, attn_mask=None, **keywords):
        assert len(arguments) == 3
        seen.append(attn_mask)
        return real(*arguments, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_models_with_plain_attention_get_ours_and_others_keep_their_own(kind):
    model = build(kind)
    expected = attention.backend(model) if kind in OWN else NAME
    assert attention.backend(model) in ("sdpa", "eager")
    assert install(model, SEQ_LEN) == expected
    assert attention.backend(model) == expected


def test_a_mask_that_reads_tensors_of_the_rows_is_tried_on_fake_ones_too():
    fields = {**GROUPED, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
    config = CONFIG_MAPPING["llama4_text"](vocab_size=VOCABULARY, pad_token_id=0, **fields)
    with fake_tensors():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        assert install(model, SEQ_LEN, compare=False) in ("sdpa", NAME)


def test_a_window_as_long_as_a_block_is_no_window():
    assert install(build("mistral", sliding_window=SEQ_LEN), SEQ_LEN) == NAME
    assert install(build("mistral", sliding_window=SEQ_LEN - 1), SEQ_LEN) == "sdpa"


@pytest.mark.parametrize("kind", ["llama", "llama-gqa", "gpt2", "qwen3", "mixtral"])
def test_without_documents_logits_and_gradients_are_sdpas_bit_for_bit(kind, ids, masks):
    model = build(kind, "sdpa").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    LossModule(model)(ids, ids).backward()
    expected, theirs = logits(model, ids), gradients(model)
    assert install(model, SEQ_LEN) == NAME
    masks.clear()
    LossModule(model)(ids, ids).backward()
    assert torch.equal(logits(model, ids), expected)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, theirs[name]), name
    assert masks == [None] * 4, "two layers, two forwards, and never a mask"


def test_dropout_and_scale_are_those_that_the_model_passes(ids):
    model = build("gpt2", "sdpa", scale_attn_by_inverse_layer_idx=True).train()
    torch.manual_seed(1)
    expected = logits(model, ids)
    assert install(model, SEQ_LEN) == NAME
    torch.manual_seed(1)
    assert torch.equal(logits(model, ids), expected)
    assert not torch.equal(logits(model, ids), expected), "dropout is on"


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        (kind, implementation)
        for kind in MODELS
        for implementation in (None, "sdpa", "eager")
        if (kind, implementation) != ("gemma2", "sdpa")  # which has no soft cap
    ],
)
def test_packed_logits_are_those_of_each_document_alone(kind, implementation, ids):
    model = build(kind, implementation)
    if implementation is None:
        install(model, SEQ_LEN)
    packed = logits(model, ids, STARTS)
    for row, part in documents(STARTS):
        alone = logits(model, ids[row : row + 1, part])[0]
        torch.testing.assert_close(packed[row, part], alone, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_gradients_are_the_sum_over_documents_alone(kind, ids):
    model = build(kind)
    install(model, SEQ_LEN)
    module = LossModule(model)
    labels = made_up_batch(len(STARTS), SEQ_LEN, VOCABULARY - 2, CPU)
    module(ids, labels, **hidden(model)).backward()
    packed = gradients(model)
    for row, part in documents(STARTS):
        module(ids[row : row + 1, part], labels[row : row + 1, part]).backward()
    assert_close(packed, gradients(model), 1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_loss_of_rows_with_padding_is_the_sum_over_documents_alone(kind):
    model = build(kind)
    install(model, SEQ_LEN)
    module = LossModule(model)
    rows = made_up_batch(len(STARTS), SEQ_LEN, VOCABULARY, CPU)
    labels = rows.roll(-1, 1)
    padding = [5, 24, 4]  # at the end of each row: the last document is no text
    expected = torch.zeros(())
    for row, part in documents(STARTS):
        labels[row, part.stop - 1] = -100  # no label across a border
        if part.stop == SEQ_LEN and part.start == SEQ_LEN - padding[row]:
            rows[row, part], labels[row, part] = 0, -100
            continue
        expected = expected + module(rows[row : row + 1, part], labels[row : row + 1, part])
    packed = module(rows, labels, **hidden(model))
    assert packed.item() == pytest.approx(expected.item(), rel=1e-6)
    assert packed.item() > 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_documents_tokens_change_nothing_in_its_neighbours(kind, ids):
    """Positions that restart are not enough: documents must not attend to each other."""
    model = build(kind)
    install(model, SEQ_LEN)
    row, part = 0, slice(8, 19)  # the third document of four
    changed = ids.clone()
    changed[0, :8] = (changed[0, :8] + 5) % VOCABULARY
    changed[0, 19:] = (changed[0, 19:] + 5) % VOCABULARY
    changed[1:] = (changed[1:] + 5) % VOCABULARY
    labels = torch.full_like(ids, -100)
    labels[row, part] = ids[row, part]
    found = []
    for rows in (ids, changed):
        LossModule(model)(rows, labels, **hidden(model)).backward()
        found.append((logits(model, rows, STARTS)[row, part], gradients(model)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    assert_close(found[0][1], found[1][1], 1e-6)
    with torch.no_grad():
        seen = logits(model, ids)[row, part] - logits(model, changed)[row, part]
    assert float(seen.abs().max()) > 1e-4, "without the mask the neighbours are seen"


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_no_attention_mask_is_passed_for_it_would_show_documents_to_each_other(kind, ids):
    model = build(kind, "sdpa")
    seen: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _, __, kw: seen.append(kw), with_kwargs=True)
    given = document_tensors(STARTS, SEQ_LEN, "sdpa", CPU)
    LossModule(model)(ids, ids, **given)
    assert seen[0].keys() == {"use_cache", "position_ids"}
    assert seen[0]["use_cache"] is False
    with torch.no_grad():
        packed = logits(model, ids, STARTS)
        ones = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
    assert float((packed - ones).abs().max()) > 1e-3, "an all-ones mask disables packing"


def test_our_function_refuses_an_attention_mask():
    model = build("llama")
    install(model, SEQ_LEN)
    heads = torch.ones(1, 4, 3, 8)
    layer = model.model.layers[0].self_attn
    with pytest.raises(OtherAttentionError, match="mask of its own"):
        attention.attention(layer, heads, heads, heads, torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"sliding_window": 2}, "sliding window of 2"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_it_cannot_compute_is_refused(keywords, reason):
    heads = torch.ones(1, 4, 3, 8)
    with pytest.raises(OtherAttentionError, match=reason):
        attention.attention(torch.nn.Module(), heads, heads, heads, None, **keywords)


def test_keys_of_another_sequence_are_refused():
    queries, keys = torch.ones(1, 4, 3, 8), torch.ones(1, 4, 5, 8)
    with pytest.raises(OtherAttentionError, match="number"):
        attention.attention(torch.nn.Module(), queries, keys, keys, None)


def test_what_says_nothing_is_let_through():
    heads = torch.ones(1, 4, 3, 8)
    harmless = {"sliding_window": 3, "softcap": None, "output_attentions": False}
    found, _ = attention.attention(torch.nn.Module(), heads, heads, heads, None, **harmless)
    assert found.shape == (1, 3, 4, 8)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_recomputed_activations_give_the_same_gradients(kind, ids):
    model = build(kind)
    install(model, SEQ_LEN)
    found = []
    for recomputed in (False, True):
        if recomputed:
            shape.apply_checkpointing(model, "full")
        torch.manual_seed(2)
        loss = LossModule(model.train())(ids, ids, **hidden(model))
        loss.backward()
        found.append((loss.item(), gradients(model)))
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


@pytest.mark.parametrize("seed", range(6))
def test_documents_of_any_lengths_and_heads_equal_a_block_diagonal_mask(seed):
    draw = np.random.default_rng(seed)
    rows, length = (int(draw.integers(1, high)) for high in (5, 40))
    groups, key_heads = (int(draw.integers(1, 4)) for _ in range(2))
    cuts = [draw.random(length - 1) < draw.random() for _ in range(rows)]
    starts = [np.r_[0, np.flatnonzero(cut) + 1] for cut in cuts]
    torch.manual_seed(seed)
    heads = [
        torch.randn(rows, length, count, size, requires_grad=True)
        for count, size in ((groups * key_heads, 8), (key_heads, 8), (key_heads, 12))
    ]
    query, key, value = (part.transpose(1, 2) for part in heads)
    given = document_tensors(starts, length, NAME, CPU)
    found, _ = attention.attention(
        torch.nn.Module(),
        *(query, key, value, None),
        scaling=0.7,
        cu_seq_lens_q=given["cu_seq_lens"],
        max_length_q=given["max_length"],
    )
    document = torch.stack([torch.from_numpy(np.r_[0, cut.cumsum()]) for cut in cuts])
    allowed = (document[:, :, None] == document[:, None]).tril()[:, None]
    scores = (query @ key.repeat_interleave(groups, 1).mT * 0.7).masked_fill(~allowed, -torch.inf)
    expected = (scores.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), heads),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_neither_attention_nor_a_cache_is_written_into_the_config(tmp_path):
    model = build("llama")
    before = model.config.to_json_string(use_diff=True)
    install(model, SEQ_LEN)
    assert model.config.to_json_string(use_diff=True) == before
    assert NAME not in before
    model.save_pretrained(tmp_path)
    assert "_attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"


def test_trying_a_model_leaves_its_mode_and_random_state_alone():
    model = build("gpt2").train()
    state = torch.get_rng_state()
    install(model, SEQ_LEN)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("device", "dtype", "head", "value_head", "dropout", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, 64, 64, 0.0, (9, 0), True),
        ("cuda", torch.float16, 256, 256, 0.0, (8, 0), True),
        ("cuda", torch.bfloat16, 64, 64, 0.0, (7, 5), False),
        ("cuda", torch.float32, 64, 64, 0.0, (9, 0), False),
        ("cuda", torch.bfloat16, 20, 20, 0.0, (9, 0), False),
        ("cuda", torch.bfloat16, 512, 512, 0.0, (9, 0), False),
        ("cuda", torch.bfloat16, 192, 128, 0.0, (9, 0), False),
        ("cuda", torch.bfloat16, 64, 64, 0.1, (9, 0), False),
        ("cpu", torch.bfloat16, 64, 64, 0.0, None, False),
    ],
)
def test_torchs_kernel_for_documents_gets_what_it_can_compute(
    device, dtype, head, value_head, dropout, capability, expected, monkeypatch
):
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = attention.takes_varlen(torch.device(device), dtype, head, value_head, dropout)
    attention._has_flash.cache_clear()
    assert found is expected


def test_the_kernel_for_documents_is_called_with_all_rows_in_one(monkeypatch, ids):
    """A stand-in for the CUDA kernel with its signature in torch 2.13, under autocast."""
    from torch.nn.attention import varlen

    seen: list[tuple[torch.dtype, int, int]] = []

    def stand_in(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
    ):
        assert window_size == (-1, 0)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert cu_seq_q is cu_seq_k
        assert {key.dtype, value.dtype} == {query.dtype}
        seen.append((query.dtype, max_q, max_k))
        allowed = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        document = torch.bucketize(torch.arange(len(query)), cu_seq_q[1:], right=True)
        allowed &= document[:, None] == document[None]
        out = F.scaled_dot_product_attention(
            *(heads.transpose(0, 1) for heads in (query, key, value)),
            attn_mask=allowed,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(0, 1)

    model = build("llama-gqa")
    install(model, SEQ_LEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, ids, STARTS)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "takes_varlen", lambda _, dtype, *__: dtype == torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, ids, STARTS)
    assert seen == [(torch.bfloat16, 24, 24)] * 2
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_the_kernels_signature_is_the_one_we_call():
    """Forward and backward in shapes alone: without a CUDA device it computes nothing."""
    query, key = (
        torch.empty(2, heads, 5, 8, dtype=torch.bfloat16, device="meta").requires_grad_()
        for heads in (4, 2)
    )
    borders = torch.empty(3, dtype=torch.int32, device="meta")
    out = attention._varlen((query, key, key), borders, 8, 0.3)
    assert out.shape == (2 * 5, 4, 8)
    out.sum().backward()
    assert [part.grad.shape for part in (query, key)] == [query.shape, key.shape]


def test_half_precision_on_a_gpu_goes_to_it(monkeypatch):
    """Fake tensors on a device that is not there: shapes and the choice, no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    called: list[str] = []
    monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    real = attention._varlen
    monkeypatch.setattr(attention, "_varlen", lambda *a: (called.append("varlen"), real(*a))[1])
    with FakeTensorMode():
        query, key = (
            torch.empty(2, heads, 16, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2)
        )
        borders = torch.empty(4, dtype=torch.int32, device="cuda")
        out, _ = attention.attention(
            torch.nn.Module(), *(query, key, key, None), cu_seq_lens_q=borders, max_length_q=16
        )
        assert called == ["varlen"]
        assert (out.shape, out.device.type, out.dtype) == ((2, 16, 4, 8), "cuda", torch.bfloat16)


class Operations(TorchDispatchMode):
    """The names of all operations that run in the context."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2"])
def test_a_step_reads_no_tensor_and_gets_no_mask(kind, ids, masks):
    """`bool(tensor)` and `tensor.item()` are the same operation."""
    model = build(kind).train()
    assert install(model, SEQ_LEN) == NAME
    masks.clear()
    with Operations() as seen:
        LossModule(model)(ids, ids).backward()
    assert "_local_scalar_dense" not in seen.names
    assert masks == [None, None]


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("own", [True, False], ids=["ours", "transformers'"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_kernel_is_chosen_for_what_is_computed_again_too(checkpointing, own, ids):
    model = build("llama", "sdpa").train()
    if own:
        install(model, SEQ_LEN)
    shape.apply_checkpointing(model, checkpointing)
    forwards = 2 if checkpointing == "none" else 4  # two layers, each once or twice
    module = LossModule(model)
    with attention.kernels("math"), Operations() as seen:
        module(ids, ids).backward()
    assert FLASH not in seen.names
    with attention.kernels("auto"), Operations() as seen:
        module(ids, ids).backward()
    assert seen.names.count(FLASH) == forwards, "math was for the context alone"
    with attention.kernels("flash"), Operations() as seen:
        module(ids, ids).backward()
    assert seen.names.count(FLASH) == forwards


def test_without_flash_attention_documents_are_computed_one_by_one(monkeypatch):
    monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    heads = torch.device("cuda"), torch.bfloat16, 64, 64, 0.0
    assert attention.takes_varlen(*heads)
    with attention.kernels("math"):
        assert not attention.takes_varlen(*heads)
    with attention.kernels("cudnn"):
        assert attention.takes_varlen(*heads), "the next one where cuDNN has none"


@pytest.mark.parametrize("asked", ["auto", "flash", "cudnn", "math"])
def test_only_kernels_of_cuda_need_cuda(asked):
    assert not list(attention.kernel_problems(asked, cpu=False))
    refused = [problem.value for problem in attention.kernel_problems(asked, cpu=True)]
    assert refused == ([asked] if asked in ("flash", "cudnn") else [])


# Positions and borders of a micro-batch, by hand; conversations of a block, each alone.
BORDERS = [np.array([0, 3], np.int32), np.array([0], np.int32)]


def tensors(name):
    return document_tensors(BORDERS, 5, name, CPU)


def test_positions_restart_with_each_document_and_row():
    found = tensors(NAME)["position_ids"]
    assert found.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert found.dtype == torch.int64


def test_borders_run_through_the_rows():
    found = tensors(NAME)["cu_seq_lens"]
    assert found.tolist() == [0, 3, 5, 10]
    assert found.dtype == torch.int32


def test_max_length_takes_few_values_and_covers_the_longest_document():
    found = {longest: round_up(longest, 100) for longest in range(1, 101)}
    assert all(value >= longest for longest, value in found.items())
    assert set(found.values()) == {1, 2, 4, 8, 16, 32, 64, 100}
    assert type(tensors(NAME)["max_length"]) is int
    assert tensors(NAME)["max_length"] == 5


def test_a_compiled_model_gets_few_shapes_and_one_length():
    """Empty documents at the end fill the borders up to a power of two."""
    found = {}
    for count in range(1, 16):
        starts = [np.arange(count), np.array([0])]
        given = document_tensors(starts, 16, NAME, CPU, compiled=True)
        plain = document_tensors(starts, 16, NAME, CPU)
        borders = given["cu_seq_lens"]
        real = len(plain["cu_seq_lens"])
        assert torch.equal(borders[:real], plain["cu_seq_lens"])
        assert (borders[real:] == 2 * 16).all()
        assert torch.equal(given["position_ids"], plain["position_ids"])
        found[len(borders)] = given["max_length"]
    assert all(size & (size - 1) == 0 for size in found)
    assert set(found.values()) == {16}


def test_attention_is_not_chosen_for_a_model_whose_base_is_rounded_already():
    model = build("llama")
    trainable.attach(model, AdapterConfig(kind="lora"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="install the attention before adapters"):
        install(model, SEQ_LEN)


def test_only_our_attention_is_told_the_borders():
    assert tensors(NAME).keys() == {"position_ids", "cu_seq_lens", "max_length"}
    for own in ("sdpa", "eager"):
        assert tensors(own).keys() == {"position_ids"}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_conversations_of_a_block_do_not_see_each_other(tmp_path, kind):
    """Each has the logits that plain transformers computes for it alone."""
    tokenizer = chats.make(tmp_path / "tokenizer", "chatml")
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(40))
    manifest, encoder = chats.data_of(tokenizer, path, lanes=1)
    lanes = Lanes(manifest, encoder, Reader(Reading(60)), DataState.fresh(manifest).cursors, 0)
    numbered = [(g, lanes.take(g)) for g in range(4)]
    batch = batch_of(numbered, manifest, first_block=0, wait_seconds=0.0, ended=False)
    assert batch.starts is not None

    length = {"llama": "max_position_embeddings", "gpt2": "n_positions"}[kind]
    sizes = {"rows": len(AutoTokenizer.from_pretrained(tokenizer)), length: manifest.seq_len}
    alone, packed = (used.model(kind, **sizes) for _ in range(2))
    assert attention.install(packed, manifest.seq_len) == NAME
    inputs = torch.from_numpy(batch.ids[:, :-1].astype(np.int64))
    hidden = document_tensors(batch.starts, manifest.seq_len, NAME, CPU)
    with torch.no_grad():
        found = LossModule(packed)(inputs, all_logits=True, **hidden)
        seeing = LossModule(packed)(inputs, all_logits=True)
        spans = [(row, span) for row, (_, block) in enumerate(numbered) for span in block.spans]
        assert len(spans) > 2 * len(numbered)
        for row, span in spans:
            part = slice(span.at, min(span.at + span.stop - span.start, manifest.seq_len))
            expected = alone(inputs[row, part][None]).logits[0]
            assert torch.allclose(found[row, part], expected, atol=1e-5), span
            same = torch.allclose(seeing[row, part], expected, atol=1e-3)
            assert same == (span.at == 0)  # without a mask, all but the first see others
