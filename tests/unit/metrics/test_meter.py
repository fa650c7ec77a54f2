import math

import pytest
import torch

from llmtrain.data.state import roll
from llmtrain.metrics.meter import DataFailedError, Meter
from llmtrain.pairs import PAIR_SLOTS
from llmtrain.types import SLOTS, StepVector, rank_layout


def due_at(*steps):
    return steps.__contains__


def meter(*, pairs=False, **sources):
    return Meter(
        torch.device("cpu"),
        ("en", "vi"),
        lambda step: step / 10,
        roll,
        layout=rank_layout(0, 2),
        sources=sources,
        stream_digest=0,
        pairs=pairs,
    )


def send(one, step, *, norm=1.5, en=6, vi=2, **slots):
    one.begin(step)
    values = [slots.get(slot, 0.0) for slot in SLOTS] + [float(en), float(vi)]
    one.send(StepVector(torch.tensor(values, dtype=torch.float64)), torch.tensor(norm))


def test_a_step_is_received_at_the_boundary_after_it():
    one, due = meter(), due_at()
    send(one, 1, loss_sum=16.0)
    assert list(one.receive(1, due)) == []
    send(one, 2, loss_sum=24.0)
    (numbers,) = one.receive(2, due)
    assert numbers.step == 1
    assert numbers.loss == 2.0
    assert numbers.learning_rate == 0.1
    assert numbers.grad_norm == 1.5
    assert numbers.step_tokens == numbers.tokens == 8
    assert numbers.sources == {"en": 6, "vi": 2}


def test_the_sum_of_a_router_is_behind_the_tokens_and_is_none_of_them():
    one, due = meter(), due_at(1, 2, 3)
    for step, (en, router) in enumerate([(6, [4.0]), (6, []), (0, [0.0])], 1):
        one.begin(step)
        values = [16.0 if slot == "loss_sum" else 0.0 for slot in SLOTS] + [en, float(en and 2)]
        vector = StepVector(torch.tensor([*values, *router], dtype=torch.float64), len(router))
        one.send(vector, torch.tensor(1.5))
    found = [numbers for step in (1, 2, 3) for numbers in one.receive(step, due)]
    assert [numbers.router_loss for numbers in found[:2]] == [0.5, None]
    assert [(numbers.loss, numbers.step_tokens) for numbers in found[:2]] == [(2.0, 8)] * 2
    assert found[2].router_loss is not None
    assert math.isnan(found[2].router_loss)
    assert found[2].skipped


# Of four pairs the model has three right, and one is a tie.
SUMS = {
    "pairs": 4,
    "chosen": 4,
    "rejected": 4,
    "correct": 3.5,
    "chosen_reward": 2.0,
    "rejected_reward": -1.0,
    "chosen_logp": -80.0,
    "rejected_logp": -100.0,
    "chosen_tokens": 40,
    "divergence": 0.0,
}


def of_pairs(one, step, *, en=60, router=(), loss_sum=2.0, **sums):
    one.begin(step)
    values = [loss_sum if slot == "loss_sum" else 0.0 for slot in SLOTS] + [float(en), 0.0]
    values += [float((SUMS | sums)[slot]) for slot in PAIR_SLOTS] + list(router)
    others = len(PAIR_SLOTS) + len(router)
    vector = StepVector(torch.tensor(values, dtype=torch.float64), others)
    one.send(vector, torch.tensor(1.5))
    return vector


@pytest.mark.parametrize("router", [(), (6.0,)])
def test_the_sums_of_pairs_are_behind_the_tokens_and_divide_the_loss(router):
    one, due = meter(pairs=True), due_at(1)
    vector = of_pairs(one, 1, router=router)
    assert (vector.tokens, vector.has_tokens) == (60, True)
    (numbers,) = one.receive(1, due)
    assert (numbers.loss, numbers.step_tokens, numbers.skipped) == (0.5, 60, False)
    assert numbers.router_loss == (1.5 if router else None)
    assert numbers.pairs == {
        "pairs": 4,
        "accuracy": 0.875,
        "margin": 0.75,
        "chosen_reward": 0.5,
        "rejected_reward": -0.25,
        "chosen_logp": -20.0,
        "rejected_logp": -25.0,
        "chosen_loss": 2.0,
    }


def test_of_feedback_each_mean_is_over_the_answers_with_that_label():
    one, due = meter(pairs=True), due_at(1)
    of_pairs(one, 1, chosen=3, rejected=1, chosen_reward=1.5, rejected_reward=-1, divergence=8)
    (numbers,) = one.receive(1, due)
    found = {key: numbers.pairs[key] for key in ("chosen_reward", "rejected_reward", "divergence")}
    assert found == {"chosen_reward": 0.5, "rejected_reward": -1.0, "divergence": 2.0}
    assert numbers.pairs["margin"] == 1.5


