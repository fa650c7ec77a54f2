import json
from pathlib import Path

import pytest
from helpers.config import loaded
from hypothesis import given, settings, strategies as st

from llmtrain.config.binding import (
    bind,
    changes,
    data_settings,
    dump,
    is_accepted,
    refusals,
)
from llmtrain.config.keys import ITEM, all_keys
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config


def differences(old, new):
    return changes(bind(old).binding, bind(new).binding)


def test_every_key_has_its_value(tmp_path):
    values = bind(loaded(tmp_path, "evaluation.sources=[{path: sample}]")).values
    listed = {"data.sources", "evaluation.sources", "model.config"}
    names = {key.name.replace(ITEM, "0") for key in all_keys()} - listed
    assert {name for name in names if not name.startswith("optimizer.groups.")} <= values.keys()
    assert json.loads(json.dumps(values)) == values
    assert values["model.config.hidden_size"] == 8
    assert values["optimizer.betas"] == [0.9, 0.95]
    assert values["optimizer.groups"] == []


def test_equal_configs_have_one_digest(tmp_path):
    config = loaded(tmp_path)
    assert bind(config).digest == bind(loaded(tmp_path)).digest
    assert bind(config).digest != bind(loaded(tmp_path, "logging.every_steps=7")).digest


@pytest.mark.parametrize(
    "override",
    [
        "model.config.hidden_size=16",
        "model.config.new=1",
        "model.pad_vocab_to=64",
        "model.tokenizer={train: 300}",
        "data.sources.0.name=other",
        "data.sources=[{path: sample}, {path: other}]",
        "data.seq_len=8",
        "data.lanes=3",
        "data.heldout=0.1",
        "run.seed=1",
        "training.global_batch_size=8",
        "training.precision=fp32",
        "training.max_grad_norm=null",
        "optimizer.learning_rate=1e-3",
        "optimizer.schedule=wsd",
        "optimizer.name=muon",
        "optimizer.groups=[{match: a}]",
        "evaluation.max_documents=3",
        "evaluation.sources=[{path: other}]",
        "data.packing=bestfit",
        "data.document_mask=true",
        "data.sources.0.max_epochs=1",
        "preference.loss=orpo",
        "training.z_loss=0.1",
    ],
)
def test_what_changes_a_run_is_a_difference(tmp_path, override):
    changed = differences(loaded(tmp_path), loaded(tmp_path, override))
    assert changed
    assert all(key.startswith(override.partition("=")[0]) for key, _, _ in changed)


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere",
        "data.workers=2",
        "data.sources.0.weight=0.5",
        "data.sources.0.path=elsewhere",
        "training.steps=20",
        "training.micro_batch_size=2",
        "training.on_nonfinite=stop",
        "training.max_skipped_in_a_row=9",
        "distributed.timeout_minutes=1",
        "distributed.strategy=ddp",
        "checkpoint.every_steps=7",
        "checkpoint.shard_gb=1",
        "evaluation.every_steps=7",
        "evaluation.prompts=[a]",
        "evaluation.patience=3",
        "logging.trackers=[tensorboard]",
    ],
)
def test_what_leaves_finished_steps_as_they_are_is_none(tmp_path, override):
    assert differences(loaded(tmp_path), loaded(tmp_path, override)) == []


def test_a_key_that_older_runs_lack_is_no_difference_at_its_default(tmp_path):
    bound = bind(loaded(tmp_path))
    assert "model.pad_vocab_to" in bound.values
    assert "model.pad_vocab_to" not in bound.binding
    changed = bind(loaded(tmp_path, "model.pad_vocab_to=64")).binding
    assert changes(bound.binding, changed) == [("model.pad_vocab_to", None, 64)]


def test_blocks_are_decided_by_the_data_the_seed_and_the_form_of_conversations(tmp_path):
    values = data_settings(loaded(tmp_path, "chat.template=chatml", "training.z_loss=0.1")).values
    assert values["chat.template"] == "chatml"
    assert {"data.seq_len", "run.seed"} <= values.keys()
    assert not [key for key in values if key.startswith(("training.", "optimizer."))]


def test_a_difference_names_both_values(tmp_path):
    old, new = loaded(tmp_path), loaded(tmp_path, "data.seq_len=8")
    assert differences(old, new) == [("data.seq_len", 1024, 8)]
    removed = loaded(tmp_path, "model.config={model_type: llama, num_attention_heads: 2}")
    assert differences(old, removed) == [("model.config.hidden_size", 8, None)]


names = st.text(min_size=1, max_size=60).filter(lambda text: text.strip() and text != "auto")


@settings(deadline=None)
@given(directory=names, revision=names, prompts=st.lists(names), rate=st.floats(1e-9, 1e3))
def test_a_written_config_is_the_same_config(tmp_path_factory, directory, revision, prompts, rate):
    config = Config.model_validate(
        {
            "run": {"dir": directory},
            "model": {"config": {"model_type": "llama", "note": prompts}, "tokenizer": revision},
            "data": {"sources": [{"path": directory, "revision": revision}]},
            "training": {"steps": 3},
            "optimizer": {"learning_rate": rate},
            "evaluation": {"prompts": prompts},
        }
    )
    again = tmp_path_factory.getbasetemp() / "config.yaml"
    again.write_text(dump(config), encoding="utf-8", newline="")
    assert load_config(again) == config


