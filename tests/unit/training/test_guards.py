import math
import statistics

import numpy as np
import pytest

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import RunError, UserError
from llmtrain.training.guards import Guards, check_replicas
from llmtrain.types import Numbers


def numbers(step, *, skipped=False, tokens=8, loss=1.0):
    return Numbers(step, loss, 1.0, 1.0, 1, tokens, 1.0, 0.0, 0, skipped, {}, False)


def spikes(losses):
    """Steps and details of the events that a run with these losses has; NaN: a skipped update."""
    told: list[tuple[int, dict[str, float]]] = []

    def tell(event, step, **detail):
        assert event == "loss_spike"
        told.append((step, detail))

    guards = Guards(TrainingConfig(steps=1000, max_skipped_in_a_row=1000), 0, tell)
    for step, loss in enumerate(losses, 1):
        guards.check(numbers(step, loss=loss, skipped=loss != loss))
    return told


# Median 2.0; of the distances to it four in five are 0.1.
NOISE = [1.9, 2.0, 2.1, 1.9, 2.1] * 40


def test_single_skips_are_counted_and_forgiven():
    guards = Guards(TrainingConfig(steps=9, max_skipped_in_a_row=3), 0, pytest.fail)
    for step, skipped in enumerate([True, True, False, True, True], 1):
        guards.check(numbers(step, skipped=skipped))
    assert guards.skipped_in_a_row == 2


def test_too_many_skips_in_a_row_end_the_run_with_1():
    guards = Guards(TrainingConfig(steps=9, max_skipped_in_a_row=3), 2, pytest.fail)
    with pytest.raises(RunError, match="3 updates in a row") as raised:
        guards.check(numbers(7, skipped=True))
    assert raised.value.exit_code == 1


def test_stop_ends_the_run_at_the_first_one():
    guards = Guards(TrainingConfig(steps=9, on_nonfinite="stop"), 0, pytest.fail)
    with pytest.raises(RunError, match="diverged at step 4"):
        guards.check(numbers(4, skipped=True))


def test_a_step_without_a_trained_token_is_the_users_to_mend():
    guards = Guards(TrainingConfig(steps=9), 0, pytest.fail)
    with pytest.raises(UserError, match="trained token") as raised:
        guards.check(numbers(4, skipped=True, tokens=0))
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("what", ["ended", "padding_only"])
def test_a_step_behind_the_end_of_the_data_is_no_failure(what):
    guards = Guards(TrainingConfig(steps=9, on_nonfinite="stop"), 0, pytest.fail)
    guards.check(numbers(4, skipped=True, tokens=0)._replace(**{what: True}))
    assert guards.skipped_in_a_row == 0


def test_equal_replicas_are_no_event():
    check_replicas({}, 4, pytest.fail)


def test_replicas_that_differ_end_the_run_with_75_and_are_named(caplog):
    told: list[tuple[str, int, dict]] = []
    differing = {f"layer.{k}": [1] for k in range(6)} | {"head": [0, 1]}
    with pytest.raises(RunError, match=r"at step 8: layer\.0 \(rank 1\).* and 2 more") as raised:
        check_replicas(differing, 8, lambda *said, **more: told.append((*said, more)))
    assert raised.value.exit_code == 75
    names = [f"layer.{k} (rank 1)" for k in range(5)]
    assert told == [("replicas_differ", 8, {"ranks": [0, 1], "count": 7, "names": names})]
    assert "head (rank 0, 1)" in caplog.text


def test_a_loss_six_deviations_above_the_median_is_a_spike():
    sigma = 1.4826 * 0.1
    assert spikes([*NOISE, 2.0 + 6.01 * sigma]) == [
        (201, {"loss": 2.0 + 6.01 * sigma, "median": 2.0, "sigma": pytest.approx(sigma)})
    ]
    assert spikes([*NOISE, 2.0 + 5.99 * sigma]) == []
    assert spikes([*NOISE, 0.1]) == []  # a fall is none


def test_the_spread_is_that_of_numpy_over_the_last_128_steps():
    losses = (3 + 0.2 * np.random.default_rng(5).standard_normal(300)).tolist()
    last = np.array(losses[-128:])
    middle = np.median(last)
    sigma = 1.482602 * np.median(abs(last - middle))
    [(step, found)] = spikes([*losses, 9.0])
    assert step == 301
    assert found["median"] == pytest.approx(middle)
    assert found["sigma"] == pytest.approx(sigma, rel=1e-4)


def test_a_loss_that_stays_high_is_one_spike_and_one_that_comes_back_another():
    found = spikes([*NOISE, 5.0, 5.0, 5.0, *NOISE[:10], 5.0])
    assert [step for step, _ in found] == [201, 214]


def test_spikes_do_not_hide_the_next_one():
    assert len(spikes([*NOISE, *([9.0, *NOISE[:4]] * 8), 9.0])) == 9


def test_a_loss_that_never_moved_has_no_spike_at_the_first_tiny_change():
    assert spikes([2.0] * 200 + [2.05, 2.0, 2.059]) == []
    assert [step for step, _ in spikes([2.0] * 200 + [2.061])] == [201]


def test_no_spike_is_told_before_there_are_64_steps_to_compare_with():
    assert spikes([*NOISE[:63], 9.0]) == []
    assert [step for step, _ in spikes([*NOISE[:64], 9.0])] == [65]


def test_a_loss_that_falls_fast_has_no_spikes():
    draw = np.random.default_rng(1)
    steps = np.arange(400)
    assert (
        spikes((2.3 + 6.7 * np.exp(-steps / 60) + 0.08 * draw.standard_normal(400)).tolist()) == []
    )


def test_skipped_updates_are_neither_spikes_nor_compared_with():
    assert spikes([float("nan")] * 100 + [9.0]) == []
    assert spikes([*NOISE, float("nan"), 2.0]) == []


def test_the_usual_length_of_a_step_is_the_median_of_the_last():
    guards = Guards(TrainingConfig(steps=9), 0, pytest.fail)
    assert guards.median_seconds() == 0
    for step, seconds in enumerate([30.0, 1.0, 2.0], 1):
        guards.check(numbers(step)._replace(seconds=seconds))
    assert guards.median_seconds() == 2.0
    for step in range(128):
        guards.check(numbers(step)._replace(seconds=4.0))
    assert guards.median_seconds() == 4.0


def spikes_by_definition(losses):
    """As `spikes`, from sorted copies of the window at every step."""
    found, spiking = [], False
    for step, loss in enumerate(losses, 1):
        window = losses[max(0, step - 129) : step - 1]
        usual = statistics.median(window) if len(window) >= 64 else math.inf
        distance = statistics.median([abs(one - usual) for one in window] or [0.0])
        sigma = max(1.4826 * distance, 0.01)
        above = loss > usual + 6 * sigma
        if above and not spiking:
            found.append((step, {"loss": loss, "median": usual, "sigma": sigma}))
        spiking = above
    return found


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.3])
def test_random_losses_have_the_spikes_of_the_definition(noise):
    draw = np.random.default_rng(7)
    losses = 3 + 5 * np.exp(-np.arange(600) / 90) + noise * draw.standard_normal(600)
    losses += np.where(draw.random(600) < 0.05, draw.choice([0.0599, 0.0601, 0.5, 4.0], 600), 0)
    rounded = np.round(losses, 3).tolist()  # so that equal ones are in the window
    found = spikes(rounded)
    assert found == spikes_by_definition(rounded)
    assert found
