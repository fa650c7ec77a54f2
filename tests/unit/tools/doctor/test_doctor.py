import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from helpers import chats, turns
from helpers.bases import save_base
from helpers.cases import SMALL, case, says
from helpers.config import SMALLEST, written
from helpers.corpus import articles, write_jsonl
from helpers.hub import ID, SHA, read_files, serving, stand_in
from helpers.model_hub import MODEL, OLD, serving_model, take_for_hub
from huggingface_hub import hf_hub_download

from llmtrain import system
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.model.count import CannotCountError
from llmtrain.text import size
from llmtrain.tools.doctor import doctor as module
from llmtrain.tools.doctor.context import run_check
from llmtrain.tools.doctor.doctor import NAMES, doctor
from llmtrain.tools.launch.launch import parse_nodes
from llmtrain.tools.plan import plan as make_plan
from llmtrain.training.start import planning

ROOT = Path(__file__).parents[4]
EIGHT = SMALLEST.replace("{steps: 10}", "{steps: 10, global_batch_size: 8}")
# What takes seconds is tried in files of its own.
SLOW = ("all-reduce", "devices", "compiler")


def looked(*arguments, skip=SLOW, **options):
    return dict(doctor(*arguments, skip=skip, **options))


def launch_file(folder, text):
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_config_the_machine_alone_is_looked_at():
    assert list(looked()) == [name for name in module.OF_MACHINE if name not in SLOW]


