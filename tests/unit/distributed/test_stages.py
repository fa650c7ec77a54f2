"""A model that is cut into stages computes what the whole one does."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING

from llmtrain.distributed.engines.stages import CannotCutError, cut, examine, own_tensors
from llmtrain.model.shape import apply_checkpointing, from_config
from llmtrain.training.start.small_trials import small_model

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL = {
    "llama": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": False},
}
OTHERS = {
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "opt": {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "ffn_dim": 64}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 32, "n_layer": 5, "n_head": 4},
}
KINDS = {**{name: SIZES | more for name, more in SMALL.items()}, **OTHERS}


def model_of(kind, **changes):
    torch.manual_seed(1)
    fields = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return from_config(CONFIG_MAPPING[kind](**(KINDS[kind] | fields | changes)))


def anatomy_of(model):
    small = small_model(model.config)
    assert small is not None
    return examine(small)


def through(model, passage, blocks, ids, given):
    """What a stage passes on; the logits of the last one."""
    with passage.through(blocks, given):
        passed = passage.run(model.base_model, ids, {"use_cache": False})
        return model(ids, use_cache=False).logits if passed is None else passed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_stages_have_the_bits_and_gradients_of_the_whole_model(kind, checkpointing):
    whole = model_of(kind)
    apply_checkpointing(whole, checkpointing)
    ids = torch.arange(30).view(2, 15) * 7 % 97
    anatomy, parts = anatomy_of(whole), []
    whole.train()
    for blocks in (range(2), range(2, 3), range(3, 5)):
        one = copy.deepcopy(whole)
        parts.append((one, cut(one, anatomy, [blocks]), blocks))
    torch.manual_seed(7)
    wanted = whole(ids, use_cache=False).logits
    wanted.square().sum().backward()
    torch.manual_seed(7)
    hidden = None
    for one, passage, blocks in parts:
        hidden = through(one, passage, blocks, ids, hidden)
    assert torch.equal(hidden, wanted)
    hidden.square().sum().backward()
    named = dict(whole.named_parameters())
    got = {}
    for one, _, _ in parts:
        for name, parameter in one.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            got[name] = got[name] + gradient if name in got else gradient
    assert got.keys() == named.keys()  # the names of the whole model
    for name, parameter in named.items():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_process_may_hold_several_stages():
    whole = model_of("llama").eval()
    ids, ranges = torch.arange(8)[None], [range(1), range(1, 3), range(3, 4), range(4, 5)]
    anatomy = anatomy_of(whole)
    two = [copy.deepcopy(whole), copy.deepcopy(whole)]
    held = [(one, cut(one, anatomy, ranges[rank::2])) for rank, one in enumerate(two)]
    hidden = None
    for stage, blocks in enumerate(ranges):
        hidden = through(*held[stage % 2], blocks, ids, hidden)
    assert torch.equal(hidden, whole(ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_has_one_stage_that_answers_for_it(kind):
    whole = model_of(kind)
    tensors = {id(t): n for n, t in (*whole.named_parameters(), *whole.named_buffers())}
    anatomy = anatomy_of(whole)
    of = [own_tensors(whole, anatomy, [one]) for one in (range(2), range(2, 4), range(4, 5))]
    assert set.union(*of) == set(tensors)
    assert sum(map(len, of)) == len(tensors)
    embedding = next(iter(whole.get_input_embeddings().parameters()))
    assert id(embedding) in of[0]


def test_a_stage_holds_no_parameters_of_another():
    whole = model_of("llama", tie_word_embeddings=True)
    anatomy = anatomy_of(whole)
    first, middle, last = (copy.deepcopy(whole) for _ in range(3))
    for one, blocks in ((first, range(2)), (middle, range(2, 4)), (last, range(4, 5))):
        cut(one, anatomy, [blocks])
    outside = [
        {name for name, _ in one.named_parameters() if ".layers." not in name}
        for one in (first, middle, last)
    ]
    embedding = "model.embed_tokens.weight"
    assert outside == [{embedding}, set(), {embedding, "model.norm.weight"}]
    assert last.lm_head.weight is last.model.embed_tokens.weight


def test_a_model_whose_blocks_share_more_than_hidden_states_cannot_be_cut():
    model, shared = model_of("llama").eval(), {}
    blocks = model.model.layers
    model.register_forward_pre_hook(lambda _module, _given: shared.clear())
    blocks[0].register_forward_hook(lambda _module, _given, output: shared.update(own=output))
    blocks[3].register_forward_hook(lambda _module, _given, output: output + shared["own"])
    with pytest.raises(CannotCutError, match="its code fails on a stage: 'own'"):
        examine(model)


def test_what_is_used_between_the_blocks_cannot_be_cut():
    model = model_of("llama").eval()
    embedding, ids = model.model.embed_tokens, torch.arange(8)[None]
    model.model.layers[3].register_forward_hook(
        lambda _module, _given, output: output + embedding(ids)
    )
    with pytest.raises(CannotCutError, match=r"model.embed_tokens is used between its blocks"):
        examine(model)


def test_a_model_that_runs_a_block_twice_cannot_be_cut():
    model = model_of("llama").eval()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(CannotCutError, match="not run once each"):
        examine(model)
