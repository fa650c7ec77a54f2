import json
import random  # noqa: TID251  # the state that is kept

import numpy as np
import pytest
import torch

from llmtrain.training.run import rng

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()


def test_states_survive_json_and_give_the_same_numbers() -> None:
    rng.seed_rank(1, 0)
    draw()
    kept = json.loads(json.dumps(rng.capture(CPU).to_json()))
    expected = [draw() for _ in range(3)]
    rng.seed_rank(2, 0)
    rng.restore(rng.States.from_json(kept), CPU)
    assert [draw() for _ in range(3)] == expected


def test_ranks_and_resumed_steps_draw_other_numbers() -> None:
    found = set()
    for rank, step in ((0, 0), (1, 0), (0, 5), (1, 5)):
        rng.seed_rank(42, rank, step)
        found.add(draw())
    assert len(found) == 4


def kept() -> dict[str, object]:
    """The states as `capture` tells them."""
    return json.loads(json.dumps(rng.capture(CPU).to_json()))


def told() -> dict[str, object]:
    """The states as the generators tell them, in the same form."""
    states = rng.States(random.getstate(), np.random.get_state(), torch.get_rng_state(), None)
    return json.loads(json.dumps(states.to_json()))


def test_states_are_those_that_the_generators_tell_whoever_draws() -> None:
    rng.seed_rank(3, 0)
    draws = [
        lambda: None,
        np.random.random,
        np.random.standard_normal,  # draws two and keeps the second one
        np.random.standard_normal,  # hands it out, and moves no word
        lambda: np.random.permutation(9),
        lambda: np.random.seed(3),  # BigBird does that in each forward
        lambda: np.random.random(624),  # as many as there are words
        random.random,
        lambda: random.gauss(0, 1),  # keeps a second one, too
        lambda: random.gauss(0, 1),
        lambda: random.seed(3),
        lambda: [random.random() for _ in range(312)],  # two words each
        lambda: rng.seed_rank(3, 0),
    ]
    choose = np.random.default_rng(0)
    for which in choose.integers(0, len(draws), 300):
        draws[which]()
        assert kept() == told()


def test_a_restored_state_is_known_even_if_only_its_kept_number_differs() -> None:
    rng.seed_rank(3, 0)
    np.random.standard_normal()
    one_left = rng.capture(CPU)
    np.random.standard_normal()  # no word has moved since
    none_left = rng.capture(CPU)
    assert np.array_equal(one_left.numpy[1], none_left.numpy[1])
    for states in (one_left, none_left, one_left):
        rng.restore(states, CPU)
        assert rng.capture(CPU).numpy[3:] == states.numpy[3:]


def test_no_generator_is_asked_again_while_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    rng.seed_rank(3, 0)
    rng.capture(CPU)
    for one in (rng._python, rng._numpy):
        monkeypatch.setattr(one, "_ask", pytest.fail)
    rng.capture(CPU)


def test_a_generator_of_another_kind_is_asked_each_time() -> None:
    assert rng._words_of_numpy(np.random.PCG64()) is None
    assert rng._words_of_numpy(np.random.MT19937(1)).shape == (625,)
    assert rng._words_of_python(random.Random(1)).shape == (625,)