@pytest.mark.launches
def test_with_a_config_everything_is_looked_at_and_the_run_is_left_alone(tmp_path):
    path = written(tmp_path, SMALL)
    checks = looked(str(path), [f"run.dir={tmp_path / 'run'}"])
    assert set(checks) == set(NAMES) - set(SLOW) - {"launch"}
    assert {check.state for check in checks.values()} <= {"ok", "warning"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["my.yaml"]


def test_a_config_that_does_not_load_is_one_line_and_the_machine_is_looked_at(tmp_path):
    path = written(tmp_path, SMALLEST + "optimiser: {}\nrun: {sead: 1}\n")
    checks = looked(str(path))
    says(checks["config"], "error", "optimiser", "run.sead")
    assert set(checks) == {"config", *module.OF_MACHINE} - set(SLOW)
    assert looked(str(tmp_path / "none.yaml"))["config"].state == "error"


def test_a_file_that_is_not_there_is_an_error_and_the_others_are_looked_at(tmp_path):
    checks = looked(accelerate_file=tmp_path / "none.yaml")
    assert checks["launch"].state == "error"
    assert checks["rendezvous"].state == "ok"


@pytest.mark.launches
def test_a_good_file_is_looked_at_with_the_config(tmp_path):
    file = launch_file(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\n")
    checks = looked(str(written(tmp_path)), [f"run.dir={tmp_path / 'run'}"], file)
    assert (checks["launch"].state, checks["environment"].state) == ("ok", "ok")


@pytest.mark.launches
def test_a_file_that_contradicts_the_config_is_an_error(tmp_path):
    file = launch_file(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 3\n")
    assert looked(accelerate_file=file)["launch"].state == "ok"
    checks = looked(str(written(tmp_path)), ["training.global_batch_size=8"], file)
    says(checks["launch"], "error", "global_batch_size")


def test_machines_that_come_and_go_are_checked_against_the_batch(tmp_path):
    skip = [
        name for name in NAMES if name not in ("launch", "rendezvous", "directory", "accelerate")
    ]

    def checked(nodes, text=EIGHT, accelerate=None):
        path, overrides = written(tmp_path, text), [f"run.dir={tmp_path / 'run'}"]
        asked = None if nodes is None else parse_nodes(nodes, 2)
        return looked(str(path), overrides, accelerate, skip=skip, nodes=asked)

    checks = checked("1:2")
    says(checks["launch"], "ok", "1, 2 machines × 2 processes")
    assert checks["rendezvous"].state == "ok"
    says(checked("1:3")["launch"], "warning", "among 3 machines (6 processes): 2 of them train")
    refused = checked("5:7")
    says(refused["launch"], "error", "training.global_batch_size = 8")
    assert "directory" in refused
    file = launch_file(tmp_path, "distributed_type: MULTI_GPU\nnum_machines: 4\nnum_processes: 4\n")
    says(checked("1:2", accelerate=file)["launch"], "error", "num_machines = 4")
    with pytest.raises(UserError, match="a config whose batch they divide"):
        doctor(nodes=parse_nodes("1:2", 2))


def test_the_launch_files_of_the_repository_are_good():
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        checks = looked(accelerate_file=path, skip=(*SLOW, "rendezvous", "versions"))
        assert checks["launch"].state == "ok", checks["launch"]


def test_a_check_that_breaks_is_an_error_line_and_the_others_go_on(monkeypatch):
    def break_down(case):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(module.OF_MACHINE, "memory", break_down)
    checks = looked()
    says(checks["memory"], "error", "ZeroDivisionError: division by zero")
    assert checks["memory"].remedy
    assert checks["clocks"].state == "ok"


def test_a_name_that_is_not_known_is_refused_with_the_names_before_anything_is_looked_at():
    with pytest.raises(UserError, match="memori") as caught:
        doctor(skip=["memori"])
    for name in NAMES:
        assert name in str(caught.value)


def test_overrides_of_nothing_are_refused_and_an_empty_name_is_no_missing_config():
    with pytest.raises(UserError, match=r"run\.seed=1"):
        doctor(None, ["run.seed=1"])
    assert next(doctor(""))[1].state == "error"


def test_what_is_looked_at_is_told_before():
    heard = []
    for name, _ in doctor(skip=SLOW, on_progress=heard.append):
        assert heard[-1] == name


def test_every_error_and_warning_says_what_to_do(tmp_path):
    path = written(tmp_path, SMALLEST)
    overrides = ["run.dir=/proc/run", "model.config.vocab_size=3", "data.sources.0.path=./none"]
    env = {"PMI_SIZE": "2", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    checks = looked(str(path), overrides, env=env)
    assert {"error"} <= {check.state for check in checks.values()}
    assert [name for name, one in checks.items() if one.state != "ok" and not one.remedy] == []


# The checks of a config that ask the functions of a start: base, model, plan, disk, data.
DATA = SMALL[SMALL.index("data:") :]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def begins_with(folder, name):
    return case(folder, text=f"model: {{from: {name}, tokenizer: sample}}\n{DATA}")


def look(made):
    return run_check(lambda: module.base(made))


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


def test_an_adapter_is_an_error_with_what_to_do(tmp_path, weights):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    says(look(begins_with(tmp_path, tmp_path / "adapter")), "error", remedy="--merge-adapters")


def test_weights_that_are_still_on_the_hub_are_a_warning_until_they_are_in_the_cache(
    model_hub, tmp_path
):
    says(
        look(begins_with(tmp_path, MODEL)),
        "warning",
        "1 files of weights are not in the cache (",
        remedy=f"hf download {MODEL} --revision {OLD}",
    )
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
    says(look(made), "warning", "2 files of weights")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    says(look(made), "error", "2 files of weights are not in the cache")


def test_a_run_with_a_checkpoint_needs_no_base(tmp_path, monkeypatch):
    from llmtrain.training.start import planning

    monkeypatch.setattr(planning, "config_of_newest_checkpoint", lambda config, run_dir: object())
    found = look(begins_with(tmp_path, "someone/gone"))
    assert (found.state, found.found.partition(":")[0]) == ("ok", "not read again")


def test_a_plan_that_fits_is_said_with_its_bytes(tmp_path):
    made = case(tmp_path, text=SMALL)
    looked = module.plan(made)
    assert looked.state == "ok"
    assert re.match(r"ddp on 1 process, micro-batch \d+ × \d+, activation", looked.found)
    expected = make_plan(made.config)
    assert size(expected.chosen.memory.total_bytes) in looked.found
    assert f"{size(expected.disk_bytes)} of checkpoints at most" in looked.found


def test_it_is_said_on_how_many_processes_a_run_has_the_same_bits(tmp_path):
    exact = ["same_bits=true", "precision=fp32", "micro_batch_size=2", "global_batch_size=12"]
    looked = module.plan(case(tmp_path, *(f"training.{one}" for one in exact), text=SMALL))
    says(looked, "ok", "the same bits on 1, 2, 3, 6 processes")


def test_what_fits_nowhere_is_an_error_with_the_key_that_helps(tmp_path):
    made = case(tmp_path, "distributed.device_memory_gb=0.0001", text=SMALL)
    says(run_check(lambda: module.plan(made)), "error", remedy="distributed.")


def test_the_launch_file_says_how_many_and_which_strategy(tmp_path):
    file = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    looked = module.plan(case(tmp_path, text=SMALL, launch=file))
    assert looked.found.startswith("fsdp2 on 2 processes, ")


def test_a_cut_model_is_planned_and_a_group_across_nodes_warned_of(tmp_path):
    file = {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "parallelism_config": {"parallelism_config_tp_size": 4},
    }
    heads = [f"model.config.num_{kind}_heads=4" for kind in ("attention", "key_value")]
    looked = module.plan(case(tmp_path, *heads, text=SMALL, launch=file))
    assert looked.state == "ok"
    assert looked.found.startswith("ddp × tensor parallel 4 on 4 processes, ")
    meeting = {"num_machines": 2, "main_process_ip": "10.0.0.1", "machine_rank": 0}
    far = module.plan(case(tmp_path, *heads, text=SMALL, launch=file | meeting))
    says(far, "warning", "distributed.tensor_parallel = 4 crosses nodes of 2")
    assert "distributed.tensor_parallel=2" in far.remedy


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("distributed.tensor_parallel=3", "distributed.tensor_parallel"),
        ("distributed.strategy=zero2 distributed.pipeline_parallel=2", "distributed.strategy"),
    ],
)
def test_a_cut_that_does_not_go_is_an_error(tmp_path, override, found):
    file = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    made = case(tmp_path, *override.split(), text=SMALL, launch=file)
    says(run_check(lambda: module.plan(made)), "error", found)


def test_what_cannot_be_counted_is_a_warning_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    looked = module.plan(case(tmp_path, text=SMALL))
    says(looked, "warning", "its experts run in a loop; ddp is taken")
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
    looked = module.data(made)
    assert looked.state == "ok"
    assert looked.found.startswith("sample: 4 files, ")
    assert not made.config.run_dir.exists()


def test_a_data_set_of_the_hub_is_resolved_to_its_commit(tmp_path, hub):
    looked = module.data(case(tmp_path, *from_hub()))
    assert looked.state == "ok", looked.found
    assert looked.found.startswith(f"encyclopedia: 1 files, 1 units at {SHA[:12]}")
    assert hub.requests["api"] > 0


def test_a_hub_that_does_not_answer_is_an_error_and_no_hang(tmp_path, hub):
    hub.down = True
    says(
        module.data(case(tmp_path, *from_hub()), seconds=1.0),
        "error",
        "no answer in 1 s",
        remedy="HF_ENDPOINT",
    )


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing-here"):
        module.data(case(tmp_path, "data.sources.0.path=./nothing-here"))


def test_another_failure_of_reading_passes(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RunError("the disk is gone", 75, "look")

    monkeypatch.setattr(module, "survey", fail)
    with pytest.raises(RunError, match="the disk is gone"):
        module.data(case(tmp_path))


def test_what_the_data_warns_of_is_a_warning_of_the_line(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", articles(40))
    path = tmp_path / "a.jsonl"
    both = f"data.sources=[{{path: {path}}}, {{path: {path}}}]"
    looked = module.data(case(tmp_path, both))
    assert looked.state == "warning"
    assert str(path) in looked.found or "a.jsonl" in looked.found


def test_the_tokenizer_fits_the_model(tmp_path):
    says(module.model(case(tmp_path, text=SMALL)), "ok", "2,048 rows; a tokenizer of 2,048 entries")


def test_a_vocabulary_that_is_too_small_is_an_error_with_the_number(tmp_path):
    made = case(tmp_path, "model.config.vocab_size=100", text=SMALL)
    looked = module.model(made)
    says(looked, "error", "vocab_size = 100")
    assert looked.remedy.startswith("2048")
    assert module.disk(made).state == "warning"


def test_a_model_that_ends_texts_otherwise_is_a_warning(tmp_path):
    made = case(tmp_path, "model.config.eos_token_id=5", text=SMALL)
    says(module.model(made), "warning", "ends texts with 0, the model with 5")


def test_a_tokenizer_that_the_run_trains_is_known_by_its_size(tmp_path):
    says(
        module.model(case(tmp_path, "model.tokenizer={train: 300}", text=SMALL)),
        "ok",
        "300 rows; a tokenizer of 300 entries, trained at the start",
    )


def test_a_tokenizer_that_is_nowhere_says_where_to_look(tmp_path, hub):
    says(
        module.model(case(tmp_path, "model.tokenizer=nobody/none", text=SMALL)),
        "error",
        remedy="HF_ENDPOINT",
    )


def test_a_run_that_began_has_its_tokenizer_whatever_the_hub_says(tmp_path, hub):
    hub.down = True
    asked = case(tmp_path, "model.tokenizer=someone/gone", text=SMALL)
    (asked.config.run_dir / "tokenizer").mkdir(parents=True)
    sample = resources.files("llmtrain.data") / "sample"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (asked.config.run_dir / "tokenizer" / name).write_bytes((sample / name).read_bytes())
    (asked.config.run_dir / "auto.json").write_text("{}")
    says(module.model(asked), "ok", "2,048 entries")


@pytest.mark.parametrize("look", [module.base, module.plan, module.model])
def test_a_hub_that_takes_too_long_is_given_up(tmp_path, monkeypatch, look):
    for name in ("planning.config_of_newest_checkpoint", "frozen.decide_base"):
        where = f"llmtrain.training.start.{name}"
        monkeypatch.setattr(where, lambda *asked: threading.Event().wait(30))
    monkeypatch.setattr(module, "MODEL_SECONDS", 0.3)
    says(run_check(lambda: look(begins_with(tmp_path, MODEL))), "error", "no complete answer")


# fp32 weights and two moments of: embedding and head 2,048 × 8 each, four attention matrices of
# 8 × 8, three of the mlp 8 × 16, two norms of a block and the last, 8 each.
BYTES = 3 * 4 * (2 * 2048 * 8 + 4 * 64 + 3 * 128 + 3 * 8)


def test_the_bytes_that_a_run_will_write_are_those_of_its_tensors(tmp_path):
    looked = module.disk(case(tmp_path, text=SMALL))
    assert looked.state == "ok"
    assert f"{size(BYTES)} a checkpoint" in looked.found
    # 3 newest, the best, the one being written and the one being deleted
    assert f"{size(6 * BYTES)} still to be kept" in looked.found


def test_frozen_parameters_have_no_moments_on_disk(tmp_path):
    looked = module.disk(case(tmp_path, "model.freeze=['*embed_tokens*']", text=SMALL))
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
        module.disk(made)
    assert str(6 * BYTES) in str(caught.value)


def test_epochs_leave_open_how_many_checkpoints_stay(tmp_path):
    text = SMALL.replace("steps: 10", "epochs: 2")
    made = case(tmp_path, "checkpoint.keep_every=500", text=text)
    says(module.disk(made), "warning", remedy="for every 500 steps")
    assert module.disk(case(tmp_path, text=text)).state == "ok"


def test_a_local_model_directory_is_described(tmp_path):
    from llmtrain.model.build import model_config
    from llmtrain.model.shape import on_meta
    from llmtrain.training.start.planning import tokens_of

    made = case(tmp_path, text=SMALL)
    (tmp_path / "model").mkdir()
    tokens = tokens_of(made.config, made.config.run_dir, None)
    hf = model_config(made.config.model, tokens, 16)
    hf.save_pretrained(tmp_path / "model")
    sample = Path(resources.files("llmtrain.data") / "sample")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((sample / name).read_bytes())
    text = SMALL.replace(SMALL[: SMALL.index("data:")], f"model: {{from: {tmp_path / 'model'}}}\n")
    looked = module.model(case(tmp_path, text=text))
    assert looked.state == "ok", looked.found
    count = sum(p.numel() for p in on_meta(hf).parameters())
    assert f"{count:,} parameters" in looked.found
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 2048


def talks(folder, *overrides):
    """A config whose one source has conversations."""
    path = write_jsonl(folder / "chat.jsonl", chats.rows_of(30))
    return case(folder, f"data.sources=[{{path: {path}}}]", *overrides, text=SMALL)


def test_the_line_of_the_data_names_the_template_of_conversations(tmp_path):
    looked = module.data(talks(tmp_path, "chat.template=chatml"))
    ends = "; conversations by chatml template, a turn ends with <|im_end|>"
    assert (looked.state, looked.found[-len(ends) :]) == ("ok", ends)
    assert not (tmp_path / "run").exists()
    own = chats.make(tmp_path / "own", "llama3")
    looked = module.data(talks(tmp_path, f"model.tokenizer={own}"))
    assert looked.found.endswith("by the tokenizer's template, a turn ends with <|eot_id|>")
    two = chats.make(tmp_path / "two", turns.GPT_OSS, turns.TOKENS[turns.GPT_OSS])
    looked = module.data(talks(tmp_path, f"model.tokenizer={two}"))
    assert looked.found.endswith("a turn ends with <|return|> or <|call|>")
    trained = ("model.tokenizer={train: 300}", "chat.template=gemma")
    assert module.data(talks(tmp_path, *trained)).found.endswith("by gemma template")


def test_conversations_without_a_template_are_a_warning(tmp_path):
    looked = module.data(talks(tmp_path))
    assert looked.state == "warning"
    assert looked.found.endswith("; conversations, but the tokenizer has no template")
    assert looked.remedy.startswith("chat.template=chatml")


def test_a_tokenizer_that_a_refused_start_left_behind_is_not_looked_at(tmp_path):
    asked = talks(tmp_path, "chat.template=chatml")
    chats.make(asked.config.run_dir / "tokenizer", None)
    assert module.data(asked).state == "ok"
    (asked.config.run_dir / "auto.json").write_text("{}")
    assert module.data(asked).state == "warning"  # in a run that has begun it is the run's own


def test_a_template_that_ends_no_turn_is_an_error(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    asked = talks(tmp_path, f"chat.template={tmp_path / 'bad.jinja'}")
    looked = run_check(lambda: module.data(asked))
    says(looked, "error", "no end-of-turn token after the answer")
    assert looked.remedy == "set chat.end_of_turn"


@pytest.mark.parametrize(
    ("value", "network"), [("./nowhere", False), ("/no/where", False), ("some/thing", True)]
)
def test_the_network_is_to_be_checked_only_if_one_was_asked(value, network):
    def find():
        raise UserError(Problem("model.tokenizer", value, "a tokenizer directory or a Hub id"))

    with pytest.raises(UserError) as refused:
        module._in_time(find)
    assert ("network" in refused.value.problems[0].remedy) is network


@pytest.fixture
def on(tmp_path, monkeypatch):
    """The run directory lies on a file system of this kind, as far as the system says."""

    def lie(kind):
        monkeypatch.setattr(system, "mounted", lambda where: system.Mount(kind))

    return lie


def test_a_directory_that_is_not_there_is_looked_at_above_and_nothing_is_left(tmp_path):
    looked = module.directory(case(tmp_path))
    assert looked.found.startswith(f"{tmp_path} on ")
    assert "locks hold" in looked.found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml"]


@pytest.mark.parametrize(
    ("kind", "alone", "two_machines"),
    [
        ("ext4", "ok", "error"),
        ("tmpfs", "warning", "error"),
        ("overlay", "warning", "error"),
        ("nfs4", "ok", "ok"),
        ("lustre", "ok", "ok"),
        ("strangefs", "ok", "warning"),
    ],
)
def test_what_a_file_system_means_for_one_machine_and_for_two(
    tmp_path, on, kind, alone, two_machines
):
    on(kind)
    assert module.directory(case(tmp_path)).state == alone
    looked = module.directory(case(tmp_path, launch={"num_machines": 2}))
    assert looked.state == two_machines
    assert ("all 2 machines" in looked.remedy) == (two_machines != "ok")


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "run").write_text("")
    assert module.directory(case(tmp_path)).state == "error"
    looked = module.directory(case(tmp_path, f"run.dir={tmp_path / 'run' / 'deeper'}"))
    assert looked.state == "error"
    assert looked.found == f"{tmp_path / 'run'} is a file, not a directory"


def test_a_directory_that_cannot_be_written_is_an_error():
    looked = module.directory(case_at("/proc/run"))
    assert looked.state == "error"
    assert looked.found.startswith("/proc cannot be written")


def case_at(run_dir):
    from llmtrain.config.schema import Config

    made = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}]},
            "training": {"steps": 1},
        }
    )
    return module.DoctorContext(made, None, False, {}, 0.0, 0.0)


