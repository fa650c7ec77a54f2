import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from helpers.checkpoints import save
from helpers.config import SMALLEST, written
from helpers.tiny import tiny_config

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import UserError
from llmtrain.rundir.record import Lines
from llmtrain.rundir.status import read_status, write_status
from llmtrain.training.start.claim import check, claim, rules_of_a_launch, rules_of_this_process


def config(run_dir, **changes):
    return Config.model_validate(tiny_config(run_dir, **changes))


def test_a_claim_makes_the_directory_and_says_that_the_run_is_starting(tmp_path):
    run_dir = tmp_path / "a" / "run"
    with claim(config(run_dir), 2, "ddp") as place:
        assert place.checkpoint is None
        assert place.lock.takeover is None
        told = read_status(run_dir)
        assert (told["state"], told["run_id"], told["world_size"]) == ("running", place.run_id, 2)
    assert (run_dir / "config.yaml").is_file()


def test_a_second_claim_keeps_the_runs_id_and_knows_its_checkpoint(tmp_path):
    with claim(config(tmp_path), 1, "ddp") as first:
        write_status(tmp_path, checkpoint="step-00000004", step=4)
    with claim(config(tmp_path), 3, "ddp") as second:
        assert second.run_id == first.run_id
        assert second.checkpoint == "step-00000004"
        assert read_status(tmp_path)["restarts"] == 1


def begin(run_dir):
    """Claim the directory and write the line that says that a run began in it."""
    with claim(config(run_dir), 1, "ddp"), closing(Lines(run_dir)) as lines:
        lines.write("start", 0)


def test_a_start_that_was_refused_binds_nothing(tmp_path):
    with claim(config(tmp_path), 1, "ddp"):
        (tmp_path / "manifest.json").write_text("of the wrong config")
        (tmp_path / "tokenizer").mkdir()
    with claim(config(tmp_path, data__seq_len=64), 1, "ddp"):
        assert not (tmp_path / "manifest.json").exists()
        assert not (tmp_path / "tokenizer").exists()
    assert "seq_len: 64" in (tmp_path / "config.yaml").read_text()


def test_a_lost_status_is_made_up_for_by_the_record(tmp_path):
    begin(tmp_path)
    with closing(Lines(tmp_path)) as lines:
        lines.write("checkpoint", 4, name="step-00000004")
    (tmp_path / "status.json").unlink()
    with claim(config(tmp_path), 1, "ddp") as place:
        assert place.checkpoint == "step-00000004"


def test_another_config_is_refused_before_anything_is_changed_but_the_record_says_so(tmp_path):
    begin(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as raised, claim(config(tmp_path, data__seq_len=64), 1, "ddp"):
        pass
    assert [problem.key for problem in raised.value.problems] == ["data.seq_len"]
    after = {path: path.read_bytes() for path in tmp_path.iterdir()}
    record = tmp_path / "metrics.jsonl"
    (added,) = after[record].removeprefix(before[record]).splitlines()
    told = json.loads(added)
    assert (told["kind"], told["event"]) == ("event", "start_refused")
    assert "data.seq_len = 64 expected: 32" in told["detail"]["reason"]
    assert after | {record: before[record]} == before


def test_a_claim_inside_a_claim_is_refused(tmp_path):
    with (
        claim(config(tmp_path), 1, "ddp"),
        pytest.raises(UserError, match="in use"),
        claim(config(tmp_path), 1, "ddp"),
    ):
        pass


def test_a_store_without_rename_is_refused_before_a_status_is_written(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.rename", refused)
    with (
        pytest.raises(UserError, match="Operation not supported"),
        claim(config(tmp_path), 1, "ddp"),
    ):
        pytest.fail("the directory was taken")
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def refusal(config):
    """What a claim says that is refused; it changes nothing."""
    with pytest.raises(UserError) as raised, claim(config, 1, "ddp"):
        pass
    return str(raised.value)


def test_never_is_for_a_directory_in_which_nothing_was_trained(tmp_path):
    never = config(tmp_path, checkpoint__resume="never")
    with claim(never, 1, "ddp"):
        pass  # refused later, for something else: it has begun nothing
    with claim(never, 1, "ddp"), closing(Lines(tmp_path)) as lines:
        lines.write("start", 0)
    said = refusal(never)
    assert "checkpoint.resume = never" in said
    assert f"{tmp_path} holds its metrics.jsonl" in said
    assert "checkpoint.resume=auto" in said


def test_a_checkpoint_alone_makes_a_directory_used(tmp_path):
    (tmp_path / "checkpoints" / "step-00000004.damaged").mkdir(parents=True)
    assert "step-00000004.damaged" in refusal(config(tmp_path, checkpoint__resume="never"))


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "LLMTRAIN_RESTARTS"])
def test_what_resume_says_is_for_the_first_start_of_a_launch(tmp_path, monkeypatch, name):
    begin(tmp_path)
    never = config(tmp_path, checkpoint__resume="never")
    monkeypatch.setenv(name, "0")
    assert "checkpoint.resume = never" in refusal(never)
    monkeypatch.setenv(name, "1")
    with claim(never, 1, "ddp") as place:
        assert place.begun


