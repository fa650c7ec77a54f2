"""Task files of lm-eval, looked at before a model is loaded."""

import importlib.util
from types import SimpleNamespace

import pytest

from llmtrain.errors import UserError
from llmtrain.tools.use import evaluate

TASK = """\
task: mine
dataset_path: text
dataset_kwargs: {data_files: DATA}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: !function code.target
"""


@pytest.fixture
def installed(monkeypatch):
    """Whether lm-eval is here or not, nothing is imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def written(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(TASK.replace("DATA", data))
    return str(path)


def test_data_files_without_a_split_are_refused_with_the_remedy(tmp_path, installed):
    for data in ("my.txt", "[a.txt, b.txt]", "{train: my.txt}"):
        with pytest.raises(UserError, match=r"data_files: \{test: FILE\}"):
            evaluate.check_tasks([written(tmp_path, data)])
    evaluate.check_tasks([written(tmp_path, "{test: my.txt}")])


def test_names_of_tasks_are_left_to_lm_eval(installed):
    evaluate.check_tasks(["hellaswag", "arc_easy"])
    evaluate.check_tasks([])


@pytest.mark.parametrize("body", ["a: [", "- list", "dataset_path: text"])
def test_a_file_without_a_task_is_refused(tmp_path, installed, body):
    path = tmp_path / "wrong.yaml"
    path.write_text(body)
    with pytest.raises(UserError, match="--tasks"):
        evaluate.check_tasks([str(path)])
    with pytest.raises(UserError, match="--tasks"):
        evaluate.check_tasks([str(tmp_path / "absent.yaml")])


def test_tasks_of_a_model_without_a_template_are_not_given_as_a_chat():
    """Before lm-eval is imported."""
    tokenizer = SimpleNamespace(chat_template=None)
    opened = SimpleNamespace(target=SimpleNamespace(given="runs/a"), tokenizer=tokenizer)
    with pytest.raises(UserError, match="whose tokenizer has a chat template") as caught:
        evaluate.run_tasks(opened, ["mine"], chat=True)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("--chat", "runs/a")


def test_without_the_extra_the_message_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'llmtrain\[eval\]'"):
        evaluate.check_tasks(["hellaswag"])
