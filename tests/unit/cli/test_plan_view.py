"""`llmtrain plan` as a person and as a script see it."""

import itertools
import json
import re

import pytest
from helpers.config import written
from helpers.rings import diagonal

from llmtrain.cli.plan_view import show_plan
from llmtrain.model.count import CannotCountError
from llmtrain.text import columns
from llmtrain.training.start import planning

SMALL = """\
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 3,
           num_attention_heads: 4, max_position_embeddings: 8192}
  tokenizer: sample
data: {sources: [{path: sample}], seq_len: 128}
training: {steps: 100, global_batch_size: 64, precision: bf16}
"""
LARGE = SMALL.replace("hidden_size: 64", "hidden_size: 8192").replace(
    "intermediate_size: 160, num_hidden_layers: 3",
    "intermediate_size: 28672, num_hidden_layers: 80",
)
HERE = (None, None, None, None)


def shown(folder, capsys, asked, *overrides, text=SMALL, write=None, as_json=False):
    config = str(written(folder, text))
    code = show_plan(config, overrides, asked, write, as_json=as_json)
    out, err = capsys.readouterr()
    return code, out, err


def rows(text, name):
    """The lines of a strategy in the tables."""
    return [line for line in text.splitlines() if line[2:].split()[:1] == [name]]


@pytest.mark.parametrize(
    ("asked", "text"), diagonal([HERE, (8, 8, 80.0, None), (1, 1, 24.0, 64.0)], [SMALL, LARGE])
)
def test_no_line_is_wider_than_80_columns_or_has_control_characters(tmp_path, capsys, asked, text):
    _, out, _ = shown(tmp_path, capsys, asked, text=text)
    assert max(columns(line) for line in out.splitlines()) <= 80
    assert all(char.isprintable() or char == "\n" for char in out)


def test_a_plan_shows_every_strategy_the_choice_and_what_else_the_run_takes(tmp_path, capsys):
    code, out, err = shown(tmp_path, capsys, (8, 2, 80.0, None))
    assert (code, err) == (0, "")
    for name in ("ddp", "hsdp", "fsdp2", "fsdp2_offload", "zero3_offload"):
        memory, layout = rows(out, name)
        parts = [float(number) for number in memory[16:].split()]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.5)
        assert layout.endswith("yes")
    assert [line[2:].split()[0] for line in out.splitlines() if line.startswith("* ")] == [
        "ddp",
        "ddp",
    ]
    for label in ("choice", "keys", "host", "disk", "speed", "rates"):
        assert re.search(rf"^{label} +\S", out, re.MULTILINE), label
    assert "training.micro_batch_size=4 model.activation_checkpointing=none" in out
    said = " ".join(out.split())
    assert "on paper, as of an H100, at an assumed 40% of the peak, at this global batch" in said


def test_what_fits_nowhere_is_shown_with_suggestions_and_ends_with_code_2(tmp_path, capsys):
    code, out, err = shown(tmp_path, capsys, (1, 1, 24.0, 64.0), text=LARGE)
    assert code == 2
    assert err.startswith("error: nothing fits 24 GiB: ")
    assert len(err.splitlines()) == 1
    for name in ("ddp", "fsdp2_offload", "zero3_offload"):
        assert rows(out, name)[1].endswith("no")
        assert f"would fit {name}: " in out
    assert re.search(r"^try +\S", out, re.MULTILINE)


def test_json_is_one_object_on_stdout_and_the_code_is_the_same(tmp_path, capsys):
    code, out, err = shown(tmp_path, capsys, HERE, as_json=True)
    assert (code, err) == (0, "")
    assert json.loads(out)["fits"] is True
    code, out, err = shown(tmp_path, capsys, (1, 1, 24.0, 64.0), text=LARGE, as_json=True)
    assert (code, json.loads(out)["fits"]) == (2, False)


def test_overrides_are_taken(tmp_path, capsys):
    _, out, _ = shown(tmp_path, capsys, HERE, "data.seq_len=256", as_json=True)
    assert json.loads(out)["seq_len"] == 256


def test_a_file_that_was_there_is_replaced_and_that_is_said(tmp_path, capsys):
    path = tmp_path / "accelerate.yaml"
    _, _, err = shown(tmp_path, capsys, HERE, write=path)
    assert err == f"written   {path}\n"
    _, out, err = shown(tmp_path, capsys, HERE, write=path, as_json=True)
    assert err == f"written   {path}, in place of the file that was there\n"
    assert json.loads(out)["fits"]  # stdout has the object alone


def test_nothing_is_written_where_nothing_fits(tmp_path, capsys):
    path = tmp_path / "accelerate.yaml"
    code, _, _ = shown(tmp_path, capsys, (1, 1, 24.0, 64.0), text=LARGE, write=path)
    assert code == 2
    assert not path.exists()


def test_what_cannot_be_counted_is_shown_as_unknown_and_ends_with_code_0(
    tmp_path, capsys, monkeypatch
):
    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    code, out, err = shown(tmp_path, capsys, (8, 1, 80.0, None))
    assert (code, err) == (0, "")
    assert "memory was not planned: its experts run in a loop" in out
    memory, layout = rows(out, "ddp")
    parts = memory[16:].split()
    assert (parts[3], parts[4], parts[6]) == ("?", "?", "?")
    assert parts[7].startswith(">")
    assert layout.endswith("?")
    assert max(columns(line) for line in out.splitlines()) <= 80


def words(text, label):
    """What stands behind a label, as one line."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{label:<10}"))
    rest = itertools.takewhile(lambda line: line.startswith(" " * 10), lines[first + 1 :])
    return " ".join([lines[first][10:], *(line.strip() for line in rest)])


def test_a_plan_says_how_long_the_run_takes_as_far_as_that_is_known(tmp_path, capsys):
    steps = 10**11
    _, out, _ = shown(tmp_path, capsys, (1, 1, 80.0, None), f"training.steps={steps}")
    rate = float(rows(out, "ddp")[1].split()[-2].replace(",", ""))
    days = int(steps * 64 * 128 / rate // 86400)
    assert words(out, "duration").startswith(f"{days:,} d ")
    assert "for 100,000,000,000 steps" in words(out, "duration")
    _, out, _ = shown(tmp_path, capsys, HERE)
    assert words(out, "duration") == "not predicted: 100 steps at a speed not known"
    _, out, _ = shown(tmp_path, capsys, HERE, "training={epochs: 2, global_batch_size: 64}")
    assert "training.epochs" in words(out, "duration")


def test_where_a_run_needs_an_offload_adapters_are_named(tmp_path, capsys):
    bigger = ("model.config.hidden_size=1024", "model.config.num_hidden_layers=12")
    _, out, _ = shown(tmp_path, capsys, (1, 1, 2.0, 64.0), *bigger)
    assert "fsdp2_offload" in words(out, "choice")
    assert "adapter.kind=lora" in out
    assert "adapter.kind=qlora, on CUDA" in out
    _, out, _ = shown(tmp_path, capsys, (1, 1, 80.0, 64.0), *bigger)
    assert "adapter.kind" not in out
