"""Documents scored one by one, against a slow version with one forward a token."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import used
from transformers import AutoTokenizer

from llmtrain.errors import UserError
from llmtrain.tools.use import evaluate
from llmtrain.tools.use.evaluate import windows
from llmtrain.tools.use.load import LoadedModel
from llmtrain.tools.use.target import Target

TEXTS = ["Article 3\nriver flows past", "", "moss and rain " * 12, "hills"]


@pytest.fixture(scope="module", params=[False, True], ids=["no begin token", "begin token"])
def opened(request, tmp_path_factory):
    folder = used.tokenizer(tmp_path_factory.mktemp("rolling") / "tokenizer", bos=request.param)
    made = used.model(max_position_embeddings=24)
    loaded = AutoTokenizer.from_pretrained(folder)
    return LoadedModel(Target("x", folder), made, loaded, torch.device("cpu"))


def slowly(opened, text, context):
    """Σ nll of a text: token i sees the ids that `context(i)` of them precede it."""
    ids = opened.tokenizer.encode(text, add_special_tokens=False)
    line = [opened.begin, *ids]
    total = 0.0
    for i, wanted in enumerate(ids):
        with torch.no_grad():
            row = torch.tensor([line[i + 1 - context(i) : i + 1]])
            total -= float(opened.model(row).logits[0, -1].double().log_softmax(0)[wanted])
    return total


@pytest.mark.parametrize("stride", [None, 24, 8, 1])
def test_every_token_is_scored_once_with_the_context_of_its_window(opened, stride):
    size, step = 24, stride or 24

    def context(i):
        if i < size:
            return i + 1
        end = size + -(-(i + 1 - size) // step) * step  # tokens scored after this window
        return i + 1 - max(0, min(end, count) - size)

    nll, tokens = 0.0, 0
    for text in TEXTS:
        count = len(opened.tokenizer.encode(text, add_special_tokens=False))
        nll += slowly(opened, text, context)
        tokens += count
    found = evaluate.score_rolling(opened, TEXTS, stride, lambda done, of: None)
    size_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (found.tokens, found.bytes, found.documents) == (tokens, size_bytes, len(TEXTS))
    assert found.loss == pytest.approx(nll / tokens, abs=1e-5)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / size_bytes, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-5)


def test_windows_overlap_by_what_the_stride_leaves():
    ids = list(range(1, 11))
    assert list(windows(ids, 0, 4, 4)) == [
        ([0, 1, 2, 3, 4], 4),
        ([4, 5, 6, 7, 8], 4),
        ([6, 7, 8, 9, 10], 2),
    ]
    assert list(windows(ids[:6], 0, 4, 2)) == [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2)]
    assert list(windows([], 0, 4, 2)) == []


def test_batches_do_not_change_the_sum(opened, monkeypatch):
    expected = evaluate.score_rolling(opened, TEXTS, None, lambda done, of: None)
    monkeypatch.setattr(evaluate, "_LOGITS_BYTES", 0)  # a window at a time
    alone = evaluate.score_rolling(opened, TEXTS, None, lambda done, of: None)
    assert alone.loss == pytest.approx(expected.loss, abs=1e-6)


def test_a_stride_beyond_the_positions_and_no_text_at_all_are_refused(opened):
    for texts, stride in ((TEXTS, 25), (TEXTS, 0), ([], None), ([""], None)):
        with pytest.raises(UserError, match=r"--stride|--data"):
            evaluate.score_rolling(opened, texts, stride, lambda done, of: None)


def test_windows_of_a_batch_have_the_rope_that_each_has_alone(opened):
    """LongRoPE chooses its factors by length, for all rows of a batch if nobody hinders it."""
    width = opened.model.config.hidden_size // opened.model.config.num_attention_heads // 2
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 17,
        "short_factor": [1.0] * width,
        "long_factor": [40.0] * width,
    }
    made = used.model(max_position_embeddings=24, rope_parameters=longrope)
    opened = replace(opened, model=made)
    texts = ["Article 3\nriver flows past", "moss and rain " * 12, "hills of moss and rain"]
    lines = [opened.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [len(line) <= 17 for line in lines] == [True, False, True]
    nll = 0.0
    for ids in lines:
        for inputs, count in windows(ids, opened.begin, 24, 24):
            with torch.no_grad():
                scores = made(torch.tensor([inputs[:-1]])).logits[0].double().log_softmax(-1)
            picked = scores.gather(1, torch.tensor(inputs[1:])[:, None])
            nll -= float(picked[-count:].sum())
    found = evaluate.score_rolling(opened, texts, None, lambda done, of: None)
    assert found.loss == pytest.approx(nll / sum(map(len, lines)), abs=1e-5)
