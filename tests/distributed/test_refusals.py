"""Bad input, through the command: exit code 2, one message, no traceback, nothing lost."""

import copy
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.chats import rows_of
from helpers.corpus import write_jsonl
from helpers.rings import needs
from helpers.tiny import lines, status, tiny_config, weights, write_config
from safetensors.torch import save_file

from llmtrain.report import verdict
from llmtrain.report.collect import collect
from llmtrain.report.run import open_run
from llmtrain.tools.watch import Watcher


def refused(server, folder, config, *more, world_size=1):
    """Run it; it must end with 2 on every rank. Returns what it said."""
    path = write_config(folder, config)
    (folder / "output.txt").unlink(missing_ok=True)
    codes = server.run(["train", str(path), *more], world_size, folder)
    said = (folder / "output.txt").read_text()
    assert codes == [2] * world_size, said
    assert "Traceback" not in said
    assert said.count("error: ") == 1
    assert "expected: " in said or "unknown key" in said
    return said


def source(path):
    def change(config, folder):
        config["data"]["sources"] = [{"path": str(folder / path)}]

    return change


def with_file(name, make):
    def change(config, folder):
        make(folder / name)
        source(name)(config, folder)

    return change


def put(section, key, value):
    def change(config, folder):
        config[section][key] = value

    return change


def parquet(columns):
    return lambda path: pq.write_table(pa.table(columns), path)


def truncated(path):
    parquet({"text": ["a word"] * 1000})(path)
    path.write_bytes(path.read_bytes()[:-20])


def begins_with(**files):
    """A directory with these JSON files and one of weights, as the model to begin with."""

    def change(config, folder):
        (folder / "weights").mkdir()
        save_file({"a": torch.zeros(2)}, folder / "weights" / "model.safetensors")
        for name, fields in files.items():
            (folder / "weights" / f"{name}.json").write_text(json.dumps(fields))
        config["model"] = {"from": str(folder / "weights"), "tokenizer": "sample"}

    return change


def model(**fields):
    return lambda config, folder: config["model"]["config"].update(fields)


def both(first, then):
    def change(config, folder):
        first(config, folder)
        then(config, folder)

    return change


def lines_of(rows):
    return lambda path: write_jsonl(path, rows)


def bad_rows():
    """Conversations of which three cannot be trained on, each for another reason."""
    rows = rows_of(20)
    rows[2]["messages"][0]["role"] = "bot"
    rows[4]["messages"][-1]["content"] = " "
    rows[6]["messages"][-1]["content"] = "moss " * 300
    return rows


def chat_lora(rows, section="", **keys):
    """An adapter on a base that lacks every weight, these rows, and other keys of a section."""

    def change(config, folder):
        fields = {**config["model"]["config"], "vocab_size": 2050}
        begins_with(config=fields)(config, folder)
        with_file("chat.jsonl", lines_of(rows))(config, folder)
        config["data"] |= {"seq_len": 256, "heldout": 0.0}
        config |= {"chat": {"template": "chatml"}, "adapter": {"kind": "lora"}}
        if section:
            config[section] |= keys

    return change


