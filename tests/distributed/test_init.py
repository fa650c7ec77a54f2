"""What `llmtrain init` writes trains as it stands, for each form of rows and each kind of base."""

import math

import pytest
from helpers import bases, brought
from helpers.tiny import lines
from transformers import AutoTokenizer

from llmtrain.tools.init import write_config
from llmtrain.training.start.data import FEW_STEPS

KINDS = ("none", "plain", "chat")
# Every form in each full run of the tests, every pair in the longer sweep.
PAIRS = [
    pytest.param(form, kind, marks=() if (n + at) % len(KINDS) == 0 else pytest.mark.slow)
    for n, form in enumerate(brought.FORMS)
    for at, kind in enumerate(KINDS)
]


def base_of(folder, kind):
    """A small base, with a template of its own or without."""
    if kind == "none":
        return None
    base = bases.save_base(folder / "base", max_position_embeddings=512)
    if kind == "chat":
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = brought.TEMPLATE
        tokenizer.save_pretrained(base)
    return str(base)


@pytest.mark.parametrize(("form", "kind"), PAIRS)
def test_the_written_config_trains_and_its_loss_falls(server, tmp_path, monkeypatch, form, kind):
    monkeypatch.chdir(tmp_path)
    data = brought.FORMS[form](tmp_path)
    # A smaller new model than it would choose, and no timing of this machine.
    smaller = ["model.config.hidden_size=32", "model.config.intermediate_size=64"]
    overrides = ["training.precision=fp32", *(smaller if kind == "none" else ())]
    path = write_config([str(data)], base_of(tmp_path, kind), tmp_path / "mine.yaml", overrides)
    assert server.run(["train", str(path)], 1, tmp_path) == [0], (
        tmp_path / "output.txt"
    ).read_text()
    run_dir = tmp_path / "runs" / "mine"
    losses = [line["loss"] for line in lines(run_dir, "eval")]
    assert losses[-1] < losses[0]
    assert losses[-1] < math.log(2048)  # guessing
    assert lines(run_dir, "train")[-1]["step"] >= FEW_STEPS
    assert not [one for one in lines(run_dir, "event") if one["event"] == "few_steps"]
