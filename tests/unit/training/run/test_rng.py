import json
import random  # noqa: TID251  # the state that is kept

import numpy as np
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