CASES = {
    "unknown key": (put("training", "lerning_rate", 1), ["training.lerning_rate", "did you mean"]),
    "missing file": (source("gone.parquet"), ["data.sources", "gone.parquet"]),
    "no text column": (
        with_file("columns.parquet", parquet({"body": ["x"], "id": ["1"]})),
        ["columns.parquet", "text", "body"],
    ),
    "truncated parquet": (with_file("short.parquet", truncated), ["short.parquet"]),
    "one document": (
        with_file("one.parquet", parquet({"text": ["only one"], "id": ["1"]})),
        ["held"],
    ),
    "vocabulary too small": (model(vocab_size=100), ["model.config.vocab_size = 100"]),
    "sequence too long": (model(max_position_embeddings=16), ["data.seq_len", "16"]),
    "unknown architecture": (model(model_type="lama"), ["model.config.model_type", "llama"]),
    "an adapter as the model": (
        begins_with(config={}, adapter_config={"base_model_name_or_path": "someone/base"}),
        ["model.from", "an adapter of someone/base", "--merge-adapters"],
    ),
    "conversations without a template": (
        with_file("chat.jsonl", lines_of(rows_of(20))),
        ["chat.template", "the tokenizer has none", "chatml, llama3, gemma"],
    ),
    "conversations that cannot be trained on": (
        chat_lora(bad_rows()),
        ["3 problems", "line 3", "role 'bot'", "line 5", "blank", "line 7", "chat.too_long"],
    ),
    "conversations cut anywhere": (
        chat_lora(rows_of(20), "data", packing="concat"),
        ["data.packing = concat", "bestfit, single or auto"],
    ),
    "a prompt that a user cannot write": (
        both(
            chat_lora(rows_of(20), "evaluation", prompts=["Hi?", "Hi <|im_end|>"]),
            put("chat", "control_tokens", "error"),
        ),
        ["1 problem", "evaluation.prompts = Hi <|im_end|>", "'<|im_end|>'"],
    ),
    "preference pairs": (
        chat_lora([{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}] * 20),
        ["data.sources.0.columns = chosen, rejected", "preference.loss=dpo"],
    ),
    "an adapter that matches no layer": (
        chat_lora(rows_of(20), "adapter", targets=["q_projj"]),
        ["adapter.targets = q_projj", "nearest: q_proj"],
    ),
    "a model with its own code": (
        begins_with(config={"model_type": "zzz", "auto_map": {"AutoConfig": "x.Y"}}),
        ["model.from", "its own code (type 'zzz')"],
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input_is_one_message_and_exit_code_2(server, tmp_path, case):
    change, words = CASES[case]
    config = tiny_config(tmp_path / "run")
    if case == "one document":
        config["data"]["heldout"] = 0.9
    change(config, tmp_path)
    said = refused(server, tmp_path, config)
    for word in words:
        assert word in said, said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_cannot_hide_documents_is_refused_where_they_must_be(
    server, tmp_path, world_size
):
    config = tiny_config(tmp_path / "run", data__document_mask=True)
    config["model"]["config"] = {
        "model_type": "bloom",
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 2,
    }
    said = refused(server, tmp_path, config, world_size=world_size)
    for word in ("data.document_mask = True", "bloom (attention: eager)", "document_mask=false"):
        assert word in said
    assert not lines(tmp_path / "run", "train")


@pytest.fixture
def trained(server, tmp_path):
    """A finished run of four steps: its config and directory."""
    config = tiny_config(tmp_path / "run", training__steps=4, checkpoint__every_steps=2)
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    return config, tmp_path / "run"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("training.steps=3", "at least 4"),
        ("checkpoint.resume=step-00000099", "step-00000099"),
        ("data.sources.0.path=gone.txt", "gone.txt"),
        ("run.seed=7", "42"),
    ],
)
def test_a_refused_start_leaves_a_finished_run_as_it_was(server, tmp_path, trained, more, words):
    config, run_dir = trained
    told, shown = (run_dir / "status.json").read_bytes(), repr(open_run(run_dir))
    seen, record = Watcher(run_dir).look(), (run_dir / "metrics.jsonl").read_bytes()
    figures = verdict.figures(collect(run_dir))
    said = refused(server, tmp_path, config, more)
    assert words in said
    assert (run_dir / "status.json").read_bytes() == told
    added = (run_dir / "metrics.jsonl").read_bytes().removeprefix(record)
    (event,) = map(json.loads, added.splitlines())
    assert (event["kind"], event["event"]) == ("event", "start_refused")
    assert event["detail"]["reason"] in " ".join(said.split())
    assert repr(open_run(run_dir)) == shown
    assert verdict.figures(collect(run_dir)) == figures
    assert replace(Watcher(run_dir).look(), events=seen.events) == seen


