"""`evaluate` on pairs of answers, against a loop over sequences with plain transformers."""

import math

import pytest
import torch
from helpers import corpus, preferred, used
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain import evaluate
from llmtrain.cli.use import evaluation
from llmtrain.errors import UserError

ROWS = preferred.strings(9)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with the same tokenizer, which has a chat template."""
    root = tmp_path_factory.mktemp("answers")
    for seed, name in enumerate(("one", "two")):
        used.tokenizer(root / name, chat=True)
        used.model(seed=seed, max_position_embeddings=200).save_pretrained(root / name)
    return root


def plainly(directory, rows, end=(0,)):
    """Σ log p of both answers of each pair, one at a time in fp64. end: ids behind an answer"""
    made = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sums = []
    for row in rows:
        for name in ("chosen", "rejected"):
            prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
            ids = tokenizer(row["prompt"] + row[name], add_special_tokens=False).input_ids
            ids += end
            with torch.no_grad():
                log_probs = made(torch.tensor([ids])).logits[0].log_softmax(-1)
            own = range(len(prompt), len(ids))
            sums.append(sum(float(log_probs[at - 1, ids[at]]) for at in own))
    return torch.tensor(sums).view(-1, 2)


def written(folder, rows=ROWS):
    return corpus.write_jsonl(folder / "pairs.jsonl", rows)


def test_pairs_are_scored_by_a_model_and_its_reference_one_sequence_at_a_time(models, tmp_path):
    found = evaluate(models / "one", written(tmp_path), reference=models / "two")
    gained = plainly(models / "one", ROWS) - plainly(models / "two", ROWS)
    rewards = 0.1 * gained
    margins = rewards[:, 0] - rewards[:, 1]
    figures = found.figures.pairs
    assert found.figures.loss == pytest.approx(
        float(-torch.nn.functional.logsigmoid(margins).mean()), abs=1e-5
    )
    assert figures["pairs"] == 9
    assert figures["accuracy"] == float((margins > 0).double().mean())
    assert figures["margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert figures["chosen_reward"] == pytest.approx(float(rewards[:, 0].mean()), abs=1e-5)
    logps = plainly(models / "one", ROWS).mean(0)
    assert figures["chosen_logp"] == pytest.approx(float(logps[0]), abs=1e-4)
    assert figures["rejected_logp"] == pytest.approx(float(logps[1]), abs=1e-4)
    shown = found.to_json()
    assert (shown["preference"], shown["beta"], shown["perplexity"]) == ("dpo", 0.1, None)
    assert shown["margin"] == figures["margin"]
    assert f"reference  {models / 'two'}" in list(evaluation(found))


def test_a_model_is_its_own_reference_with_a_margin_of_zero(models, tmp_path):
    found = evaluate(models / "one", written(tmp_path), reference=models / "one").figures
    assert found.pairs["margin"] == 0.0
    assert found.pairs["accuracy"] == 0.5
    assert found.loss == pytest.approx(math.log(2), abs=1e-12)


def test_without_a_reference_log_probabilities_are_compared_and_it_is_said(models, tmp_path):
    found = evaluate(models / "one", written(tmp_path))
    sums = plainly(models / "one", ROWS)
    margins = 0.1 * (sums[:, 0] - sums[:, 1])
    assert found.figures.pairs["margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    said = "\n".join(evaluation(found))
    assert "(cpo, beta 0.1)" in said
    assert "reference  none: accuracy and margin compare log p alone; --reference MODEL" in said


def test_conversations_go_through_the_template_of_the_model(models, tmp_path):
    rows = preferred.pairs(5)
    found = evaluate(models / "one", written(tmp_path, rows)).figures
    as_strings = [
        {
            "prompt": f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n"
            "<|im_start|>assistant\n",
            **{name: f"{row[name][0]['content']}<|im_end|>" for name in ("chosen", "rejected")},
        }
        for row in rows
    ]
    sums = plainly(models / "one", as_strings, end=[])  # an answer ends with the end of a turn
    assert found.pairs["chosen_logp"] == pytest.approx(float(sums[:, 0].mean()), abs=1e-4)
    assert found.pairs["rejected_logp"] == pytest.approx(float(sums[:, 1].mean()), abs=1e-4)


def test_pairs_that_are_too_long_for_the_model_are_left_out_and_counted(models, tmp_path):
    long = {"prompt": "Why?", "chosen": "word " * 400, "rejected": "No."}
    found = evaluate(models / "one", written(tmp_path, [*ROWS, long]))
    assert found.to_json()["left_out"] == 1
    assert found.figures.pairs["pairs"] == 9
    assert "left out   1 pairs, too long for the model" in list(evaluation(found))
    with pytest.raises(UserError, match="at least one pair of answers that fits"):
        evaluate(models / "one", written(tmp_path, [long]))


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ({"stride": 4, "reference": None}, "--stride", "left out with pairs of answers"),
        ({"data": "config.yaml"}, "--reference", "it is for pairs of answers"),
        ({"as_run": "runs/a", "data": None}, "--reference", "scores the held-out set of that run"),
    ],
)
def test_options_that_do_not_go_with_pairs_are_refused(models, tmp_path, options, key, expected):
    asked = {"data": written(tmp_path), "reference": models / "two"} | options
    with pytest.raises(UserError, match=expected) as caught:
        evaluate(models / "one", asked.pop("data"), **asked)
    assert [one.key for one in caught.value.problems] == [key]


def test_a_reference_with_another_tokenizer_is_refused(models, tmp_path):
    corpus.write_tokenizer(tmp_path / "other", 400)
    used.model(rows=512).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="a model with the tokenizer of"):
        evaluate(models / "one", written(tmp_path), reference=tmp_path / "other")


def test_rows_that_are_no_pairs_are_refused_by_file_and_line(models, tmp_path):
    equal = {"prompt": "Why?", "chosen": "So.", "rejected": "So."}
    with pytest.raises(UserError, match="chosen and rejected are equal") as caught:
        evaluate(models / "one", written(tmp_path, [*ROWS, equal]), reference=models / "two")
    assert caught.value.problems[0].key.endswith("pairs.jsonl, line 10")
    texts = corpus.write_jsonl(tmp_path / "texts.jsonl", [{"text": "A text."}])
    with pytest.raises(UserError, match="these are documents of text"):
        evaluate(models / "one", texts, reference=models / "two")


def test_a_model_without_a_template_cannot_be_asked_about_conversations(models, tmp_path):
    used.tokenizer(tmp_path / "plain")
    used.model().save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="--as RUN"):
        evaluate(tmp_path / "plain", written(tmp_path, preferred.pairs(2)))
