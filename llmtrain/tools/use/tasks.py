"""Benchmark tasks, by lm-eval, of its own collection or described in a file.

The trap: lm-eval lets a tokenizer add its begin token to a text that it has put a begin token in
front of already, and scores the second one. So it is told to let the tokenizer add none.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError, first_line, raise_any
from llmtrain.tools.use.load import Opened

KEY = "--tasks"
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_FILE = (".yaml", ".yml")
_BATCH_SIZE = 8


def check(names: Sequence[str]) -> None:
    """Raise UserError if lm-eval is missing or a task file cannot work. It is fast."""
    if names and importlib.util.find_spec("lm_eval") is None:
        expected, remedy = "an installed lm-eval", "pip install 'llmtrain[eval]'"
        raise UserError(Problem(KEY, ", ".join(names), expected, remedy))
    raise_any(problem for name in names if name.endswith(_FILE) for problem in _problems(name))


def run(opened: Opened, names: Sequence[str], *, chat: bool) -> dict[str, dict[str, Any]]:
    """Return task → metric → value.

    names: lm-eval's names of tasks or groups, or YAML files with a task
    chat: whether the tasks' texts go through the model's chat template

    Raises UserError for a task that does not exist, or whose data cannot be read, and with `chat`
    for a model without a chat template.
    """
    if chat and not opened.tokenizer.chat_template:
        expected = "a model whose tokenizer has a chat template"
        raise UserError(Problem("--chat", opened.target.given, expected, "leave --chat out"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = [Path(name) for name in names if name.endswith(_FILE)]
    asked = [_task_of(name) if name.endswith(_FILE) else name for name in names]
    manager = TaskManager(
        include_path=sorted({str(file.parent) for file in files}),
        include_defaults=len(files) < len(names),  # reading all of them takes seconds
    )
    if unknown := [name for name in asked if name not in manager.all_tasks]:
        raise UserError(Problem(KEY, ", ".join(unknown), "tasks of lm-eval, or YAML files"))
    logging.getLogger(HFLM.__module__).setLevel(logging.ERROR)  # it warns of any loaded model
    model = HFLM(
        pretrained=opened.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        add_bos_token=False,
        batch_size=_BATCH_SIZE,
    )
    try:
        found = simple_evaluate(
            model=model,
            tasks=asked,
            task_manager=manager,
            apply_chat_template=chat,
            log_samples=False,
        )
    except OSError as error:  # also of the network
        expected = f"tasks whose data can be read: {first_line(error)}"
        raise UserError(Problem(KEY, ", ".join(names), expected)) from error
    return {name: _numbers(values) for name, values in found["results"].items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task; lm-eval names them with their filter, `acc,none`."""
    return {
        key.removesuffix(",none"): value
        for key, value in values.items()
        if isinstance(value, int | float)
    }


def _problems(name: str) -> Iterator[Problem]:
    """Yield what makes lm-eval fail on a task file, with a better message than its own."""
    settings = _settings(name)
    if not settings.get("task") and not settings.get("group"):
        yield Problem(KEY, name, "a YAML file with a task (`task: NAME`)")
    files = (settings.get("dataset_kwargs") or {}).get("data_files")
    asked = [str(settings[key]) for key in _SPLITS if settings.get(key)]
    if files is None:
        return
    split = asked[0] if asked else "test"
    expected = f"a mapping that has each split of the task ({', '.join(asked) or 'none is named'})"
    if not isinstance(files, dict) or not {*asked} <= files.keys():
        remedy = f"data_files: {{{split}: FILE}} and test_split: {split}"
        yield Problem(f"{name}: dataset_kwargs.data_files", files, expected, remedy)


def _task_of(name: str) -> str:
    settings = _settings(name)
    return str(settings.get("group") or settings.get("task"))


def _settings(name: str) -> dict[str, Any]:
    """Read a task file; lm-eval's own tags (`!function`) count as strings."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads plain values alone."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))
    try:
        with Path(name).open(encoding="utf-8") as file:
            found = Loader(file).get_single_data()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        expected = f"a YAML file with a task ({first_line(error)})"
        raise UserError(Problem(KEY, name, expected)) from error
    return found if isinstance(found, dict) else {}
