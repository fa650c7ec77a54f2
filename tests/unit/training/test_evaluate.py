"""The sums of an evaluation by source, against plain arithmetic."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.agreement import Alone
from llmtrain.data.chat.end_of_turn import EndOfTurn
from llmtrain.data.heldout import HeldOut, HeldOutPart
from llmtrain.model.loss import LossModule
from llmtrain.training.due import Due
from llmtrain.training.evaluate import by_source, evaluate, sample
from llmtrain.types import NOT_TRAINED, Evaluation, Flags, rank_layout

VOCABULARY = 31


def module():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, intermediate_size=24, **shape)
    return LossModule(LlamaForCausalLM(config).eval())


def heldout(*parts):
    """Five documents of unequal lengths, of two sources in turn."""
    draw = np.random.default_rng(3)
    lengths = np.array([9, 4, 17, 6, 30])
    ids = draw.integers(1, VOCABULARY, 1 + lengths.sum()).astype(np.int32)
    starts = 1 + np.concatenate([[0], lengths.cumsum()[:-1]])
    scored = np.ones(len(ids), bool)
    scored[[0, *(starts[1:] - 1), -1]] = False  # separators
    return HeldOut(ids, scored, starts, 5, 300, 0, parts, np.array([0, 1, 0, 1, 0]))


def run_of(held, model, seq_len, size):
    """What `evaluate` needs of a run."""
    nobody = SimpleNamespace(flags=lambda reason, look=True: Flags())
    return SimpleNamespace(
        built=SimpleNamespace(micro_batch_size=size),
        checkpoints=SimpleNamespace(flags=dict),
        config=SimpleNamespace(data=SimpleNamespace(seq_len=seq_len)),
        data=SimpleNamespace(
            heldout=held,
            manifest=SimpleNamespace(packing="concat", hides_documents=False),
            answers=None,
        ),
        device=torch.device("cpu"),
        engine=SimpleNamespace(evaluating=torch.no_grad),
        model=model,
        layout=rank_layout(0, 1),
        ranks=Alone(),
        requests=nobody,
        signals=SimpleNamespace(reason=None),
        step=3,
    )


def by_hand(held, model, seq_len):
    """Σ nll and tokens of each source, block by block and token by token."""
    sums, tokens = [0.0, 0.0], [0, 0]
    document = np.repeat(held.owners, np.diff(held.starts, append=len(held.ids)))
    for begin in range(0, len(held.ids) - 1, seq_len):
        ids = torch.from_numpy(held.ids[begin : begin + seq_len + 1].astype(np.int64))
        with torch.no_grad():
            nll = -model.model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        for k, target in enumerate(ids[1:].tolist()):
            if held.scored[begin + 1 + k]:
                owner = document[begin + k]
                sums[owner] += float(nll[k, target])
                tokens[owner] += 1
    return sums, tokens


TWO = (HeldOutPart("a", 3, 200), HeldOutPart("b", 2, 100))


@pytest.mark.parametrize(("seq_len", "size"), [(8, 1), (8, 3), (64, 2), (128, 1)])
def test_each_source_has_the_loss_of_its_own_tokens(seq_len, size):
    model, held = module(), heldout(*TWO)
    found = evaluate(run_of(held, model, seq_len, size))
    assert found is not None
    sums, tokens = by_hand(held, model, seq_len)
    for part, nll, count in zip(held.parts, sums, tokens, strict=True):
        one = found.sources[part.label]
        assert one.tokens == count
        assert one.loss == pytest.approx(nll / count, abs=1e-6)
        assert one.perplexity == pytest.approx(math.exp(nll / count), rel=1e-5)
        assert one.bits_per_byte == pytest.approx(nll / math.log(2) / part.bytes, rel=1e-5)
        assert (one.bytes, one.documents, one.seconds) == (part.bytes, part.documents, 0.0)
    assert found.tokens == sum(tokens)
    assert found.loss == pytest.approx(sum(sums) / sum(tokens), abs=1e-6)
    assert found.seconds > 0


@pytest.mark.parametrize("seq_len", [8, 64])
def test_sources_change_no_bit_of_the_loss_of_all(seq_len):
    model = module()
    alone = evaluate(run_of(heldout(), model, seq_len, 2))
    split = evaluate(run_of(heldout(*TWO), model, seq_len, 2))
    assert isinstance(alone, Evaluation)
    assert isinstance(split, Evaluation)
    assert split.loss == alone.loss
    assert (split.tokens, split.bits_per_byte) == (alone.tokens, alone.bits_per_byte)
    assert alone.sources == {}


def test_chat_has_no_bits_per_byte():
    model = module()
    mixed = evaluate(run_of(heldout(TWO[0], HeldOutPart("b", 2, 100, chat=True)), model, 8, 2))
    assert mixed is not None
    assert mixed.bits_per_byte is None
    assert mixed.sources["a"].bits_per_byte is not None
    assert mixed.sources["b"].bits_per_byte is None
    alone = evaluate(run_of(heldout(HeldOutPart("b", 5, 300, chat=True)), model, 8, 2))
    assert alone is not None
    assert (alone.bits_per_byte, alone.sources) == (None, {})


def test_a_source_without_a_scored_token_has_no_result():
    three = (*TWO, HeldOutPart("empty", 0, 0))
    found = evaluate(run_of(heldout(*three), module(), 8, 2))
    assert found is not None
    assert found.sources.keys() == {"a", "b"}


def test_a_token_of_one_source_that_is_not_finite_leaves_the_others_alone():
    each = torch.tensor([[1.5, torch.inf, 0.0]])
    targets = torch.tensor([[1, 2, NOT_TRAINED]])
    found = by_source(each, targets, torch.tensor([[0, 1, 1]]), 2)
    assert found.tolist() == [[math.inf, 2.0], [1.5, 1.0], [math.inf, 1.0]]


# Ranks that hold a part of the weights each wait for each other in every forward.
EOS = 0
LETTERS = 5


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


def sampling_run(model, ranks, what_is_due):
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
    (found,) = sample(sampling_run(model, ranks, due()))
    return found.text, len(contexts), ranks.heard


def sure(token):
    """Logits that leave no other choice."""
    return [100.0 if one == token else 0.0 for one in range(LETTERS)]


def test_rank_0_draws_for_all():
    text, forwards, said = written([sure(2), sure(3), sure(EOS)], None)
    assert (text, forwards) == ("cd", 3)
    other = written([sure(1), sure(EOS), [float("nan")] * LETTERS], said)
    assert other == (text, forwards, said)


def test_a_rank_that_could_go_on_ends_where_rank_0_diverged():
    text, forwards, said = written([sure(2), [float("inf")] * LETTERS], None)
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
    asked = sampling_run(
        lambda ids: torch.tensor([sure(2 if ids[0, -1] == 1 else end)]), Written(None), due()
    )
    asked.data.encoder.chat = SimpleNamespace(
        has_template=True,
        prompt_ids=lambda messages: [1],
        check=lambda: EndOfTurn("d", 3, "", "", {"e": 4}),
    )
    assert sample(asked)[0].text == "c"


def test_the_finished_model_is_sampled():
    assert len(sample(sampling_run(ends_at_once, Written(None), due(steps=3)))) == 1


def test_the_model_is_sampled_where_the_data_has_ended():
    ended = due()
    ended.data_ended = True
    assert len(sample(sampling_run(ends_at_once, Written(None), ended))) == 1


def test_who_asked_for_a_stop_waits_for_no_sample():
    stopped = due()
    stopped.ask(("signal",))
    assert sample(sampling_run(ends_at_once, Written(None), stopped)) == []


def test_drawing_leaves_the_random_state_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert len(written([sure(2), [0.0] * LETTERS], None)[0]) > 0
    assert torch.equal(torch.get_rng_state(), before)
