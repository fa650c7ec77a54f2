"""The tables of docs/guides/coming-from.md agree with the program, and their tests exist."""

import pytest
from helpers.ranks import ROOT

from llmtrain.config.keys import all_keys
from llmtrain.config.load import load_config
from llmtrain.config.suggestions import foreign, guess
from llmtrain.errors import UserError

PAGE = (ROOT / "docs" / "guides" / "coming-from.md").read_text("utf-8")


def rows(heading):
    """The cells of the first table below a heading, without its head."""
    below = PAGE.partition(f"\n## {heading}\n")[2]
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named(row):
    """The names of other trainers in a row, and the key beside them; "" for no key."""
    first, second, ours, _ = row
    key = "" if ours == "no key" else ours.strip("`")
    names = [cell.strip("`") for cell in (first, second) if cell != "–"]
    assert names
    return names, key


def meant(name):
    return guess(name).key.replace(".0.", ".*.")


def test_each_name_of_another_trainer_leads_to_the_key_beside_it():
    fine_tuning = rows("Fine-tuning")
    assert len(fine_tuning) >= 20
    for names, key in map(named, fine_tuning):
        for name in names:
            assert name == key or meant(name) == key, f"{name}: {meant(name)}, not {key}"


def test_no_name_of_a_pretrainer_leads_to_another_key_than_the_one_beside_it():
    pretraining = rows("Pretraining")
    assert len(pretraining) >= 10
    ours = {key.name for key in all_keys()} | {""}
    for names, key in map(named, pretraining):
        assert key in ours
        assert all(meant(name) in (key, "") for name in names), names
        assert all(meant(name) == key for name in names if name in foreign()), names


def test_the_message_is_that_of_the_program(monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["training.per_device_train_batch_size=8", "tensor_parallel_size=2"]
    with pytest.raises(UserError) as raised:
        load_config("configs/quickstart.yaml", overrides)
    assert f"```text\nerror: {raised.value}\n```" in PAGE
