import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import saved_run
from helpers.config import written

import llmtrain
from llmtrain.cli import main as module
from llmtrain.cli.main import app, main

ROOT = Path(__file__).parents[3]
# What costs a third of a second or more to import.
HEAVY = {"torch", "numpy", "rich", "accelerate", "transformers", "pyarrow", "datasets"}
DATA = ["data", "data inspect", "data which", "data tokenize", "data repack"]
USE = ["evaluate", "generate", "export"]
KEEP = ("list", "verify", "prune", "rehearse")
CHECKPOINTS = ["checkpoints", *(f"checkpoints {name}" for name in KEEP)]
CLEAN = {name: value for name, value in os.environ.items() if name != "RANK"}


def run(*arguments, env=None):
    command = [sys.executable, "-m", "llmtrain", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=CLEAN | (env or {}), check=False
    )


def imported_by(*arguments, env=None):
    """Modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "llmtrain", *arguments]
    there = CLEAN | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, env=there, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.launches
def test_help_shows_the_commands_in_groups():
    shown = run("--help")
    assert shown.returncode == 0
    assert shown.stdout == (
        "Train language models: exact, resumable, any number of devices.\n"
        "\n"
        "Start      quickstart    train a small model on the built-in sample, 2 minutes\n"
        "           init          write a config that fits your data, or a recipe\n"
        "           doctor        is this machine ready for this config?\n"
        "           plan          memory, strategy and speed before you pay for them\n"
        "Train      train         run a config; the same command resumes\n"
        "           watch         look at a run while it runs\n"
        "           supervise     run a command and restart what can be restarted\n"
        "           report        write report.html\n"
        "Use        evaluate      a run's held-out loss again, other documents, tasks\n"
        "           generate      continue a text, or answer in a conversation\n"
        "           chat          a conversation in the terminal\n"
        "           export        a model directory, proved to compute the same\n"
        "           eject         the first steps of a config as one file of plain torch\n"
        "Look after data          inspect · which · tokenize · repack\n"
        "           checkpoints   list · verify · prune · rehearse\n"
        "           config        show · schema · diff\n"
        "\n"
        "Options    --version  --help  --install-completion\n"
    )


@pytest.mark.launches
def test_help_imports_typer_alone():
    assert not (HEAVY | {"pydantic", "yaml"}) & imported_by("--help")


@pytest.mark.launches
def test_tab_imports_typer_alone():
    words = {"COMP_WORDS": "llmtrain train a.yaml data.pack", "COMP_CWORD": "3"}
    imported = imported_by(env=words | {"_LLMTRAIN_COMPLETE": "complete_bash"})
    assert "llmtrain.cli.options" in imported
    assert not (HEAVY | {"pydantic", "yaml"}) & imported


@pytest.mark.parametrize(
    "command", ["train", "supervise", "doctor", "plan", *USE, *DATA, *CHECKPOINTS]
)
@pytest.mark.launches
def test_the_help_of_a_command_imports_nothing_heavy(command):
    assert not HEAVY & imported_by(*command.split(), "--help")


@pytest.mark.launches
def test_a_config_error_imports_pydantic_and_yaml_alone(tmp_path):
    path = str(written(tmp_path, "training: {lerning_rate: 1}\n"))
    for launched in ([], ["--processes", "2"]):
        assert not HEAVY & imported_by("train", path, *launched)
    assert not HEAVY & imported_by("plan", path)


@pytest.mark.parametrize(
    "command",
    [
        "quickstart",
        "init",
        "doctor",
        "plan",
        "train",
        "supervise",
        "report",
        *USE,
        *DATA,
        *CHECKPOINTS,
    ],
)
@pytest.mark.launches
def test_every_command_explains_itself(command):
    shown = run(*command.split(), "--help")
    assert shown.returncode == 0
    assert f"Usage: llmtrain {command}" in shown.stdout
    if command == "train":
        assert "\n  Example: llmtrain train mine.yaml training.steps=50; " in shown.stdout


@pytest.mark.launches
def test_the_version_is_that_of_the_package():
    assert re.fullmatch(r"llmtrain \d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "x.yaml", "--process", "2"], "No such option: --process"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "x.yaml", "--processes", "0"], "--processes"),
        (["report"], "Missing argument 'RUN'"),
    ],
)
@pytest.mark.launches
def test_a_wrong_command_line_is_one_message_and_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["list", "verify"])
@pytest.mark.launches
def test_looking_at_checkpoints_imports_no_torch(tmp_path, command):
    run_dir = saved_run(tmp_path)
    assert not {"torch", "transformers", "accelerate"} & imported_by(
        "checkpoints", command, str(run_dir)
    )


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
@pytest.mark.launches
def test_a_config_error_is_one_message_and_code_2(tmp_path, more):
    path = written(tmp_path, "training: {lerning_rate: 1}\n")
    done = run("train", str(path), "run.sed=3", *more)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: 5 problems in {path}\n")
    assert "did you mean optimizer.learning_rate?" in done.stderr
    assert "did you mean run.seed?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.launches
def test_the_script_says_the_same(tmp_path):
    path = str(written(tmp_path, "training: {lerning_rate: 1}\n"))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), path]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, check=False)
    assert (done.returncode, done.stderr) == (2, run("train", path).stderr)


@pytest.mark.launches
def test_a_config_error_is_said_by_rank_0_alone(tmp_path):
    path = str(written(tmp_path, "training: {lerning_rate: 1}\n"))
    done = run("train", path, env={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("option", [["--processes", "2"], ["--accelerate", "x.yaml"]])
@pytest.mark.launches
def test_a_launch_inside_a_launch_is_refused(tmp_path, option):
    done = run("train", str(written(tmp_path)), *option, env={"LOCAL_RANK": "0"})
    assert done.returncode == 2
    assert "LOCAL_RANK" in done.stderr


def test_several_runs_are_compared_only_where_a_file_is_named(tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(SystemExit) as ended:
        main(["report", *names])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "  --out\n" in said.err
    assert "try:      --out comparison.html" in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_last_words_and_the_code_of_a_launched_run_are_passed_on(tmp_path, monkeypatch, capsys):
    from llmtrain.tools.launch import child, launch as tools

    seen = []

    def note(*arguments):
        seen.append(arguments)
        return child.Ended(75, "error: a peer is gone")

    monkeypatch.setattr(tools, "launch", note)
    with pytest.raises(SystemExit) as ended:
        main(["train", "a.yaml", "run.seed=1", "--processes", "2", "--accelerate", "b.yaml"])
    assert ended.value.code == 75
    assert capsys.readouterr().err == "error: a peer is gone\n"
    assert seen == [("a.yaml", ["run.seed=1"], Path("b.yaml"), 2)]


def test_every_command_of_the_program_has_a_place_in_the_help():
    for command in app.registered_commands:
        assert command.rich_help_panel in ("Start", "Train", "Use")
    assert module.app.pretty_exceptions_enable is False


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_whose_output_was_closed_does_its_work(monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as ended:
        main(["config", "schema"])
    getattr(sys, stream).close()
    assert not ended.value.code


def test_windows_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main(["train", "x.yaml"])
    assert ended.value.code == 2
    sentence = "llmtrain runs on Linux, not on Windows: install it in WSL (`wsl --install`)"
    assert capsys.readouterr().err == f"error: {sentence}\n"
    with pytest.raises(llmtrain.UserError) as refused:
        llmtrain.train(object())
    assert str(refused.value) == sentence
