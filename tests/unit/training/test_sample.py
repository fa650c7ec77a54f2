"""Ranks that hold a part of the weights each wait for each other in every forward."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmtrain.data.chat.end_of_turn import EndOfTurn
from llmtrain.training.evaluate import sample
from llmtrain.training.run.due import Due

EOS = 0
VOCABULARY = 5


class Tokens:
    """Ids are letters."""

    bos, eos = None, EOS

    def encode(self, text):
        return np.array([ord(one) - ord("a") for one in text])

    def decode(self, ids):
        return "".join(chr(ord("a") + one) for one in ids)


class Written:
    """The control group of a rank. said: what rank 0 broadcasts, None where this is rank 0."""

    def __init__(self, said):
        self.rank = 0 if said is None else 1
        self.world_size = 2
        self.heard: list[bytes] = []
        self._said = said

    def broadcast(self, body):
        self.heard.append(body if self._said is None else self._said[len(self.heard)])
        return self.heard[-1]


def due(*, steps=100):
    """What is due in a run of so many steps."""
    periods = {"evaluate_every": 20, "save_every": 20, "log_every": 1}
    return Due(
        steps=steps, first=0, last_evaluation=None, heldout=True, data_ended=False, **periods
    )


def run_of(model, ranks, what_is_due):
    """A run at step 3."""
    return SimpleNamespace(
        config=SimpleNamespace(
            run=SimpleNamespace(seed=1),
            data=SimpleNamespace(seq_len=8),
            evaluation=SimpleNamespace(prompts=["bc"]),
        ),
        data=SimpleNamespace(tokenizer=Tokens(), encoder=SimpleNamespace(chat=None)),
        device=torch.device("cpu"),
        due=what_is_due,
        engine=SimpleNamespace(evaluating=nullcontext),
        model=model,
        ranks=ranks,
        step=3,
    )


def written(rows, said):
    """The text, the number of forwards and what was broadcast. rows: logits of each forward."""
    forwards = iter(rows)
    contexts = []

    def model(ids):
        contexts.append(ids.tolist())
        return torch.tensor([next(forwards, rows[-1])])

    ranks = Written(said)
    (found,) = sample(run_of(model, ranks, due()))
    return found.text, len(contexts), ranks.heard


def sure(token):
    """Logits that leave no other choice."""
    return [100.0 if one == token else 0.0 for one in range(VOCABULARY)]


def test_rank_0_draws_for_all():
    text, forwards, said = written([sure(2), sure(3), sure(EOS)], None)
    assert (text, forwards) == ("cd", 3)
    other = written([sure(1), sure(EOS), [float("nan")] * VOCABULARY], said)
    assert other == (text, forwards, said)


def test_a_rank_that_could_go_on_ends_where_rank_0_diverged():
    text, forwards, said = written([sure(2), [float("inf")] * VOCABULARY], None)
    assert (text, forwards) == ("c", 2)
    assert written([sure(2)], said) == (text, forwards, said)


def test_a_text_without_an_end_is_cut_off():
    text, forwards, said = written([sure(4)], None)
    assert text == "e" * 64
    assert forwards == len(said) == 64


def ends_at_once(_ids):
    """A model that is sure of the end."""
    return torch.tensor([sure(EOS)])


@pytest.mark.parametrize("end", [EOS, 3, 4])
def test_an_answer_ends_at_each_token_that_ends_a_turn(end):
    asked = run_of(
        lambda ids: torch.tensor([sure(2 if ids[0, -1] == 1 else end)]), Written(None), due()
    )
    asked.data.encoder.chat = SimpleNamespace(
        has_template=True,
        prompt_ids=lambda messages: [1],
        check=lambda: EndOfTurn("d", 3, "", "", {"e": 4}),
    )
    assert sample(asked)[0].text == "c"


def test_the_finished_model_is_sampled():
    assert len(sample(run_of(ends_at_once, Written(None), due(steps=3)))) == 1


def test_the_model_is_sampled_where_the_data_has_ended():
    ended = due()
    ended.data_ended = True
    assert len(sample(run_of(ends_at_once, Written(None), ended))) == 1


def test_who_asked_for_a_stop_waits_for_no_sample():
    stopped = due()
    stopped.ask(("signal",))
    assert sample(run_of(ends_at_once, Written(None), stopped)) == []


def test_drawing_leaves_the_random_state_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert len(written([sure(2), [0.0] * VOCABULARY], None)[0]) > 0
    assert torch.equal(torch.get_rng_state(), before)
