"""Pairs of answers through a model: packed as alone, and as plain transformers scores them."""

from typing import Any

import pytest
import torch
from helpers import answers
from helpers.bases import small_fields
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.config.schema import PreferenceConfig
from llmtrain.model import attention
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.pairs import PAIR_SLOTS

VOCABULARY, SEQ_LEN = 61, 48
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},  # a cap, and its own attention
    "cohere": {"logit_scale": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "phi": {},  # a bias of the head
}
LOSSES = ["dpo", "dpo_norm", "robust", "ipo", "hinge", "apo_zero", "orpo", "simpo", "cpo"]


def built(kind: str = "llama", dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    torch.manual_seed(4)
    given = small_fields(
        16, 2, 2, num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64
    )
    config = AutoConfig.for_model(kind, **(given | MODELS.get(kind, {}) | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that documents that see each other show
    return model.eval()


def module_of(model: Any, loss: str = "dpo", **more: Any) -> LossModule:
    head = examine(model)
    assert isinstance(head, Head)
    attention.install(model, SEQ_LEN)
    return LossModule(model, head, preference=PreferenceConfig(loss=loss, beta=0.3, **more))


def scored(module: LossModule, rows: list[list[answers.Pair]], **more: Any) -> torch.Tensor:
    name = attention.backend(module.model)
    given = answers.micro_batch(rows, SEQ_LEN, name, answers.tensors(rows))
    with torch.no_grad():
        return module(**given, each=True, **more)


ROWS = [answers.pairs(2, VOCABULARY, seed) for seed in range(3)]
EVERY = [pair for row in ROWS for pair in row]


@pytest.mark.parametrize("kind", MODELS)
def test_the_sums_are_those_of_a_loop_over_transformers(kind):
    """Labels that are off by one would show here, and a cap, a factor or a bias left out."""
    expected = answers.plain_sums(built(kind), EVERY)
    found = scored(module_of(built(kind)), ROWS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_pairs_have_the_losses_and_gradients_of_pairs_alone(loss):
    """A loss that divides by the length of a row, or of another sequence, would not."""
    reference = torch.linspace(-9, -30, 2 * len(EVERY), dtype=torch.float64).view(-1, 2)
    packed, alone = module_of(built(), loss), module_of(built(), loss)
    given = answers.tensors(ROWS, reference)
    found = packed(**answers.micro_batch(ROWS, SEQ_LEN, attention.NAME, given))
    found[0].backward()
    expected = torch.zeros_like(found).detach()
    for number, pair in enumerate(EVERY):
        ids, labels = answers.alone([pair], 16)
        own = answers.tensors([[pair]], reference[number : number + 1])
        one = alone(ids, labels, pairs=own)
        one[0].backward()
        expected += one.detach()
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)
    gradients = zip(packed.model.parameters(), alone.model.parameters(), strict=True)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gemma2"], ids=["our attention", "transformers' own"])
def test_changing_one_sequence_leaves_the_bits_of_all_others(kind):
    module = module_of(built(kind, torch.float32))
    before = scored(module, ROWS)
    chosen, rejected = ROWS[1][0]
    other = answers.Half(rejected.prompt, tuple(id_ % 50 + 4 for id_ in rejected.answer))
    changed = [ROWS[0], [(chosen, other), ROWS[1][1]], ROWS[2]]
    after = scored(module, changed)
    same = before == after
    assert same.tolist() == [[True, n != 2] for n in range(len(EVERY))]


def test_each_pair_is_scored_alike_with_and_without_gradients():
    module = module_of(built(dtype=torch.float32))
    given = answers.micro_batch(ROWS, SEQ_LEN, attention.NAME, answers.tensors(ROWS))
    sums, found = scored(module, ROWS), module(**given)
    slots = dict(zip(PAIR_SLOTS, found.tolist()[1:], strict=True))
    assert slots["chosen_logp"] == sums[:, 0].sum().item()
    assert slots["rejected_logp"] == sums[:, 1].sum().item()
    assert found.shape == (1 + len(PAIR_SLOTS),)


def test_exchanged_answers_have_the_opposite_margins():
    module = module_of(built())
    exchanged = [[(rejected, chosen) for chosen, rejected in row] for row in ROWS]
    found = []
    for rows in (ROWS, exchanged):
        given = answers.micro_batch(rows, SEQ_LEN, attention.NAME, answers.tensors(rows))
        found.append(dict(zip(PAIR_SLOTS, module(**given).tolist()[1:], strict=True)))
    one, other = found
    assert one["chosen_reward"] == pytest.approx(other["rejected_reward"])
    assert one["chosen_logp"] == pytest.approx(other["rejected_logp"])
    assert one["correct"] == len(EVERY) - other["correct"]


@pytest.mark.parametrize("known", [False, True], ids=["looked for", "known"])
def test_from_logits_the_loss_and_gradients_are_the_same(known):
    reference = torch.linspace(-9, -30, 2 * len(EVERY), dtype=torch.float64).view(-1, 2)
    given = answers.micro_batch(ROWS, SEQ_LEN, attention.NAME, answers.tensors(ROWS, reference))
    if not known:
        del given["trained"]
    one = module_of(built(dtype=torch.float32))
    other = LossModule(one.model, None, preference=PreferenceConfig(loss="dpo", beta=0.3))
    weights = list(one.model.parameters())
    found, right = one(**given), other(**given)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(of[0], weights) for of in (found, right))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_router_counts_once_a_pair():
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = built("mixtral", torch.float32, **fields, router_aux_loss_coef=0.5).train()
    attention.install(model, SEQ_LEN)
    module = LossModule(model, None, preference=PreferenceConfig(loss="dpo"))
    given = answers.micro_batch(ROWS, SEQ_LEN, attention.NAME, answers.tensors(ROWS))
    found = module(**given)
    keywords = {key: given[key] for key in ("position_ids", "cu_seq_lens", "max_length")}
    routed = model(given["input_ids"], **attention.model_keywords(**keywords)).aux_loss
    assert module.router_loss is not None
    assert module.router_loss.item() == pytest.approx(0.5 * len(EVERY) * routed.item(), rel=1e-5)
    gate = model.model.layers[0].mlp.gate.weight
    (own,) = torch.autograd.grad(found[0], gate)
    (bare,) = torch.autograd.grad(0.5 * len(EVERY) * routed, gate)
    module.model.config.router_aux_loss_coef = 0.0
    (without,) = torch.autograd.grad(module(**given)[0], gate)
    torch.testing.assert_close(own - without, bare, rtol=1e-4, atol=1e-5)
