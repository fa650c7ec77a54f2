import json

import pytest
from helpers.config import written
from helpers.runs import start_line, train_line, write_run

from llmtrain.cli.config import diff, schema, show
from llmtrain.errors import UserError


def test_values_are_shown_with_who_set_them(tmp_path, capsys):
    path = str(written(tmp_path))
    show(path, ["optimizer.learning_rate=0.5"])
    text = capsys.readouterr().out
    assert "learning_rate" in text
    assert "0.5   # command line" in text
    assert "max_skipped_in_a_row" not in text, "a key for experts"
    show(path, [], all_=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["training.max_skipped_in_a_row"]["set_by"] == "default"
    assert found["training.steps"]["set_by"] == "file"


def test_a_part_that_was_overridden_is_named_with_its_key(tmp_path, capsys):
    show(str(written(tmp_path)), ["data.sources.0.weight=0.5"], as_json=True)
    assert json.loads(capsys.readouterr().out)["data.sources"]["set_by"] == "command line"


def test_the_schema_has_every_section(capsys):
    schema()
    found = json.loads(capsys.readouterr().out)
    assert {"run", "model", "data", "training", "optimizer"} <= found["properties"].keys()
    assert found["additionalProperties"] is False


def test_the_keys_in_which_two_configs_differ(tmp_path, capsys):
    one = written(tmp_path)
    text = one.read_text()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(text.replace("steps: 10", "steps: 11"))
    diff(str(one), str(run))
    assert "training.steps: 10 → 11" in capsys.readouterr().out
    one.write_text(text.replace("hidden_size: 8", "hidden_size: 16, num_hidden_layers: 2"))
    diff(str(one), str(run))
    assert capsys.readouterr().out == (
        "run.dir: runs/my → runs/config\n"
        "model.config.hidden_size: 16 → 8\n"
        "model.config.num_hidden_layers: 2 → not set\n"
        "training.steps: 10 → 11\n"
    )
    diff(str(one), str(one))
    assert capsys.readouterr().out == "no key differs\n"
    for name in ("missing.yaml", "."):
        with pytest.raises(UserError):
            diff(str(one), str(tmp_path / name))


@pytest.mark.parametrize(
    ("length", "line"),
    [
        ({"steps": 14, "epochs": None}, "training.steps: 10 → 14"),
        ({"steps": 14}, "training.steps: 10 → 14"),  # of an older version
        ({"steps": 14, "epochs": 2.0}, "training.epochs: null → 2.0"),
        ({"steps": 10, "epochs": None}, "run.dir"),
    ],
)
def test_the_length_of_a_run_is_that_which_was_trained(tmp_path, capsys, length, line):
    one = written(tmp_path)
    run = write_run(tmp_path / "run", [start_line(0) | {"steps": 10}, start_line(10) | length])
    run.joinpath("config.yaml").write_text(one.read_text())
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_line(11)) + "\n")
    diff(str(one), str(run))
    told = capsys.readouterr().out
    assert line in told
    assert ("training" in told) == ("training" in line)


@pytest.mark.parametrize("command", ["show", "json", "diff"])
def test_a_secret_of_the_environment_is_not_shown(tmp_path, monkeypatch, capsys, command):
    secret = "correct-horse-9-battery"
    monkeypatch.setenv("SERVICE_PASSWORD", secret)
    path = str(written(tmp_path))
    asks = f'evaluation.prompts=["say {secret}"]'
    if command == "diff":
        other = tmp_path / "other.yaml"
        prompts = f"evaluation: {{prompts: ['say {secret}']}}\n"
        other.write_text(written(tmp_path).read_text() + prompts)
        diff(path, str(other))
    else:
        show(path, [asks], as_json=command == "json")
    said = capsys.readouterr().out
    assert "say ***" in said
    assert secret not in said
