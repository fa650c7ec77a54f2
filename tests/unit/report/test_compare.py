import pytest
from helpers import runs
from helpers.runs import HOSTILE

from llmtrain.report.collect import collect
from llmtrain.report.compare import differences, render, write_comparison

CONFIG = "data:\n  seq_len: 128\ntraining:\n  steps: 300\noptimizer:\n  learning_rate: {}\n"


def run(folder, name, rate="0.001", shift=0.0, **start):
    first, *lines = runs.history()
    lines = [
        line | {"loss": line["loss"] + shift} if line["kind"] == "eval" else line for line in lines
    ]
    first |= {"run_id": name, **start}
    return runs.write_run(folder / name, [first, *lines], config=CONFIG.format(rate))


def test_the_page_names_the_keys_that_differ_and_the_run_that_ends_lower(tmp_path):
    a, b = run(tmp_path, "a"), run(tmp_path, "b", rate="0.01", shift=0.06)
    out = write_comparison([a, b], tmp_path / "c.html")
    page = out.read_text(encoding="utf-8")
    assert "a ends lowest: held-out loss" in page
    assert "0.060 below b." in page
    assert differences([collect(a), collect(b)]) == [("optimizer.learning_rate", ["0.001", "0.01"])]
    assert page.count("<figure") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c.html"}


def test_runs_are_compared_by_the_length_that_was_trained(tmp_path):
    a, b = run(tmp_path, "a"), run(tmp_path, "b", steps=400)
    assert differences([collect(a), collect(b)]) == [("training.steps", ["300", "400"])]


def test_a_run_beside_itself_and_five_runs_have_a_page(tmp_path):
    a = collect(run(tmp_path, "a"))
    page = render([a, a])
    assert "The same run is here more than once." in page
    assert "a (2)" in page
    assert "end equal" in page
    assert "<figure" not in render([a] * 5)


@pytest.mark.parametrize("lines", [[], [runs.start_line(0)], [runs.train_line(1)]])
def test_a_run_without_numbers_beside_another_is_no_error(tmp_path, lines):
    empty = runs.write_run(tmp_path / HOSTILE[:40].replace("/", "_"), lines, config="nonsense")
    page = render([collect(empty), collect(run(tmp_path, "b"))])
    assert "nothing can be compared" in page
    assert "<script>alert" not in page


def test_runs_whose_models_are_cut_otherwise_differ_in_their_strategy(tmp_path):
    a, b = run(tmp_path, "a"), run(tmp_path, "b", tensor_parallel=2)
    assert differences([collect(a), collect(b)]) == [
        ("strategy", ["ddp", "ddp × tensor parallel 2"])
    ]


def preferred(folder, name, loss="dpo", beta=0.1, **changes):
    first, *lines = runs.preferred_history()
    lines = [line | changes if line["kind"] == "eval" else line for line in lines]
    config = runs.PREFERENCE.format(loss=loss, beta=beta)
    return collect(runs.write_run(folder / name, [first | {"run_id": name}, *lines], config=config))


def test_runs_with_one_loss_of_pairs_are_compared_by_it(tmp_path):
    page = render([preferred(tmp_path, "a"), preferred(tmp_path, "b", loss="dpo", accuracy=0.9)])
    assert "a and b end equal: held-out loss" in page
    assert "nats a pair" in page


@pytest.mark.parametrize("other", [{"loss": "ipo"}, {"beta": 0.2}])
def test_runs_with_other_losses_of_pairs_are_compared_by_accuracy(tmp_path, other):
    page = render([preferred(tmp_path, "a"), preferred(tmp_path, "b", accuracy=0.9, **other)])
    assert "b ends highest: held-out accuracy 0.900, 0.201 above a." in page
    assert "What is computed of a pair differs" in page
    assert page.count("<figure") == 1
