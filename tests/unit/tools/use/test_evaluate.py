"""`evaluate` on the held-out set of a run and on other documents, against plain loops."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import corpus, used
from helpers.config import SMALLEST
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from llmtrain import evaluate
from llmtrain.data import heldout
from llmtrain.errors import UserError
from llmtrain.rundir import contents
from llmtrain.tools.use import packed
from llmtrain.types import NOT_TRAINED


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = used.run(tmp_path_factory.mktemp("evaluate") / "run")
    used.checkpoint(run_dir, 4, used.model(seed=1), loss=2.0)
    used.checkpoint(run_dir, 8, used.model(seed=2), loss=3.0)
    return run_dir


def plainly(directory, run_dir, *, hidden=False):
    """Mean nll of the run's held-out blocks, one block at a time, with transformers' attention.

    hidden: each document of a block goes through the model alone.
    """
    made = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    held = heldout.load(run_dir / contents.HELDOUT)
    total = count = 0.0
    for g in range(held.num_blocks(used.SEQ_LEN)):
        ids, labels, starts = held.block(g, used.SEQ_LEN)
        borders = [*starts, used.SEQ_LEN] if hidden else [0, used.SEQ_LEN]
        for first, end in pairwise(borders):
            row = torch.from_numpy(ids[first:end].astype(np.int64))[None]
            targets = torch.from_numpy(labels[first:end])
            with torch.no_grad():
                logits = made(row).logits[0].double()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            count += int((targets != NOT_TRAINED).sum())
    return total / count, round(count)


def test_a_run_is_scored_with_its_best_checkpoint_on_its_own_held_out_set(run):
    best = run / "checkpoints" / "step-00000004"
    loss, tokens = plainly(best, run)
    found = evaluate(run)
    held = heldout.load(run / contents.HELDOUT)
    figures = found.figures
    assert (found.model, found.step, found.split) == (best, 4, "heldout")
    assert (figures.tokens, figures.bytes, figures.documents) == (tokens, held.bytes, 20)
    assert figures.loss == pytest.approx(loss, abs=1e-6)
    assert figures.bits_per_byte == pytest.approx(loss * tokens / math.log(2) / held.bytes)
    other = evaluate(run / "checkpoints" / "step-00000008")
    assert other.figures.loss == pytest.approx(
        plainly(run / "checkpoints" / "step-00000008", run)[0], abs=1e-6
    )
    shown = found.to_json()
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["kind"], shown["step"], shown["loss"]) == ("eval", 4, figures.loss)


def test_documents_are_hidden_from_each_other_where_the_run_hides_them(tmp_path):
    run = used.run(tmp_path / "run", packing="bestfit")
    made = used.checkpoint(run, 4, used.model(seed=1))
    loss, tokens = plainly(made, run, hidden=True)
    found = evaluate(run).figures
    assert found.tokens == tokens
    assert found.loss == pytest.approx(loss, abs=1e-6)
    assert abs(found.loss - plainly(made, run)[0]) > 1e-4


def test_the_order_of_sums_is_that_of_the_runs_processes(run):
    measured = packed.heldout_of(run, 4, "RUN")
    assert (measured.world_size, measured.micro_batch_size) == (2, 3)
    assert packed.heldout_of(run, None, "RUN").micro_batch_size == 3
    opened = packed_model(run)
    alone = packed.score(opened, measured, nothing).loss
    other = replace(measured, world_size=1, micro_batch_size=1)
    assert packed.score(opened, other, nothing).loss == pytest.approx(alone, abs=1e-6)


def packed_model(run):
    from llmtrain.tools.use.load import open_model
    from llmtrain.tools.use.target import find_target

    return open_model(find_target(str(run)), seq_len=used.SEQ_LEN)


def nothing(done, of):
    return None


def test_the_layout_is_that_of_the_start_that_made_the_evaluation(tmp_path):
    run = used.run(tmp_path / "run")
    lines = (run / contents.METRICS).read_text().splitlines()
    start = json.loads(lines[0]) | {"world_size": 4, "micro_batch_size": 5, "step": 4}
    lines.insert(2, json.dumps(start))
    (run / contents.METRICS).write_text("\n".join(lines) + "\n")
    found = [packed.heldout_of(run, step, "RUN") for step in (4, 8, 12)]
    assert [(one.world_size, one.micro_batch_size) for one in found] == [(2, 3), (4, 5), (4, 5)]


def test_another_model_is_scored_on_the_held_out_set_of_a_run(run, tmp_path):
    made = used.directory(tmp_path / "model", used.model(seed=3), run / contents.TOKENIZER)
    found = evaluate(made, run)
    assert found.step is None
    assert found.figures.loss == pytest.approx(plainly(made, run)[0], abs=1e-6)


def test_a_model_with_another_tokenizer_is_not_scored_on_it(run, tmp_path):
    other = corpus.write_tokenizer(tmp_path / "tokenizer", 280)
    made = used.directory(tmp_path / "model", used.model(seed=3), other)
    with pytest.raises(UserError, match="with the tokenizer of"):
        evaluate(made, run)


def test_adapters_are_scored_on_the_model_that_they_were_trained_on(tmp_path):
    run = used.run(tmp_path / "run")
    base = used.directory(tmp_path / "base", used.model(), run / contents.TOKENIZER)
    adapter = used.adapter(tmp_path / "adapter", base, run / contents.TOKENIZER)
    used.adapter_checkpoint(run, 4, adapter)
    found = evaluate(run).figures.loss
    assert abs(found - evaluate(base, run).figures.loss) > 1e-3


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_any_documents_are_scored_one_by_one(run, tmp_path, suffix):
    rows = [{"text": row["text"].replace("\n", " ")} for row in corpus.articles(9)]
    path = tmp_path / f"some.{suffix}"
    if suffix == "txt":
        path.write_text("".join(f"{row['text']}\n" for row in rows), encoding="utf-8")
    elif suffix == "jsonl":
        corpus.write_jsonl(path, rows)
    else:
        corpus.write_parquet(path, rows)
    found = evaluate(run, path, stride=16)
    assert found.split == str(path)
    assert found.figures.documents == 9
    assert found.figures.bytes == sum(len(row["text"].encode()) for row in rows)


def test_a_configs_held_out_documents_are_scored_one_by_one(run, tmp_path):
    articles = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(300), group=5)
    config = tmp_path / "my.yaml"
    config.write_text(SMALLEST.replace("path: sample}]", f"path: {articles}}}], heldout: 0.3"))
    config.write_text(config.read_text() + "evaluation: {max_documents: 7}\n")
    assert evaluate(run, config).figures.documents == 7
    lines = corpus.write_lines(tmp_path / "b.txt", [b"one", b"two"])
    config.write_text(config.read_text().replace("7}", f"7, sources: [{{path: {lines}}}]}}"))
    found = evaluate(run, config).figures
    assert (found.documents, found.bytes) == (2, 6)


@pytest.mark.parametrize(
    ("data", "options", "key"),
    [
        (None, {"stride": 8}, "--stride"),
        (None, {"chat": True}, r"--chat = True.*\n.*--tasks"),
        ("absent.txt", {}, "--data"),
        ("my.yaml", {}, "my.yaml"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, tmp_path, monkeypatch, data, options, key):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=key):
        evaluate(run, data, **options)


def test_a_model_without_a_run_needs_data(run, tmp_path):
    made = used.directory(tmp_path / "model", used.model(), run / contents.TOKENIZER)
    with pytest.raises(UserError, match="this model has no own data"):
        evaluate(made)


def test_a_run_that_held_nothing_out_needs_data(tmp_path):
    run = used.run(tmp_path / "run")
    used.checkpoint(run, 4, used.model())
    (run / contents.HELDOUT).unlink()
    with pytest.raises(UserError, match="--data FILE"):
        evaluate(run)
