"""The checks of a config that ask the functions of a start: base, model, plan, disk, data."""

import json
import os
import re
import subprocess
import threading
from importlib import resources
from pathlib import Path

import pytest
from helpers import chats, turns
from helpers.bases import save_base
from helpers.cases import SMALL, case
from helpers.corpus import articles, write_jsonl
from helpers.hub import ID, SHA, read_files, serving, stand_in
from helpers.model_hub import MODEL, OLD, serving_model, take_for_hub
from huggingface_hub import hf_hub_download

from llmtrain.errors import Problem, RunError, UserError
from llmtrain.model.count import CannotCountError
from llmtrain.text import size
from llmtrain.tools.doctor import doctor
from llmtrain.tools.doctor.context import run_check
from llmtrain.tools.plan import plan as make_plan
from llmtrain.training.start import planning

DATA = SMALL[SMALL.index("data:") :]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def begins_with(folder, name):
    return case(folder, text=f"model: {{from: {name}, tokenizer: sample}}\n{DATA}")


def look(made):
    return run_check(lambda: doctor.base(made))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), hidden_size=8, intermediate_size=12)


@pytest.fixture
def model_hub(weights, tmp_path, monkeypatch):
    with serving_model({OLD: read_files(weights)}) as server:
        take_for_hub(monkeypatch, server, tmp_path / "home")
        yield server


def test_a_new_model_begins_with_nothing(tmp_path):
    found = look(case(tmp_path, text=SMALL))
    assert (found.state, found.remedy) == ("ok", "")
    assert "random weights" in found.found


def test_a_directory_has_its_weights_here(tmp_path, weights):
    found = look(begins_with(tmp_path, weights))
    assert found.state == "ok"
    assert found.found.startswith(str(weights))
    assert found.found.endswith("of weights, on this machine")


def test_a_directory_without_weights_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    assert "has no weights" in look(begins_with(tmp_path, tmp_path / "empty")).found


def test_an_adapter_is_an_error_with_what_to_do(tmp_path, weights):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    found = look(begins_with(tmp_path, tmp_path / "adapter"))
    assert found.state == "error"
    assert "--merge-adapters" in found.remedy


def test_weights_that_are_still_on_the_hub_are_a_warning_until_they_are_in_the_cache(
    model_hub, tmp_path
):
    found = look(begins_with(tmp_path, MODEL))
    assert found.state == "warning"
    assert "1 files of weights are not in the cache (" in found.found
    assert f"hf download {MODEL} --revision {OLD}" in found.remedy
    assert [name for _, name in model_hub.read] == ["config.json"]
    hf_hub_download(MODEL, "model.safetensors", revision=OLD)
    assert look(begins_with(tmp_path, MODEL)).state == "ok"


def test_of_shards_those_that_are_missing_are_counted_and_offline_they_are_an_error(
    model_hub, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    files = model_hub.commits[OLD]
    body = files.pop("model.safetensors")
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    files.update(dict.fromkeys(shards, body))
    index = {"weight_map": {f"weight {n}": name for n, name in enumerate(shards)}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    for name in ("model.safetensors.index.json", shards[0]):
        hf_hub_download(MODEL, name, revision=OLD)
    made = begins_with(tmp_path, MODEL)
    found = look(made)
    assert found.state == "warning"
    assert "2 files of weights" in found.found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = look(made)
    assert found.state == "error"
    assert "2 files of weights are not in the cache" in found.found


def test_a_run_with_a_checkpoint_needs_no_base(tmp_path, monkeypatch):
    from llmtrain.training.start import planning

    monkeypatch.setattr(planning, "config_of_newest_checkpoint", lambda config, run_dir: object())
    found = look(begins_with(tmp_path, "someone/gone"))
    assert (found.state, found.found.partition(":")[0]) == ("ok", "not read again")


def test_a_plan_that_fits_is_said_with_its_bytes(tmp_path):
    made = case(tmp_path, text=SMALL)
    looked = doctor.plan(made)
    assert looked.state == "ok"
    assert re.match(r"ddp on 1 process, micro-batch \d+ × \d+, activation", looked.found)
    expected = make_plan(made.config)
    assert size(expected.chosen.memory.total_bytes) in looked.found
    assert f"{size(expected.disk_bytes)} of checkpoints at most" in looked.found


def test_what_fits_nowhere_is_an_error_with_the_key_that_helps(tmp_path):
    made = case(tmp_path, "distributed.device_memory_gb=0.0001", text=SMALL)
    looked = run_check(lambda: doctor.plan(made))
    assert looked.state == "error"
    assert "distributed." in looked.remedy


def test_the_launch_file_says_how_many_and_which_strategy(tmp_path):
    file = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2},
    }
    looked = doctor.plan(case(tmp_path, text=SMALL, launch=file))
    assert looked.found.startswith("fsdp2 on 2 processes, ")


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab_size"):
        doctor.plan(case(tmp_path, "model.config.vocab_size=3", text=SMALL))


