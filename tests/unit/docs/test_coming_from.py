"""The tables of docs/guides/coming-from.md agree with the program, and their tests exist."""

from __future__ import annotations

import re

import pytest
from helpers.ranks import ROOT

from llmtrain.config.load import load_config
from llmtrain.config.suggestions import guess
from llmtrain.errors import UserError

PAGE = (ROOT / "docs" / "guides" / "coming-from.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = PAGE.partition(f"\n## {heading}\n")[2]
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_each_name_of_another_trainer_leads_to_the_key_beside_it() -> None:
    fine_tuning, pretraining = rows("Key by key: fine-tuning"), rows("Key by key: pretraining")
    assert len(fine_tuning) >= 20
    assert len(pretraining) >= 20
    for first, second, ours, _ in fine_tuning + pretraining:
        key = "" if ours == "no key" else ours.strip("`")
        names = [cell.strip("`") for cell in (first, second) if cell != "–"]
        assert names
        for name in names:
            found = guess(name).key.replace(".0.", ".*.")
            assert name == key or found == key, f"{name}: {found}, not {key}"


def test_the_message_is_that_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = ["training.per_device_train_batch_size=8", "tensor_parallel_size=2"]
    with pytest.raises(UserError) as raised:
        load_config("configs/quickstart.yaml", overrides)
    assert f"```text\nerror: {raised.value}\n```" in PAGE


def test_each_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) == len(rows("Complaint by complaint")) >= 15
    files = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = set(re.findall(r"def (test_\w+)", "\n".join(files)))
    assert set(named) <= defined