def test_a_lost_status_does_not_make_the_run_another_one(tmp_path):
    save(tmp_path / "checkpoints", 99, run_id="another")
    with claim(config(tmp_path), 1, "ddp"), closing(Lines(tmp_path)) as lines:
        lines.write("start", 0, run_id="this one")
    (tmp_path / "status.json").unlink()
    with claim(config(tmp_path), 1, "ddp") as place:
        assert place.run_id == "this one"


def test_without_a_record_the_newest_intact_manifest_says_whose_directory_it_is(tmp_path):
    save(tmp_path / "checkpoints", 4, run_id="this one")
    save(tmp_path / "checkpoints", 8, run_id="damaged")
    (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").write_bytes(b"{}")
    with claim(config(tmp_path), 1, "ddp") as place:
        assert place.run_id == "this one"


CHANGES = [
    ("model__config", {"model_type": "llama", "vocab_size": 999}, "vocab_size = 999"),
    ("training__global_batch_size", 48, "training.global_batch_size = 48"),
    ("data__seq_len", 64, "data.seq_len = 64"),
    ("training__precision", "bf16", "training.precision = bf16"),
]


def test_another_vocabulary_batch_length_or_precision_is_refused(tmp_path):
    begin(tmp_path)
    for name, value, says in CHANGES:
        said = refusal(config(tmp_path, **{name: value}))
        assert says in said
        assert "with which" in said
        assert "checkpoint.accept_changes=[" in said


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    said = refusal(config(tmp_path / "run"))
    assert f"run.dir = {tmp_path / 'run'}" in said
    assert "there is a file of that name" in said
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_directory_that_cannot_be_written_is_refused():
    said = refusal(config(Path("/proc/self")))  # for root, too
    assert "run.dir = /proc/self" in said
    assert "a directory that can be written (" in said


@pytest.mark.parametrize("parent", ["a file", "not there"])
def test_a_parent_that_cannot_be_made_is_named(tmp_path, parent):
    place = Path("/proc/nowhere") if parent == "not there" else tmp_path / "file"
    if parent == "a file":
        place.touch()
    said = refusal(config(place / "deep" / "run"))
    assert f"{place} is not one and cannot be made (" in said


FILES = [
    "config.yaml",
    "auto.json",
    "manifest.json",
    "status.json",
    "metrics.jsonl",
    "cursors.jsonl",
    "skipped-units.jsonl",
    "eval.safetensors",
    "lock",
    "STOP",
    "logs/rank-0.log",
    "logs/rank-1.failed",
]
DIRECTORIES = [
    "checkpoints",
    "logs",
    "tokenizer",
    "staged",
    "checkpoints/step-00000004",
    "checkpoints/step-00000004.partial",
    "checkpoints/step-00000004.damaged-2",
    "checkpoints/.trash-4",
]


def put(path, kind):
    """Something of that kind where a run expects something else, or nothing at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "a directory":
            path.mkdir()
        case "a regular file":
            path.write_text("mine")
        case "a link that leads to nothing":
            path.symlink_to("nowhere")
        case _:
            os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "a directory") for name in FILES),
        *((name, "a regular file") for name in DIRECTORIES),
        *((name, "a link that leads to nothing") for name in ("metrics.jsonl", "checkpoints")),
        *((name, "neither: a pipe") for name in ("metrics.jsonl", "lock", "checkpoints")),
    ],
)
def test_what_is_of_the_wrong_kind_is_named_and_nothing_is_changed(tmp_path, name, kind):
    put(tmp_path / name, kind)
    before = sorted(tmp_path.rglob("*"))
    said = refusal(config(tmp_path))
    assert said.startswith("1 problem\n")
    assert f"  {tmp_path / name}\n" in said
    expected = "a regular file" if name in FILES else "a directory"
    assert f"expected: {expected}, or nothing of that name; it is {kind}" in said
    assert "move it away" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_all_that_is_of_the_wrong_kind_is_told_at_once(tmp_path):
    put(tmp_path / "metrics.jsonl", "a directory")
    put(tmp_path / "logs", "a regular file")
    with pytest.raises(UserError) as raised:
        check(config(tmp_path))
    named = {problem.key for problem in raised.value.problems}
    assert named == {str(tmp_path / "metrics.jsonl"), str(tmp_path / "logs")}


def test_what_goes_while_it_is_looked_at_is_not_wrong(tmp_path, monkeypatch):
    """Other ranks of the same start remove their old marks."""
    put(tmp_path / "logs" / "rank-1.failed", "a regular file")
    put(tmp_path / "lock", "a directory")
    listed = Path.iterdir

    def others_at_work(folder):
        there = list(listed(folder))
        (tmp_path / "logs" / "rank-1.failed").unlink(missing_ok=True)
        return there

    monkeypatch.setattr(Path, "iterdir", others_at_work)
    with pytest.raises(UserError) as raised:
        check(config(tmp_path))
    assert [problem.key for problem in raised.value.problems] == [str(tmp_path / "lock")]


def test_links_to_what_belongs_there_and_names_of_others_are_taken(tmp_path):
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    put(run_dir / "step-00000004", "a regular file")
    put(run_dir / "notes", "a directory")
    put(run_dir / "tensorboard", "a regular file")
    put(elsewhere / "step-00000004.tar", "a regular file")
    (run_dir / "checkpoints").symlink_to(elsewhere)
    with claim(config(run_dir), 1, "ddp"):
        pass


STRANGE_LINES = [
    {},
    {"kind": "start", "time": 1.0},
    {"kind": "start", "step": 0},
    {"kind": 3, "time": 1.0, "step": 0},
    {"kind": "checkpoint", "time": "now", "step": 4, "name": "step-00000008"},
    {"kind": "start", "time": 1.0, "step": "0"},
]


@pytest.mark.parametrize("line", STRANGE_LINES, ids=json.dumps)
def test_a_line_that_no_run_writes_counts_for_nothing_and_is_told(tmp_path, caplog, line):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with claim(config(tmp_path), 1, "ddp") as place:
        assert not place.begun
        assert place.checkpoint is None
    assert "left out a line of" in caplog.text
    assert str(line) in caplog.text


def test_a_line_without_what_lines_of_its_kind_have_is_taken_for_what_it_says(tmp_path):
    with closing(Lines(tmp_path)) as lines:
        lines.write("start", 0, steps="many", run_id="this one")
        lines.write("checkpoint", 4, name="step-00000004", seconds="long")
        lines.write("checkpoint", 8)
        lines.write("train", 9, seconds=1.0)
    with claim(config(tmp_path), 1, "ddp") as place:
        assert place.begun
        assert (place.run_id, place.checkpoint) == ("this one", "step-00000004")
        assert place.steps is None
        assert place.pace is None


def test_a_secret_in_a_prompt_is_not_written_and_no_later_start_minds(tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-9-battery")
    asked = config(tmp_path, evaluation__prompts=["say correct-horse-9-battery", "The planet"])
    with claim(asked, 1, "ddp"), closing(Lines(tmp_path)) as lines:
        lines.write("start", 0)
    written = (tmp_path / "config.yaml").read_text()
    assert "battery" not in written
    assert "say ***" in written
    assert "The planet" in written
    with claim(asked, 1, "ddp"):
        pass


# What a start refuses before torch is imported, all of it in one message.
TWO = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def found(folder, *overrides, env=None):
    """Key → message of what is wrong with a start of this process."""
    path = written(folder)
    here = f"run.dir={folder / 'run'}"
    try:
        load_config(path, [here, *overrides], rules_of_this_process(str(path), env or {}))
    except UserError as error:
        return {problem.key: str(problem) for problem in error.problems}
    return {}


WRONG = (
    "data.sources.0.path=./missing.jsonl",
    "evaluation.sources=[{path: './*.none'}]",
    "model.tokenizer=./no/tokenizer",
    "model.config.num_hidden_layers=-3",
    "training.global_batch_size=3",
)
KEYS = {
    "data.sources.0.path",
    "evaluation.sources.0.path",
    "model.tokenizer",
    "model.config.num_hidden_layers",
    "training.global_batch_size",
}


def test_all_that_can_be_seen_without_torch_is_reported_in_one_start(tmp_path):
    assert set(found(tmp_path, *WRONG, env=TWO)) == KEYS
    beside = found(tmp_path, *WRONG, "loging.every_steps=3", env=TWO)
    assert set(beside) == KEYS | {"loging"}


def test_what_is_there_is_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    sources = (
        f"data.sources=[{{path: '{tmp_path}/*.jsonl'}}, {{path: '{tmp_path}'}}, {{path: a/b}}]"
    )
    assert not found(tmp_path, sources, f"model.tokenizer={tmp_path}", env=TWO)
    assert not found(tmp_path, "model.tokenizer=nobody/none")


def test_weights_that_are_not_there_or_wrong_are_found(tmp_path):
    asked = f"model={{from: {tmp_path / 'weights'}, tokenizer: sample}}"
    assert set(found(tmp_path, asked)) == {"model.from"}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"hidden_size": "abc"}')
    assert set(found(tmp_path, asked)) == {f"{tmp_path}/weights/config.json: hidden_size"}


def test_of_a_run_to_begin_with_nothing_is_looked_at_here(tmp_path):
    (tmp_path / "weights" / "checkpoints").mkdir(parents=True)
    (tmp_path / "weights" / "eval.safetensors").touch()
    assert not found(tmp_path, f"model={{from: {tmp_path / 'weights'}, tokenizer: sample}}")


def test_a_run_that_has_begun_needs_none_of_them_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "auto.json").write_text("{}")
    assert set(found(tmp_path, *WRONG, env=TWO)) == {
        "model.config.num_hidden_layers",
        "training.global_batch_size",
    }


def test_on_several_machines_the_disk_is_left_to_their_ranks(tmp_path):
    env = TWO | {"WORLD_SIZE": "4"}
    assert set(found(tmp_path, *WRONG[:3], env=env)) == set()


def test_a_batch_that_no_process_could_split_is_reported_once(tmp_path):
    overrides = ("training.global_batch_size=10", "training.micro_batch_size=4")
    path = written(tmp_path)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, rules_of_a_launch(str(path), TWO, {}))
    assert [one.key for one in caught.value.problems] == ["training.global_batch_size"]


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
@pytest.mark.launches
def test_a_start_that_is_refused_imports_no_torch(tmp_path, more):
    path = written(tmp_path, SMALLEST)
    program = (
        "import sys\n"
        "from llmtrain.cli import main, rank\n"
        "def leave(code, message):\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules, code)\n"
        "    sys.exit(code)\n"
        "rank._leave = leave\n"
        "try:\n"
        "    main.main(sys.argv[1:])\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, "train", str(path), *WRONG[:4], *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_run_of_adapters_needs_its_base_at_every_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "auto.json").write_text("{}")
    asked = f"model={{from: {tmp_path / 'weights'}}}"
    assert set(found(tmp_path, asked)) == set()
    assert set(found(tmp_path, asked, "adapter.kind=lora")) == {"model.from"}