def test_a_model_that_scores_has_no_log_probabilities():
    one, due = meter(pairs=True), due_at(1)
    of_pairs(one, 1, chosen_logp=0, rejected_logp=0, chosen_tokens=0)
    (numbers,) = one.receive(1, due)
    assert {numbers.pairs[key] for key in ("chosen_logp", "rejected_logp", "chosen_loss")} == {None}
    assert numbers.pairs["margin"] == 0.75


def test_a_step_without_a_pair_is_a_step_without_a_trained_token():
    one, due = meter(pairs=True), due_at(1)
    vector = of_pairs(one, 1, en=0, loss_sum=0.0, router=(0.0,), **dict.fromkeys(PAIR_SLOTS, 0))
    assert not vector.has_tokens
    (numbers,) = one.receive(1, due)
    assert numbers.skipped
    assert math.isnan(numbers.loss)
    assert math.isnan(numbers.router_loss)
    assert numbers.pairs["pairs"] == 0
    assert {numbers.pairs[key] for key in ("accuracy", "margin", "chosen_loss")} == {None}


def test_what_is_due_at_a_step_drains_it_at_once():
    one, due = meter(), due_at(2)
    send(one, 1)
    assert list(one.receive(1, due)) == []
    send(one, 2)
    assert [numbers.step for numbers in one.receive(2, due)] == [1, 2]


def test_a_stop_that_arrives_drains_the_step_that_hears_it():
    one, stopped = meter(), []

    def due(step):
        return bool(stopped)

    send(one, 1, signal=1.0)
    assert list(one.receive(1, due)) == []
    send(one, 2)
    received = []
    for numbers in one.receive(2, due):
        received.append(numbers.step)
        stopped += numbers.stops
    assert (received, stopped) == ([1, 2], ["signal"])


@pytest.mark.parametrize(
    "bad", [{"not_finite": 1.0}, {"norm": math.inf}, {"norm": math.nan}, {"en": 0, "vi": 0}]
)
def test_skipped_steps_do_not_count_as_trained(bad):
    one, due = meter(en=100), due_at(1, 2)
    send(one, 1, **bad)
    (numbers,) = one.receive(1, due)
    assert numbers.skipped
    assert numbers.tokens == 100
    send(one, 2)
    (numbers,) = one.receive(2, due)
    assert not numbers.skipped
    assert numbers.tokens == 108


def test_digests_of_ranks_add_up_beyond_64_bits():
    one, due = meter(), due_at(1)
    a, b = 0xFFFF_FFFF_FFFF_FFF0, 0x1234_5678_9ABC_DEF0
    limbs = {
        f"digest_{k}": float((a >> 16 * k & 0xFFFF) + (b >> 16 * k & 0xFFFF)) for k in range(4)
    }
    send(one, 1, **limbs)
    (numbers,) = one.receive(1, due)
    assert numbers.batch_digest == (a + b) % 2**64
    assert one.stream_digest == roll(0, (a + b) % 2**64)


def test_a_step_without_data_on_some_rank_raises_and_leaves_no_trace():
    one, due = meter(), due_at()
    send(one, 1)
    list(one.receive(1, due))
    send(one, 2, data_failed=1.0)
    assert [numbers.step for numbers in one.receive(2, due)] == [1]
    digest = one.stream_digest
    send(one, 3, data_failed=1.0)
    with pytest.raises(DataFailedError):
        list(one.receive(3, due))
    assert (one.stream_digest, one.tokens) == (digest, 8)


def test_the_data_has_ended_when_all_ranks_say_so():
    one, due = meter(), due_at(1, 2)
    send(one, 1, ended=1.0, padding_only=1.0)
    (numbers,) = one.receive(1, due)
    assert not numbers.ended
    assert not numbers.padding_only
    send(one, 2, ended=2.0, padding_only=2.0, en=0, vi=0)
    (numbers,) = one.receive(2, due)
    assert numbers.ended
    assert numbers.padding_only
    assert math.isnan(numbers.loss)


def test_a_step_whose_data_failed_is_named():
    one, due = meter(), due_at()
    send(one, 4, data_failed=1.0)
    with pytest.raises(DataFailedError) as raised:
        list(one.receive(5, due))
    assert raised.value.step == 4
    assert one.tokens == 0