def test_what_cannot_be_counted_is_a_warning_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    looked = doctor.plan(case(tmp_path, text=SMALL))
    assert looked.state == "warning"
    assert "its experts run in a loop; ddp is taken" in looked.found
    assert looked.remedy


def from_hub(*overrides):
    return [f"data.sources=[{{path: {ID}}}]", *overrides]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one data set of forty articles."""
    path = tmp_path / "files" / "train.jsonl"
    write_jsonl(path, articles(40))
    with serving({"train.jsonl": path.read_bytes()}) as server:
        stand_in(monkeypatch, server, tmp_path / "home")
        yield server


def test_the_sources_of_a_config_are_counted_and_nothing_is_written(tmp_path):
    made = case(tmp_path)
    looked = doctor.data(made)
    assert looked.state == "ok"
    assert looked.found.startswith("sample: 4 files, ")
    assert not made.config.run_dir.exists()


def test_a_data_set_of_the_hub_is_resolved_to_its_commit(tmp_path, hub):
    looked = doctor.data(case(tmp_path, *from_hub()))
    assert looked.state == "ok", looked.found
    assert looked.found.startswith(f"encyclopedia: 1 files, 1 units at {SHA[:12]}")
    assert hub.requests["api"] > 0


def test_a_hub_that_does_not_answer_is_an_error_and_no_hang(tmp_path, hub):
    hub.down = True
    looked = doctor.data(case(tmp_path, *from_hub()), seconds=1.0)
    assert looked.state == "error"
    assert "no answer in 1 s" in looked.found
    assert "HF_ENDPOINT" in looked.remedy


def test_offline_without_what_was_kept_is_refused(tmp_path, hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE") as caught:
        doctor.data(case(tmp_path, *from_hub()))
    assert caught.value.problems[0].remedy
    assert not hub.requests


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing-here"):
        doctor.data(case(tmp_path, "data.sources.0.path=./nothing-here"))


def test_another_failure_of_reading_passes(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RunError("the disk is gone", 75, "look")

    monkeypatch.setattr(doctor, "survey", fail)
    with pytest.raises(RunError, match="the disk is gone"):
        doctor.data(case(tmp_path))


def test_what_the_data_warns_of_is_a_warning_of_the_line(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", articles(40))
    path = tmp_path / "a.jsonl"
    both = f"data.sources=[{{path: {path}}}, {{path: {path}}}]"
    looked = doctor.data(case(tmp_path, both))
    assert looked.state == "warning"
    assert str(path) in looked.found or "a.jsonl" in looked.found


def test_the_tokenizer_fits_the_model(tmp_path):
    looked = doctor.model(case(tmp_path, text=SMALL))
    assert looked.state == "ok"
    assert "2,048 rows; a tokenizer of 2,048 entries" in looked.found


def test_a_vocabulary_that_is_too_small_is_an_error_with_the_number(tmp_path):
    made = case(tmp_path, "model.config.vocab_size=100", text=SMALL)
    looked = doctor.model(made)
    assert looked.state == "error"
    assert "vocab_size = 100" in looked.found
    assert looked.remedy.startswith("2048")
    assert doctor.disk(made).state == "warning"


def test_a_model_that_ends_texts_otherwise_is_a_warning(tmp_path):
    made = case(tmp_path, "model.config.eos_token_id=5", text=SMALL)
    looked = doctor.model(made)
    assert looked.state == "warning"
    assert "ends texts with 0, the model with 5" in looked.found


def test_a_tokenizer_that_the_run_trains_is_known_by_its_size(tmp_path):
    looked = doctor.model(case(tmp_path, "model.tokenizer={train: 300}", text=SMALL))
    assert looked.state == "ok"
    assert "300 rows; a tokenizer of 300 entries, trained at the start" in looked.found


def test_a_pattern_that_freezes_nothing_is_an_error(tmp_path):
    looked = doctor.model(case(tmp_path, "model.freeze=[nothing]", text=SMALL))
    assert looked.state == "error"
    assert "model.freeze" in looked.found


def test_a_tokenizer_that_is_nowhere_says_where_to_look(tmp_path, hub):
    looked = doctor.model(case(tmp_path, "model.tokenizer=nobody/none", text=SMALL))
    assert looked.state == "error"
    assert "HF_ENDPOINT" in looked.remedy


def test_a_run_that_began_has_its_tokenizer_whatever_the_hub_says(tmp_path, hub):
    hub.down = True
    asked = case(tmp_path, "model.tokenizer=someone/gone", text=SMALL)
    (asked.config.run_dir / "tokenizer").mkdir(parents=True)
    sample = resources.files("llmtrain.data.sample")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (asked.config.run_dir / "tokenizer" / name).write_bytes((sample / name).read_bytes())
    (asked.config.run_dir / "auto.json").write_text("{}")
    looked = doctor.model(asked)
    assert looked.state == "ok"
    assert "2,048 entries" in looked.found


@pytest.mark.parametrize("look", [doctor.base, doctor.plan, doctor.model])
def test_a_hub_that_takes_too_long_is_given_up(tmp_path, monkeypatch, look):
    for name in ("planning.config_of_newest_checkpoint", "frozen.decide_base"):
        where = f"llmtrain.training.start.{name}"
        monkeypatch.setattr(where, lambda *asked: threading.Event().wait(30))
    monkeypatch.setattr(doctor, "MODEL_SECONDS", 0.3)
    looked = run_check(lambda: look(begins_with(tmp_path, MODEL)))
    assert looked.state == "error"
    assert "no complete answer" in looked.found


# fp32 weights and two moments of: embedding and head 2,048 × 8 each, four attention matrices of
# 8 × 8, three of the mlp 8 × 16, two norms of a block and the last, 8 each.
BYTES = 3 * 4 * (2 * 2048 * 8 + 4 * 64 + 3 * 128 + 3 * 8)


def test_the_bytes_that_a_run_will_write_are_those_of_its_tensors(tmp_path):
    looked = doctor.disk(case(tmp_path, text=SMALL))
    assert looked.state == "ok"
    assert f"{size(BYTES)} a checkpoint" in looked.found
    # 3 newest, the best, the one being written and the one being deleted
    assert f"{size(6 * BYTES)} still to be kept" in looked.found


def test_frozen_parameters_have_no_moments_on_disk(tmp_path):
    looked = doctor.disk(case(tmp_path, "model.freeze=['*embed_tokens*']", text=SMALL))
    assert f"{size(BYTES - 2 * 4 * 2048 * 8)} a checkpoint" in looked.found


def test_too_little_room_is_refused_with_what_is_needed(tmp_path, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        fields = list(real(path))
        fields[4] = 5 * BYTES // fields[1]
        return os.statvfs_result(fields)

    made = case(tmp_path, text=SMALL)
    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(UserError, match="free for the checkpoints") as caught:
        doctor.disk(made)
    assert str(6 * BYTES) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "lacking"),
    [("size=1m", "free for the checkpoints"), ("size=64m,nr_inodes=20", "inodes")],
)
def test_a_real_disk_that_is_too_small_is_refused(tmp_path, options, lacking):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        made = case(tmp_path, f"run.dir={small / 'run'}", text=SMALL)
        with pytest.raises(UserError, match=lacking):
            doctor.disk(made)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_epochs_leave_open_how_many_checkpoints_stay(tmp_path):
    text = SMALL.replace("steps: 10", "epochs: 2")
    made = case(tmp_path, "checkpoint.keep_every=500", text=text)
    looked = doctor.disk(made)
    assert looked.state == "warning"
    assert "for every 500 steps" in looked.remedy
    assert doctor.disk(case(tmp_path, text=text)).state == "ok"


def test_a_local_model_directory_is_described(tmp_path):
    from llmtrain.model.build import model_config
    from llmtrain.model.shape import on_meta
    from llmtrain.training.start.planning import tokens_of

    made = case(tmp_path, text=SMALL)
    (tmp_path / "model").mkdir()
    tokens = tokens_of(made.config, made.config.run_dir, None)
    hf = model_config(made.config.model, tokens, 16)
    hf.save_pretrained(tmp_path / "model")
    sample = Path(resources.files("llmtrain.data.sample"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((sample / name).read_bytes())
    text = SMALL.replace(SMALL[: SMALL.index("data:")], f"model: {{from: {tmp_path / 'model'}}}\n")
    looked = doctor.model(case(tmp_path, text=text))
    assert looked.state == "ok", looked.found
    count = sum(p.numel() for p in on_meta(hf).parameters())
    assert f"{count:,} parameters" in looked.found
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 2048


def talks(folder, *overrides):
    """A config whose one source has conversations."""
    path = write_jsonl(folder / "chat.jsonl", chats.rows_of(30))
    return case(folder, f"data.sources=[{{path: {path}}}]", *overrides, text=SMALL)


def test_the_line_of_the_data_names_the_template_of_conversations(tmp_path):
    looked = doctor.data(talks(tmp_path, "chat.template=chatml"))
    ends = "; conversations by chatml template, a turn ends with <|im_end|>"
    assert (looked.state, looked.found[-len(ends) :]) == ("ok", ends)
    assert not (tmp_path / "run").exists()
    own = chats.make(tmp_path / "own", "llama3")
    looked = doctor.data(talks(tmp_path, f"model.tokenizer={own}"))
    assert looked.found.endswith("by the tokenizer's template, a turn ends with <|eot_id|>")
    two = chats.make(tmp_path / "two", turns.GPT_OSS, turns.TOKENS[turns.GPT_OSS])
    looked = doctor.data(talks(tmp_path, f"model.tokenizer={two}"))
    assert looked.found.endswith("a turn ends with <|return|> or <|call|>")
    trained = ("model.tokenizer={train: 300}", "chat.template=gemma")
    assert doctor.data(talks(tmp_path, *trained)).found.endswith("by gemma template")


def test_conversations_without_a_template_are_a_warning(tmp_path):
    looked = doctor.data(talks(tmp_path))
    assert looked.state == "warning"
    assert looked.found.endswith("; conversations, but the tokenizer has no template")
    assert looked.remedy.startswith("chat.template=chatml")


def test_a_tokenizer_that_a_refused_start_left_behind_is_not_looked_at(tmp_path):
    asked = talks(tmp_path, "chat.template=chatml")
    chats.make(asked.config.run_dir / "tokenizer", None)
    assert doctor.data(asked).state == "ok"
    (asked.config.run_dir / "auto.json").write_text("{}")
    assert doctor.data(asked).state == "warning"  # in a run that has begun it is the run's own


def test_a_template_that_ends_no_turn_is_an_error(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    asked = talks(tmp_path, f"chat.template={tmp_path / 'bad.jinja'}")
    looked = run_check(lambda: doctor.data(asked))
    assert looked.state == "error"
    assert "no end-of-turn token after the answer" in looked.found
    assert looked.remedy == "set chat.end_of_turn"


@pytest.mark.parametrize(
    ("value", "network"), [("./nowhere", False), ("/no/where", False), ("some/thing", True)]
)
def test_the_network_is_to_be_checked_only_if_one_was_asked(value, network):
    problem = Problem("model.tokenizer", value, "a tokenizer directory or a Hub id")
    assert ("network" in doctor._absent(problem)) is network
