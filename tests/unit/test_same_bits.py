"""`scripts/same_bits.py`: what it compares, without training anything."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "same_bits.py"


@pytest.fixture(scope="module")
def same_bits():
    spec = importlib.util.spec_from_file_location("same_bits", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["same_bits"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules["same_bits"]


def data_state(run_id):
    return {"fingerprint": f"print of {run_id}", "parts": {"chat": f"chat of {run_id}"}}


def write_run(folder, run_id="a"):
    """A run of two steps with a checkpoint."""
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "manifest.json").write_text(run_id)
    state = {"run_id": run_id, "step": 2, "tokens": 128, "versions": {"llmtrain": run_id}}
    state |= {"rng": [run_id], "data": data_state(run_id)}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (folder / "eval.safetensors").write_bytes(b"held out")
    chat = {"settings": {"date": f"the day of {run_id}"}}
    manifest = {"seed": 1, "fingerprint": f"print of {run_id}", "chat": chat}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    numbers = {"batch_digest": "0f", "loss": 7.25, "grad_norm": 0.5, "learning_rate": 1.0}
    train = [
        {"kind": "train", "time": 1.0, "step": step, "tokens": 64 * step, **numbers}
        for step in (1, 2)
    ]
    evaluation = {"kind": "eval", "time": 2.0, "step": 2, "loss": 7.0, "tokens": 9, "seconds": 0.1}
    write_lines(folder, [{"kind": "start", "time": 0.0, "step": 0}, *train, evaluation])
    return folder


def write_lines(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_line(folder, kind, step, /, **changes):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fitting = [line for line in lines if (line["kind"], line["step"]) == (kind, step)]
    fitting[0].update(changes)
    write_lines(folder, lines)


@pytest.fixture
def differences(same_bits, tmp_path):
    """What differs once `change` was made to one of two runs that are the same."""

    def found(change):
        old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", run_id="b")
        change(new)
        return same_bits.compare(same_bits.read(old), same_bits.read(new))

    return found


def test_times_and_ids_are_no_difference(differences):
    assert differences(lambda run: change_line(run, "train", 1, time=9.0, seconds=3.0)) == []


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("train", "batch_digest", "0e"),
        ("train", "loss", 7.250000000000001),
        ("train", "loss", None),
        ("train", "grad_norm", 0.5000000000000001),
        ("train", "learning_rate", 1.0000000000000002),
        ("train", "tokens", 127),
        ("eval", "loss", 7.000000000000001),
    ],
)
def test_the_last_bit_of_a_number_is_a_difference(differences, kind, key, value):
    (found,) = differences(lambda run: change_line(run, kind, 2, **{key: value}))
    assert found.startswith(f"{kind} line of step 2: {key} ")
    assert found.endswith(repr(value))


def test_a_step_that_one_run_lacks_is_a_difference(differences):
    found = differences(lambda run: change_line(run, "train", 2, step=3))
    assert found == [
        "train line of step 2: only in the old run",
        "train line of step 3: only in the new run",
    ]


@pytest.mark.parametrize(
    "name", ["checkpoints/step-00000002/model.safetensors", "eval.safetensors"]
)
def test_a_byte_of_a_file_is_a_difference(differences, name):
    (found,) = differences(lambda run: (run / name).write_bytes(b"weightt"))
    assert found.startswith(f"{name}: sha256 ")


def test_a_value_of_the_manifest_is_a_difference(differences):
    def change(run):
        text = (run / "manifest.json").read_text()
        (run / "manifest.json").write_text(text.replace('"seed": 1', '"seed": 2'))

    (found,) = differences(change)
    assert found.startswith("manifest.json: sha256 ")


def test_a_file_that_one_run_lacks_is_a_difference(differences):
    name = "checkpoints/step-00000002/config.json"
    assert differences(lambda run: (run / name).touch()) == [f"{name}: only in the new run"]


def test_a_field_of_the_state_is_named(differences):
    name = "checkpoints/step-00000002/trainer_state.json"

    def change(run):
        state = {"run_id": "b", "step": 2, "tokens": 129, "versions": {}, "data": data_state("b")}
        (run / name).write_text(json.dumps(state))

    (found,) = differences(change)
    assert found.startswith(f"{name}: tokens: sha256 ")


def test_of_a_step_that_was_trained_twice_the_last_line_counts(same_bits, tmp_path):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run, [*lines, {**lines[2], "loss": 6.0}])
    assert same_bits.read(run).numbers["train", 2]["loss"] == 6.0


def test_a_row_says_how_much_was_compared_and_the_first_differences(same_bits, tmp_path):
    counts = same_bits.count(same_bits.read(write_run(tmp_path / "run")))
    assert counts == "2 steps, 1 evaluations, 4 files"
    assert same_bits.row("ddp1", "straight", counts, []).endswith(" same")
    text = same_bits.row("ddp1", "straight", counts, [f"file {i}" for i in range(10)])
    assert "differs in 10" in text
    assert text.endswith("    file 7\n    and 2 more")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no-such-commit"], "'no-such-commit' is no commit of "),
        (
            ["--only=ddp1,ddp9", "HEAD"],
            "--only: 'ddp9' is none of text, dropout, chat, lora, ddp1, ",
        ),
    ],
)
def test_bad_input_is_code_2(same_bits, capsys, arguments, problem):
    assert same_bits.main(arguments) == 2
    assert problem in capsys.readouterr().err
