"""`evaluate` on the held-out set of a run and on other documents, against plain loops."""

import importlib.util
import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import chats, corpus, used
from helpers.config import SMALLEST, written
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain import evaluate
from llmtrain.data import heldout
from llmtrain.errors import UserError
from llmtrain.rundir import contents
from llmtrain.tools.use import evaluate as module, packed
from llmtrain.tools.use.evaluate import documents_of, windows
from llmtrain.tools.use.load import LoadedModel
from llmtrain.tools.use.target import Target
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
    assert (measured.groups, measured.micro_batch_size) == (2, 3)
    assert packed.heldout_of(run, None, "RUN").micro_batch_size == 3
    opened = packed_model(run)
    alone = packed.score(opened, measured, nothing).loss
    other = replace(measured, groups=1, micro_batch_size=1)
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
    assert [(one.groups, one.micro_batch_size) for one in found] == [(2, 3), (4, 5), (4, 5)]


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


# The documents that `--data` names.


def test_conversations_are_refused_by_the_name_of_the_option(tmp_path):
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(20))
    config = written(tmp_path, SMALLEST.replace("path: sample", f"path: {path}"))
    for given in (path, config):
        with pytest.raises(UserError, match="documents of text, not conversations") as caught:
            documents_of(str(given))
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("--data", str(path))
        assert problem.remedy.startswith("--data RUN scores the held-out conversations of a run")


# Documents scored one by one, against a slow version with one forward a token.
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
    found = module.score_rolling(opened, TEXTS, stride, lambda done, of: None)
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
    expected = module.score_rolling(opened, TEXTS, None, lambda done, of: None)
    monkeypatch.setattr(module, "_LOGITS_BYTES", 0)  # a window at a time
    alone = module.score_rolling(opened, TEXTS, None, lambda done, of: None)
    assert alone.loss == pytest.approx(expected.loss, abs=1e-6)


def test_a_stride_beyond_the_positions_and_no_text_at_all_are_refused(opened):
    for texts, stride in ((TEXTS, 25), (TEXTS, 0), ([], None), ([""], None)):
        with pytest.raises(UserError, match=r"--stride|--data"):
            module.score_rolling(opened, texts, stride, lambda done, of: None)


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
    found = module.score_rolling(opened, texts, None, lambda done, of: None)
    assert found.loss == pytest.approx(nll / sum(map(len, lines)), abs=1e-5)


# Task files of lm-eval, looked at before a model is loaded.
TASK = """\
task: mine
dataset_path: text
dataset_kwargs: {data_files: DATA}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: !function code.target
"""


@pytest.fixture
def installed(monkeypatch):
    """Whether lm-eval is here or not, nothing is imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def task_file(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(TASK.replace("DATA", data))
    return str(path)


def test_data_files_without_a_split_are_refused_with_the_remedy(tmp_path, installed):
    for data in ("my.txt", "[a.txt, b.txt]", "{train: my.txt}"):
        with pytest.raises(UserError, match=r"data_files: \{test: FILE\}"):
            module.check_tasks([task_file(tmp_path, data)])
    module.check_tasks([task_file(tmp_path, "{test: my.txt}")])


def test_names_of_tasks_are_left_to_lm_eval(installed):
    module.check_tasks(["hellaswag", "arc_easy"])
    module.check_tasks([])


@pytest.mark.parametrize("body", ["a: [", "- list", "dataset_path: text"])
def test_a_file_without_a_task_is_refused(tmp_path, installed, body):
    path = tmp_path / "wrong.yaml"
    path.write_text(body)
    with pytest.raises(UserError, match="--tasks"):
        module.check_tasks([str(path)])
    with pytest.raises(UserError, match="--tasks"):
        module.check_tasks([str(tmp_path / "absent.yaml")])


def test_tasks_of_a_model_without_a_template_are_not_given_as_a_chat():
    """Before lm-eval is imported."""
    tokenizer = SimpleNamespace(chat_template=None)
    opened = SimpleNamespace(target=SimpleNamespace(given="runs/a"), tokenizer=tokenizer)
    with pytest.raises(UserError, match="whose tokenizer has a chat template") as caught:
        module.run_tasks(opened, ["mine"], chat=True)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("--chat", "runs/a")


def test_without_the_extra_the_message_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'llmtrain\[eval\]'"):
        module.check_tasks(["hellaswag"])
