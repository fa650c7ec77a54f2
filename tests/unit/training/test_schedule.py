import math
from itertools import pairwise

import pytest

from llmtrain.config.schema import OptimizerConfig
from llmtrain.training.optimizer import learning_rate_factor, warmup_steps


def factors(steps, **keys):
    config = OptimizerConfig.model_validate(keys)
    return [learning_rate_factor(config, steps, step) for step in range(1, steps + 1)]


def test_cosine_warms_up_peaks_and_ends_at_the_floor():
    found = factors(100, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert found[:10] == [pytest.approx(step / 10) for step in range(1, 11)]
    assert found[54] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert found[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(found[9:]))


def test_linear_falls_by_equal_steps_to_the_floor():
    found = factors(11, schedule="linear", warmup_steps=1, min_lr_ratio=0.0)
    assert found == [pytest.approx(1 - k / 10) for k in range(11)]


def test_constant_stays_at_the_peak():
    assert factors(20, schedule="constant", warmup_steps=2)[1:] == [1.0] * 19


def test_wsd_is_flat_and_decays_over_the_last_fifth():
    found = factors(100, schedule="wsd", warmup_steps=10, min_lr_ratio=0.1)
    assert found[9:80] == [1.0] * 71
    assert found[80] == pytest.approx(1 - 0.9 / 20)
    assert found[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_factor_lies_in_0_to_1_whatever_the_lengths(schedule):
    for steps in (1, 2, 3, 10):
        for warmup in (1, 2, 10, 0.5):
            found = factors(steps, schedule=schedule, warmup_steps=warmup)
            assert all(0 < factor <= 1 for factor in found)


def test_a_fraction_of_warmup_is_a_share_of_the_steps():
    assert warmup_steps(OptimizerConfig(warmup_steps=0.03), 1000) == 30
    assert warmup_steps(OptimizerConfig(warmup_steps=0.03), 10) == 1
    assert warmup_steps(OptimizerConfig(warmup_steps=100), 30) == 30


def test_it_is_the_schedule_of_transformers():
    import torch
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 10, 100, min_lr_rate=0.1)
    ours = factors(100, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    for step in range(100):
        optimizer.step()
        theirs.step()
        assert ours[step] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
