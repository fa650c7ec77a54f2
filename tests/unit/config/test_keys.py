import ast
import runpy
from functools import cache
from pathlib import Path

import pytest

from llmtrain.config.keys import all_keys

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "config_keys.txt"
SCRIPT = "scripts/reference.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / SCRIPT))


def test_keys_types_and_defaults_are_the_agreed_ones(script):
    command = f"python {SCRIPT} golden > tests/golden/config_keys.txt"
    assert script["golden"]() == GOLDEN.read_text(encoding="utf-8"), f"if this is meant: {command}"


def test_every_key_is_explained():
    for key in all_keys():
        assert key.description.endswith("."), key.name


def test_only_what_the_design_calls_expert_is():
    expert = {key.name for key in all_keys() if key.expert}
    assert expert == {
        "chat.control_tokens",
        "chat.end_of_turn",
        "chat.rewritten_history",
        "adapter.train_tokens",
        "checkpoint.every_minutes",
        "checkpoint.shard_gb",
        "checkpoint.supersede",
        "checkpoint.verify",
        "checkpoint.writers",
        "distributed.fsdp_sync",
        "distributed.pipeline_schedule",
        "distributed.pipeline_stages_per_rank",
        "distributed.wrap_class",
        "model.pad_vocab_to",
        "preference.desirable_weight",
        "preference.gamma",
        "preference.label_smoothing",
        "preference.reference",
        "preference.sft_weight",
        "preference.undesirable_weight",
        "training.loss_kernel",
        "training.deterministic",
        "training.max_skipped_in_a_row",
        "training.same_bits",
        "training.threads",
        "training.z_loss",
    }


@cache
def attributes():
    """Every attribute that the package reads outside its config folder, and in `binding.py`."""
    return frozenset(_attributes())


def _attributes():
    for path in (ROOT / "llmtrain").rglob("*.py"):
        if path.parent.name == "config" and path.name != "binding.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield node.attr


@pytest.mark.parametrize("key", [key.name for key in all_keys()])
def test_every_key_is_read_somewhere(key):
    last = key.rpartition(".")[2]
    assert (f"{last}_" if last == "from" else last) in attributes()


def test_there_are_few_keys_and_fewer_that_most_people_need():
    keys = [key for key in all_keys() if not key.name.startswith("evaluation.sources.*")]
    experts = [key.name for key in keys if key.expert]
    # A key more needs a reason in docs/understand/decisions.md, and a look at which may go for it.
    assert len(keys) - len(experts) <= 83
    assert len(experts) <= 26