@pytest.mark.parametrize(("given", "kept"), [({}, False), ({"text_column": "text"}, True)])
def test_only_a_text_column_that_was_set_is_written(tmp_path, given, kept):
    """Set, it makes a source of conversations a text."""
    source = {"path": "chat.jsonl", **given}
    config = Config.model_validate({
        "run": {"dir": str(tmp_path / "run")},
        "model": {"config": {"model_type": "llama"}, "tokenizer": "sample"},
        "data": {"sources": [source, {"path": "a.jsonl", "columns": {"prompt": "question"}}]},
        "chat": {"template": "chatml"},
        "training": {"epochs": 2},
        "evaluation": {"sources": [source]},
    })  # fmt: skip
    again = tmp_path / "config.yaml"
    again.write_text(dump(config), encoding="utf-8")
    found = load_config(again)
    assert found == config
    assert (found.chat.template, found.training.epochs) == ("chatml", 2)
    for one in (*found.data.sources[:1], *found.evaluation.sources):
        assert ("text_column" in one.model_fields_set) == kept
        assert one.text_column == "text"
    assert "text_column" not in found.data.sources[1].model_fields_set


def test_a_config_without_an_evaluation_can_be_written_and_read_again(tmp_path):
    config = Config.model_validate(
        {
            "model": {"config": {"model_type": "llama"}, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}], "heldout": 0.0},
            "training": {"steps": 3},
        }
    )
    again = tmp_path / "config.yaml"
    again.write_text(dump(config), encoding="utf-8")
    assert load_config(again).checkpoint.keep_best == 0


@pytest.mark.parametrize("revision", ["12345e6", "on", "12:30", "null", "0o17", "1e5"])
def test_texts_that_look_like_numbers_stay_texts(tmp_path, revision):
    config = loaded(tmp_path, f"data.sources.0.revision='{revision}'")
    again = Path(tmp_path) / "config.yaml"
    again.write_text(dump(config), encoding="utf-8")
    assert load_config(again).data.sources[0].revision == revision


def test_what_accept_changes_names_is_not_refused(tmp_path):
    accept = "checkpoint.accept_changes=[data.seq_len, model.config]"
    overrides = ["data.seq_len=8", "model.config.hidden_size=16", "run.seed=1"]
    old, new = loaded(tmp_path), loaded(tmp_path, accept, *overrides)
    found = differences(old, new)
    assert {change.key for change in found} == {
        "data.seq_len",
        "model.config.hidden_size",
        "run.seed",
    }
    (problem,) = refusals(found, new.checkpoint.accept_changes, "as before")
    assert problem.key == "run.seed"
    assert "accept_changes=[run.seed]" in str(problem)


def test_a_key_that_only_begins_alike_is_not_accepted(tmp_path):
    config = loaded(tmp_path, "checkpoint.accept_changes=[data.sources.1]")
    assert is_accepted("data.sources.1.text_column", config.checkpoint.accept_changes)
    assert not is_accepted("data.sources.10.text_column", config.checkpoint.accept_changes)
    assert not is_accepted("data.sources", config.checkpoint.accept_changes)


def test_keys_that_earlier_versions_did_not_have_bind_from_their_second_value_on(tmp_path):
    old = loaded(tmp_path)
    newer = {
        f"training.{name}" for name in ("compile", "deterministic", "same_bits", "loss_kernel")
    }
    newer |= {"optimizer.name", "optimizer.groups", "training.z_loss", "model.attention_backend"}
    assert not newer & bind(old).binding.keys()
    new = loaded(tmp_path, "optimizer.name=muon", "optimizer.groups=[{match: '*.bias'}]")
    group = {"match": "*.bias", "learning_rate": None, "weight_decay": None}
    assert differences(old, new) == [
        ("optimizer.name", "adamw", "muon"),
        ("optimizer.groups", [], [group]),
    ]
    assert differences(new, old) == [
        ("optimizer.name", "muon", "adamw"),
        ("optimizer.groups", [group], []),
    ]
    refused = refusals(differences(old, new), ["optimizer.groups"], "as it began")
    assert [(problem.key, problem.expected) for problem in refused] == [
        ("optimizer.name", "adamw, as it began")
    ]


def test_adapters_bind_a_run_and_without_any_it_is_bound_as_before_there_were_any(tmp_path):
    plain = loaded(tmp_path)
    assert "adapter.kind" in bind(plain).values
    assert not [key for key in bind(plain).binding if key.startswith("adapter.")]
    assert differences(plain, loaded(tmp_path, "adapter.r=3")) == []
    asked = ("model={from: gpt2}", "adapter.kind=lora")
    lora = loaded(tmp_path, *asked)
    assert ("adapter.r", 16, 3) in differences(lora, loaded(tmp_path, *asked, "adapter.r=3"))
    changed = {key for key, _, _ in differences(loaded(tmp_path, asked[0]), lora)}
    assert "adapter.kind" in changed


def test_micro_batch_and_threads_are_frozen_where_they_decide_the_bits(tmp_path):
    exact = ("training.same_bits=true", "training.precision=fp32", "training.micro_batch_size=2")
    old, other = loaded(tmp_path, *exact), loaded(tmp_path, *exact, "training.micro_batch_size=1")
    assert [tuple(one) for one in differences(old, other)] == [("training.micro_batch_size", 2, 1)]
    threads = loaded(tmp_path, *exact, "training.threads=2")
    assert [tuple(one) for one in differences(old, threads)] == [("training.threads", "auto", 2)]
    without = loaded(tmp_path, *exact, "training.same_bits=false")
    assert [tuple(one) for one in differences(old, without)] == [
        ("training.same_bits", True, False)
    ]
    assert [tuple(one) for one in differences(without, old)] == [
        ("training.same_bits", False, True)
    ]
    smaller = loaded(tmp_path, *exact[1:], "training.micro_batch_size=1")
    assert not differences(without, smaller)
