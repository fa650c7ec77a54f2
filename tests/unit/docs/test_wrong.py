"""The messages of docs/guides/wrong.md are those of the program."""

import re

import pytest
from helpers.ranks import ROOT

from llmtrain.config.load import load_config
from llmtrain.errors import UserError

PAGE = (ROOT / "docs" / "guides" / "wrong.md").read_text("utf-8")
_JOINED = re.compile(r'"\s*\n\s*f?"')  # two literals that Python joins


def first_cells():
    """The cells in which a row shows a message or an event."""
    return re.findall(r'^\| <a id="[\w-]+"></a>([^|]+) \|', PAGE, flags=re.M)


def source():
    texts = (file.read_text("utf-8") for file in sorted((ROOT / "llmtrain").rglob("*.py")))
    return _JOINED.sub("", "\n".join(texts))


def test_each_message_is_one_of_the_program():
    program = source()
    cells = first_cells()
    assert len(cells) >= 30
    for cell in cells:
        shown = re.match(r"`([^`]+)`|\*([^*]+)\*", cell)
        assert shown, cell
        for part in (shown[1] or shown[2]).split("…"):
            text = part.strip().rstrip("?")
            assert re.search(re.escape(text), program, re.IGNORECASE), f"{cell}: {text!r}"


def test_each_row_has_a_name_of_its_own_to_link_to():
    names = re.findall(r'<a id="([\w-]+)">', PAGE)
    assert len(names) == len(set(names)) == len(first_cells())


def test_the_first_message_is_that_of_the_program(monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["training.global_batch_size=10", "training.micro_batch_size=4"]
    with pytest.raises(UserError) as raised:
        load_config("configs/quickstart.yaml", overrides)
    assert f"```text\nerror: {raised.value}\n```" in PAGE