def test_a_lock_that_another_process_takes_too_is_a_warning(tmp_path, monkeypatch):
    granted = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: granted)
    looked = module.directory(case(tmp_path))
    assert looked.state in ("warning", "error")
    assert "granted twice" in looked.found
    says(module.directory(case(tmp_path, come_and_go=True)), "error", "granted twice")


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    import fcntl

    def refuse(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    looked = module.directory(case(tmp_path))
    assert "no locks (Operation not supported)" in looked.found
    assert "nolock" in looked.remedy
    come_and_go = module.directory(case(tmp_path, come_and_go=True))
    says(come_and_go, "error", "machines of --nodes cannot meet", remedy="nolock")


def test_a_run_that_lives_there_is_named(tmp_path):
    from llmtrain.rundir.lock import RunLock

    with RunLock(tmp_path / "run", "1"):
        looked = module.directory(case(tmp_path))
        assert f"pid {os.getpid()}" in looked.found
        assert "STOP" in looked.remedy
    assert "pid" not in module.directory(case(tmp_path)).found


def test_a_run_of_another_config_is_an_error_and_one_of_this_is_resumed(tmp_path):
    from llmtrain.config.binding import dump

    first = case(tmp_path)
    first.config.run_dir.mkdir()
    (first.config.run_dir / "config.yaml").write_text(dump(first.config))
    (first.config.run_dir / "metrics.jsonl").write_text(
        '{"kind": "start", "time": 1.0, "step": 0}\n'
    )
    assert "would be resumed" in module.directory(case(tmp_path)).found
    says(module.directory(case(tmp_path, "run.seed=7")), "error", "run.seed = 7")


def test_clocks_that_agree_are_ok(tmp_path):
    says(module.clocks(case(tmp_path)), "ok", "differs by 0.0")
    assert module.clocks(case()).state == "ok"


def test_a_file_system_with_another_time_is_a_warning(tmp_path, monkeypatch):
    real = Path.stat

    def an_hour_ahead(path, **options):
        found = list(real(path, **options))
        found[8] += 3600
        return os.stat_result(found)

    looked_at = case(tmp_path)
    monkeypatch.setattr(Path, "stat", an_hour_ahead)
    says(module._skew(tmp_path), "warning", "differs by 3")
    assert looked_at.config


def test_a_clock_that_is_set_meanwhile_is_a_warning():
    says(module.clocks(case(clock_was_set_by=90.0)), "warning", "+90.")


def test_a_date_before_this_code_is_an_error():
    says(module.clocks(replace(case(), wall=0.0)), "error", "the date is 1970-01-01")


@pytest.mark.launches
def test_the_lock_is_asked_for_by_another_process(tmp_path):
    """The little program itself, against a lock that is held and one that is free."""
    import fcntl

    path = tmp_path / "lock"
    command = [sys.executable, "-I", "-S", "-c", module._TAKE, str(path)]
    with path.open("wb") as file:
        assert subprocess.run(command, check=False).returncode == 0
        fcntl.flock(file, fcntl.LOCK_EX)
        assert subprocess.run(command, check=False).returncode == 1
    missing = [*command[:-1], str(tmp_path / "none")]
    done = subprocess.run(missing, capture_output=True, text=True, check=False)
    assert (done.returncode, "No such file" in done.stderr) == (1, True)


def test_what_can_be_no_part_of_a_run_directory_is_an_error(tmp_path):
    (tmp_path / "lock").mkdir()
    says(module.directory(case_at(str(tmp_path))), "error", str(tmp_path / "lock"))
