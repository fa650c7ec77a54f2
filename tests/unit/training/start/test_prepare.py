import json
import logging
from collections import Counter

import pytest
from helpers import chats, corpus

from llmtrain import system
from llmtrain.config.schema import Config
from llmtrain.data.chat.template import named_template
from llmtrain.data.state import DataState
from llmtrain.errors import UserError
from llmtrain.rundir.contents import HELDOUT, MANIFEST, TOKENIZER
from llmtrain.training.start.prepare import load_manifest, prepare


@pytest.fixture
def config(tmp_path):
    corpus.write_parquet(tmp_path / "data" / "0.parquet", corpus.articles(60))
    found = corpus.config(tmp_path / "data").model_dump(by_alias=True, exclude_unset=True)
    return Config.model_validate(found | {"model": {"tokenizer": "sample"}})


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_first_start_decides_the_back_end_and_says_so(config, run_dir, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tiktoken"
    assert "equal those of tokenizers on 60 documents" in caplog.text


def test_a_later_start_decides_nothing(config, run_dir, monkeypatch, caplog):
    prepare(config, run_dir, 1, None)
    stored = json.loads((run_dir / MANIFEST).read_text())
    stored["tokenizer"]["backend"] = "tokenizers"
    (run_dir / MANIFEST).write_text(json.dumps(stored))
    monkeypatch.setattr("llmtrain.training.start.prepare.choose_tokenizer", None)
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tokenizers"
    assert (run_dir / TOKENIZER / "tokenizer.json").is_file()


def changed(config, accept, **data):
    """The config with other values of `data`, accepted."""
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    tree["data"] |= data
    tree["checkpoint"] = {"accept_changes": accept}
    return Config.model_validate(tree)


def files(run_dir):
    return {path.name: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_what_is_made_anew_takes_the_place_of_the_old_as_a_whole(config, run_dir):
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    (run_dir / HELDOUT).touch()
    other = changed(config, ["data.seq_len"], seq_len=32)
    prepare(other, run_dir, 1, None, saved)
    assert load_manifest(other, run_dir).seq_len == 32
    assert load_manifest(other, run_dir).lanes == saved.lanes
    assert {path.name for path in run_dir.iterdir()} == {MANIFEST, TOKENIZER}


@pytest.mark.parametrize(
    ("accept", "data"),
    [
        (["model.tokenizer"], {}),  # it is gone
        (["data.seq_len"], {"seq_len": 32, "packing": "bestfit"}),  # one is not accepted
    ],
)
def test_a_refused_change_leaves_everything_as_it_was(config, run_dir, tmp_path, accept, data):
    prepare(config, run_dir, 1, None)
    before = files(run_dir)
    saved = DataState.fresh(load_manifest(config, run_dir))
    other = changed(config, accept, **data)
    if not data:
        (tmp_path / "empty").mkdir()
        model = other.model.model_copy(update={"tokenizer": str(tmp_path / "empty")})
        other = other.model_copy(update={"model": model})
        with pytest.raises(UserError):
            prepare(other, run_dir, 1, None, saved)
    else:
        prepare(other, run_dir, 1, None, saved)  # what follows refuses it
    assert {name: body for name, body in files(run_dir).items() if name in before} == before
    prepare(config, run_dir, 1, None, saved)
    assert load_manifest(config, run_dir).fingerprint == saved.fingerprint


def test_another_set_of_sources_is_one_change(config, run_dir, tmp_path):
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    tree["data"]["heldout"] = 0.1
    config = Config.model_validate(tree)
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    corpus.write_parquet(tmp_path / "more" / "0.parquet", corpus.articles(40))
    sources = [*tree["data"]["sources"], {"path": str(tmp_path / "more")}]
    other = changed(config, ["data.sources"], sources=sources)
    prepare(other, run_dir, 1, None, saved)
    assert len(load_manifest(other, run_dir).sources) == 2


def test_a_kill_between_old_and_new_is_finished_by_the_next_start(config, run_dir):
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    other = changed(config, ["data.seq_len"], seq_len=32)
    prepare(other, run_dir, 1, None, saved)
    whole = files(run_dir)
    # As a kill leaves it: the tokenizer has been moved, the manifest has not.
    (run_dir / "staged").mkdir()
    (run_dir / MANIFEST).rename(run_dir / "staged" / MANIFEST)
    (run_dir / MANIFEST).write_text("{}")
    prepare(other, run_dir, 1, None, saved)
    assert files(run_dir) == whole


def test_the_watchdog_sees_every_file_unit_and_text_that_is_looked_at(
    config, run_dir, tmp_path, monkeypatch
):
    phases = Counter()
    monkeypatch.setattr(system, "beat", lambda phase, *_: phases.update([phase]))
    for number in (1, 2):
        corpus.write_parquet(tmp_path / "data" / f"{number}.parquet", corpus.articles(60))
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    prepare(
        Config.model_validate(tree | {"model": {"tokenizer": {"train": 300}}}), run_dir, 1, None
    )
    assert phases["looking into the files of the data"] == 3
    assert phases["reading a unit of the data"] >= 3
    assert 120 < phases["training a tokenizer"] <= 180  # a text each, but for those held out


def talks(tmp_path, **chat):
    """A config whose source has conversations."""
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(20))
    tree = {
        "model": {"tokenizer": "sample", "config": {"model_type": "llama", "hidden_size": 64}},
        "data": {"sources": [{"path": str(path)}], "seq_len": 512},
        "chat": chat,
        "training": {"steps": 10},
    }
    return Config.model_validate(tree)


def test_conversations_without_a_template_are_refused(tmp_path, run_dir):
    with pytest.raises(UserError, match="a chat template: the tokenizer has none"):
        prepare(talks(tmp_path), run_dir, 1, None)
    assert not (run_dir / MANIFEST).exists()


def test_an_accepted_template_is_in_the_tokenizer_that_is_made_again(tmp_path, run_dir):
    first = talks(tmp_path, template="chatml")
    prepare(first, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(first, run_dir))
    date = load_manifest(first, run_dir).chat.settings["date"]
    tree = first.model_dump(by_alias=True, exclude_unset=True) | {"chat": {"template": "gemma"}}

    def with_accepted(*keys):
        return Config.model_validate(tree | {"checkpoint": {"accept_changes": keys}})

    prepare(with_accepted(), run_dir, 1, None, saved)  # what follows refuses it
    with pytest.raises(UserError, match=r"accept_changes=\[model\.tokenizer\]"):  # new tokens
        prepare(with_accepted("chat.template"), run_dir, 1, None, saved)
    assert (run_dir / TOKENIZER / "chat_template.jinja").read_text() == named_template("chatml")
    other = with_accepted("chat.template", "model.tokenizer")
    prepare(other, run_dir, 1, None, saved)
    assert (run_dir / TOKENIZER / "chat_template.jinja").read_text() == named_template("gemma")
    tokenizer = chats.plain(run_dir / TOKENIZER)
    assert tokenizer.token_to_id("<end_of_turn>") is not None
    assert tokenizer.token_to_id("<|im_end|>") is None
    chat = load_manifest(other, run_dir).chat
    assert chat.end_of_turn["text"] == "<end_of_turn>"
    assert chat.settings["date"] == date


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("<|endoftext|>\n", r"'<|endoftext|>\n' before an answer: it ends every prompt"),
        (" ", "' ' before an answer: it is trained like the answer"),
        ("", None),
    ],
)
def test_what_a_template_puts_before_an_answer_is_logged(tmp_path, run_dir, caplog, before, said):
    caplog.set_level(logging.INFO, "llmtrain")
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{{ BEFORE if m.role == 'assistant' else '' }}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    prepare(talks(tmp_path, template=template.replace("BEFORE", repr(before))), run_dir, 1, None)
    assert (said is None) == ("before an answer" not in caplog.text)
    assert (said or "") in caplog.text
