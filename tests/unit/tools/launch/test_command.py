"""What a command says of the run that it starts: config, run directory, secrets."""

from pathlib import Path

import pytest
from helpers.config import SMALLEST, written

from llmtrain.errors import UserError
from llmtrain.tools.launch.supervise import checked_run_dir, config_in, shown


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("accelerate launch --config_file a.yaml scripts/train.py my.yaml", ("my.yaml", [])),
        ("accelerate launch --config_file=a.yaml scripts/train.py my.yaml", ("my.yaml", [])),
        (
            "llmtrain train my.yaml run.dir=r data.sources.0.path=x=y --processes 2",
            ("my.yaml", ["run.dir=r", "data.sources.0.path=x=y"]),
        ),
        ("llmtrain train --accelerate a.yaml my.yml run.seed=2", ("my.yml", ["run.seed=2"])),
        ("env A.B=1 sh -c exit my.yaml", ("my.yaml", [])),
        ("sh run.sh", None),
        ("train --config_file a.yaml", None),
    ],
)
def test_the_config_of_the_run_is_found_in_the_command(command, config):
    assert config_in(command.split()) == config


def train(path, *overrides):
    return ["llmtrain", "train", str(path), *overrides]


def test_the_run_directory_is_that_of_the_config_and_its_overrides(tmp_path):
    command = train(written(tmp_path), f"run.dir={tmp_path}/r")
    assert checked_run_dir(command, None) == tmp_path / "r"


def test_a_config_that_names_the_same_directory_in_other_words_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = train(written(tmp_path), "run.dir=runs/../r")
    assert checked_run_dir(command, tmp_path / "r") == Path("runs/../r")


def test_a_run_directory_that_the_config_does_not_name_is_bad_input(tmp_path):
    command = train(written(tmp_path), "run.dir=runs/other")
    with pytest.raises(UserError, match="--run = runs/typo") as caught:
        checked_run_dir(command, Path("runs/typo"))
    assert "runs/other, the run.dir of" in str(caught.value)


@pytest.mark.parametrize("run_dir", [None, Path("r")])
def test_a_wrong_config_is_bad_input_whether_the_directory_is_named_or_not(tmp_path, run_dir):
    with pytest.raises(UserError, match=r"model\.foo "):
        checked_run_dir(train(written(tmp_path), "run.dir=r", "model.foo=1"), run_dir)
    wrong = written(tmp_path, SMALLEST.replace("steps", "step"))
    with pytest.raises(UserError, match=r"training\.step "):
        checked_run_dir(train(wrong, "run.dir=r"), run_dir)


def test_a_command_without_a_config_needs_the_run_directory(tmp_path):
    with pytest.raises(UserError, match="--run DIR"):
        checked_run_dir(["sh", "run.sh"], None)
    assert checked_run_dir(["sh", "run.sh"], tmp_path) == tmp_path


@pytest.mark.parametrize("text", ["machines: 2\nmodel: p5\n", None])
def test_beside_a_named_directory_the_yaml_of_another_program_is_left_alone(tmp_path, text):
    other = tmp_path / "cluster.yaml"
    if text is not None:
        other.write_text(text)
    assert checked_run_dir(["submit", str(other), "run.sh"], tmp_path) == tmp_path


SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["env", f"HF_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["env", f"HF_TOKEN=a {SECRET}", "llmtrain", "train"], "train"),
        ([f"HF_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["docker", "run", f"--env=WANDB_API_KEY={SECRET}", "image"], "image"),
        (["env", f"GITLAB_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["train.py", f"--x-token={SECRET}", "my.yaml"], "my.yaml"),
        (["train.py", f"--hub-token={SECRET}", "my.yaml"], "my.yaml"),
        (["train.py", "--hub-token", SECRET, "my.yaml"], "my.yaml"),
        (["sh", "-c", f"cd x; HF_TOKEN={SECRET} llmtrain train my.yaml"], "train my.yaml"),
        (["sh", "-c", f"export HF_TOKEN='a {SECRET}'; llmtrain train"], "llmtrain train"),
        (["sh", "-c", f'export HF_TOKEN="a {SECRET}"; llmtrain train'], "llmtrain train"),
        (["llmtrain", "train", f"model.config.hub_token={SECRET}", "run.seed=2"], "run.seed=2"),
    ],
)
def test_a_command_is_shown_without_what_is_given_to_the_name_of_a_secret(command, kept):
    found = shown(command)
    assert SECRET not in found
    assert "***" in found
    assert kept in found


def test_a_command_is_shown_without_secrets_of_the_environment_and_what_looks_like_one(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "it's " + SECRET)
    assert shown(["train.py", "it's " + SECRET, "hf_" + "aB" * 17]) == "train.py '***' '***'"


def test_what_is_no_secret_is_shown_as_it_is():
    command = ["env", "A=1", "train", "my.yaml", "model.eos_token=x", "--name", "a b"]
    assert shown(command) == "env A=1 train my.yaml model.eos_token=x --name 'a b'"