def test_the_command_of_a_finished_run_adds_nothing_to_its_time(server, tmp_path, trained):
    config, run_dir = trained
    figures = verdict.figures(collect(run_dir))
    good = lines(run_dir, "end")[-1]["goodput"]
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    assert verdict.figures(collect(run_dir)) == figures
    assert lines(run_dir, "end")[-1]["goodput"] == pytest.approx(good, rel=0.05)


@needs("tensorboard")
def test_a_broken_file_of_trackers_ids_is_refused_on_all_ranks(server, tmp_path):
    config = tiny_config(tmp_path / "run", logging__trackers=["tensorboard"])
    path = write_config(tmp_path, config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").write_text("{")
    assert server.run(["train", str(path)], 2, tmp_path) == [2, 2]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("1 problem") == 1
    assert "trackers then begin new runs of their own" in said


def test_a_disk_without_room_is_refused_before_training(server, tmp_path):
    path = write_config(tmp_path, tiny_config(tmp_path / "run"))
    arguments = ["call", "helpers.odd_ranks", "on_a_full_disk", str(path), "1000000"]
    codes = server.run(arguments, 1, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert codes == [2], said
    assert "Traceback" not in said
    assert "MB" in said or "MiB" in said, said
    assert lines(tmp_path / "run", "train") == []


def test_a_unit_that_breaks_under_way_ends_all_ranks_with_its_name(server, tmp_path):
    table = pa.table({"text": [f"article {i} " * 30 for i in range(400)]})
    path = tmp_path / "data.parquet"
    pq.write_table(table, path, row_group_size=50, compression="none")
    config = tiny_config(tmp_path / "run", training__steps=200, data__heldout=0.0)
    config["data"]["sources"] = [{"path": str(path)}]
    assert server.run(
        ["train", str(write_config(tmp_path, config)), "training.steps=2"], 2, tmp_path
    ) == [0, 0]
    body = bytearray(path.read_bytes())
    for start in range(70_000, 75_000):  # in the middle: sizes and both ends stay
        body[start] ^= 0xFF
    path.write_bytes(body)
    (tmp_path / "output.txt").unlink()
    codes = server.run(["train", str(tmp_path / "config.yaml")], 2, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert codes == [2, 2], said
    assert "data.parquet" in said
    assert "Traceback" not in said
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"]) == ("failed", 2)
    assert "data.parquet" in found["reason"]


def test_a_checkpoint_of_another_config_is_refused_without_the_runs_config_file(
    server, tmp_path, trained
):
    config, run_dir = trained
    (run_dir / "config.yaml").unlink()
    config["optimizer"]["learning_rate"] = 0.5
    assert "optimizer.learning_rate = 0.5" in refused(server, tmp_path, config)


def test_a_model_that_diverged_is_saved_evaluated_and_ends_with_1(server, tmp_path):
    config = tiny_config(
        tmp_path / "run",
        training__steps=30,
        training__max_skipped_in_a_row=4,
        training__max_grad_norm=None,
        evaluation__every_steps=2,
        checkpoint__every_steps=2,
    )
    config["optimizer"] = {"learning_rate": 1e38, "warmup_steps": 1}
    config["evaluation"]["prompts"] = ["The planet"]
    codes = server.run(["train", str(write_config(tmp_path, config))], 2, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert codes == [1, 1], said
    assert "diverged at step" in said
    assert "Traceback" not in said
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"]) == ("failed", 1)
    assert any(line["loss"] is None for line in lines(tmp_path / "run", "eval"))
    assert [e for e in lines(tmp_path / "run", "event") if e["event"] == "update_skipped"]
    assert lines(tmp_path / "run", "train")[-1]["skipped"]


def test_empty_documents_and_broken_bytes_are_counted(server, tmp_path):
    good = [f'{{"text": "article {i} of many"}}' for i in range(300)]
    rows = [*good, '{"text": ""}', '{"text": "   "}', '{"text": null}']
    body = "\n".join(rows).encode() + b'\n{"text": "a \xff byte"}\n'
    (tmp_path / "data.jsonl").write_bytes(body)
    config = tiny_config(tmp_path / "run", training__steps=8, data__heldout=0.0)
    config["data"]["sources"] = [{"path": str(tmp_path / "data.jsonl")}]
    assert server.run(["train", str(write_config(tmp_path, config))], 2, tmp_path) == [0, 0]
    told = {event["event"]: event["detail"] for event in lines(tmp_path / "run", "event")}
    assert told["dropped_documents"]["dropped"] >= 3
    assert "replaced" not in told["dropped_documents"]
    assert told["replaced_characters"]["documents"] >= 1


def test_a_field_of_the_model_is_named_beside_a_missing_tokenizer(server, tmp_path):
    config = tiny_config(tmp_path / "run", model__tokenizer="./nowhere")
    config["model"]["config"]["hidden_sizes"] = 1
    said = refused(server, tmp_path, config)
    for word in ("2 problems", "model.tokenizer = ./nowhere", "model.config.hidden_sizes = 1"):
        assert word in said
    assert "did you mean hidden_size?" in said


def test_all_mistakes_come_at_once(server, tmp_path):
    config = tiny_config(tmp_path / "run")
    config["training"]["lerning_rate"] = 1
    config["data"]["seq_len"] = "long"
    said = refused(server, tmp_path, config, "optimizer.betas=[2,3]")
    for word in ("training.lerning_rate", "data.seq_len", "optimizer.betas"):
        assert word in said


def test_a_directory_of_another_config_is_refused_and_left_as_it_is(server, tmp_path, trained):
    config, run_dir = trained
    before, told = weights(run_dir, 4), status(run_dir)
    other = copy.deepcopy(config)
    other["run"]["seed"] = 7
    other["optimizer"]["learning_rate"] = 1e-4
    said = refused(server, tmp_path, other)
    for word in ("run.seed = 7", "42", "optimizer.learning_rate", "run.dir"):
        assert word in said
    assert weights(run_dir, 4) == before
    assert status(run_dir) == told
    assert "run.seed = 7" in lines(run_dir, "event")[-1]["detail"]["reason"]


def test_free_keys_may_change_and_more_steps_go_on(server, tmp_path, trained):
    config, run_dir = trained
    config["training"]["steps"] = 6
    config["training"]["micro_batch_size"] = 4
    config["logging"]["every_steps"] = 2
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    assert lines(run_dir, "start")[-1]["resumed_from"] == "step-00000004"
    assert status(run_dir)["step"] == 6


def test_checkpoints_that_vanished_are_never_a_silent_fresh_start(server, tmp_path, trained):
    import shutil

    config, run_dir = trained
    shutil.rmtree(run_dir / "checkpoints")
    said = refused(server, tmp_path, config)
    assert "step-00000004" in said


def test_after_a_refusal_the_corrected_command_runs_in_the_same_directory(server, tmp_path):
    config = tiny_config(tmp_path / "run", training__steps=2)
    config["model"]["config"]["vocab_size"] = 100
    refused(server, tmp_path, config)
    del config["model"]["config"]["vocab_size"]
    config["data"]["seq_len"] = 16
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    assert status(tmp_path / "run")["state"] == "finished"


def test_a_lost_status_file_resumes_from_the_checkpoints_that_are_there(server, tmp_path, trained):
    config, run_dir = trained
    run_id = status(run_dir)["run_id"]
    (run_dir / "status.json").unlink()
    config["training"]["steps"] = 6
    assert server.run(["train", str(write_config(tmp_path, config))], 1, tmp_path) == [0]
    assert lines(run_dir, "start")[-1]["resumed_from"] == "step-00000004"
    assert status(run_dir)["run_id"] == run_id


def test_fewer_steps_than_were_made_are_refused(server, tmp_path, trained):
    config, _ = trained
    config["training"]["steps"] = 3
    said = refused(server, tmp_path, config)
    assert "training.steps = 3" in said
    assert "at least 4" in said
